"""Requests with images in the core: they wait, share, retry, make room, and leave nothing."""

from __future__ import annotations

import pytest

from deepinfer.scheduler import queues
from deepinfer.wire.config import EngineArgs
from deepinfer.wire.params import SamplingParams
from support.core_driver import CoreDriver, Request
from support.scripted_images import MAX_LINES, PLACEHOLDER, picture

CELLS = 1 + MAX_LINES
"""Of the largest region."""


def driver(num_blocks: int = 64, arena_cells: int = 8 * CELLS, **fields: object) -> CoreDriver:
    values: dict[str, object] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "max_model_len": 64,
        "stop_preempted_request": False,
        "image_urls": True,
    }
    args = EngineArgs(**(values | fields))  # type: ignore[arg-type]
    return CoreDriver(args, num_blocks, arena_cells=arena_cells)


def greedy(max_tokens: int = 6) -> SamplingParams:
    return SamplingParams(seed=0, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def ask(engine: CoreDriver, *pictures: bytes, **fields: object) -> Request:
    prompt = [5, 6] + [token for _ in pictures for token in (PLACEHOLDER, 7)]
    return engine.add(prompt, greedy(), pictures=pictures, **fields)  # type: ignore[arg-type]


def events(engine: CoreDriver, request: Request) -> list[str]:
    story = engine.core.story(request.request_id)
    assert story is not None
    return [event.event for event in story]


def test_text_passes_a_request_that_waits_for_its_image() -> None:
    engine = driver()
    waits = ask(engine, picture(1))
    text = engine.add([5, 6, 7], greedy())
    engine.take_image_jobs()
    while engine.plan() is not None:
        engine.deliver()
    engine.hold_alone(text)
    assert waits.live and not waits.tokens
    assert engine.core.stats()["images_encoding"] == 1
    engine.run()
    engine.hold_alone(waits)
    assert events(engine, waits)[:5] == [
        "arrived", "images_wait", "queued", "image_begins", "image_done",
    ]  # fmt: skip
    engine.hold_idle()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_no_more_than_a_bounded_number_pass(monkeypatch, policy: str) -> None:
    monkeypatch.setattr(queues, "MAX_PASSING", 3)
    engine = driver(policy=policy)
    waits = ask(engine, picture(1))
    texts = [engine.add([5, 6, 7 + i], greedy()) for i in range(6)]
    engine.take_image_jobs()
    while engine.plan() is not None:
        engine.deliver()
    assert [text.live for text in texts] == [False] * 3 + [True] * 3
    engine.run()
    for request in [waits, *texts]:
        engine.hold_alone(request)
    engine.hold_idle()


def test_equal_images_are_encoded_once_and_shared_within_a_salt() -> None:
    engine = driver()
    requests = [ask(engine, picture(1), picture(1)) for _ in range(3)]
    requests.append(ask(engine, picture(1), by_url=True))
    engine.run()
    assert engine.images_done == 2  # what a URL holds is known when it was fetched
    later = ask(engine, picture(1))
    assert engine.core.stats()["images_waiting"] == 0
    engine.run()
    assert engine.images_done == 2
    other = ask(engine, picture(1), salt="another tenant")
    engine.run()
    assert engine.images_done == 3
    for request in [*requests, later, other]:
        engine.hold_alone(request)
    engine.hold_idle()
    assert engine.core.stats()["image_arena_used_bytes"] == 2 * 4 * 64


def test_equal_placeholders_of_other_images_are_no_equal_prompt_beginnings() -> None:
    engine = driver()
    first = ask(engine, picture(1, 6), picture(2, 6))
    engine.run()
    swapped = ask(engine, picture(2, 6), picture(1, 6))
    again = ask(engine, picture(1, 6), picture(2, 6))
    engine.run()
    for request in (first, swapped, again):
        engine.hold_alone(request)
    assert first.tokens != swapped.tokens
    assert swapped.end is not None and swapped.end.cached_tokens == 0
    assert again.end is not None and again.end.cached_tokens > 12


def test_a_chunk_may_cut_an_image_and_a_recompute_gets_it_again() -> None:
    engine = driver(max_num_batched_tokens=3)
    request = ask(engine, picture(1, 6), picture(2, 5))
    for _ in range(6):
        engine.step()
    assert engine.evict(request)
    for _ in range(3):
        engine.step()
    engine.kill_worker()
    engine.run()
    engine.hold_alone(request)
    assert engine.images_done == 2
    engine.hold_idle()


def test_an_image_that_cannot_be_had_ends_its_requests_alone_by_name() -> None:
    engine = driver(num_image_workers=2)
    good, text = ask(engine, picture(1)), engine.add([5, 6], greedy())
    bad = ask(engine, picture(2), b"\x89PNG but not really")
    empty = ask(engine, picture(2), b"")
    engine.run()
    engine.hold_alone(good)
    engine.hold_alone(text)
    for request in (bad, empty):
        assert request.end is not None
        assert (request.end.status, request.end.reason) == ("FINISHED_VE_FAILED", "image_failed")
        assert request.end.detail.startswith("image:1: ")
        assert request.end.message.startswith("image 1: ")
    engine.hold_idle()


def test_images_that_make_a_prompt_too_long_end_it() -> None:
    engine = driver(max_model_len=20)
    request = ask(engine, *[picture(i, 6) for i in range(3)])
    fits = ask(engine, picture(0, 6))
    engine.run()
    assert request.end is not None and request.end.status == "FINISHED_VE_FAILED"
    assert request.end.detail.startswith("image:1: it does not fit: ")
    assert "the limit is 20" in request.end.message
    engine.hold_alone(fits)
    engine.hold_idle()


def test_a_job_is_tried_again_when_its_worker_dies_and_fails_when_two_do() -> None:
    engine = driver()
    request, other = ask(engine, picture(1)), ask(engine, picture(2))
    engine.take_image_jobs()
    engine.kill_image_worker(0)
    assert "image_retry" in events(engine, request)
    engine.take_image_jobs()
    assert engine.image_jobs[0].image.data == picture(1)
    engine.kill_image_worker(0)
    assert request.end is not None and request.end.status == "FINISHED_VE_FAILED"
    assert request.end.detail == "image:0: it ended 2 image workers: killed"
    engine.run()
    engine.hold_alone(other)
    engine.hold_idle()


def test_without_image_workers_requests_with_images_end_and_text_goes_on() -> None:
    engine = driver()
    waits = ask(engine, picture(1))
    engine.core.images_down("no encoder", 0.0)
    engine.collect()
    later = ask(engine, picture(1))
    for request in (waits, later):
        assert request.end is not None and request.end.detail == "image:0: no encoder"
    text = engine.add([5, 6], greedy())
    engine.run()
    engine.hold_alone(text)
    engine.hold_idle()
    engine.kill_image_worker(0)
    again = ask(engine, picture(1))
    engine.run()
    engine.hold_alone(again)


@pytest.mark.parametrize("moment", range(12))
@pytest.mark.parametrize("end", ["abort", "deadline", "leave", "shutdown"])
def test_an_end_at_any_stage_leaves_nothing_held(moment: int, end: str) -> None:
    """IMG-06: before the job, while it runs, before prefill, half way, while decoding."""
    engine = driver(max_num_batched_tokens=4)
    requests = [ask(engine, picture(i, 6), picture(3), timeout_ms=5000.0) for i in range(3)]

    def finish() -> None:
        if engine.image_jobs:
            engine.finish_image(0)

    for stage in ([engine.take_image_jobs, finish, engine.plan, engine.step] * 3)[:moment]:
        stage()
    if end == "abort":
        for request in requests:
            engine.abort(request)
    elif end == "deadline":
        engine.now += 6.0
        engine.core.tick(engine.now)
    elif end == "leave":
        engine.core.client_gone(b"c", "disconnect", engine.now)
    else:
        engine.core.shutdown(engine.now)
    engine.collect()
    assert all(request.end is not None for request in requests)
    engine.run()
    engine.hold_idle()


def test_a_full_arena_is_back_pressure_and_nobody_starves() -> None:
    """IMG-06: a cache of two pictures, 50 requests over 5 pictures."""
    engine = driver(arena_cells=2 * CELLS, num_image_workers=2)
    requests = [ask(engine, picture(i * 7 % 5, 6)) for i in range(50)]
    for request in requests[3::8]:
        engine.step()
        engine.abort(request)
    engine.run()
    for request in requests:
        if request not in requests[3::8]:
            engine.hold_alone(request)
    engine.hold_idle()


def test_the_first_gets_the_room_that_those_behind_it_hold() -> None:
    engine = driver(arena_cells=3 * CELLS, num_image_workers=2, max_num_seqs=1)
    # The second one's image is there first; then the first one needs the whole arena.
    first = ask(engine, picture(1, 6), b"picture 2 6", picture(3, 6))
    engine.take_image_jobs()
    second = ask(engine, picture(4, 6))
    engine.finish_image(0)
    engine.finish_image(1)
    third = ask(engine, picture(5, 6), picture(6, 6), picture(7, 6))
    engine.run()
    for request in (first, second, third):
        engine.hold_alone(request)
    engine.hold_idle()


def test_images_that_never_fit_together_fail_instead_of_waiting_for_ever() -> None:
    engine = driver(arena_cells=2 * CELLS)
    request = ask(engine, *[picture(i, 6) for i in range(3)])
    other = ask(engine, picture(1))
    engine.run()
    assert request.end is not None and request.end.status == "FINISHED_VE_FAILED"
    assert request.end.detail == "image:2: all images together do not fit: image_arena_bytes"
    engine.hold_alone(other)
    engine.hold_idle()


def test_a_resubmitted_request_goes_on_behind_its_images() -> None:
    engine = driver()
    alone = engine.expected(ask(engine, picture(1), picture(2))).tokens
    again = ask(engine, picture(1), picture(2), output=alone[:3], resubmitted=True)
    engine.run()
    assert again.output == alone
    engine.hold_alone(again)


@pytest.mark.parametrize("end", ["abort", "take back"])
def test_a_region_is_not_given_away_while_a_step_may_read_it(end: str) -> None:
    engine = driver(arena_cells=CELLS, max_num_batched_tokens=4)
    reads = ask(engine, picture(1, 6))
    engine.take_image_jobs()
    engine.finish_image(0)
    while engine.plan() is not None:
        pass
    assert len(engine.results) == 2
    if end == "abort":
        engine.abort(reads)
        ask(engine, picture(2))
    else:
        ask(engine, picture(2))
        assert engine.evict(reads)
        reads_again = engine.core._life.clients.find(reads.client, reads.key)
        first = engine.core._life.queue.held()[0]
        assert reads_again is not None
        # As if the other one went before it.
        engine.core._life.queue.remove(reads_again, engine.now)
        reads_again.queue_key = (1.0, 0, reads_again.arrival_number)
        engine.core._life.queue.add(reads_again, engine.now)
        assert engine.core._life.queue.goes_before(first, reads_again)
    for _ in range(2):
        engine.take_image_jobs()
        assert not engine.image_jobs
        engine.deliver()
    engine.take_image_jobs()
    assert engine.image_jobs
    engine.run()
    engine.hold_idle()


def test_of_equally_served_tenants_one_makes_room_for_the_other() -> None:
    engine = driver(
        policy="fair",
        arena_cells=12,
        num_image_workers=2,
        max_num_seqs=3,
        max_num_batched_tokens=2,
        async_scheduling=False,
    )
    requests = [engine.add([6] * 17, greedy(1), user_id="one"), ask(engine, picture(4, 3))]
    engine.step()
    engine.take_image_jobs()
    pictures = [picture(0, 2), picture(0, 3), picture(3, 2)]
    requests.append(ask(engine, *pictures, user_id="two"))
    engine.take_image_jobs()
    engine.kill_worker()
    engine.run()
    for request in requests:
        assert request.end is not None
    engine.hold_idle()
