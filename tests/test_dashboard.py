"""The dashboard in a browser, over real engines: who is where, what it holds, how it ended."""

from __future__ import annotations

import asyncio
import re
import signal
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from deepinfer import AsyncEngine, Client, SamplingParams
from deepinfer.frontend.gateway.app import Gateway
from deepinfer.frontend.gateway.tenants import Tenants, digest_of
from support.browser import Page, browser, needs_browser
from support.patience import PATIENCE_S
from support.scripted_engine import ScriptedFolder
from support.served import in_process, served
from support.streams import outputs

pytestmark = pytest.mark.process

ROOT = Path(__file__).parent.parent
COLUMNS = ("waiting", "prefilling", "running", "ended")
HOSTILE = '<script>window.pwned=1</script><img src=x onerror="window.pwned=1">&amp;?#%2F'
TENANT_IDS = ("acme", "globex", "<b>b</b>")


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.fixture
def page(tab: Page) -> Iterator[Page]:
    yield tab
    tab.open("about:blank")
    tab.complaints()


def board(page: Page) -> dict[str, list[str]]:
    """The ids in each column."""
    return {c: page.texts(f'[data-column="{c}"] li .id') for c in COLUMNS}


def reasons(page: Page) -> dict[str, str]:
    """Why each request ended, by its id; read at once, for the page goes on."""
    pairs = page.script(
        """return [...document.querySelectorAll('[data-column="ended"] li')].map(
            (card) => ['.id', '.who'].map((part) => card.querySelector(part).textContent))"""
    )
    return dict(pairs)


def card(column: str, name: str) -> str:
    """JavaScript for the card of an id."""
    return (
        f"""[...document.querySelectorAll('[data-column="{column}"] .card')]"""
        f""".find((c) => c.querySelector('.id').textContent === {name!r})"""
    )


# ---- the page, whole ----------------------------------------------------------------------------


@needs_browser
async def test_requests_move_through_the_columns_to_their_reasons(
    tmp_path: Path, page: Page
) -> None:
    folder = ScriptedFolder(tmp_path / "m", step_ms=20, max_model_len=2048)
    endpoint = f"ipc://{tmp_path}/engine"
    flags = ["--endpoint", endpoint, "--max-num-seqs", "3", "--max-num-batched-tokens", "16"]
    flags += ["--num-kv-blocks", "120"]
    with served(folder, *flags) as server:
        await asyncio.to_thread(_empty_page, page, server.url)
        async with Client(endpoint) as client:

            def ask(user: str, name: str, prompt: int, most: int) -> asyncio.Future[Any]:
                params = SamplingParams(max_tokens=most, temperature=0)
                ids, name = [5 + prompt % 7] * prompt, f"{user}/{name}"
                return asyncio.ensure_future(outputs(client, ids, params, name, user))

            with folder.held() as hold:
                streams = [ask("acme", "runs", 5, 300), ask("globex", "long-prompt", 500, 1200)]
                streams += [ask("acme", "short", 4, 30), ask("globex", "queued", 8, 12)]
                streams += [ask("<b>b</b>", HOSTILE, 8, 12)]
                while (await client.stats())["live"] < len(streams):
                    pass
                hold.let_pass(12)
                await asyncio.to_thread(_held_page, page)
            await asyncio.to_thread(_moving_page, page)
            assert await client.abort("globex/long-prompt")
            await asyncio.to_thread(_aborted_page, page)
            await asyncio.gather(*streams)
            await asyncio.to_thread(_ended_page, page)
            await outputs(client, [5] * 4, SamplingParams(max_tokens=4), "acme/later")
            # The time in which nobody asked for anything is cut out of the axis.
            page.until(lambda: page.script("return document.querySelector('#timeline .cut')"))
            assert not page.complaints(), "errors of the page, or what its policy forbids"


def _empty_page(page: Page, url: str) -> None:
    page.open(url + "/dashboard")
    page.until(lambda: page.script("return document.body.dataset.state") == "ok")
    assert page.find("#model").text == "scripted"
    for column in COLUMNS:
        assert page.find(f'[data-column="{column}"] .empty').is_displayed()
    assert page.find("#timeline .empty").text == "no step has run yet"


