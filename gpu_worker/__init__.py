"""The device worker: weights, KV cache, kernels and sampler; it also runs on the CPU."""
