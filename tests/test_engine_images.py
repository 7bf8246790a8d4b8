"""Requests with images through whole engines; image workers that crash, hang and freeze.

The scripted model computes from every number of every line of embeddings, so what a request says
shows whose picture it was given.
"""

from __future__ import annotations

import asyncio
import base64
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from deepinfer import LLM, AsyncEngine, SamplingParams
from deepinfer.frontend import images
from deepinfer.frontend.errors import EngineDownError
from support.patience import PATIENCE_S
from support.scripted_engine import ScriptedFolder, engine_processes, process_of
from support.scripted_images import picture

pytestmark = pytest.mark.process

SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
IMAGE_WORKER = "support.scripted_image_worker"


@pytest.fixture
def folder(tmp_path: Path) -> ScriptedFolder:
    return ScriptedFolder(tmp_path / "model", images=True)


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def prompt_for(folder: ScriptedFolder, pictures: list[bytes]) -> list[int]:
    return [5, 6] + [token for _ in pictures for token in (folder.placeholder, 7)]


async def ask(engine: AsyncEngine, folder: ScriptedFolder, pictures: list[bytes]) -> list[Any]:
    prompt = prompt_for(folder, pictures)
    data = {"image": pictures}
    return [out async for out in engine.generate(prompt, SHORT, multi_modal_data=data)]


def hold(folder: ScriptedFolder, pictures: list[bytes], outs: list[Any]) -> None:
    prompt = prompt_for(folder, pictures)
    assert [out.token_id for out in outs] == folder.reference(prompt, 8, pictures)
    assert {out.prompt_len for out in outs} == {len(folder.whole_prompt(prompt, pictures))}


def image_workers() -> list[Any]:
    return [process for process in engine_processes() if IMAGE_WORKER in process.cmdline()]


async def test_two_pictures_swapped_sixteen_at_once_are_never_the_others(folder) -> None:
    """Evidence 4: by value. Equal sizes, so only what was read tells them apart."""
    args = folder.args(num_image_workers=2, max_num_batched_tokens=16)
    async with AsyncEngine(args) as engine:
        one, two = picture(1, 5), picture(2, 5)
        pairs = [[one, two], [two, one]] * 8
        answers = await asyncio.gather(*(ask(engine, folder, pair) for pair in pairs))
        for pair, outs in zip(pairs, answers, strict=True):
            hold(folder, pair, outs)
        stats = await engine.stats()
        assert stats["images_encoded"] == 2
        assert stats["image_arena_used_bytes"] == stats["image_arena_cached_bytes"] > 0
        assert stats["image_file_bytes"] == 0


async def test_a_picture_that_kills_its_workers_ends_alone(folder) -> None:
    """IMG-06."""
    async with AsyncEngine(folder.args()) as engine:
        first = image_workers()[0].pid
        bad, good, text = await asyncio.gather(
            ask(engine, folder, [picture(1), b"crash"]),
            ask(engine, folder, [picture(2)]),
            ask(engine, folder, []),
        )
        assert (bad[-1].finish_reason, len(bad)) == ("image_failed", 1)
        assert bad[-1].finish_detail.startswith("image:1: it ended 2 image workers: ")
        assert "SIGKILL" in bad[-1].error
        hold(folder, [picture(2)], good)
        hold(folder, [], text)
        hold(folder, [picture(3)], await ask(engine, folder, [picture(3)]))
        assert image_workers()[0].pid != first
        assert (await engine.stats())["worker_restarts"] == 0


@pytest.mark.parametrize("how", [b"hang", b"freeze"])
async def test_a_worker_that_hangs_or_falls_silent_is_replaced(folder, how: bytes) -> None:
    """IMG-06: within the time limit of a job, or that of a heartbeat."""
    args = folder.args(image_timeout_s=0.2, heartbeat_timeout_s=2)
    async with AsyncEngine(args) as engine:
        bad, good = await asyncio.gather(
            ask(engine, folder, [how]), ask(engine, folder, [picture(1)])
        )
        assert bad[-1].finish_detail.startswith("image:0: it ended 2 image workers")
        hold(folder, [picture(1)], good)


async def test_what_cannot_be_read_ends_by_name(folder) -> None:
    async with AsyncEngine(folder.args()) as engine:
        for pictures in ([picture(1), b"text as PNG"], [picture(1), b""], [picture(1), None]):
            [out] = await ask(engine, folder, pictures)  # type: ignore[arg-type]
            assert (out.finished, out.finish_reason) == (True, "image_failed")
            assert out.finish_detail.startswith("image:1: ")
        story = [event.event for event in await engine.trace(out.request_id)]
        assert story == ["arrived", "ended"]


async def test_random_deaths_of_image_workers_disturb_no_text(folder) -> None:
    """Evidence 3: 100 mixed requests; all end right, or by their image alone."""
    pick = random.Random(1)
    wishes = [
        [
            picture(pick.randrange(40), pick.randrange(1, 6))
            for _ in range(pick.choice([0, 0, 1, 2]))
        ]
        for _ in range(100)
    ]
    args = folder.args(num_image_workers=2, heartbeat_timeout_s=2, stop_preempted_request=False)
    async with AsyncEngine(args) as engine:
        asked = [asyncio.ensure_future(ask(engine, folder, wish)) for wish in wishes]
        while not all(task.done() for task in asked):
            victims = image_workers()
            if victims:
                number = pick.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
                pick.choice(victims).send_signal(number)
            await asyncio.wait(asked, timeout=1 + 2 * pick.random())
        for wish, task in zip(wishes, asked, strict=True):
            outs = task.result()
            if wish and outs[-1].finish_reason == "image_failed":
                assert "image worker" in outs[-1].finish_detail
            else:
                hold(folder, wish, outs)
        stats = await engine.stats()
        assert stats["worker_restarts"] == 0 and stats["image_worker_restarts"] > 0
        assert stats["image_arena_used_bytes"] == stats["image_arena_cached_bytes"]


