"""Keys, limits and their file: who is let in, who is told to come back, and when."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.frontend.gateway.errors import ApiError
from deepinfer.frontend.gateway.tenant_file import MAX_PRIORITY, TenantLimits
from deepinfer.frontend.gateway.tenants import LIMITS, Tenant, Tenants, digest_of, new_key
from deepinfer.scheduler import intake
from support.patience import PATIENCE_S

KEYS = {name: f"di-{name}" for name in ("acme", "beta", "gamma")}
DIGESTS = {name: digest_of(key) for name, key in KEYS.items()}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def table(name: str, fields: str = "", digest: str | None = None) -> str:
    return f'[tenants.{name}]\nkeys = ["{digest or DIGESTS[name]}"]\n{fields}\n'


def bearer(name: str) -> str:
    return f"Bearer {KEYS[name]}"


def tenant(clock: Clock, **limits: object) -> Tenant:
    return Tenant("acme", TenantLimits(keys=[], **limits), clock)


async def refusal(of: Tenant) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await of.enter()
    assert caught.value.status == 429
    assert caught.value.retry_after_s is not None and caught.value.retry_after_s > 0
    return caught.value


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


# ---- keys -------------------------------------------------------------------------------------


def test_a_new_key_opens_what_its_digest_stands_for(tmp_path: Path) -> None:
    key, digest = new_key()
    assert key.startswith("di-") and len(key) == 46
    assert key not in digest and new_key()[0] != key
    path = tmp_path / "tenants.toml"
    path.write_text(table("acme", digest=digest))
    assert Tenants.from_file(path).identify(f"Bearer {key}").name == "acme"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Basic di-acme",
        "di-acme",
        "Bearer di-acm",
        "Bearer " + DIGESTS["acme"],
        "Bearer di-acme di-acme",
        "Bearer \ud800",
        "Bearer " + "x" * 65_536,
    ],
)
def test_who_bears_no_known_key_is_refused_and_not_quoted(
    tmp_path: Path, header: str | None
) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(table("acme"))
    with pytest.raises(ApiError) as caught:
        Tenants.from_file(path).identify(header)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert len(caught.value.message) < 100 and "acm" not in caught.value.message


def test_the_scheme_is_read_in_any_case(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(table("acme") + table("beta"))
    tenants = Tenants.from_file(path)
    assert tenants.identify("bearer  di-beta ").name == "beta"
    assert tenants.identify("BEARER di-acme").name == "acme"


async def test_without_a_file_everyone_is_let_in() -> None:
    tenants = Tenants.anonymous()
    someone = tenants.identify(None)
    assert someone is tenants.identify("Bearer whatever") and someone.name == ""
    assert someone.cache_salt == ""
    assert someone.limit_max_tokens(None) is None
    assert someone.limit_max_tokens(10**9) == 10**9
    assert someone.check_priority(-MAX_PRIORITY) == -MAX_PRIORITY
    admissions = [await someone.enter() for _ in range(500)]
    someone.spend(10**9)
    assert someone.open == 500 and not tenants.reload_if_changed()
    for admission in admissions:
        someone.leave(admission)
    assert someone.open == 0


# ---- what a request may ask for ---------------------------------------------------------------


def test_more_tokens_than_the_tenant_may_have_are_refused_by_the_clients_own_word() -> None:
    limited = tenant(Clock(), max_tokens=100)
    assert limited.limit_max_tokens(None) == 100
    assert limited.limit_max_tokens(100) == 100
    assert limited.limit_max_tokens(1) == 1
    with pytest.raises(ApiError) as caught:
        limited.limit_max_tokens(101, "max_completion_tokens")
    assert (caught.value.status, caught.value.param) == (400, "max_completion_tokens")
    assert "100" in caught.value.message and "101" in caught.value.message


@pytest.mark.parametrize(("bounds", "default"), [((-5, 5), 0), ((3, 9), 3), ((-9, -3), -3)])
def test_priorities_stay_in_the_tenants_range(bounds: tuple[int, int], default: int) -> None:
    limited = tenant(Clock(), priority=bounds)
    assert limited.check_priority(None) == default
    assert [limited.check_priority(bound) for bound in bounds] == list(bounds)
    for beyond in (bounds[0] - 1, bounds[1] + 1):
        with pytest.raises(ApiError) as caught:
            limited.check_priority(beyond)
        assert (caught.value.status, caught.value.param) == (400, "priority")


def test_by_default_nobody_goes_ahead_of_the_others() -> None:
    limited = tenant(Clock())
    assert limited.check_priority(7) == 7
    with pytest.raises(ApiError):
        limited.check_priority(-1)


def test_priorities_are_those_of_the_engine() -> None:
    assert MAX_PRIORITY == intake.MAX_PRIORITY


def test_no_group_can_be_taken_for_a_tenant(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(
        table("acme", 'cache_group = "beta"') + table("beta") + table("gamma", 'cache_group="beta"')
    )
    acme, beta, gamma = (Tenants.from_file(path).identify(bearer(name)) for name in KEYS)
    assert acme.cache_salt == gamma.cache_salt
    assert len({acme.cache_salt, beta.cache_salt, ""}) == 3
    assert len(beta.cache_salt) <= intake.MAX_SALT_CHARS


# ---- rates ------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.floats(0.01, 1000), st.lists(st.floats(0, 3), min_size=1, max_size=60))
def test_requests_pass_at_the_rate_and_exactly_when_they_were_told(
    rate: float, pauses: list[float]
) -> None:
    """LIM of requests/s: bursts of one second, at least one; the time that is named is true."""

    async def story() -> None:
        clock = Clock()
        limited = tenant(clock, requests_per_s=rate)
        start = clock.now
        for passed, pause in enumerate(pauses, 1):
            clock.now += pause
            try:
                limited.leave(await limited.enter())
            except ApiError as error:
                wait = error.retry_after_s
                assert wait is not None and 0 < wait <= 1 / rate + 1e-6
                clock.now += 0.99 * wait
                if wait > 1e-3:
                    await refusal(limited)
                clock.now += 0.01 * wait + 1e-9
                limited.leave(await limited.enter())
            assert passed <= max(1.0, rate) + (clock.now - start) * rate + 1e-3

    asyncio.run(story())


async def test_a_burst_is_one_seconds_worth() -> None:
    clock = Clock()
    limited = tenant(clock, requests_per_s=4)
    clock.now += 3600
    for _ in range(4):
        await limited.enter()
    error = await refusal(limited)
    assert error.retry_after_s == pytest.approx(0.25)
    assert error.code == "rate_limit_exceeded" and "requests_per_s" in error.message
    assert limited.refused == {"requests_per_s": 1, "tokens_per_min": 0, "max_concurrent": 0}


async def test_tokens_may_be_owed_and_nobody_is_let_in_until_they_are_paid() -> None:
    """A request runs on when its tenant comes into debt; the next one waits for the whole debt."""
    clock = Clock()
    limited = tenant(clock, tokens_per_min=600)
    first = await limited.enter()
    limited.spend(500)
    second = await limited.enter()
    for _ in range(200):
        limited.spend(1)
    error = await refusal(limited)
    assert error.retry_after_s == pytest.approx(10.0)
    assert "tokens_per_min" in error.message and "600" in error.message
    limited.spend(50)
    clock.now += 14.9
    assert (await refusal(limited)).retry_after_s == pytest.approx(0.1)
    clock.now += 0.1
    limited.leave(await limited.enter())
    limited.leave(first)
    limited.leave(second)


async def test_times_that_are_given_count_and_not_the_clock() -> None:
    limited = tenant(Clock(), requests_per_s=1, tokens_per_min=60)
    await limited.enter(5000.0)
    with pytest.raises(ApiError) as caught:
        await limited.enter(5000.25)
    assert caught.value.retry_after_s == pytest.approx(0.75)
    await limited.enter(5001.0)
    limited.spend(70, 5001.0)
    with pytest.raises(ApiError) as caught:
        await limited.enter(5002.0)
    assert caught.value.retry_after_s == pytest.approx(9.0)


async def test_the_longest_of_the_waits_is_named() -> None:
    clock = Clock()
    limited = tenant(clock, requests_per_s=0.5, tokens_per_min=60, max_concurrent=1)
    await limited.enter()
    assert (await refusal(limited)).retry_after_s == pytest.approx(2.0)
    limited.spend(160)
    assert (await refusal(limited)).retry_after_s == pytest.approx(100.0)
    assert limited.refused == {"requests_per_s": 1, "tokens_per_min": 1, "max_concurrent": 0}


# ---- slots ------------------------------------------------------------------------------------


async def test_without_a_queue_a_full_tenant_is_refused_at_once() -> None:
    clock = Clock()
    limited = tenant(clock, max_concurrent=2, requests_per_s=3)
    first, _ = await limited.enter(), await limited.enter()
    for _ in range(20):
        error = await refusal(limited)
    assert "max_concurrent" in error.message
    assert limited.refused["max_concurrent"] == 20
    limited.leave(first)
    await limited.enter()  # the refused ones took nothing of requests_per_s
    assert limited.open == 2


async def test_those_in_line_go_in_by_their_turn_and_know_how_long_they_waited() -> None:
    clock = Clock()
    limited = tenant(clock, max_concurrent=1, max_queued=2)
    first = await limited.enter()
    queued = [asyncio.create_task(limited.enter()) for _ in range(2)]
    await settle()
    assert (limited.open, limited.waiting) == (1, 2)
    assert "2 requests wait already" in (await refusal(limited)).message
    clock.now += 3
    limited.leave(first)
    await settle()
    assert [task.done() for task in queued] == [True, False]
    clock.now += 4
    limited.leave(queued[0].result())
    await settle()
    assert [task.result().queued_s for task in queued] == [3.0, 7.0]
    assert first.queued_s == 0


async def test_who_gives_up_waiting_leaves_his_place_to_the_next() -> None:
    limited = tenant(Clock(), max_concurrent=1, max_queued=1)
    first = await limited.enter()
    impatient = asyncio.create_task(limited.enter())
    await settle()
    impatient.cancel()
    await settle()
    patient = asyncio.create_task(limited.enter())
    await settle()
    assert limited.waiting == 1
    limited.leave(first)
    limited.leave(await patient)
    assert (limited.open, limited.waiting) == (0, 0)


async def test_the_estimate_follows_how_long_this_tenants_requests_take() -> None:
    clock = Clock()
    limited = tenant(clock, max_concurrent=4)
    for _ in range(60):
        async with limited.admit():
            clock.now += 20
    for _ in range(4):
        await limited.enter()
    assert (await refusal(limited)).retry_after_s == pytest.approx(5.0, rel=0.01)


async def test_a_slot_is_given_back_once_whatever_happens_inside() -> None:
    limited = tenant(Clock(), max_concurrent=1)
    with pytest.raises(KeyError):
        async with limited.admit() as admission:
            raise KeyError
    assert limited.open == 0
    with pytest.raises(RuntimeError):
        limited.leave(admission)
    assert limited.open == 0


# ---- the file ---------------------------------------------------------------------------------

BROKEN = {
    "weight": 'weight = "much"',
    "requests_per_s": "requests_per_s = 0",
    "tokens_per_min": "tokens_per_min = inf",
    "max_concurrent": "max_concurrent = 0",
    "max_queued": "max_queued = 5",
    "max_tokens": "max_tokens = 1.5",
    "priority": "priority = [5, 1]",
    "cache_group": 'cache_group = "tenant:beta"',
    "speed": "speed = 9",
}


@pytest.mark.parametrize("field", BROKEN)
def test_errors_name_the_file_the_tenant_and_the_field(tmp_path: Path, field: str) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(table("beta") + table("acme", BROKEN[field]))
    with pytest.raises(ValueError) as caught:
        Tenants.from_file(path)
    assert all(part in str(caught.value) for part in (str(path), "[tenants.acme]", field))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no [tenants.NAME] table"),
        ("[tenants]", "no [tenants.NAME] table"),
        ("tenants = 3", "no [tenants.NAME] table"),
        ("[tenant.acme]\nkeys = []", "tenant"),
        ("[tenants.acme", "end of document"),
        ("[tenants.acme]\nweight = 1", "keys"),
        ("[tenants]\nacme = 1", "[tenants.acme]"),
        ('[tenants."a b"]\nkeys = []', "a b"),
        (f"[tenants.{'a' * 65}]\nkeys = []", "64"),
        ('[tenants.acme]\nkeys = ["di-secret-secret-secret"]', "sha256:"),
        (table("acme") + table("beta", digest=DIGESTS["acme"]), "acme as well"),
        ("a = " + "[" * 100_000, "nested"),
        ("#" * (8 << 20) + "#", "larger"),
        ("[tenants.acme]\nkeys = []\nweight = " + "9" * 400, "weight"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        Tenants.from_file(path)
    assert str(path) in str(caught.value) and named in str(caught.value)
    assert "secret-secret" not in str(caught.value)


def test_a_file_that_is_no_text_or_not_there_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    with pytest.raises(FileNotFoundError):
        Tenants.from_file(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="tenants.toml"):
        Tenants.from_file(path)


def put(path: Path, text: str) -> None:
    """Replace the file as one should: in one step."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


