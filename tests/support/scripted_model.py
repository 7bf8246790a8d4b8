"""A model whose next token is a pure function of the sequence so far.

It stands in for a transformer wherever a test is about the engine around it. It keeps a cache of
its own, like a transformer: each step writes the token ids it is given into the paged cache at
(block table, position), and the context of a logit is read back from there. A wrong block table,
position, length or slot, a block that was handed out while in use, or one that was never written
therefore shows as wrong output, as it would with real keys and values.

    model = ScriptedModel(vocab_size=50, num_blocks=64, block_size=4)
    runner = Runner(model, max_num_seqs=8, max_model_len=100, num_blocks=64, block_size=4)
    assert tokens_of_the_engine == model.continuation(prompt, max_tokens)

- ``next_token``: context (int32 array) to the greedy token; ``hash_chain`` by default, or
  ``script({prompt: outputs})``.
- ``on_forward``: called with the batch before each step; it may hold the step or raise.
- ``hidden_size``, ``rope_axes``: as ``runner.StepModel``. An image's line of embeddings is taken
  for a token of its own, ``image_tokens`` of it, so that what follows depends on every number of
  every image: ``model.continuation(with_images(prompt, {position: lines}), max_tokens)``.
- ``on_logits``: called with (context, row of logits) for each wanted row; it may change the row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepinfer.gpu_worker.backend import RaggedBatch
from deepinfer.gpu_worker.random_uniform import seed_state, uniforms

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
NextToken = Callable[[Int32], int]

UNWRITTEN = -1
_IMAGE_TOKEN = 1 << 30  # above every vocabulary
NOISE = 4.0
WINNER = 5.0
"""Logits are noise in [0, 4) that depends on the context, the next token's is 5: a random choice
at temperature 1 is truly random, a greedy one has a clear winner."""
NEVER = -100.0
"""The logit of a token that ends a request, where it is not the next one: no random choice may end
what a test holds open."""


def hash_chain(vocab_size: int, eos_token_id: int | None = None, eos_odds: int = 0) -> NextToken:
    """Every token depends on all tokens before it.

    With ``eos_odds``, about one in that many is ``eos_token_id``; else it never comes.
    """
    ordinary = [i for i in range(vocab_size) if i != eos_token_id]

    def next_token(context: Int32) -> int:
        number = _hash(context)
        if eos_odds and eos_token_id is not None and number % eos_odds == 0:
            return eos_token_id
        return ordinary[(number >> 20) % len(ordinary)]

    return next_token


def script(outputs: Mapping[tuple[int, ...], Sequence[int]]) -> NextToken:
    """Each prompt is answered with its own tokens, the last of which repeats for ever.

    ``KeyError`` for a context that continues none of the prompts in the way it should.
    """

    def next_token(context: Int32) -> int:
        tokens = tuple(context.tolist())
        for prompt, answer in outputs.items():
            count = len(tokens) - len(prompt)
            if count >= 0 and tokens[: len(prompt)] == prompt:
                return answer[min(count, len(answer) - 1)]
        raise KeyError(f"no script for {tokens}")

    return next_token


def image_tokens(lines: Float32) -> Int32:
    """What stands in a context for the lines of an image: a large number for each."""
    digests = [hashlib.blake2b(line.tobytes(), digest_size=4).digest() for line in lines]
    return np.array([_IMAGE_TOKEN | int.from_bytes(digest, "little") >> 2 for digest in digests])


def with_images(tokens: Sequence[int], images: Mapping[int, Float32]) -> list[int]:
    """Return the context of a prompt that has images' lines in the place of tokens."""
    context = list(tokens)
    for position, lines in images.items():
        context[position : position + len(lines)] = image_tokens(lines).tolist()
    return context


@dataclass
class PagedTokens:
    """The cache: ``tokens`` int32 [num_blocks, block_size]."""

    num_blocks: int
    block_size: int

    def __post_init__(self) -> None:
        self.tokens = np.full((self.num_blocks, self.block_size), UNWRITTEN, np.int32)