@pytest.mark.parametrize("victim", ["support.scripted_worker", "deepinfer.scheduler"])
async def test_streams_with_images_outlive_worker_and_scheduler(folder, victim: str) -> None:
    pictures = [picture(1, 5), picture(2, 4)]
    prompt = prompt_for(folder, pictures)
    args = folder.args(stop_preempted_request=False)
    async with AsyncEngine(args) as engine:
        with folder.held(after=3):
            stream = engine.generate(prompt, SHORT, multi_modal_data={"image": pictures})
            outs = [await anext(stream) for _ in range(3)]
            process_of(victim).kill()
        outs += [out async for out in stream]
        hold(folder, pictures, outs)


async def test_an_aborted_request_leaves_no_image_behind(tmp_path) -> None:
    """IMG-06: while its image is encoded."""
    folder = ScriptedFolder(tmp_path / "model", images=True, image_ms=300)
    async with AsyncEngine(folder.args()) as engine:
        asked = asyncio.ensure_future(ask(engine, folder, [picture(1), picture(2)]))
        async with asyncio.timeout(30):
            while not (await engine.stats())["images_encoding"]:
                await asyncio.sleep(0)
        asked.cancel()
        hold(folder, [picture(3)], await ask(engine, folder, [picture(3)]))
        stats = await engine.stats()
        assert stats["images_waiting"] == stats["image_file_bytes"] == 0
        assert stats["image_arena_used_bytes"] == stats["image_arena_cached_bytes"]


async def test_large_inputs_are_prepared_beside_the_loop(folder, monkeypatch) -> None:
    """LOOP-01 through ``AsyncEngine``: others go on while pictures are packed and texts refused."""
    others_ended = threading.Event()
    packed = images._png

    def late(image: Image.Image) -> bytes:
        assert others_ended.wait(PATIENCE_S)
        return packed(image)

    monkeypatch.setattr(images, "_png", late)
    large = Image.new("RGB", (4000, 3000), (200, 10, 90))
    async with AsyncEngine(folder.args()) as engine:
        prompt = prompt_for(folder, [b""] * 8)
        data = {"image": [large] * 8}
        pictures = asyncio.ensure_future(engine.prepare(prompt, SHORT, data))
        with pytest.raises(ValueError, match="more than the limit of 1024 tokens"):
            await engine.prepare("word " * (4 << 20), SHORT)
        for outs in await asyncio.gather(*(ask(engine, folder, []) for _ in range(200))):
            hold(folder, [], outs)
        assert (await engine.health())["ok"] and not pictures.done()
        others_ended.set()
        assert [len(ref.data) > 10_000 for ref in (await pictures).images] == [True] * 8


async def test_an_encoder_that_fails_to_load_leaves_text(tmp_path) -> None:
    folder = ScriptedFolder(tmp_path / "model", images=True, images_fail="no such encoder")
    async with AsyncEngine(folder.args()) as engine:
        hold(folder, [], await ask(engine, folder, []))
        assert (await engine.health())["images"] == "down"
        with pytest.raises(ValueError, match="takes no images"):
            await ask(engine, folder, [picture(1)])


async def test_without_image_workers_there_are_no_images(folder) -> None:
    async with AsyncEngine(folder.args(num_image_workers=0)) as engine:
        assert engine.info.images is None and not image_workers()
        hold(folder, [], await ask(engine, folder, []))


async def test_an_arena_that_does_not_fit_is_an_error_by_name(folder) -> None:
    with pytest.raises(EngineDownError, match="image_arena_bytes"):
        async with AsyncEngine(folder.args(image_arena_bytes=1 << 50)):
            pass


def test_llm_takes_images_in_chats_and_prompts(folder) -> None:
    one, two = picture(1), picture(2, 5)
    args = {name: getattr(folder.args(), name) for name in ("worker_module", "image_worker_module")}
    chat = [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": data_url(one)}},
                {"type": "image", "image": two},
            ],
        }
    ]
    with LLM(str(folder.path), **args) as llm:
        [answer] = llm.chat(chat, SHORT, progress=False)
        ids = answer.prompt_token_ids
        assert ids.count(folder.placeholder) == 2
        assert answer.token_ids == folder.reference(ids, 8, [one, two])
        answers = llm.generate(
            ["a <image>", "none", "b <image>"],
            SHORT,
            [{"image": [one]}, None, {"image": two}],
            progress=False,
        )
        for answer, pictures in zip(answers, ([one], [], [two]), strict=True):
            assert answer.token_ids == folder.reference(answer.prompt_token_ids, 8, pictures)
        with pytest.raises(ValueError, match="prompt 0: .* once for each image"):
            llm.generate("no place", SHORT, {"image": [one]}, progress=False)