def _held_page(page: Page) -> None:
    """The worker is held in a step: nothing moves, so what is shown can be held to the engine."""
    expected = {
        "waiting": ["queued", HOSTILE],
        "prefilling": ["long-prompt"],
        "running": ["runs", "short"],
        "ended": [],
    }
    drawn_steps = "return +document.querySelector('#timeline svg')?.dataset.steps"
    page.until(lambda: page.script(drawn_steps) == 12, "twelve steps pass")
    page.until(lambda: board(page) == expected, f"{expected}")
    assert [n for n in page.texts(".column h3 b")] == ["2", "1", "2", "0"]
    # Ids and names are text. The column is not the markup that the id spells.
    assert page.script("return window.pwned === undefined && !document.querySelector('main img')")
    assert not page.script("return document.querySelectorAll('main .who b, #tenants b').length")
    assert sorted(page.texts("#tenants td:first-child")) == sorted(TENANT_IDS)
    # A colour for each tenant, the same on its cards; progress of the prompt and of the output.
    colours = {
        name: page.script(f"return {card(column, name)}.style.getPropertyValue('--colour')")
        for column in COLUMNS[:3]
        for name in expected[column]
    }
    assert colours["runs"] == colours["short"] != colours["queued"] == colours["long-prompt"]
    assert len(set(colours.values())) == 3
    code = "return new DOMMatrix({}.querySelector('.bar i').style.transform).a"
    part = page.script(code.format(card("prefilling", "long-prompt")))
    assert 0.05 < part < 0.6
    assert 0 < page.script(code.format(card("running", "runs"))) < 0.1
    # KV blocks: a square each, in the colours of who owns them.
    assert page.script("return document.querySelectorAll('#waffle .cell').length") == 120
    owned = page.script(
        "return [...document.querySelectorAll('#waffle .cell.owned')]"
        ".map((c) => c.style.getPropertyValue('--colour'))"
    )
    assert set(owned) == {colours["runs"], colours["queued"]}
    assert owned.count(colours["queued"]) == 32, "500 tokens of the long prompt"
    legend = dict(zip(page.texts("#owners li span"), page.texts("#owners li b"), strict=True))
    assert legend["globex"] == "32" and int(legend["free"]) == 120 - 32 - int(legend["acme"])
    # Steps: each planned and executed, the held one open.
    drawn = page.script(
        "return ['plan', 'exec', 'decode', 'prefill', 'open'].map((c) => [...document"
        ".querySelectorAll(`#timeline rect.${c}`)].filter((r) => r.getBBox().width > 0).length)"
    )
    assert drawn[0] > drawn[1] == 12 and drawn[2] and drawn[3] and drawn[4] == 1
    # Marked, to be recognised when it has moved.
    page.script(f"{card('waiting', 'queued')}.marked = true")


def _moving_page(page: Page) -> None:
    page.until(lambda: "queued" in board(page)["ended"])
    assert not page.complaints()
    assert page.script(f"return {card('ended', 'queued')}.marked"), "the card moved, it is no copy"
    page.until(lambda: page.script("return document.querySelectorAll('#rates path').length"))
    page.until(
        lambda: any(
            float(rate.replace(",", "")) > 0 for rate in page.texts("#tenants td:nth-child(2)")
        ),
        f"{page.texts('#tenants td')}",
    )


def _aborted_page(page: Page) -> None:
    page.until(lambda: reasons(page).get("long-prompt") == "abort · client_abort")
    page.script(f"{card('ended', 'long-prompt')}.click()")
    page.until(lambda: page.texts("#events b")[-1:] == ["ended"])
    events = page.texts("#events b")
    assert events[:3] == ["arrived", "queued", "admitted"] and re.match("[0-9]+ chunks", events[3])
    assert page.find("#story-title").text == "globex/long-prompt"
    assert page.script("return document.activeElement.id") == "story-close"
    # Dark, with a story open; then Escape closes it and the focus is where it was.
    page.resize(1440, 1180, dark=True)
    assert page.screenshot("dashboard-dark").stat().st_size > 20_000
    page.script("document.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape'}))")
    assert not page.find("#story").is_displayed()
    assert page.script(f"return document.activeElement === {card('ended', 'long-prompt')}")