async def test_a_changed_file_is_in_force_and_nothing_that_is_open_is_forgotten(
    tmp_path: Path,
) -> None:
    path, clock = tmp_path / "tenants.toml", Clock()
    put(path, table("acme", "max_concurrent = 2\nmax_queued = 2\ntokens_per_min = 60"))
    tenants = Tenants.from_file(path, clock)
    acme = tenants.identify(bearer("acme"))
    for _ in range(2):
        await acme.enter()
    in_line = asyncio.create_task(acme.enter())
    await settle()
    acme.spend(90)
    assert not tenants.reload_if_changed()
    put(path, table("acme", "max_concurrent = 3\ntokens_per_min = 120\nweight = 2") + table("beta"))
    assert tenants.reload_if_changed()
    await asyncio.wait_for(in_line, PATIENCE_S)
    assert tenants.identify(bearer("acme")) is acme and acme.open == 3
    assert tenants.identify(bearer("beta")).name == "beta"
    assert acme.weight == 2.0
    assert (await refusal(acme)).retry_after_s == pytest.approx(15.0)  # 30 owed, 2 a second
    assert not tenants.reload_if_changed()


async def test_a_removed_tenant_is_refused_and_what_it_had_open_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    fields = "max_concurrent = 1\nmax_queued = 1"
    put(path, table("acme", fields) + table("beta"))
    tenants = Tenants.from_file(path)
    acme = tenants.identify(bearer("acme"))
    running = await acme.enter()
    in_line = asyncio.create_task(acme.enter())
    await settle()
    put(path, table("beta"))
    assert tenants.reload_if_changed()
    with pytest.raises(ApiError):
        tenants.identify(bearer("acme"))
    assert [each.name for each in tenants] == ["acme", "beta"]
    acme.spend(10)
    acme.leave(running)
    last = await asyncio.wait_for(in_line, PATIENCE_S)
    # Whoever is put back finds its own requests counted.
    put(path, table("acme", fields) + table("beta"))
    assert tenants.reload_if_changed()
    assert tenants.identify(bearer("acme")).open == 1
    acme.leave(last)
    put(path, table("beta"))
    assert tenants.reload_if_changed()
    assert [each.name for each in tenants] == ["beta"]


