"""What must hold between any two events. Tests check it after every one, the process when idle."""

from __future__ import annotations

from collections import Counter

import numpy as np

from deepinfer.scheduler.lifecycle import Lifecycle
from deepinfer.scheduler.sequence import Sequence, Status
from deepinfer.scheduler.table import TokenClass
from deepinfer.scheduler.tenants import NOBODY_WAITS


def check(life: Lifecycle) -> None:
    """Raise ``AssertionError`` naming what is broken."""
    life.clients.check()
    _check_queue(life)
    _check_tenants(life)
    with_deadline = sum(seq.deadline is not None for seq in life.clients)
    assert with_deadline == len(life.deadlines), "a deadline outlives its request"
    if not hasattr(life, "table"):
        return  # no worker yet, so nothing holds anything
    bound = life.table.bound()
    for sequence in bound:
        _check_slot(life, sequence)
    _check_slots(life, bound)
    life.pool.check([life.table.blocks(seq.slot) for seq in bound])
    users = Counter(token for sequence in bound for token in sequence.stop_ids)
    assert users == life.stop_users, "stop ids are counted wrongly"
    marked = np.flatnonzero(life.token_class & TokenClass.STOP_ID).tolist()
    assert marked == sorted(users), "stop ids are marked wrongly"
    life.images.check(life.clients)
    live = set(map(id, life.clients))
    placed = [*map(id, bound), *map(id, life.queue)]
    assert len(placed) == len(set(placed)), "a sequence is in two places"
    assert live == set(placed), "a live sequence is nowhere, or a finished one somewhere"


def _check_queue(life: Lifecycle) -> None:
    keys = [sequence.queue_key for sequence in life.queue]
    assert keys == sorted(keys), "the queue is out of order"
    for sequence in life.queue:
        name = sequence.request_id
        assert sequence.status is Status.WAITING, f"{name!r} is {sequence.status.name} in the queue"
        assert sequence.slot == -1, f"{name!r} waits and holds slot {sequence.slot}"
        missing = sequence.images is not None and sequence.images.missing > 0
        assert sequence.schedulable is not missing, f"{name!r} and its images disagree"
    for resubmitted, places in life.queue.places.items():
        wait = [seq.asker for seq in life.queue if seq.resubmitted == resubmitted]
        assert places.taken == Counter(wait) and places.total == len(wait), "places are miscounted"


def _check_tenants(life: Lifecycle) -> None:
    tenants = life.tenants
    live = Counter(sequence.tenant for sequence in life.clients)
    assert live == {i: n for i, n in enumerate(tenants.live.tolist()) if n}, "live is counted wrong"
    assert tenants.num_live == len(live)
    tenants.check()
    if life.queue.fair:
        first: dict[int, int] = {}
        for sequence in life.queue:
            if not sequence.schedulable:
                continue
            first.setdefault(sequence.tenant, sequence.arrival_number)
        told = enumerate(tenants.first.tolist())
        assert first == {i: n for i, n in told if n != NOBODY_WAITS}, "who waits first is wrong"


def _check_slots(life: Lifecycle, bound: list[Sequence]) -> None:
    table = life.table
    slots = {sequence.slot for sequence in bound}
    assert len(slots) == len(bound), "a slot has two owners"
    assert slots | set(table.free_slots) == set(range(table.num_slots)), "a slot is lost"
    assert len(table.free_slots) + len(bound) == table.num_slots, "a free slot is listed twice"
    for slot in table.free_slots:
        assert not (table.known[slot] or table.decode[slot] or table.held[slot]), (
            f"free slot {slot} still has state"
        )
    in_slots = Counter(sequence.tenant for sequence in bound)
    assert in_slots == {i: n for i, n in enumerate(life.tenants.running.tolist()) if n}
    unfinished = [seq for seq in bound if not table.sure[seq.slot]]
    assert sorted(map(id, unfinished)) == sorted(map(id, life.prefilling)), "prefilling is wrong"
    if life.ready:
        running = int(table.decode.sum()) * life.tokens_per_row
        assert running <= life.args.max_num_batched_tokens, "decode rows exceed the budget"
    for slot in life.released:
        assert not table.known[slot], f"slot {slot} is to be released and known"


def _check_slot(life: Lifecycle, sequence: Sequence) -> None:
    table, slot, size = life.table, sequence.slot, life.args.block_size
    name = f"{sequence.request_id!r} in slot {slot}"
    assert table.at(slot) is sequence
    assert not sequence.status.finished, f"{name} is {sequence.status.name}"
    assert sequence.images is None or not sequence.images.missing, f"{name} lacks an image"
    assert table.key[slot] == sequence.key and table.client[slot] == sequence.client_index
    assert table.num_prompt[slot] == sequence.num_prompt
    assert table.tenant[slot] == sequence.tenant
    assert sequence.charged <= table.charged[slot] <= table.length[slot], f"{name} is overcharged"
    length, computed = int(table.length[slot]), int(table.computed[slot])
    sure, held = int(table.sure[slot]), int(table.held[slot])
    assert table.room[slot] == held * size
    assert sequence.num_prompt <= length <= table.max_length[slot], f"{name} has {length} tokens"
    if not sure:
        assert sequence.status is Status.WAITING, f"{name} prefills and is {sequence.status.name}"
        assert computed < length, f"{name} has nothing left to compute"
        assert held == -(-length // size), f"{name} holds {held} blocks for {length} tokens"
        return
    assert sequence.status is Status.RUNNING, f"{name} decodes and is {sequence.status.name}"
    assert length < table.max_length[slot], f"{name} should have ended"
    assert length <= sure <= table.max_length[slot], f"{name}: {length} tokens, {sure} for sure"
    if table.decode[slot]:
        assert table.known[slot], f"{name} decodes unknown to the worker"
        reach = min(computed, int(table.max_length[slot]) - 1)
        assert reach <= held * size, f"{name}: {reach} positions in {held} blocks"
    else:
        assert held == 0 and sure == table.max_length[slot], f"{name} is drained too early"
