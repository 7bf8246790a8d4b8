"""The scheduler: sequences, queues, KV blocks and policies in a pure core, and its process."""
