"""Choosing the next token of each row from its logits.

What a row gets is a function of its own logits, parameters, seed and tokens alone:

1. the rules of ``logit_rules`` (bans, bias, penalties), in the order given there;
2. greedy (temperature below ``GREEDY_BELOW``): the first largest logit, and that is all;
3. else temperature, then ``min_p``, ``top_k``, ``top_p`` (each on what the one before has left),
   and one uniform number, keyed by seed and output position, through the inverse of the cumulative
   distribution;
4. ``golden_token_ids`` replace all of it for the first outputs.

Log probabilities are raw: ``log_softmax`` of the model's logits before any of these steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deepinfer.gpu_worker.kernels import sampling
from deepinfer.gpu_worker.kernels.fork_join import ThreadTeam
from deepinfer.gpu_worker.logit_rules import LogitRules
from deepinfer.gpu_worker.logprobs import token_logprobs
from deepinfer.gpu_worker.random_uniform import seed_state, uniforms
from deepinfer.wire.columns import Int32
from deepinfer.wire.messages import TokenLogprobs
from deepinfer.wire.params import SamplingParams

Float32 = npt.NDArray[np.float32]
Index = npt.NDArray[np.int64]

NOT_FINITE = "the model's logits are not finite"
ALL_BANNED = (
    "every token is banned by allowed_token_ids, bad_words, min_tokens or logit_bias of the request"
)


@dataclass(slots=True)
class Sampled:
    """What one step chose.

    - ``tokens`` int32 [S]: undefined for the rows in ``failed``.
    - ``failed``: row to the reason why it has no token.
    - ``logprobs``: row to log probabilities, for the rows that asked and did not fail.
    """

    tokens: Int32
    failed: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class Sampler:
    """The sampling parameters of every slot, as columns, and the choice of tokens by them.

    ``team``: the threads that share the work, which the backend has already; the calling thread
    alone when not given.
    """

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        max_num_seqs: int,
        team: ThreadTeam | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        # An EOS id that only the tokenizer knows can never be sampled, so there is none to ban.
        self._eos_token_ids = [i for i in eos_token_ids if 0 <= i < vocab_size]
        self._team = team or ThreadTeam(1)
        # Slots that want more than the largest logit: most steps have none.
        self._special: set[int] = set()
        self._random = np.zeros(max_num_seqs, np.bool_)
        self._temperature = np.ones(max_num_seqs, np.float64)
        self._top_k = np.zeros(max_num_seqs, np.int64)
        self._top_p = np.zeros(max_num_seqs, np.float64)
        self._min_p = np.zeros(max_num_seqs, np.float64)
        self._state = np.zeros(max_num_seqs, np.uint64)
        # Outputs before which a slot needs a Python object's attention: 0 for plain rows.
        self._rules_until = np.zeros(max_num_seqs, np.int64)
        self._golden_until = np.zeros(max_num_seqs, np.int64)
        self._num_logprobs = np.full(max_num_seqs, -1, np.int64)
        self._rules: dict[int, LogitRules] = {}
        self._golden: dict[int, list[int]] = {}

    def warm_up(self) -> None:
        """Compile the kernels, or load them from their cache."""
        logits = np.zeros((1, self._vocab_size), np.float32)
        rows = np.zeros(1, np.int64)
        self._largest(logits)
        self._draw(logits, rows, logits[:, 0], rows, rows)
        token_logprobs(self._team.control, logits, rows, rows)

    def admit(self, slot: int, params: SamplingParams, num_prompt: int) -> None:
        """Take the parameters of a sequence that enters ``slot``.

        ``ValueError`` when they cannot be followed (ids outside the vocabulary, bad words that are
        still strings, no seed although the choice is random); the slot is then left unused.
        """
        rules = LogitRules(params, num_prompt, self._eos_token_ids, self._vocab_size)
        if not params.greedy and params.seed is None:
            raise ValueError("seed must be set before a request reaches the worker")
        self.release(slot)
        self._random[slot] = not params.greedy
        self._temperature[slot] = params.temperature
        self._top_k[slot] = params.top_k if params.top_k > 0 else self._vocab_size
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._state[slot] = seed_state(params.seed or 0)
        if rules.lasting or rules.min_tokens:
            self._rules[slot] = rules
            self._rules_until[slot] = np.iinfo(np.int64).max if rules.lasting else rules.min_tokens
        if params.golden_token_ids:
            self._golden[slot] = params.golden_token_ids
            self._golden_until[slot] = len(params.golden_token_ids)
        if params.logprobs is not None:
            self._num_logprobs[slot] = min(params.logprobs, self._vocab_size)
        plain = params.greedy and params.logprobs is None
        if not plain or slot in self._rules or slot in self._golden:
            self._special.add(slot)

    def release(self, slot: int) -> None:
        """Forget the parameters of ``slot``."""
        self._random[slot] = False
        self._rules_until[slot] = self._golden_until[slot] = 0
        self._num_logprobs[slot] = -1
        self._special.discard(slot)
        self._rules.pop(slot, None)
        self._golden.pop(slot, None)

    def sample(
        self,
        logits: Float32,
        slots: npt.NDArray[np.integer],
        num_outputs: npt.NDArray[np.integer],
        history: Callable[[int], Int32],
    ) -> Sampled:
        """Choose one token for each row.

        - ``logits`` float32 [S, V], C-contiguous; rows that have rules are overwritten.
        - ``slots``, ``num_outputs`` integers [S]: the row's slot, and how many outputs it has.
        - ``history``: slot to all its tokens so far, prompt and outputs, int32.

        A row that cannot get a token is reported in ``failed``; the others are not affected.
        """
        if self._special.isdisjoint(slots.tolist()):
            tokens, _, finite = self._largest(logits)
            if finite:
                return Sampled(tokens)
        asked = np.flatnonzero(self._num_logprobs[slots] >= 0)
        raw = logits[asked]
        golden = num_outputs < self._golden_until[slots]
        ruled = np.flatnonzero((num_outputs < self._rules_until[slots]) & ~golden)
        failed = self._apply_rules(logits, slots, ruled, history)
        tokens, peaks, _ = self._largest(logits)
        failing = ~np.isfinite(peaks)
        for row in np.flatnonzero(failing).tolist():
            banned = peaks[row] == -np.inf and row in ruled
            failed.setdefault(row, ALL_BANNED if banned else NOT_FINITE)
        failing[list(failed)] = True
        rows = np.flatnonzero(self._random[slots] & ~golden & ~failing)
        if len(rows):
            tokens[rows] = self._draw(logits, rows, peaks[rows], slots[rows], num_outputs[rows])
        for row in np.flatnonzero(golden).tolist():
            tokens[row] = self._golden[int(slots[row])][int(num_outputs[row])]
        raw, asked = raw[~failing[asked]], asked[~failing[asked]]
        found = token_logprobs(
            self._team.control, raw, tokens[asked], self._num_logprobs[slots[asked]]
        )
        return Sampled(tokens, failed, dict(zip(asked.tolist(), found, strict=True)))

    def _largest(self, logits: Float32) -> tuple[Int32, Float32, bool]:
        """Each row's token of the largest logit, that logit, and whether all these are finite."""
        tokens, peaks = np.empty(len(logits), np.int32), np.empty(len(logits), np.float32)
        finite = sampling.largest(self._team.control, logits, tokens, peaks)
        return tokens, peaks, finite

    def _apply_rules(
        self,
        logits: Float32,
        slots: npt.NDArray[np.integer],
        rows: Index,
        history: Callable[[int], Int32],
    ) -> dict[int, str]:
        failed: dict[int, str] = {}
        for row in rows.tolist():
            slot = int(slots[row])
            # Checked here because a rule may overwrite the very logit that is not finite.
            if not (logits[row] < np.inf).all():
                failed[row] = NOT_FINITE
                continue
            try:
                with np.errstate(all="ignore"):
                    self._rules[slot].apply(logits[row], history(slot))
            except Exception as error:  # one row's trouble must not become its neighbours'
                failed[row] = f"{type(error).__name__} while sampling: {error}"
        return failed

    def _draw(
        self,
        logits: Float32,
        rows: Index,
        peaks: Float32,
        slots: npt.NDArray[np.integer],
        num_outputs: npt.NDArray[np.integer],
    ) -> Int32:
        out = np.empty(len(rows), np.int32)
        sampling.draw(
            self._team.control,
            logits,
            rows,
            peaks,
            self._temperature[slots],
            self._top_k[slots],
            self._top_p[slots],
            self._min_p[slots],
            uniforms(self._state[slots], num_outputs),
            out,
        )
        return out
