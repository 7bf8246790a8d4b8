"""A silence counts while there is somebody who could hear."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deepinfer.wire import silence
from deepinfer.wire.silence import Silence


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(silence, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_it_grows_until_the_peer_is_heard(clock: SimpleNamespace) -> None:
    silence = Silence(1.0)
    for second in range(1, 20):
        clock.now += 1.0
        assert silence.seconds() == second
    silence.heard()
    clock.now += 0.5
    assert silence.seconds() == 0.5


def test_questions_that_come_a_little_late_change_nothing(clock: SimpleNamespace) -> None:
    silence = Silence(0.1)
    for _ in range(10):
        clock.now += 0.5
        silence.seconds()
    assert silence.seconds() == pytest.approx(5.0)


def test_time_in_which_nobody_listened_hardly_counts(clock: SimpleNamespace) -> None:
    silence = Silence(1.0)
    for _ in range(3):
        clock.now += 1.0
        silence.seconds()
    clock.now += 60.0
    assert silence.seconds() == 3.5
    clock.now += 1.0
    assert silence.seconds() == 4.5
