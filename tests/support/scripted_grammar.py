"""A grammar matcher as a script: it says which tokens may come next and must see every real one.

It stands in for a structured-output library in tests. A prompt that begins with ``GRAMMAR`` is
bound by it; ``matcher_for`` says so to the worker, to the reference and to the client alike.
"""

from __future__ import annotations

VOCAB = 40
EOS = 3
GRAMMAR = 2

OPENS, CLOSES, ATOMS = range(10, 20), range(20, 30), range(30, VOCAB)
MOST_OPEN = 3


class BracketMatcher:
    """Brackets of ten kinds, three deep at most, with atoms between them; at least one pair.

    What may come next depends on all tokens before, so a matcher that missed a token, saw one
    twice or saw one that is void allows other tokens than it should.
    """

    def __init__(self) -> None:
        self.num_accepted = 0
        self.done = False
        self._open: list[int] = []

    def allowed(self) -> list[int]:
        """Return the tokens that may come next."""
        tokens = [] if self._open or not self.num_accepted else [EOS]
        if len(self._open) < MOST_OPEN:
            tokens += OPENS
        if self._open:
            tokens += [CLOSES[self._open[-1]], *ATOMS]
        return tokens

    def accept(self, position: int, token: int) -> None:
        """Take the output token at a position; ``AssertionError`` for one that cannot be there.

        After the end of the grammar a request may go on (``ignore_eos``); then all is allowed.
        """
        assert position == self.num_accepted, (
            f"output {position} was given to a matcher that knows {self.num_accepted}"
        )
        self.num_accepted += 1
        if self.done:
            return
        assert token in self.allowed(), f"output {position}: token {token} breaks the grammar"
        if token == EOS:
            self.done = True
        elif token in OPENS:
            self._open.append(token - OPENS[0])
        elif token in CLOSES:
            self._open.pop()


def matcher_for(prompt: list[int]) -> BracketMatcher | None:
    """Return a fresh matcher when a grammar binds the answers to this prompt."""
    return BracketMatcher() if prompt and prompt[0] == GRAMMAR else None