def test_a_key_can_move_and_another_be_added(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    put(path, table("acme"))
    tenants = Tenants.from_file(path)
    put(path, table("beta", digest=DIGESTS["acme"]) + table("acme", digest=DIGESTS["gamma"]))
    assert tenants.reload_if_changed()
    assert tenants.identify(bearer("acme")).name == "beta"
    assert tenants.identify(bearer("gamma")).name == "acme"


@pytest.mark.parametrize("broken", ["[tenants.acme", "", "[tenants.acme]\nkeys = [1]", None])
def test_a_broken_file_keeps_the_tenants_and_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    path = tmp_path / "tenants.toml"
    put(path, table("acme"))
    tenants = Tenants.from_file(path)
    caplog.set_level(logging.WARNING, "deepinfer.gateway")
    if broken is None:
        path.unlink()
    else:
        put(path, broken)
    for _ in range(3):
        assert not tenants.reload_if_changed()
        assert tenants.identify(bearer("acme")).name == "acme"
    assert len(caplog.records) == 1 and "tenants.toml" in caplog.text
    put(path, table("beta"))
    assert tenants.reload_if_changed()
    assert tenants.identify(bearer("beta")).name == "beta"
    path.unlink()
    assert not tenants.reload_if_changed()
    assert len(caplog.records) == 2


def test_every_limit_that_refuses_is_counted_by_its_name() -> None:
    assert set(LIMITS) <= set(TenantLimits.__struct_fields__)


# ---- what is documented -------------------------------------------------------------------------

PAGE = (Path(__file__).parent.parent / "docs" / "gateway.md").read_text()


def test_the_documented_file_is_one_and_shows_every_field(tmp_path: Path) -> None:
    [example] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "tenants.toml"
    path.write_text(example)
    assert {each.name for each in Tenants.from_file(path)} == {"acme", "acme-batch", "ops"}
    assert set(re.findall(r"^(\w+) = ", example, re.MULTILINE)) == set(
        TenantLimits.__struct_fields__
    )


def test_the_documented_fields_and_defaults_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*?) ?\|", PAGE, re.MULTILINE)
    assert [name for name, _ in rows] == list(TenantLimits.__struct_fields__)
    defaults = {field.name: field.default for field in msgspec.structs.fields(TenantLimits)}
    for name, documented in rows:
        match defaults[name]:
            case msgspec.NODEFAULT:
                assert documented == ""
            case None:
                assert documented in ("no limit", "none")
            case tuple(bounds):
                assert documented == str(list(bounds))
            case bool(value):
                assert documented == str(value).lower()
            case value:
                assert documented == str(value)
