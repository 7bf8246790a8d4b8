"""The decoder-only transformer that Llama, Mistral, Qwen2, Qwen3 and models with images share.

RMSNorm before each half of a layer, rotary positions, grouped-query attention, a gated SiLU
feed-forward (Touvron et al., arXiv:2302.13971; Jiang et al., arXiv:2310.06825). The families
differ in biases, per-head norms of q and k, and sliding windows, all of which is configuration.

An image is lines that take the place of its tokens' embeddings (Idefics3, arXiv:2408.12637); in
Qwen2.5-VL (arXiv:2502.13923) its tokens have positions in three axes as well, see ``rope``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deepinfer.gpu_worker.backend import (
    STORAGE,
    Backend,
    Float32,
    Int32,
    KVCache,
    KVLayer,
    RaggedBatch,
    RMSNorm,
    Stored,
)
from deepinfer.gpu_worker.memory import on_lines
from deepinfer.gpu_worker.model_config import ModelConfig, load_model_config
from deepinfer.gpu_worker.rope import axis_tables, rope_tables
from deepinfer.gpu_worker.weight_cache import WeightCache
from deepinfer.wire.checkpoint import Checkpoint
from deepinfer.wire.model_folder import ModelError

_WARM_UP_TOKENS = 40
# Rows of a decode step up to which its operations are recorded: each number of rows is a recording
# of its own, 8 KB a layer.
_MOST_RECORDED_ROWS = 64


@dataclass(slots=True)
class Layer:
    """Weights of one layer, packed by the backend; ``q_norm`` and ``k_norm`` only for Qwen3."""

    input_norm: RMSNorm
    qkv: Any
    q_norm: Float32 | None
    k_norm: Float32 | None
    output: Any
    post_attention_norm: RMSNorm
    gate_up: Any
    down: Any
    window: int


@dataclass(slots=True)
class Weights:
    """All weights of a model, packed; ``head`` is ``None`` where it is the embedding."""

    embedding: Any
    layers: list[Layer]
    final_norm: RMSNorm
    head: Any


class Rotation(NamedTuple):
    """Line ``lines[t]`` of ``cos`` and ``sin``, [P, D / 2], turns queries and keys of token t."""

    cos: Float32
    sin: Float32
    lines: Int32


@dataclass(slots=True)
class DecodeStep:
    """The recorded step of a number of rows with one token each: ``run`` reads all the others.

    The lines of ``rotation`` are the batch's positions, or an array of their own.
    """

    batch: RaggedBatch
    rotation: Rotation
    logits: Float32
    run: Callable[[], None]


class Model:
    """One loaded model and its KV cache: ``forward`` turns the rows of a step into logits.

    Public attributes: ``architecture``, ``vocab_size``, ``max_model_len`` (tokens, prompt and
    output), ``eos_token_ids``, ``hidden_size``, ``rope_axes``, ``config`` and ``dtype``.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: Backend,
        weights: Weights,
        dtype: str,
        max_model_len: int | None = None,
        kv_cache_dtype: str | None = None,
    ) -> None:
        self.config = config
        self.backend = backend
        self.dtype = dtype
        self.architecture = config.architecture
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.rope_axes = len(config.rope.sections) or 1
        self.max_model_len = max_model_len or config.max_model_len
        self.eos_token_ids = config.eos_token_ids
        self.embedding = weights.embedding
        self.layers = weights.layers
        self.final_norm = weights.final_norm
        self.head = weights.embedding if weights.head is None else weights.head
        self.cos, self.sin = rope_tables(config.rope, config.head_dim, self.max_model_len)
        self.kv_dtype = kv_cache_dtype or self.dtype
        self.cache: KVCache | None = None
        self._scratch: dict[str, Stored] = {}
        self._decode_steps: dict[tuple[int, int, bool], DecodeStep] = {}

    @classmethod
    def load(
        cls,
        folder: str | Path,
        backend: Backend,
        dtype: str = "bfloat16",
        max_model_len: int | None = None,
        kv_cache_dtype: str | None = None,
        quantization: str = "none",
        cache: WeightCache | None = None,
    ) -> Model:
        """Load a folder with config.json and safetensors weights.

        ``dtype`` ("float32" or "bfloat16") is what weights are kept in, and the KV cache as well
        unless ``kv_cache_dtype`` (one of these, or "int8") says otherwise. ``quantization`` is that
        of the matrices, see ``Backend.pack_linear``. ``max_model_len`` lowers the model's own
        limit. Packed weights come from ``cache`` where it has them, and go there where it has not.
        Raises ``ModelError`` naming the file and the field or tensor when the folder cannot
        be served.
        """
        if dtype not in STORAGE:
            raise ModelError(f"dtype must be one of {', '.join(STORAGE)}, got {dtype!r}")
        folder = Path(folder)
        config = load_model_config(folder)
        if max_model_len is not None and not 1 <= max_model_len <= config.max_model_len:
            raise ModelError(
                f"max_model_len must be between 1 and the model's {config.max_model_len}, "
                f"got {max_model_len}"
            )
        weights = cache.weights() if cache is not None else None
        if weights is None:
            weights = _Packing(Checkpoint(folder), config, backend, dtype, quantization).all()
            if cache is not None:
                cache.store(weights)
        return cls(config, backend, weights, dtype, max_model_len, kv_cache_dtype)

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes that a KV block of ``block_size`` tokens takes over all layers."""
        config = self.config
        return KVCache.bytes_per_block(
            config.num_layers, block_size, config.num_kv_heads, config.head_dim, self.kv_dtype
        )

    def attach_cache(self, num_blocks: int, block_size: int) -> None:
        """Give the model a fresh KV cache; an earlier one is dropped."""
        config = self.config
        self.cache = KVCache(
            config.num_layers,
            num_blocks,
            block_size,
            config.num_kv_heads,
            config.head_dim,
            self.kv_dtype,
        )
        self._decode_steps.clear()

    @property
    def num_blocks(self) -> int:
        """KV blocks of the attached cache; 0 before ``attach_cache``."""
        return 0 if self.cache is None else self.cache.num_blocks

    def warm_up(self) -> None:
        """Run a prefill and a decode step, so that all that compiles has done so.

        Writes to the cache's first blocks, so it comes before the first sequence. One layer calls
        every kernel; all of them would take half as long as loading the kernels does.
        """
        assert self.cache is not None, "attach_cache comes before warm_up"
        layers, kv_layers = self.layers, self.cache.layers
        self.layers, self.cache.layers = layers[-1:], kv_layers[-1:]
        try:
            self._warm_up()
        finally:
            self.layers, self.cache.layers = layers, kv_layers
            self._decode_steps.clear()

    def _warm_up(self) -> None:
        assert self.cache is not None
        blocks = np.arange(self.cache.num_blocks, dtype=np.int32)[None, :_WARM_UP_TOKENS]
        longest = min(_WARM_UP_TOKENS, blocks.size * self.cache.block_size, self.max_model_len)
        for tokens in (longest, 1):
            positions = np.arange(longest - tokens, longest, dtype=np.int32)
            self.forward(
                RaggedBatch(
                    token_ids=np.zeros(tokens, np.int32),
                    positions=positions,
                    q_start=np.array([0, tokens], np.int32),
                    slots=np.zeros(1, np.int32),
                    lengths=np.array([longest], np.int32),
                    block_tables=blocks,
                    logit_index=np.array([tokens - 1], np.int32),
                )
            )

    def forward(self, batch: RaggedBatch) -> Float32:
        """Run the batch's tokens, write their keys and values, return logits.

        Returns float32 ``[len(batch.logit_index), vocab_size]``. The array is the model's own
        scratch: the caller may change it, and the next ``forward`` overwrites it.
        """
        rows = len(batch.slots)
        one_each = len(batch.token_ids) == len(batch.logit_index) == rows
        if one_each and rows <= _MOST_RECORDED_ROWS and not batch.images:
            return self._decode(batch)
        logits = self._buffer("logits", len(batch.logit_index), self.vocab_size)
        self._compute(batch, logits, self._rotation(batch))
        return logits

    def _rotation(self, batch: RaggedBatch) -> Rotation:
        if batch.rope is None:
            return Rotation(self.cos, self.sin, batch.positions)
        if len(batch.rope) == 1:
            return Rotation(self.cos, self.sin, batch.rope[0])
        cos, sin = axis_tables(self.cos, self.sin, batch.rope, self.config.rope.sections)
        return Rotation(cos, sin, np.arange(len(cos), dtype=np.int32))

    def _decode(self, batch: RaggedBatch) -> Float32:
        """Run one token a row, all with logits, by the operations recorded for so many rows."""
        tables = batch.block_tables[batch.slots]
        key = *tables.shape, batch.rope is not None
        step = self._decode_steps.get(key)
        if step is None:
            step = self._decode_steps[key] = self._record(*key)
        step.batch.token_ids[:] = batch.token_ids
        step.batch.positions[:] = batch.positions
        step.batch.lengths[:] = batch.lengths
        step.batch.block_tables[:] = tables
        if batch.rope is not None:
            step.rotation.lines[:] = batch.rope[0]
        step.run()
        return step.logits

    def _record(self, rows: int, table_width: int, own_lines: bool) -> DecodeStep:
        batch = RaggedBatch(
            token_ids=np.zeros(rows, np.int32),
            positions=np.zeros(rows, np.int32),
            q_start=np.arange(rows + 1, dtype=np.int32),
            slots=np.arange(rows, dtype=np.int32),
            lengths=np.ones(rows, np.int32),
            block_tables=np.zeros((rows, table_width), np.int32),
            logit_index=np.arange(rows, dtype=np.int32),
        )
        lines = np.zeros(rows, np.int32) if own_lines else batch.positions
        rotation = Rotation(self.cos, self.sin, lines)
        logits = self._buffer("logits", rows, self.vocab_size)
        run = self.backend.record(lambda: self._compute(batch, logits, rotation))
        return DecodeStep(batch, rotation, logits, run)

    def _compute(self, batch: RaggedBatch, logits: Float32, rotation: Rotation) -> None:
        """All operations of a step, from token ids to ``logits``."""
        assert self.cache is not None, "attach_cache comes before forward"
        hidden = self._buffer("hidden", len(batch.token_ids), self.config.hidden_size)
        self.backend.embed(batch.token_ids, self.embedding, hidden)
        for at, rows in batch.images:
            self.backend.put_rows(rows, at, hidden)
        last = len(self.layers) - 1
        for index, (layer, kv) in enumerate(zip(self.layers, self.cache.layers, strict=True)):
            attended = self._attend(layer, kv, batch, hidden, rotation)
            if index == last:
                # No later layer reads the other tokens: only those with logits go on.
                hidden = self._take(batch, hidden, "wanted_hidden")
                attended = self._take(batch, attended, "wanted_attended")
            self.backend.linear(attended, layer.output, hidden, add=True)
            self._feed_forward(layer, hidden)
        self.backend.linear(hidden, self.head, logits, norm=self.final_norm)

    def _attend(
        self,
        layer: Layer,
        kv: KVLayer,
        batch: RaggedBatch,
        hidden: Float32,
        rotation: Rotation,
    ) -> Stored:
        """Attention of every token over the cache, ``[T, HQ * D]``, before the output matrix."""
        config, backend, tokens = self.config, self.backend, len(hidden)
        heads = config.num_heads + 2 * config.num_kv_heads
        qkv = self._buffer("qkv", tokens, heads * config.head_dim)
        backend.linear(hidden, layer.qkv, qkv, norm=layer.input_norm)
        backend.rope_and_cache(
            qkv, kv, batch, *rotation, layer.q_norm, layer.k_norm, config.norm_eps
        )
        columns, dtype = config.num_heads * config.head_dim, layer.output.input_dtype
        attended = self._buffer("attended", tokens, columns, dtype)
        backend.attention(qkv, kv, batch, config.head_dim**-0.5, layer.window, attended)
        return attended

    def _feed_forward(self, layer: Layer, hidden: Float32) -> None:
        """Add ``down(silu(gate(x)) * up(x))`` of the normed ``hidden`` to ``hidden``."""
        width, dtype = self.config.intermediate_size, layer.down.input_dtype
        activated = self._buffer("activated", len(hidden), width, dtype)
        self.backend.linear(hidden, layer.gate_up, activated, norm=layer.post_attention_norm)
        self.backend.linear(activated, layer.down, hidden, add=True)

    def _take(self, batch: RaggedBatch, rows: Stored, name: str) -> Stored:
        taken = self._buffer(name, len(batch.logit_index), rows.shape[1], rows.dtype)
        self.backend.take_rows(rows, batch.logit_index, taken)
        return taken

    def _buffer(self, name: str, rows: int, columns: int, dtype: Any = np.float32) -> Stored:
        """Uninitialised ``[rows, columns]`` that lasts until the name is asked for again.

        Buffers grow to the largest step seen and are then reused: fresh arrays of this size would
        come from the system zeroed page by page, at every step.
        """
        array = self._scratch.get(name)
        if array is None or len(array) < rows:
            # What was recorded still works, but would keep the smaller buffer beside this one.
            self._decode_steps.clear()
            array = self._scratch[name] = on_lines((rows, columns), dtype)
        return array[:rows]


class _Packing:
    """Picks the tensors of each part of the model out of a checkpoint and packs them."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ModelConfig,
        backend: Backend,
        dtype: str,
        quantization: str,
    ) -> None:
        self.checkpoint = checkpoint
        self.config = config
        self.backend = backend
        self.dtype = dtype
        self.quantization = quantization
        roots = config.text_weights
        there = (root for root in roots if checkpoint.has(f"{root}.embed_tokens.weight"))
        self.root = next(there, roots[-1])

    def all(self) -> Weights:
        """Pack everything; ``ModelError`` when a tensor is missing, or is none of the model's."""
        config = self.config
        tied = config.tied_embeddings or (
            config.head_may_be_missing and not self.checkpoint.has("lm_head.weight")
        )
        weights = Weights(
            embedding=self._vocabulary_matrix(f"{self.root}.embed_tokens"),
            layers=[self._layer(index) for index in range(config.num_layers)],
            final_norm=self._norm(f"{self.root}.norm"),
            head=None if tied else self._vocabulary_matrix("lm_head"),
        )
        # Older exporters wrote these; both follow from config.json and the other tensors.
        self.checkpoint.ignore(
            "lm_head.weight",
            *(
                f"{self.root}.layers.{i}.self_attn.rotary_emb.inv_freq"
                for i in range(config.num_layers)
            ),
        )
        self.checkpoint.ignore_below(*config.encoder_weights)
        self.checkpoint.check_all_read()
        return weights

    def _layer(self, index: int) -> Layer:
        config, hidden, head_dim = self.config, self.config.hidden_size, self.config.head_dim
        queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
        layer = f"{self.root}.layers.{index}"
        attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        return Layer(
            input_norm=self._norm(f"{layer}.input_layernorm"),
            qkv=self._linear(
                {
                    f"{attention}.q_proj": queries,
                    f"{attention}.k_proj": keys,
                    f"{attention}.v_proj": keys,
                },
                hidden,
                config.qkv_bias,
            ),
            q_norm=self._vector(f"{attention}.q_norm.weight", head_dim) if config.qk_norm else None,
            k_norm=self._vector(f"{attention}.k_norm.weight", head_dim) if config.qk_norm else None,
            output=self._linear({f"{attention}.o_proj": hidden}, queries, config.output_bias),
            post_attention_norm=self._norm(f"{layer}.post_attention_layernorm"),
            gate_up=self._linear(
                {
                    f"{mlp}.gate_proj": config.intermediate_size,
                    f"{mlp}.up_proj": config.intermediate_size,
                },
                hidden,
                config.mlp_bias,
                gated=True,
            ),
            down=self._linear(
                {f"{mlp}.down_proj": hidden}, config.intermediate_size, config.mlp_bias
            ),
            window=config.windows[index],
        )

    def _vocabulary_matrix(self, name: str) -> Any:
        """A [vocab_size, hidden_size] matrix: the embedding table or the output head.

        In int8 where the others are in int4: files in Q4_1 have more bits here, too, and on
        SmolLM2-135M int4 would move the logits 20 times as far (0.046 against 0.0025 nats) as all
        other matrices together.
        """
        quantization = "int8" if self.quantization == "int4" else self.quantization
        return self._linear(
            {name: self.config.vocab_size}, self.config.hidden_size, False, False, quantization
        )

    def _norm(self, name: str) -> RMSNorm:
        """The RMSNorm of that name over the hidden size."""
        return RMSNorm(
            self._vector(f"{name}.weight", self.config.hidden_size), self.config.norm_eps
        )

    def _vector(self, name: str, length: int) -> Float32:
        """A norm weight or bias; these stay float32 in every run dtype, as activations do.

        Copied, so that no small tensor keeps the whole file mapped.
        """
        return np.array(self.checkpoint.weight(name, (length,), "float32"))

    def _linear(
        self,
        parts: dict[str, int],
        columns: int,
        bias: bool,
        gated: bool = False,
        quantization: str | None = None,
    ) -> Any:
        """Pack the named matrices, with the rows given for each, below one another."""
        biases = [self._vector(f"{name}.bias", rows) for name, rows in parts.items() if bias]
        return self.backend.pack_linear(
            [
                self.checkpoint.weight(f"{name}.weight", (rows, columns), self.dtype)
                for name, rows in parts.items()
            ],
            np.concatenate(biases) if biases else None,
            quantization or self.quantization,
            gated,
        )
