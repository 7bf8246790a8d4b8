"""The ``Backend`` protocol in plain torch, written to be obviously right and not to be fast.

It is the oracle that the compiled kernels and the models are tested against. Attention gathers a
row's keys and values out of the paged cache and computes the softmax in one piece, so it shares
neither code nor order of operations with the kernels. It makes no promise of batch invariance.
"""

from __future__ import annotations

import numpy as np
import torch

from deepinfer.gpu_worker.backend import LANES, KVLayer, RaggedBatch
from deepinfer.wire.checkpoint import bfloat16_to_float32, float32_to_bfloat16


def _float(stored):
    return bfloat16_to_float32(stored) if stored.dtype == np.uint16 else np.array(stored)


class TorchLinear:
    input_dtype = np.dtype(np.float32)

    def __init__(self, parts, bias, gated):
        if len({(part.dtype, part.shape[1]) for part in parts}) != 1:
            raise ValueError("parts must share columns and dtype")
        self.weight = torch.from_numpy(np.concatenate([_float(part) for part in parts]))
        self.bias = None if bias is None else torch.from_numpy(np.array(bias))
        self.gated = gated

    @property
    def out_features(self):
        return self.weight.shape[0] // (2 if self.gated else 1)

    @property
    def in_features(self):
        return self.weight.shape[1]


class TorchBackend:
    def pack_linear(self, parts, bias=None, quantization="none", gated=False):
        assert quantization == "none"
        return TorchLinear(list(parts), bias, gated)

    def record(self, operations):
        return operations

    def embed(self, ids, table, out):
        out[:] = table.weight[torch.from_numpy(ids).long()].numpy()

    def put_rows(self, x, at, out):
        out[at : at + len(x)] = x

    def take_rows(self, x, index, out):
        out[:] = x[index]

    def linear(self, x, weight, out, add=False, norm=None):
        if norm is not None:
            x = _normed(x, norm.weight, norm.eps)
        product = torch.nn.functional.linear(torch.from_numpy(x), weight.weight, weight.bias)
        if weight.gated:
            gate, up = product.chunk(2, dim=1)
            product = torch.nn.functional.silu(gate) * up
        out[:] = product.numpy() + (out if add else 0)

    def rope_and_cache(self, qkv, layer, batch, cos, sin, lines, q_norm, k_norm, eps):
        kv_heads, d = layer.keys.shape[1], layer.head_dim
        heads = qkv.reshape(len(qkv), -1, d)
        q, k, v = np.split(heads, [heads.shape[1] - 2 * kv_heads, heads.shape[1] - kv_heads], 1)
        if q_norm is not None:
            q[:], k[:] = _normed(q, q_norm, eps), _normed(k, k_norm, eps)
        for part in (q, k):
            low, high = part[..., : d // 2].copy(), part[..., d // 2 :].copy()
            c, s = cos[lines][:, None], sin[lines][:, None]
            part[..., : d // 2] = low * c - high * s
            part[..., d // 2 :] = high * c + low * s
        store = float32_to_bfloat16 if layer.keys.dtype == np.uint16 else np.asarray
        block_index, o = np.divmod(batch.positions, layer.block_size)
        blocks = batch.block_tables[np.repeat(batch.slots, np.diff(batch.q_start)), block_index]
        layer.keys[blocks, :, o // LANES, :, o % LANES] = store(k)
        layer.values[blocks, :, o, :d] = store(v)

    def attention(self, qkv, layer, batch, scale, window, out):
        kv_heads, d = layer.keys.shape[1], layer.head_dim
        q_heads = out.shape[1] // d
        for row, slot in enumerate(batch.slots):
            first, end = batch.q_start[row], batch.q_start[row + 1]
            keys, values = _gather(layer, batch, slot, int(batch.lengths[row]))
            group = q_heads // kv_heads
            keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
            q = torch.from_numpy(qkv[first:end, : q_heads * d].reshape(-1, q_heads, d))
            scores = q.transpose(0, 1) @ keys.transpose(1, 2) * scale
            seen = torch.from_numpy(batch.positions[first:end])[:, None] - torch.arange(
                keys.shape[1]
            )
            hidden = (seen < 0) | ((seen >= window) if window else torch.zeros_like(seen).bool())
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[first:end] = (weights @ values).transpose(0, 1).reshape(end - first, -1).numpy()

    def log_softmax_stats(self, logits):
        return logits.max(axis=-1), torch.from_numpy(logits).logsumexp(-1).numpy()


def _normed(x, weight, eps):
    scale = 1.0 / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(eps))
    return x * scale * weight


def _gather(layer: KVLayer, batch: RaggedBatch, slot: int, length: int):
    """Keys and values of a row's first ``length`` positions, float32 ``[HK, length, D]``."""
    table = batch.block_tables[slot, : -(-length // layer.block_size)]
    # [blocks, HK, groups, D, LANES] -> [HK, blocks, groups * LANES, D], pad lanes cut off
    keys = _float(layer.keys[table]).transpose(1, 0, 2, 4, 3)
    keys = keys.reshape(*keys.shape[:2], -1, layer.head_dim)[:, :, : layer.block_size]
    values = _float(layer.values[table])[..., : layer.head_dim].transpose(1, 0, 2, 3)
    return (
        torch.from_numpy(part.reshape(part.shape[0], -1, layer.head_dim)[:, :length].copy())
        for part in (keys, values)
    )
