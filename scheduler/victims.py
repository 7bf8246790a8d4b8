"""Who is preempted when there are not enough KV blocks, or for a request of higher priority."""

from __future__ import annotations

from deepinfer.scheduler.blocks import BlockPool
from deepinfer.scheduler.queues import WaitingQueue
from deepinfer.scheduler.sequence import Sequence
from deepinfer.scheduler.table import BatchTable


def memory_victim(table: BatchTable, queue: WaitingQueue) -> Sequence:
    """Return the sequence that gives up its blocks because a running row needs one.

    That is the running one with the most output tokens, of equals the youngest; under the priority
    policy one of the lowest class. The first in rank (class, then arrival) is spared while another
    holds blocks: it comes to its end whatever happens, so the engine always makes progress. When it
    is the only one that runs, the youngest unfinished prompt gives way.
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


def _worst_first(
    table: BatchTable, queue: WaitingQueue, sequence: Sequence
) -> tuple[int, int, int]:
    num_output = int(table.length[sequence.slot]) - sequence.num_prompt
    return (queue.class_of(sequence), num_output, sequence.arrival_number)
