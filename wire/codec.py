"""One msgpack frame per message, with a size limit in both directions."""

from __future__ import annotations

from typing import Any

import msgspec

MAX_MESSAGE_BYTES = 64 << 20
"""Nothing larger is sent to a client."""

MAX_REQUEST_BYTES = 32 << 20
"""Nothing larger is taken from a client: a prompt of a million tokens takes 4 MB, images 24."""

MAX_STEP_BYTES = 1 << 30
"""The limit between scheduler and worker, who trust each other: a plan may admit many requests."""


class BadFrame(ValueError):
    """A frame that is no message: junk, truncated, oversized, or of the wrong shape."""


class Codec:
    """Encodes any message and decodes those of one side of a link.

    ``accepts`` is the union of the message types that may arrive; ``max_in`` and ``max_out`` bound
    a frame, in bytes.
    """

    def __init__(
        self, accepts: Any, *, max_in: int = MAX_MESSAGE_BYTES, max_out: int = MAX_MESSAGE_BYTES
    ) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(accepts)
        self._max_in = max_in
        self._max_out = max_out

    def encode(self, message: msgspec.Struct) -> bytes:
        """Return the frame; ``ValueError`` when it is above the size limit."""
        frame = self._encoder.encode(message)
        if len(frame) > self._max_out:
            raise ValueError(
                f"{type(message).__name__} takes {len(frame)} bytes, the limit is {self._max_out}"
            )
        return frame

    def decode(self, frame: bytes | memoryview) -> Any:
        """Return the message; raise ``BadFrame`` for anything that is not one."""
        if len(frame) > self._max_in:
            raise BadFrame(f"frame of {len(frame)} bytes, the limit is {self._max_in}")
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadFrame(str(error)) from error
