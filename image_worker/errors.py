"""Why an image cannot be used, in words for the person who sent it; and how long it may take."""

from __future__ import annotations

import time


class ImageError(ValueError):
    """An image that cannot be used. The text never holds anything of what was fetched or sent."""


class Deadline:
    """A moment after which work on an image is pointless."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Seconds that are left; ``ImageError`` when there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise ImageError(f"it took longer than {self.timeout_s:g} s")
        return left

    def check(self) -> None:
        """Raise ``ImageError`` when the moment has passed."""
        self.remaining_s()
