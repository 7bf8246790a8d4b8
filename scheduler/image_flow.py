"""How images move their sequences: wait for them, take them in, or end with them."""

from __future__ import annotations

from deepinfer.scheduler.ends import Ending
from deepinfer.scheduler.images import MAX_CAUSE_CHARS, Image, Images, State
from deepinfer.scheduler.lifecycle import Lifecycle
from deepinfer.scheduler.sequence import Sequence
from deepinfer.wire.arena import Region
from deepinfer.wire.image_jobs import ImageDone, ImageJob, ImageWorkerReady
from deepinfer.wire.messages import ImageRef


class ImageFlow:
    """Decides whose image is encoded next, and what its result means for the sequences.

    The images of the sequence that goes first are encoded first. When the arena has no room for
    them, it is made of what nobody uses, and then of what sequences hold that wait behind this one,
    the last of them first: they get theirs again later. What sequences in slots hold is waited for.
    So the first one always gets its images in the end, however full the arena was; it fails when
    its own alone do not fit.
    """

    def __init__(self, life: Lifecycle) -> None:
        self._life = life
        self._images: Images = life.images
        self._stuck: tuple[int, int, int | None] | None = None

    # ---- sequences ------------------------------------------------------------------------------

    def arrive(self, sequence: Sequence, refs: list[ImageRef], now: float) -> None:
        """Take in a new sequence with images; it is queued, or ends at once."""
        for index, ref in enumerate(refs):
            if not (ref.data or ref.url):
                self._end(sequence, index, "it is empty", now)
                return
        if self._images.down:
            self._end(sequence, 0, self._images.down, now)
            return
        self._images.want(sequence, refs)
        assert sequence.images is not None
        missing = sequence.images.missing
        sequence.schedulable = not missing
        if missing:
            sequence.story.tell(now, "images_wait", images=len(refs), missing=missing)
        elif self._take_in(sequence, now):
            return
        self._life.enqueue(sequence, now)

    def _take_in(self, sequence: Sequence, now: float) -> bool:
        """All images are there: put in their tokens. Return whether the sequence ended by that."""
        images, life = sequence.images, self._life
        assert images is not None
        if not images.spliced:
            grown = images.splice(sequence.tokens)
            sequence.num_prompt += (len(grown) - len(sequence.tokens)) // 4
            sequence.tokens = grown
        sequence.story.tell(
            now,
            "images_ready",
            prompt_tokens=sequence.num_prompt,
            waited_ms=(now - sequence.arrival) * 1e3,
            passed_by=sequence.passed_by,
        )
        if life.rules.too_long(sequence.num_prompt):
            limit = life.rules.limit
            ends = zip(images.positions, images.lengths, strict=True)
            over = [index for index, (start, length) in enumerate(ends) if start + length > limit]
            index = over[0] if over else len(images.images) - 1
            cause = f"it does not fit: the prompt has {sequence.num_prompt} tokens with its images"
            self._end(sequence, index, f"{cause}, the limit is {limit}", now)
            return True
        return life.end_if_unservable(sequence, now)

    def _end(self, sequence: Sequence, index: int, cause: str, now: float) -> None:
        cause = " ".join(cause.split())[:MAX_CAUSE_CHARS]
        self._life.end(
            sequence,
            Ending.IMAGE_FAILED,
            now,
            matched=f"{index}: {cause}",
            message=f"image {index}: {cause}",
        )

    def _fail(self, image: Image, cause: str, now: float) -> None:
        """End all who want an image that cannot be had."""
        for index, sequence in self._images.fail(image):
            if not sequence.status.finished:
                self._end(sequence, index, cause, now)

    # ---- jobs -----------------------------------------------------------------------------------

    def jobs(self, now: float) -> list[tuple[int, ImageJob]]:
        """Return the jobs to send, with the numbers of the workers that get them."""
        images, life, sent = self._images, self._life, []
        while images.workers and images.pending:
            if life.queue.fair:
                life.tenants.settle()
            at = self._moment()
            if self._stuck in (at, (*at[:2], None)):
                break
            sequence, index, image = self._first_pending()
            region = self._room_for(sequence, now)
            if region is None:
                if sequence.status.finished:
                    continue
                # Looked at again when somebody leaves, or when a step ends that reads what is idle.
                at = self._moment()
                self._stuck = at if images.idle else (*at[:2], None)
                break
            worker = images.workers[0]
            job = images.begin(worker, image, region, now)
            job.timeout_s = self._life.args.image_timeout_s
            sequence.story.tell(now, "image_begins", image=index, worker=worker)
            sent.append((worker, job))
        return sent

    def _moment(self) -> tuple[int, int, int | None]:
        """Return what changes when room may have come up, or another sequence goes first."""
        counters = self._life.counters
        # Under the fair policy the order changes with what was computed.
        steps = counters.steps_planned + counters.steps_done if self._life.queue.fair else 0
        return self._images.version, steps, next(iter(self._life.in_flight), None)

    def _first_pending(self) -> tuple[Sequence, int, Image]:
        """Return a pending image of the sequence that goes first, and its place there."""
        for sequence in self._life.queue.held():
            assert sequence.images is not None
            for index, image in enumerate(sequence.images.images):
                if image.state is State.PENDING:
                    return sequence, index, image
        raise AssertionError("an image is pending and nobody waits for it")

    def _room_for(self, first: Sequence, now: float) -> Region | None:
        images = self._images
        while True:
            region = images.allocate()
            if region is not None:
                return region
            if images.evict():
                continue
            if images.idle:
                return None  # until the steps end that may read what is idle
            victim = self._victim(first)
            if victim is not None:
                self._take_back(victim, now)
                continue
            if self._holds_all(first):
                index = self._missing_index(first)
                self._end(first, index, "all images together do not fit: image_arena_bytes", now)
            return None

    def _victim(self, first: Sequence) -> Image | None:
        """Return an image of sequences that all wait behind ``first``, of the last of them."""
        queue = self._life.queue
        for sequence in reversed(list(queue)):
            for image in reversed(sequence.images.images if sequence.images else ()):
                if image.state is State.THERE and all(
                    user.slot < 0 and user is not first and queue.goes_before(first, user)
                    for user in image.users.values()
                ):
                    return image
        return None

    def _take_back(self, image: Image, now: float) -> None:
        self._images.take_back(image)
        for (_, index), sequence in image.users.items():
            sequence.story.tell(now, "image_taken_back", image=index, why="the arena is full")
            if sequence.schedulable:
                self._life.queue.set_schedulable(sequence, False, now)

    def _holds_all(self, first: Sequence) -> bool:
        """Whether the arena is full of one sequence's own images alone."""
        assert first.images is not None
        own = {image: image.region for image in first.images.images if image.region is not None}
        return self._images.space.used == sum(region.length for region in own.values())

    def _missing_index(self, sequence: Sequence) -> int:
        assert sequence.images is not None
        states = [image.state for image in sequence.images.images]
        return states.index(State.PENDING)

    # ---- workers --------------------------------------------------------------------------------

    def worker_ready(self, worker: int, ready: ImageWorkerReady) -> None:
        """A worker is loaded and waits for a job.

        ``ValueError`` when the arena is too small for its images.
        """
        size = self._images.space.size
        if ready.max_region_bytes > size:
            raise ValueError(
                f"image_arena_bytes must be at least {ready.max_region_bytes}, the size of this "
                f"model's largest image, got {size}"
            )
        self._images.worker_ready(worker, ready.placeholder, ready.max_region_bytes)

    def worker_gone(self, worker: int, cause: str, now: float) -> None:
        """A worker is dead: its job goes to another, unless it has killed one before."""
        image = self._images.worker_gone(worker)
        if image is None or not image.users:
            return
        if image.state is State.WORKING:
            self._fail(image, f"it ended {image.deaths} image workers: {cause}", now)
            return
        for (_, index), sequence in image.users.items():
            sequence.story.tell(now, "image_retry", image=index, cause=cause)

    def down(self, cause: str, now: float) -> None:
        """No image worker gets ready: end all who wait for one, and who come until one does."""
        self._images.down = cause
        for image in list(self._images.pending):
            self._fail(image, cause, now)

    def done(self, worker: int, done: ImageDone, now: float) -> None:
        """Take in an answer; ``BrokenImage`` when it cannot be one to its job."""
        found = self._images.done(worker, done)
        if found is None:
            return
        job, error = found
        if error:
            self._fail(job.image, error, now)
            return
        for (_, index), sequence in list(job.image.users.items()):
            assert sequence.images is not None
            if sequence.schedulable or sequence.status.finished:
                continue
            sequence.story.tell(
                now, "image_done", image=index, worker=worker, took_ms=(now - job.since) * 1e3
            )
            if not sequence.images.missing and not self._take_in(sequence, now):
                self._life.queue.set_schedulable(sequence, True, now)
