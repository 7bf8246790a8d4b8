"""``Images``: every image that a sequence waits for or has, and the arena that holds them.

An image is known by the salt of its request and the digest of its file. Equal ones are encoded once
and shared. One that nobody uses any more stays, as a cache, until its place is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

import numpy as np

from deepinfer.scheduler.arena_space import ArenaSpace
from deepinfer.scheduler.in_flight import InFlight
from deepinfer.scheduler.sequence import Sequence
from deepinfer.wire.arena import HEADER_BYTES, Region
from deepinfer.wire.columns import Int32, unpack_int32
from deepinfer.wire.image_jobs import EncodedImage, ImageDone, ImageJob
from deepinfer.wire.messages import ImageRef
from deepinfer.wire.steps import ImageSpan

DEATHS_ALLOWED = 1
"""Image workers that may die over an image and it is tried once more."""

DIGEST_BYTES = 16
MAX_CAUSE_CHARS = 500


class BrokenImage(ValueError):
    """An answer that cannot be one to its job: the worker is broken."""


class State(Enum):
    """Where an image is on its way into the arena."""

    PENDING = "pending"
    WORKING = "working"
    THERE = "there"
    FAILED = "failed"


class Image:
    """One image. ``users`` are the sequences that want it, by arrival number and place in them.

    ``fence`` is the latest step that may read ``region`` though nobody uses the image any more.
    """

    __slots__ = (
        "deaths",
        "digest",
        "encoded",
        "fence",
        "key",
        "ref",
        "region",
        "salt",
        "state",
        "users",
    )

    def __init__(self, ref: ImageRef, salt: str, digest: bytes = b"") -> None:
        self.ref = ref
        self.salt = salt
        self.digest = digest
        self.key: tuple[str, bytes] | None = None
        self.state = State.PENDING
        self.users: dict[tuple[int, int], Sequence] = {}
        self.encoded: EncodedImage | None = None
        self.region: Region | None = None
        self.fence = 0
        self.deaths = 0


class ImageSet:
    """The images of one sequence, in their order.

    ``positions`` are those of the placeholders in the prompt as it was sent, and after ``splice``
    those of the images' first tokens in the whole.
    """

    __slots__ = ("images", "lengths", "positions")

    def __init__(self, images: list[Image], positions: list[int]) -> None:
        self.images = images
        self.positions = positions
        self.lengths: list[int] = []

    @property
    def missing(self) -> int:
        """How many of them are not in the arena."""
        return sum(image.state is not State.THERE for image in self.images)

    @property
    def spliced(self) -> bool:
        """Whether their tokens stand in the sequence already."""
        return bool(self.lengths)

    def splice(self, tokens: bytes) -> bytes:
        """Return an int32 column with the images' tokens in the place of their placeholders."""
        parts, end, shift = [], 0, 0
        for index, image in enumerate(self.images):
            assert image.encoded is not None
            position, own = self.positions[index], image.encoded.tokens
            parts += [tokens[4 * end : 4 * position], own]
            end = position + 1
            self.positions[index] = position + shift
            self.lengths.append(len(own) // 4)
            shift += self.lengths[-1] - 1
        return b"".join([*parts, tokens[4 * end :]])

    def spans(self) -> list[ImageSpan]:
        """Return what a device worker must know; all images must be there."""
        told = []
        for image, position in zip(self.images, self.positions, strict=True):
            assert image.encoded is not None and image.region is not None
            told.append(ImageSpan(position, image.encoded.runs, image.region, image.encoded.grid))
        return told

    def marks(self, start: int, end: int) -> bytes:
        """Return what tells the tokens from ``start`` to ``end`` from the same of other images.

        24 bytes for each image that has some of them: its digest and where it begins from there.
        """
        found = [
            image.digest + (position - start).to_bytes(8, "little", signed=True)
            for image, position, length in zip(
                self.images, self.positions, self.lengths, strict=True
            )
            if position < end and start < position + length
        ]
        return b"".join(found)


@dataclass(slots=True)
class Job:
    """What one image worker does."""

    number: int
    image: Image
    region: Region
    since: float


@dataclass(slots=True)
class ImageCounters:
    """Totals since the start."""

    images_encoded: int = 0
    images_failed: int = 0
    image_cache_hits: int = 0
    image_retries: int = 0
    images_taken_back: int = 0


class Images:
    """Images by state, and the workers that have a job or wait for one.

    - *pending*: somebody wants it; it is not encoded.
    - *working*: an image worker has it, with a region of the largest size there is.
    - *there*: encoded, in a region of its own size. When its last user leaves it is *idle*.

    A region may be given to another image when every step that was planned while a sequence in a
    slot had it has a result: ``in_flight`` holds the steps without one.

    ``version`` changes whenever room may have come up.
    """

    def __init__(self, arena_bytes: int, in_flight: dict[int, InFlight]) -> None:
        self.space = ArenaSpace(arena_bytes)
        self.counters = ImageCounters()
        self.placeholder = -1
        self.vocab_size = 0
        self.down = ""
        """Why no image worker is waited for."""
        self.held_bytes = 0
        """Of the files of all images that somebody wants."""
        self.version = 0
        self.jobs: dict[int, Job] = {}
        self.workers: list[int] = []
        """Those that wait for a job."""
        self.pending: dict[Image, None] = {}
        self.idle: OrderedDict[Image, None] = OrderedDict()
        self._in_flight = in_flight
        self._known: dict[tuple[str, bytes], Image] = {}
        self._max_region_bytes = 0
        self._num_jobs = 0

    # ---- sequences ------------------------------------------------------------------------------

    def want(self, sequence: Sequence, refs: Iterable[ImageRef]) -> None:
        """Give a sequence its images: those that are known, and new ones."""
        images, positions = [], []
        for index, ref in enumerate(refs):
            image = self._find(ref, sequence.salt)
            image.users[sequence.arrival_number, index] = sequence
            images.append(image)
            positions.append(ref.position)
        sequence.images = ImageSet(images, positions)
        self.version += 1

    def leave(self, sequence: Sequence) -> None:
        """A sequence has ended: what it alone used is idle, what it alone wanted is forgotten."""
        if sequence.images is None:
            return
        for index, image in enumerate(sequence.images.images):
            del image.users[sequence.arrival_number, index]
            if not image.users:
                self._lose_last_user(image)
        self.version += 1

    def _find(self, ref: ImageRef, salt: str) -> Image:
        if not ref.data:
            image = Image(ref, salt)
        else:
            digest = blake2b(ref.data, digest_size=DIGEST_BYTES).digest()
            known = self._known.get((salt, digest))
            if known is not None:
                if not known.users:
                    self._take_up(known, ref)
                self.counters.image_cache_hits += 1
                return known
            image = Image(ref, salt, digest)
            self._register(image)
        self.held_bytes += len(ref.data)
        self.pending[image] = None
        return image

    def _take_up(self, image: Image, ref: ImageRef) -> None:
        """Somebody wants an image again that nobody did."""
        self.idle.pop(image, None)
        image.ref = ref
        self.held_bytes += len(ref.data)

    def _lose_last_user(self, image: Image) -> None:
        self.held_bytes -= len(image.ref.data)
        image.ref = ImageRef()
        match image.state:
            case State.PENDING:
                del self.pending[image]
                self._unregister(image)
            case State.THERE:
                image.fence = self._latest_step()
                self.idle[image] = None

    def _register(self, image: Image) -> None:
        key = (image.salt, image.digest)
        if key not in self._known:
            image.key = key
            self._known[key] = image

    def _unregister(self, image: Image) -> None:
        if image.key is not None:
            del self._known[image.key]
            image.key = None

    def _latest_step(self) -> int:
        return next(reversed(self._in_flight), 0)

    # ---- room -----------------------------------------------------------------------------------

    @property
    def cached_bytes(self) -> int:
        """Bytes of the arena whose images nobody uses."""
        return sum(image.region.length for image in self.idle if image.region is not None)

    def allocate(self) -> Region | None:
        """Return a region that any image fits in, ``None`` when there is no room for it."""
        return self.space.allocate(self._max_region_bytes)

    def evict(self) -> bool:
        """Forget the idle image that was unused for longest and that no step reads any more."""
        oldest = next(iter(self._in_flight), None)
        for image in self.idle:
            if oldest is None or image.fence < oldest:
                self._drop(image)
                return True
        return False

    def take_back(self, image: Image) -> None:
        """Make an image pending again, whose users all wait."""
        assert image.state is State.THERE and image.region is not None
        ghost = Image(ImageRef(), image.salt)
        ghost.state, ghost.region = State.THERE, image.region
        ghost.fence = self._latest_step()
        self.idle[ghost] = None
        self.idle.move_to_end(ghost, last=False)
        image.state, image.region = State.PENDING, None
        self.pending[image] = None
        self.counters.images_taken_back += 1

    def _drop(self, image: Image) -> None:
        assert image.region is not None
        self.space.free(image.region)
        image.region = None
        del self.idle[image]
        self._unregister(image)

    # ---- workers --------------------------------------------------------------------------------

    def worker_ready(self, worker: int, placeholder: int, max_region_bytes: int) -> None:
        """A worker can take a job."""
        self.down = ""
        self.placeholder = placeholder
        self._max_region_bytes = max_region_bytes
        self.workers.append(worker)
        self.version += 1

    def begin(self, worker: int, image: Image, region: Region, now: float) -> ImageJob:
        """Return a pending image as a job for a worker that waits; the deadline is not set."""
        self.workers.remove(worker)
        del self.pending[image]
        image.state = State.WORKING
        self._num_jobs += 1
        self.jobs[worker] = Job(self._num_jobs, image, region, now)
        return ImageJob(self._num_jobs, image.ref, region, 0.0)

    def worker_gone(self, worker: int) -> Image | None:
        """A worker is dead; return the image it had, pending again if it may be tried again."""
        if worker in self.workers:
            self.workers.remove(worker)
        job = self.jobs.pop(worker, None)
        if job is None:
            return None
        self.space.free(job.region)
        self.version += 1
        image = job.image
        image.deaths += 1
        if not image.users:
            self._unregister(image)
            image.state = State.FAILED
        elif image.deaths <= DEATHS_ALLOWED:
            image.state = State.PENDING
            self.pending[image] = None
            self.counters.image_retries += 1
        return image

    def done(self, worker: int, done: ImageDone) -> tuple[Job, str] | None:
        """Take in an answer; return its job and an error, ``None`` when it was not asked for.

        Without an error ``job.image`` is there, or the one that takes its place; with one it is
        still *working*. Raises ``BrokenImage`` when the answer cannot be one to its job.
        """
        job = self.jobs.get(worker)
        if job is None or job.number != done.job:
            return None
        image, encoded = job.image, done.encoded
        if encoded is not None:
            self._check_encoded(job, encoded)
        del self.jobs[worker]
        self.workers.append(worker)
        self.version += 1
        if encoded is None:
            self.space.free(job.region)
            return job, done.error or "it could not be encoded"
        if image.digest not in (b"", encoded.digest):  # fetched again, after it was taken back
            self.space.free(job.region)
            return job, "it is not the image any more that it was"
        self.counters.images_encoded += 1
        image.region = self.space.shrink(job.region, encoded.num_bytes)
        image.encoded, image.state = encoded, State.THERE
        if not image.digest:
            image.digest = encoded.digest
            job.image = self._share(image)
        if not image.users:
            self.idle[image] = None
            if image.key is None:
                self._drop(image)  # there is another of the same content
        return job, ""

    def fail(self, image: Image) -> list[tuple[int, Sequence]]:
        """Give an image up; return who wanted it, each with the place of the image in it."""
        self.pending.pop(image, None)
        self._unregister(image)
        image.state = State.FAILED
        self.counters.images_failed += 1
        return [(index, sequence) for (_, index), sequence in image.users.items()]

    def _share(self, image: Image) -> Image:
        """Return the image that holds what was fetched: maybe it has been here before."""
        known = self._known.get((image.salt, image.digest))
        if known is None:
            self._register(image)
        if known is None or known.state is not State.THERE or not image.users:
            return image
        self.counters.image_cache_hits += 1
        if not known.users:
            self._take_up(known, image.ref)
        for (_, index), sequence in image.users.items():
            assert sequence.images is not None
            sequence.images.images[index] = known
            known.users[sequence.arrival_number, index] = sequence
        image.users.clear()
        return known

    def _check_encoded(self, job: Job, encoded: EncodedImage) -> None:
        tokens, runs = _column(encoded.tokens), _column(encoded.runs)
        fits = (
            len(tokens) > 0
            and int(tokens.min()) >= 0
            and int(tokens.max()) < self.vocab_size
            and len(runs) > 0
            and len(runs) % 2 == 0
        )
        if fits:
            starts, ends = runs[::2], runs[::2] + runs[1::2]
            fits = bool(
                starts[0] >= 0
                and ends[-1] <= len(tokens)
                and (runs[1::2] > 0).all()
                and (ends[:-1] <= starts[1:]).all()
            )
        if not fits:
            raise BrokenImage(f"job {job.number}: tokens and runs do not fit together")
        if not HEADER_BYTES < encoded.num_bytes <= job.region.length:
            raise BrokenImage(f"job {job.number}: {encoded.num_bytes} bytes were not granted")
        if len(encoded.digest) != DIGEST_BYTES:
            raise BrokenImage(f"job {job.number}: a digest of {len(encoded.digest)} bytes")
        if job.image.ref.data and encoded.digest != job.image.digest:
            raise BrokenImage(f"job {job.number}: the digest is that of another file")
        before = job.image.encoded
        if before is not None and encoded.digest == before.digest:
            again = encoded.tokens == before.tokens and encoded.runs == before.runs
            if not again:
                raise BrokenImage(f"job {job.number}: other tokens than the first time")

    # ---- looking in -----------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Return gauges and totals, by name."""
        counters = self.counters
        return {name: getattr(counters, name) for name in counters.__slots__} | {
            "images_waiting": len(self.pending),
            "images_encoding": len(self.jobs),
            "image_arena_bytes": self.space.size,
            "image_arena_used_bytes": self.space.used,
            "image_arena_cached_bytes": self.cached_bytes,
            "image_file_bytes": self.held_bytes,
        }

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Assert that these are all the users, and that every region has one owner."""
        users: dict[Image, dict[tuple[int, int], Sequence]] = {}
        for sequence in sequences:
            for index, image in enumerate(sequence.images.images if sequence.images else ()):
                users.setdefault(image, {})[sequence.arrival_number, index] = sequence
        for image, known in users.items():
            assert image.users == known, "an image's users are not those who have it"
            assert image.state is not State.FAILED, "a failed image is in use"
            assert (image in self.pending) is (image.state is State.PENDING)
        for key, image in self._known.items():
            assert image.key == key == (image.salt, image.digest)
            assert image in users or image in self.idle or image.state is State.WORKING
        working = [job.image for job in self.jobs.values()]
        assert all(image.state is State.WORKING for image in working)
        assert all(image.users and image.region is None for image in self.pending)
        assert all(image.state is State.THERE and not image.users for image in self.idle)
        there = [*self.idle, *(image for image in users if image.state is State.THERE)]
        regions = [image.region for image in there if image.region is not None]
        assert len(regions) == len(there), "an image is there without a region"
        self.space.check([*regions, *(job.region for job in self.jobs.values())])
        assert self.held_bytes == sum(len(image.ref.data) for image in users), "bytes are lost"
        assert not set(self.workers) & self.jobs.keys(), "a worker waits and has a job"


def _column(column: bytes) -> Int32:
    return np.zeros(0, np.int32) if len(column) % 4 else unpack_int32(column)