def _ended_page(page: Page) -> None:
    names = {"runs", "short", "queued", "long-prompt", HOSTILE}
    page.until(lambda: set(board(page)["ended"]) == names)
    found = reasons(page)
    assert found["runs"] == found[HOSTILE] == "length · max_tokens"
    page.script(f"{card('ended', HOSTILE)}.click()")
    page.until(lambda: page.texts("#events b")[-1:] == ["ended"])
    assert page.find("#story-title").text == f"<b>b</b>/{HOSTILE}"
    assert page.script("return window.pwned === undefined && !document.querySelector('aside img')")
    page.find("#story-close").click()
    page.resize(1440, 1180)
    assert page.screenshot("dashboard-light").stat().st_size > 20_000
    page.resize(360, 800)
    page.until(lambda: page.script("return innerWidth") == 360)
    assert page.script("return document.documentElement.scrollWidth") <= 360
    page.screenshot("dashboard-narrow")
    page.resize(1440, 1180)


@needs_browser
async def test_a_page_says_what_is_wrong_with_its_engine(tmp_path: Path, page: Page) -> None:
    endpoint = f"ipc://{tmp_path}/engine"
    with served(ScriptedFolder(tmp_path / "m"), "--endpoint", endpoint) as server:

        def gauge(name: str, part: str) -> str:
            names = page.texts("#gauges .gauge > span")
            return page.texts(f"#gauges .gauge > {part}")[names.index(name)]

        def healthy() -> bool:
            return page.find("#health").text == "healthy" and not page.find("#banner").text

        def lose_both() -> None:
            page.open(server.url + "/dashboard")
            page.until(lambda: healthy() and gauge("Output", "em") == "7 in all")
            server.child("support.scripted_worker").kill()
            page.until(lambda: healthy() and gauge("Worker restarts", "b") == "1")
            server.child("deepinfer.scheduler").kill()  # another one knows of nothing
            page.until(lambda: healthy() and gauge("Output", "em") == "0 in all")
            assert gauge("Output", "b") == "0.0tok/s", (
                "no rate from one engine's total to another's"
            )

        async with Client(endpoint) as client:
            await outputs(client, [5] * 4, SamplingParams(max_tokens=7, temperature=0))
        await asyncio.to_thread(lose_both)
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(server.process.wait)
        page.until(lambda: page.find("#health").text == "unreachable")
        assert re.search(r"does not answer.*is [\d.]+ m?s old", page.find("#banner").text)


# ---- who may look ---------------------------------------------------------------------------


def keyed_tenants(tmp_path: Path) -> Tenants:
    """An operator, whose key is "secret", and another tenant with "plain"."""
    path = tmp_path / "tenants.toml"
    path.write_text(
        f'[tenants.ops]\nkeys = ["{digest_of("secret")}"]\noperator = true\n'
        f'[tenants.acme]\nkeys = ["{digest_of("plain")}"]\n'
    )
    return Tenants.from_file(path)


@asynccontextmanager
async def keyed_gateway(tmp_path: Path) -> AsyncIterator[str]:
    async with AsyncEngine(ScriptedFolder(tmp_path / "m").args()) as engine:
        await outputs(engine, [5] * 4, SamplingParams(max_tokens=3), "acme/a b/c", user_id="acme")
        async with in_process(engine, keyed_tenants(tmp_path)) as url:
            yield url


