"""The life of sequences: each step of it is one method here, and only here.

enter → (queue) → take_slot → introduce → start_decoding → … → end, with drain shortly before an
end that can be foreseen, and give_back, preempt or restart on the way back to the queue.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

import numpy as np

from deepinfer.scheduler.blocks import BlockPool
from deepinfer.scheduler.clients import ClientBook
from deepinfer.scheduler.ends import Ending, StopRules
from deepinfer.scheduler.fair_queue import FairQueue
from deepinfer.scheduler.images import Images
from deepinfer.scheduler.in_flight import InFlight
from deepinfer.scheduler.outbox import Outbox
from deepinfer.scheduler.pace import Pace
from deepinfer.scheduler.prefix_cache import PrefixCache
from deepinfer.scheduler.queues import WaitingQueue
from deepinfer.scheduler.recent import RecentEnds
from deepinfer.scheduler.sequence import Sequence, Status
from deepinfer.scheduler.story import StoryShelf
from deepinfer.scheduler.suspects import find_culprit
from deepinfer.scheduler.table import BatchTable, TokenClass, UInt8
from deepinfer.scheduler.tenants import Tenants
from deepinfer.scheduler.victims import makes_way
from deepinfer.wire.config import EngineArgs
from deepinfer.wire.messages import End, RowNote
from deepinfer.wire.steps import RowAdmit, WorkerReady

HEADROOM_ROW = 1
HEADROOM = 12
"""Blocks that a sequence leaves available when it enters a slot: for each row that is there, and in
all. The first keeps pace with large batches, whose rows also end and give blocks back all the time;
the second is for a few rows, each of which may grow long before another ends. Measured without
prefix cache on mixes that need three times a pool of 64 blocks: recomputed tokens per output token
are 0.09 on average and 0.28 at worst; with one block per row alone (and four for a sequence that
was preempted before) they were 0.25 and 0.89, for a twentieth fewer steps. In a pool of 256 blocks
both are below 0.2 and take equally many steps. ``benchmarks/thrash.py`` measures it."""


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    steps_planned: int = 0
    steps_done: int = 0
    ignored_results: int = 0
    voided_rows: int = 0
    accepted: int = 0
    refused: int = 0
    preemptions: int = 0
    worker_restarts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0
    ended: dict[Ending, int] = field(default_factory=lambda: dict.fromkeys(Ending, 0))


class Lifecycle:
    """All state of the engine's sequences, and the moves between its parts."""

    def __init__(self, args: EngineArgs, tokens_per_row: int, image_arena_bytes: int) -> None:
        self.args = args
        self.tokens_per_row = tokens_per_row
        self.clients = ClientBook()
        self.tenants = Tenants()
        self.queue = (
            FairQueue(self.tenants)
            if args.policy == "fair"
            else WaitingQueue(by_priority=args.policy == "priority")
        )
        self.outbox = Outbox()
        self.shelf = StoryShelf()
        self.recent = RecentEnds()
        self.counters = Counters()
        self.deadlines: list[tuple[float, int, Sequence]] = []
        self.in_flight: dict[int, InFlight] = {}
        self.pace = Pace(args.max_step_ms / 1e3 if args.max_step_ms is not None else None)
        # Nobody else asks it anything.
        self.paced = self.queue.fair or args.max_step_ms is not None
        self.images = Images(image_arena_bytes, self.in_flight)
        self.ready = False

    def set_up(self, ready: WorkerReady) -> None:
        """Make an empty batch and cache of the size the worker has."""
        size = self.args.block_size
        self.vocab_size = self.images.vocab_size = ready.vocab_size
        most = min(self.args.max_model_len or ready.max_model_len, ready.max_model_len)
        self.rules = StopRules(frozenset(ready.eos_token_ids), most, ready.num_blocks * size)
        limit = self.rules.limit
        # No step may compute more than the budget, and decode rows cannot be left out of one.
        slots = min(self.args.max_num_seqs, self.args.max_num_batched_tokens // self.tokens_per_row)
        self.table = BatchTable(max(slots, 1), limit + 1, -(-limit // size), size)
        self.tenants.attach(self.table)
        self.pool = BlockPool(ready.num_blocks)
        self.cache = PrefixCache(self.pool, size, self.args.enable_prefix_caching)
        self.prefilling: list[Sequence] = []
        self.released: list[int] = []
        self.token_class: UInt8 = np.zeros(ready.vocab_size, dtype=np.uint8)
        eos = [token for token in ready.eos_token_ids if token < ready.vocab_size]
        self.token_class[eos] = TokenClass.EOS
        # How many sequences in slots name a token in stop_token_ids.
        self.stop_users: dict[int, int] = {}
        self.ready = True

    # ---- in -------------------------------------------------------------------------------------

    def enter(self, sequence: Sequence, now: float) -> None:
        """Accept a sequence: it is live from now on and will end exactly once."""
        self.counters.accepted += 1
        self.clients.add(sequence)
        self.tenants.add(sequence.tenant)
        if sequence.deadline is not None:
            insort(self.deadlines, (sequence.deadline, sequence.arrival_number, sequence))
        num_output = len(sequence.tokens) // 4 - sequence.num_prompt
        if num_output:
            self.recent.brought(sequence, num_output)
        sequence.story.tell(
            now, "arrived", prompt_tokens=sequence.num_prompt, output_tokens=num_output
        )

    def enqueue(self, sequence: Sequence, now: float) -> None:
        """Put a new sequence into the waiting queue."""
        self.queue.enter(sequence, now)
        sequence.story.tell(now, "queued", waiting=len(self.queue))

    def end_if_unservable(self, sequence: Sequence, now: float) -> bool:
        """End a sequence at once that can never run, or that has nothing left to do."""
        rules = self.rules
        ignored = rules.too_long(sequence.num_prompt)
        if ignored is not None:
            self.end(sequence, ignored, now)
            return True
        length = len(sequence.tokens) // 4
        if length > sequence.num_prompt:
            last = int.from_bytes(sequence.tokens[-4:], "little")
            stop = rules.after_token(sequence, last, length)
            if stop is not None:
                self.end(sequence, stop[0], now, stop[1])
                return True
        return False

    # ---- queue to slot --------------------------------------------------------------------------

    def cached_blocks(self, sequence: Sequence) -> list[int]:
        """Return the blocks that already hold the beginning of a sequence's tokens."""
        if not self.cache.enabled:
            return []
        num_tokens = len(sequence.tokens) // 4
        self.cache.extend(
            sequence.digests, sequence.salt, sequence.tokens, num_tokens, sequence.images
        )
        # A full hit leaves at least one token to compute, because that one's logits are wanted.
        most = num_tokens - 1
        if self._wants_prompt_logprobs(sequence):
            # The log probability of position p is computed at p - 1, so that one is not skipped.
            most = min(most, sequence.prompt_logprobs_next - 1)
        return self.cache.match(sequence.digests, most // self.args.block_size)

    def missing_blocks(self, sequence: Sequence, cached: list[int]) -> int:
        """Return how many blocks must be available for the sequence to take a slot.

        That is the rest of its tokens, those of its cached blocks that nobody owns, and room for
        the rows in slots to grow: see ``_headroom``.
        """
        total = -(-(len(sequence.tokens) // 4) // self.args.block_size)
        idle = sum(1 for block in cached if self.pool.is_idle(block))
        return total - len(cached) + idle + self._headroom(sequence)

    def take_slot(self, sequence: Sequence, cached: list[int], now: float) -> None:
        """Give a waiting sequence a slot and the blocks for all its tokens.

        The worker hears of it with its first chunk (``introduce``).
        """
        self.queue.remove(sequence, now)
        slot = self.table.bind(sequence, self.rules.last_length(sequence))
        for block in cached:
            self.pool.share(block)
        total = -(-(len(sequence.tokens) // 4) // self.args.block_size)
        self.table.add_blocks(slot, cached + self.pool.allocate(total - len(cached)))
        computed = len(cached) * self.args.block_size
        self.table.computed[slot] = computed
        self.table.charged[slot] = max(computed, sequence.charged)
        self.tenants.take_slot(slot)
        sequence.num_registered = len(cached)
        insort(self.prefilling, sequence, key=lambda seq: seq.queue_key)
        for token_id in sequence.stop_ids:
            self.stop_users[token_id] = self.stop_users.get(token_id, 0) + 1
            self.token_class[token_id] |= TokenClass.STOP_ID

    def rematch(self, sequence: Sequence) -> None:
        """Swap blocks that were taken but not yet written for cached ones found meanwhile.

        Of several prompts with one beginning that take slots together, the first computes it and
        the others find it when their turn comes.
        """
        table, slot = self.table, sequence.slot
        held = int(table.computed[slot]) // self.args.block_size
        cached = self.cached_blocks(sequence)
        if len(cached) <= held:
            return
        own = table.block_table[slot, held : len(cached)].copy()
        for block in cached[held:]:
            self.pool.share(block)
        table.block_table[slot, held : len(cached)] = cached[held:]
        self.pool.release(own)
        computed = len(cached) * self.args.block_size
        table.computed[slot] = computed
        table.charged[slot] = max(computed, int(table.charged[slot]))
        sequence.num_registered = len(cached)

    def introduce(self, sequence: Sequence, now: float) -> RowAdmit:
        """Tell the worker of a sequence whose first chunk is in the plan that is being made."""
        table, slot = self.table, sequence.slot
        cached = int(table.computed[slot])
        table.known[slot] = True
        waited_ms = sequence.waited_s * 1e3
        blocks = int(table.held[slot])
        if sequence.first_scheduled is None:
            sequence.first_scheduled = now
            sequence.cached_tokens = min(cached, sequence.num_prompt)
            self.counters.prompt_tokens += sequence.num_prompt
            self.counters.cached_tokens += sequence.cached_tokens
            sequence.story.tell(
                now,
                "admitted",
                cached_tokens=cached,
                blocks=blocks,
                waited_ms=waited_ms,
                **sequence.chosen,
            )
        else:
            recompute = max(0, sequence.computed_before - cached)
            sequence.recomputed_tokens += recompute
            self.counters.recomputed_tokens += recompute
            sequence.story.tell(
                now,
                "resumed",
                recomputed_tokens=recompute,
                cached_tokens=cached,
                blocks=blocks,
                waited_ms=waited_ms,
                **sequence.chosen,
            )
        return RowAdmit(
            slot=slot,
            epoch=int(table.epoch[slot]),
            tokens=sequence.tokens,
            num_prompt=sequence.num_prompt,
            num_cached=cached,
            blocks=table.blocks(slot).astype("<i4", copy=False).tobytes(),
            params=sequence.params,
            prompt_logprobs_start=sequence.prompt_logprobs_next,
            images=sequence.images.spans() if sequence.images is not None else [],
        )

    def start_decoding(self, sequence: Sequence) -> None:
        """The last chunk is planned: the row decodes from the next step on."""
        table, slot = self.table, sequence.slot
        self.prefilling.remove(sequence)
        table.decode[slot] = True
        table.version += 1
        table.sure[slot] = table.length[slot] + 1
        sequence.move(Status.RUNNING)

    def register(self, sequence: Sequence, num_computed: int) -> None:
        """Make the blocks that hold the first ``num_computed`` tokens findable.

        The digests of those blocks must be known.
        """
        if not self.cache.enabled:
            return
        blocks = self.table.block_table[sequence.slot]
        full = num_computed // self.args.block_size
        for index in range(sequence.num_registered, full):
            self.pool.name(int(blocks[index]), sequence.digests[index])
        sequence.num_registered = max(full, sequence.num_registered)

    # ---- slot to queue --------------------------------------------------------------------------

    def give_back(self, sequence: Sequence, now: float) -> None:
        """Return a sequence that the worker has not heard of to the queue; nothing is lost."""
        assert not self.table.known[sequence.slot]
        self._leave_slot(sequence)
        self.queue.add(sequence, now)

    def preempt(
        self, sequence: Sequence, now: float, why: str, recompute: bool, by: Sequence | None = None
    ) -> None:
        """Take slot and blocks from a sequence; it ends, or keeps its tokens and waits again.

        ``by`` is the one it makes way for, if that is known: else a block was needed.
        """
        sequence.story.tell(
            now,
            "preempted",
            by.story.whose if by else "kv_cache",
            why=why,
            blocks_freed=int(self.table.held[sequence.slot]),
            results_voided=self._in_flight(sequence),
        )
        if not recompute:
            self.end(sequence, Ending.PREEMPTED, now)
            return
        sequence.computed_before = self._computed(sequence)
        sequence.num_preemptions += 1
        self.counters.preemptions += 1
        self._leave_slot(sequence)
        if sequence.status is Status.RUNNING:
            sequence.move(Status.WAITING)
        self.queue.add(sequence, now)

    def restart(self, now: float, cause: str) -> None:
        """The worker is gone, and with it slots, blocks and cache: everything is recomputed.

        This is the recompute preemption of all at once, whatever the policy. It is no preemption
        in the counters: nobody was short of anything.
        """
        culprit = find_culprit(
            self._rows_of_current_step(), self._progress, alone=len(self.clients) == 1
        )
        for sequence in self.table.bound():
            sequence.story.tell(
                now, "worker_restart", cause=cause, results_voided=self._in_flight(sequence)
            )
            sequence.num_restarts += 1
            sequence.computed_before = self._computed(sequence)
            self._leave_slot(sequence, keep_cache=False)
            if sequence.status is Status.RUNNING:
                sequence.move(Status.WAITING)
            self.queue.add(sequence, now)
        self.counters.worker_restarts += 1
        self.in_flight.clear()
        self.pace.restart()
        self.ready = False
        if culprit is not None:
            self.end(culprit, Ending.WORKER_FAILED, now, message=cause)

    # ---- out ------------------------------------------------------------------------------------

    def drain(self, sequence: Sequence) -> None:
        """Take a row out of the next plan whose end is certain to come with what is in flight.

        The slot stays bound until the result was read, so the tokens find their sequence. The
        blocks are free at once: the worker executes in order, so who gets them writes after the
        last step of this row.
        """
        table, slot = self.table, sequence.slot
        self._release_blocks(sequence, keep_cache=True)
        table.drop_blocks(slot)
        table.decode[slot] = False
        table.version += 1
        table.known[slot] = False
        self.released.append(slot)

    def end(
        self,
        sequence: Sequence,
        ending: Ending,
        now: float,
        matched: object = None,
        num_output: int | None = None,
        message: str = "",
    ) -> None:
        """End a sequence, give back all it holds, and say so to its client. Once, and only here.

        ``num_output`` is how many of its outputs count, all when not given.
        """
        voided = 0
        if sequence.slot >= 0:
            voided = self._in_flight(sequence)
            self._leave_slot(sequence)
        elif sequence in self.queue:
            self.queue.remove(sequence, now)
        produced = len(sequence.tokens) // 4 - sequence.num_prompt
        num_output = produced if num_output is None else num_output
        last = sequence.num_prompt + num_output - 1
        last_token = int.from_bytes(sequence.tokens[last * 4 : last * 4 + 4], "little")
        sequence.move(ending.status)
        self.images.leave(sequence)
        self.clients.remove(sequence)
        self.tenants.remove(sequence.tenant)
        if sequence.deadline is not None:
            entry = (sequence.deadline, sequence.arrival_number)
            del self.deadlines[bisect_left(self.deadlines, entry)]
        self.counters.ended[ending] += 1
        total_ms = (now - sequence.arrival) * 1e3
        started = sequence.first_scheduled
        end = End(
            key=sequence.key,
            status=ending.status.name,
            reason=ending.status.reason,
            detail=ending.detail(matched),
            num_output_tokens=num_output,
            last_token_id=last_token,
            cached_tokens=sequence.cached_tokens,
            num_preemptions=sequence.num_preemptions,
            recomputed_tokens=sequence.recomputed_tokens,
            queue_ms=total_ms if started is None else (started - sequence.arrival) * 1e3,
            total_ms=total_ms,
            message=message,
            prompt_tokens=sequence.num_prompt,
        )
        self.outbox.end(sequence.client, end)
        self.recent.add(sequence, end, produced, now)
        sequence.story.tell(
            now,
            "ended",
            status=end.status,
            reason=end.reason,
            detail=end.detail,
            output_tokens=num_output,
            cached_tokens=end.cached_tokens,
            preemptions=end.num_preemptions,
            recomputed_tokens=end.recomputed_tokens,
            results_voided=voided,
            **({"message": message} if message else {}),
        )
        self.shelf.keep(sequence.story)

    def first_token(self, sequence: Sequence, now: float) -> None:
        """A row got its first token since it was admitted: its counters may have changed."""
        self.table.look_at[sequence.slot] = self.table.max_length[sequence.slot]
        sequence.strikes = 0
        first_ever = int(self.table.length[sequence.slot]) == sequence.num_prompt + 1
        sequence.story.tell(now, "first_token" if first_ever else "continued")
        self.outbox.note(
            sequence.client,
            RowNote(
                sequence.key,
                sequence.cached_tokens,
                sequence.num_preemptions,
                sequence.num_prompt,
            ),
        )

    def num_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens the sequence has, prompt and outputs."""
        if sequence.slot >= 0:
            return int(self.table.length[sequence.slot])
        return len(sequence.tokens) // 4

    # ---- inside ---------------------------------------------------------------------------------

    def _leave_slot(self, sequence: Sequence, keep_cache: bool = True) -> None:
        slot = sequence.slot
        if sequence.images is not None:
            self.images.version += 1  # they may be taken back from it now
        self.tenants.leave_slot(slot)
        if self.table.known[slot] or self.table.sure[slot]:
            # Of one the worker never heard of, only found positions stand there, which may be lost.
            sequence.charged = int(self.table.charged[slot])
        self._release_blocks(sequence, keep_cache)
        if self.table.known[slot]:
            self.released.append(slot)
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        for token_id in sequence.stop_ids:
            self.stop_users[token_id] -= 1
            if not self.stop_users[token_id]:
                del self.stop_users[token_id]
                self.token_class[token_id] &= ~np.uint8(TokenClass.STOP_ID)
        self.table.unbind(sequence)

    def _release_blocks(self, sequence: Sequence, keep_cache: bool) -> None:
        table, slot = self.table, sequence.slot
        if keep_cache and self.cache.enabled and table.decode[slot]:
            # Outputs become findable only now: while the sequence runs, a digest per block would
            # be the dearest part of a step.
            known = self._computed(sequence)
            tokens = table.token_bytes(slot)
            self.cache.extend(sequence.digests, sequence.salt, tokens, known, sequence.images)
            self.register(sequence, known)
        self.pool.release(table.blocks(slot))
        sequence.num_registered = 0

    def _computed(self, sequence: Sequence) -> int:
        """Positions whose keys and values are certainly computed once all plans were executed."""
        table, slot = self.table, sequence.slot
        if table.sure[slot]:
            return int(table.length[slot]) - 1
        return int(table.computed[slot])

    def _rows_of_current_step(self) -> list[Sequence]:
        """Return the sequences of the step that the worker is in: the oldest without a result."""
        flight = next(iter(self.in_flight.values()), None)
        if flight is None:
            return []
        rows = dict(zip(flight.slots.tolist(), flight.epochs.tolist(), strict=True)) | flight.chunks
        table = self.table
        return [table.at(slot) for slot, epoch in rows.items() if table.epoch[slot] == epoch]

    def _progress(self, sequence: Sequence) -> int:
        """Count the positions that the latest step of a sequence computes, or was to compute.

        A row that died decoding is at the same place when its recompute dies with its last chunk.
        """
        table, slot = self.table, sequence.slot
        return int(table.length[slot] if table.sure[slot] else table.computed[slot])

    def _in_flight(self, sequence: Sequence) -> int:
        """Count the steps in flight that compute this sequence."""
        table, slot = self.table, sequence.slot
        if table.sure[slot]:
            return int(table.sure[slot] - table.length[slot])
        epoch = int(table.epoch[slot])
        return sum(1 for flight in self.in_flight.values() if flight.chunks.get(slot) == epoch)

    def _headroom(self, sequence: Sequence) -> int:
        """Blocks that stay available for rows to grow when a sequence comes in.

        Without it the next rows that need a block would push somebody out again at once. It is
        never more than the rows and the sequence can need to their longest lengths, and nothing
        for a sequence alone, so that one always fits.
        """
        table, size = self.table, self.args.block_size
        slots = [*np.flatnonzero(table.decode).tolist(), *(seq.slot for seq in self.prefilling)]
        if self.queue.by_priority:
            # No room is kept for those who would lose theirs anyway.
            slots = [s for s in slots if not makes_way(self.queue, table.at(s), sequence)]
        if not slots:
            return 0
        # The last token of a sequence is never computed, so it needs no place.
        missing = -((table.room[slots] - (table.max_length[slots] - 1)) // size)
        own = -(-(self.rules.last_length(sequence) - 1) // size)
        own -= -(-(len(sequence.tokens) // 4) // size)
        needed = int(np.maximum(missing, 0).sum()) + max(own, 0)
        return min(needed, len(slots) * HEADROOM_ROW + HEADROOM)

    def _wants_prompt_logprobs(self, sequence: Sequence) -> bool:
        wanted = sequence.params.prompt_logprobs is not None
        return wanted and sequence.prompt_logprobs_next < sequence.num_prompt
