"""Who is preempted: when blocks are short, for a higher priority, for an under-served tenant."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from deepinfer.scheduler.blocks import BlockPool
from deepinfer.scheduler.queues import WaitingQueue
from deepinfer.scheduler.sequence import Sequence
from deepinfer.scheduler.table import BatchTable
from deepinfer.scheduler.tenants import ROUNDING, Tenants


def memory_victim(table: BatchTable, queue: WaitingQueue) -> Sequence:
    """Return the sequence that gives up its blocks because a running row needs one.

    That is the running one with the most output tokens, of equals the youngest; under the priority
    policy one of the lowest class, under the fair policy one of the tenant that was served most.
    The first in rank (class, then arrival) is spared while another holds blocks: it comes to its
    end whatever happens, so the engine always makes progress. When it is the only one that runs,
    the youngest unfinished prompt gives way.
    """
    holders = [seq for seq in table.bound() if table.held[seq.slot]]
    first = min(holders, key=lambda seq: (queue.class_of(seq), seq.arrival_number))
    others = [seq for seq in holders if seq is not first]
    # A sequence alone was admitted only because it fits to its very end.
    assert others, f"{first.request_id!r} is alone and does not fit"
    running = [seq for seq in others if table.decode[seq.slot]]
    return max(running or others, key=lambda seq: _worst_first(table, queue, seq))


def makes_way(queue: WaitingQueue, sequence: Sequence, head: Sequence) -> bool:
    """Whether a sequence in a slot may be pushed out for the one at the front of the queue.

    It must be of a strictly lower class, and not have waited so long that its age makes up for the
    difference: so nobody is pushed out for ever.
    """
    return sequence.priority > head.priority and queue.class_of(sequence) > head.priority


def priority_victims(
    table: BatchTable, queue: WaitingQueue, pool: BlockPool, head: Sequence, missing: int
) -> list[Sequence]:
    """Return those that make way for ``head``, which needs a slot and ``missing`` blocks.

    Only those that ``makes_way`` allows. Empty when ``head`` fits as things are, or does not fit
    even with all of them gone.
    """
    # A drained row leaves its slot with the next result; no need to push anybody out for a slot.
    slots = len(table.free_slots) + int((~table.decode & (table.sure > 0)).sum())
    blocks = pool.available
    lower = [seq for seq in table.bound() if table.held[seq.slot] and makes_way(queue, seq, head)]
    lower.sort(key=lambda seq: _worst_first(table, queue, seq), reverse=True)
    victims: list[Sequence] = []
    for sequence in lower:
        if slots and blocks >= missing:
            break
        victims.append(sequence)
        slots += 1
        # Blocks with other owners stay theirs.
        blocks += int((pool.references[table.blocks(sequence.slot)] == 1).sum())
    return victims if slots and blocks >= missing else []


def fair_victims(
    table: BatchTable,
    pool: BlockPool,
    tenants: Tenants,
    head: Sequence,
    longest: int,
    missing_blocks: Callable[[], int],
) -> list[Sequence]:
    """Return those that make way for ``head``, of the tenant that goes first, under fair.

    What a tenant *has* is the larger of its part of the slots and its part of the blocks (its
    dominant share: Ghodsi et al., "Dominant Resource Fairness", NSDI 2011); its *share* is its
    weight over those of all tenants with live requests. Victims are the youngest sequences of
    tenants that have more than their share and were served no less than the head's. Each tenant
    keeps its oldest one, so whom a tenant keeps comes to its end and nothing starves. The head is
    favoured only when its tenant has nothing in a slot, or has no more than its share with the
    head. Empty when nobody needs to make way, or ``head`` would not fit even so.

    That is for *light* tenants: all their live requests together take one slot, or no more than
    their share of slots. One with more work than that comes in as others end, because nobody
    passes the first of the queue; it is favoured only beside tenants that were served more by the
    ``longest`` that one sequence can get, which others' ends alone allow when they are far away.

    So tenants with endless work do not push each other back and forth, and what is computed again
    for fairness is bounded by the requests of light tenants.

    ``missing_blocks`` counts the blocks that must be available for the head.
    """
    # A drained row leaves its slot with the next result; no need to push anybody out for a slot.
    slots = len(table.free_slots) + int((~table.decode & (table.sure > 0)).sum())
    has_slots, has_blocks = tenants.holdings(pool.num_blocks)
    has, share, order = np.maximum(has_slots, has_blocks), tenants.shares(), tenants.order
    mine = head.tenant
    light = tenants.is_light(mine, table.num_slots)
    ahead = 0.0 if light else longest / float(tenants.weight[mine])
    over = (has > share + ROUNDING) & (order - order[mine] >= ahead)
    over[mine] = False
    if not over.any():
        return []
    if has_slots[mine]:
        length = len(head.tokens) // 4
        blocks_with = has_blocks[mine] + -(-length // table.block_size) / pool.num_blocks
        if max(has_slots[mine] + 1 / table.num_slots, blocks_with) > share[mine] + ROUNDING:
            return []  # see ``Tenants.may_push`` as well
    blocks = pool.available
    missing = missing_blocks()
    if slots and blocks >= missing:
        return []
    holders = [seq for seq in table.bound() if table.held[seq.slot] and over[seq.tenant]]
    holders.sort(key=lambda seq: (order[seq.tenant], seq.arrival_number), reverse=True)
    oldest = {seq.tenant: seq for seq in holders}  # the last of each tenant stays in it
    victims: list[Sequence] = []
    for sequence in holders:
        if slots and blocks >= missing:
            break
        tenant, slot = sequence.tenant, sequence.slot
        has_now = max(has_slots[tenant], has_blocks[tenant])
        if sequence is oldest[tenant] or has_now <= share[tenant] + ROUNDING:
            continue
        victims.append(sequence)
        slots += 1
        # Blocks with other owners stay theirs.
        blocks += int((pool.references[table.blocks(slot)] == 1).sum())
        has_slots[tenant] -= 1 / table.num_slots
        has_blocks[tenant] -= int(table.held[slot]) / pool.num_blocks
    return victims if slots and blocks >= missing else []


def _worst_first(
    table: BatchTable, queue: WaitingQueue, sequence: Sequence
) -> tuple[float, int, int]:
    num_output = int(table.length[sequence.slot]) - sequence.num_prompt
    return (queue.rank_of(sequence), num_output, sequence.arrival_number)
