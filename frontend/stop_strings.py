"""Finds stop strings in a text that arrives in pieces.

An Aho-Corasick automaton over the stop strings: its depth after each character is the length of the
longest end of the text that begins a stop string, which is exactly what must be held back. Time is
linear in the text, whatever the number of stop strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopMatcher:
    """Passes text on up to the first stop string.

    The first is the one that is complete first; of several that end at the same character, the
    longest. Both depend only on the text, so every way of cutting it into pieces gives the same.
    With ``include_stop`` the stop string itself is part of the output, and nothing is held back.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._automaton = _automaton(tuple(stops))
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """Return the text to pass on and the stop string that was completed, if any.

        Unless ``armed``, stop strings that ``text`` completes are text like any other; one that
        begins in it and is completed later counts whole. After a match all further text is dropped.
        """
        if self.matched is not None:
            return "", None
        automaton = self._automaton
        state = self._state
        for i, char in enumerate(text):
            state = automaton.step(state, char)
            stop = automaton.completed[state]
            if stop is not None and armed:
                end = len(self._held) + i + 1
                cut = end if self._include_stop else end - len(stop)
                passed = (self._held + text)[:cut]
                self._held = ""
                self.matched = stop
                return passed, stop
        self._state = state
        if self._include_stop:
            return text, None
        text = self._held + text
        keep = len(text) - automaton.held[state]
        self._held = text[keep:]
        return text[:keep], None

    def finish(self) -> str:
        """Return what was held back: the text ended before it became a stop string."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """States are the prefixes of the stop strings; state 0 is the empty one.

    - ``completed[state]``: the longest stop string that ends here, or ``None``.
    - ``held[state]``: how many characters may yet become part of a stop string.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.completed: list[str | None] = [None]
        self.held = [0]
        depth = [0]
        for stop in stops:
            state = 0
            for char in stop:
                if char not in self._next[state]:
                    self._next[state][char] = len(depth)
                    self._next.append({})
                    self._fail.append(0)
                    self.completed.append(None)
                    self.held.append(0)
                    depth.append(depth[state] + 1)
                state = self._next[state][char]
            self.completed[state] = stop
        # Breadth first: a state's fail state is shallower, hence already done.
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            fail = self._fail[state]
            if self.completed[state] is None:
                self.completed[state] = self.completed[fail]
            # The end of a stop string that nothing goes on from is no beginning of one.
            self.held[state] = depth[state] if self._next[state] else self.held[fail]
            for char, child in self._next[state].items():
                self._fail[child] = self.step(fail, char)
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        """Return the state after one more character; constant time on average over a text."""
        while char not in self._next[state]:
            if state == 0:
                return 0
            state = self._fail[state]
        return self._next[state][char]


@lru_cache(maxsize=64)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    return _Automaton(stops)