class ScriptedModel:
    """Implements what the runner and the worker process ask of a model; see the module's text."""

    architecture = "ScriptedForCausalLM"
    dtype = "float32"

    def __init__(
        self,
        vocab_size: int = 64,
        num_blocks: int = 64,
        block_size: int = 16,
        *,
        max_model_len: int = 1024,
        eos_token_ids: Sequence[int] = (0,),
        hidden_size: int = 4,
        rope_axes: int = 1,
        next_token: NextToken | None = None,
        on_forward: Callable[[RaggedBatch], None] | None = None,
        on_logits: Callable[[Int32, Float32], None] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.hidden_size = hidden_size
        self.rope_axes = rope_axes
        self.eos_token_ids = list(eos_token_ids)
        self.next_token = next_token or hash_chain(vocab_size, self.eos_token_ids[0])
        self.on_forward = on_forward
        self.on_logits = on_logits
        self.num_forwards = 0
        self.attach_cache(num_blocks, block_size)

    def kv_bytes_per_block(self, block_size: int) -> int:
        return 4 * block_size

    def attach_cache(self, num_blocks: int, block_size: int) -> None:
        self.cache = PagedTokens(num_blocks, block_size)

    def forward(self, batch: RaggedBatch) -> Float32:
        self.num_forwards += 1
        if self.on_forward is not None:
            self.on_forward(batch)
        rows = np.repeat(np.arange(len(batch.slots)), np.diff(batch.q_start))
        self._check(batch, rows)
        block_size = self.cache.block_size
        slots = batch.slots[rows]
        blocks = batch.block_tables[slots, batch.positions // block_size]
        tokens = batch.token_ids.copy()
        for at, lines in batch.images:
            tokens[at : at + len(lines)] = image_tokens(lines)
        self.cache.tokens[blocks, batch.positions % block_size] = tokens
        logits = np.empty((len(batch.logit_index), self.vocab_size), np.float32)
        for line, index in enumerate(batch.logit_index.tolist()):
            context = self._read(batch.block_tables[slots[index]], int(batch.positions[index]) + 1)
            logits[line] = self.logits(context)
        return logits

    def logits(self, context: Int32) -> Float32:
        """Return the logits that follow a context, float32 [vocab_size]."""
        state = np.full(self.vocab_size, seed_state(_hash(context)))
        row = (uniforms(state, np.arange(self.vocab_size)) * NOISE).astype(np.float32)
        row[self.eos_token_ids] = NEVER
        row[self.next_token(context)] = WINNER
        if self.on_logits is not None:
            self.on_logits(context, row)
        return row

    def continuation(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Return the greedy outputs of a prompt, up to and with the first EOS."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + max_tokens:
            tokens.append(int(np.argmax(self.logits(np.array(tokens, np.int32)))))
            if tokens[-1] in self.eos_token_ids:
                break
        return tokens[len(prompt) :]

    def _read(self, block_table: Int32, length: int) -> Int32:
        num_blocks = -(-length // self.cache.block_size)
        context = self.cache.tokens[block_table[:num_blocks]].reshape(-1)[:length]
        assert (context != UNWRITTEN).all(), f"read positions never written: {context.tolist()}"
        return context

    def _check(self, batch: RaggedBatch, rows: npt.NDArray[np.int64]) -> None:
        """Hold the batch to what ``RaggedBatch`` promises."""
        counts = np.diff(batch.q_start)
        assert (counts >= 1).all(), "every row brings at least one token"
        assert batch.q_start[0] == 0 and batch.q_start[-1] == len(batch.token_ids)
        assert len(np.unique(batch.slots)) == len(batch.slots), "a slot stands in two rows"
        back_from_end = batch.q_start[1:][rows] - np.arange(len(rows))
        assert (batch.positions == batch.lengths[rows] - back_from_end).all(), "positions"
        assert (np.diff(batch.logit_index) > 0).all(), "logit_index ascends"
        assert (batch.token_ids >= 0).all() and (batch.token_ids < self.vocab_size).all()
        arrays = [batch.token_ids, batch.positions, batch.q_start, batch.slots, batch.lengths]
        arrays += [batch.block_tables, batch.logit_index]
        assert all(a.dtype == np.int32 and a.flags.c_contiguous for a in arrays)


def _hash(context: Int32) -> int:
    digest = hashlib.blake2b(np.ascontiguousarray(context, "<i4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