async def test_only_an_operator_sees_the_requests_of_all(tmp_path: Path) -> None:
    """SEC-01, of the engine's view and of any request's story."""
    async with (
        keyed_gateway(tmp_path) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
    ):
        story = "/v1/engine/requests/acme%2Fa%20b%2Fc/story"
        for path in ("/v1/engine/view", story):
            for key, status in ((None, 401), ("wrong", 401), ("plain", 403), ("secret", 200)):
                headers = {"authorization": f"Bearer {key}"} if key else {}
                answer = await http.get(path, headers=headers)
                assert answer.status_code == status, (path, key)
                if status != 200:
                    assert "acme" not in answer.text and answer.json()["error"]["message"]
        operator = {"authorization": "Bearer secret"}
        events = (await http.get(story, headers=operator)).json()["events"]
        assert events[-1]["event"] == "ended" and events[-1]["detail"]["output_tokens"] == 3
        view = (await http.get("/v1/engine/view", headers=operator)).json()
        assert view["models"] == ["scripted"] and view["ok"] and view["requests"] == []
        assert view["ended"][0]["request_id"] == "acme/a b/c"
        assert view["users"][0] == {
            "user_id": "acme", "waiting": 0, "prefilling": 0, "running": 0, "blocks": 0,
            "output_tokens": 3,
        }  # fmt: skip
        assert view["steps"][-1]["read_ns"] < view["now_ns"]
        unknown = await http.get("/v1/engine/requests/none/story", headers=operator)
        assert unknown.status_code == 404
        assert (await http.get("/dashboard")).status_code == 200, "it holds no data"


@needs_browser
async def test_the_page_asks_for_a_key_and_keeps_it_in_the_tab(tmp_path: Path, page: Page) -> None:
    async with keyed_gateway(tmp_path) as url:

        def enter(key: str) -> None:
            page.until(lambda: page.find("#ask").is_displayed())
            page.find("#key").send_keys(key)
            page.find("#ask button").click()

        def look() -> None:
            page.open(url + "/dashboard")
            page.until(lambda: page.find("#ask").is_displayed())
            assert not page.find("main").is_displayed()
            assert page.script("return document.activeElement.id") == "key"
            page.screenshot("dashboard-key")
            enter("wrong")
            page.until(lambda: "incorrect API key" in page.find("#ask-why").text)
            enter("plain")
            page.until(lambda: "not an operator's" in page.find("#ask-why").text)
            enter("secret")
            page.until(lambda: board(page)["ended"] == ["a b/c"])
            assert not page.find("#ask").is_displayed()
            page.driver.refresh()
            page.until(lambda: board(page)["ended"] == ["a b/c"])
            stored = "return [sessionStorage.length, localStorage.length, document.cookie]"
            assert page.script(stored) == [1, 0, ""]
            page.script("sessionStorage.clear()")

        await asyncio.to_thread(look)


# ---- the files ------------------------------------------------------------------------------


def files() -> dict[str, str]:
    folder = ROOT / "frontend" / "gateway"
    return {path.suffix: path.read_text() for path in folder.glob("dashboard.[hcj]*")}


def test_the_page_loads_nothing_from_elsewhere_and_makes_no_html_of_text() -> None:
    found = files()
    assert set(found) == {".html", ".css", ".js"}
    for text in found.values():
        assert set(re.findall(r"https?://[^\"'`\s)]+", text)) <= {"http://www.w3.org/2000/svg"}
        assert not re.search(r"@import|url\(", text)
    unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|srcdoc"
    assert not re.search(unsafe, found[".js"])
    assert not re.search(r"\son\w+=|<script(?![^>]*\ssrc=)|<style|\sstyle=", found[".html"])


async def test_the_files_are_served_with_a_policy_that_allows_only_them() -> None:
    engine = SimpleNamespace()
    gateway = Gateway(engine, ["m"], Tenants.anonymous())  # type: ignore[arg-type]
    transport = httpx.ASGITransport(gateway)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for name, kind in (("", "html"), (".css", "css"), (".js", "javascript")):
            answer = await http.get("/dashboard" + name)
            assert answer.status_code == 200 and f"text/{kind}" in answer.headers["content-type"]
            assert answer.text == files()[name or ".html"]
            policy = answer.headers["content-security-policy"].split("; ")
            assert "default-src 'none'" in policy and "script-src 'self'" in policy
            assert "frame-ancestors 'none'" in policy and "unsafe" not in str(policy)


def test_the_picture_in_the_readme_is_a_small_png() -> None:
    picture = (ROOT / "docs" / "dashboard.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and len(picture) < 200_000
    width, height = struct.unpack(">II", picture[16:24])
    assert width >= 1000 and height >= 500
    assert "docs/dashboard.png" in (ROOT / "README.md").read_text()
