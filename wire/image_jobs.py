"""Messages between the scheduler and an image worker, and what an image becomes.

An image worker has one job at a time. It writes an image's embeddings into the region of the arena
that the job grants, and says how much of it was used; the scheduler owns the region again with the
result. Columns are little-endian int32 bytes.
"""

from __future__ import annotations

from deepinfer.wire.arena import Region
from deepinfer.wire.messages import ImageRef, Message, Part

# ---- scheduler to image worker ------------------------------------------------------------------


class ImageJob(Message):
    """Turn one image into embeddings within ``region``, at most ``timeout_s`` seconds from now."""

    job: int
    image: ImageRef
    region: Region
    timeout_s: float


class StopImageWorker(Message):
    """Leave, cleanly."""


# ---- image worker to scheduler ------------------------------------------------------------------


class ImageWorkerHello(Message):
    """The process runs and begins to load."""


class ImageWorkerReady(Message):
    """The encoder is loaded.

    - ``placeholder``: the token that stands for one whole image in a prompt that a client sends.
    - ``max_region_bytes``: no image needs a larger region.
    """

    placeholder: int
    max_region_bytes: int
    phases: dict[str, float]


class ImageWorkerFailed(Message):
    """The worker cannot go on (a model without an encoder); it exits after this message."""

    message: str


class ImageWorkerHeartbeat(Message):
    """Sent every second by a thread of its own, also while a job runs."""

    job: int
    busy_s: float


class EncodedImage(Part):
    """What takes the place of an image's placeholder, and where its embeddings stand.

    - ``digest``: blake2b of the file as it was given or fetched, 16 bytes.
    - ``tokens``: int32 column, the tokens to put in the place of the placeholder.
    - ``runs``: int32 column of pairs (offset in ``tokens``, count): tokens whose embeddings stand
      in the region, one after the other, in this order.
    - ``grid``: (frames, rows, columns) of merged patches for models with rotary positions in three
      axes, else empty. Such an image is one run.
    - ``num_bytes``: of the region that is used, its header among them; it holds float32
      [total of the runs, hidden size].
    """

    digest: bytes
    tokens: bytes
    runs: bytes
    grid: tuple[int, ...]
    num_bytes: int


class ImageDone(Message):
    """A job is done: ``encoded``, or the reason why not, for people."""

    job: int
    encoded: EncodedImage | None = None
    error: str = ""


ToImageWorker = ImageJob | StopImageWorker
FromImageWorker = (
    ImageWorkerHello | ImageWorkerReady | ImageWorkerFailed | ImageWorkerHeartbeat | ImageDone
)
