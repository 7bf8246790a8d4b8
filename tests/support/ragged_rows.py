"""Feeds sequences to a model step by step, the way the runner does, with scattered blocks."""

from __future__ import annotations

import numpy as np

from deepinfer.gpu_worker.backend import RaggedBatch


class RaggedRows:
    """Sequences in a model's cache; ``step`` adds tokens to some and returns their logits.

    Blocks come from a shuffled pool as rows grow, so tables are neither contiguous nor ascending,
    and a row's slot is not its place in the batch.
    """

    def __init__(self, model, num_rows):
        self.model = model
        self.block_size = model.cache.block_size
        self.free = list(np.random.default_rng(3).permutation(model.num_blocks))
        self.slots = [2 * num_rows - 1 - row for row in range(num_rows)]
        # Entries that are not set yet name a real block, which must not be read.
        self.tables = np.full((2 * num_rows, model.num_blocks), model.num_blocks - 1, np.int32)
        self.lengths = [0] * num_rows
        self.held = [0] * num_rows

    def step(self, tokens):
        """Run one step; ``tokens`` is row -> the ids it adds, the result row -> logits [n, V]."""
        positions = []
        for row, ids in tokens.items():
            positions.append(np.arange(self.lengths[row], self.lengths[row] + len(ids)))
            self.lengths[row] += len(ids)
            while self.held[row] * self.block_size < self.lengths[row]:
                self.tables[self.slots[row], self.held[row]] = self.free.pop()
                self.held[row] += 1
        bounds = np.cumsum([0, *map(len, tokens.values())], dtype=np.int32)
        logits = self.model.forward(
            RaggedBatch(
                token_ids=np.concatenate(list(tokens.values())).astype(np.int32),
                positions=np.concatenate(positions).astype(np.int32),
                q_start=bounds,
                slots=np.array([self.slots[row] for row in tokens], np.int32),
                lengths=np.array([self.lengths[row] for row in tokens], np.int32),
                block_tables=self.tables,
                logit_index=np.arange(bounds[-1], dtype=np.int32),
            )
        )
        return {row: logits[bounds[i] : bounds[i + 1]].copy() for i, row in enumerate(tokens)}
