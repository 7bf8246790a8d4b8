"""One job: fetch, decode, encode, write into the arena. Whatever happens, an answer."""

from __future__ import annotations

import hashlib
import logging

from deepinfer.image_worker.decode import BYTES_PER_PIXEL, MAX_PIXELS, decode
from deepinfer.image_worker.errors import Deadline, ImageError
from deepinfer.image_worker.fetch import Fetcher
from deepinfer.image_worker.model import VisionModel
from deepinfer.wire.arena import ALIGNMENT, HEADER_BYTES, Arena
from deepinfer.wire.columns import pack_int32
from deepinfer.wire.image_jobs import EncodedImage, ImageDone, ImageJob
from deepinfer.wire.messages import MAX_IMAGE_BYTES

log = logging.getLogger("deepinfer.image_worker")

_DIGEST_BYTES = 16
# One request may have several images, and all of them stand in the arena while it is computed.
_SHARE_OF_ARENA = 4


class ImageReader:
    """Does jobs with a model's encoder.

    ``max_region_bytes``: what the largest image takes, or what one may take of the arena;
    ``ValueError`` when that is not even one row.
    """

    def __init__(self, model: VisionModel, arena: Arena, fetcher: Fetcher) -> None:
        self._model = model
        self._arena = arena
        self._fetcher = fetcher
        self._row_bytes = 4 * model.hidden_size
        max_rows = min(model.max_rows, self._rows_in(arena.size // _SHARE_OF_ARENA))
        if max_rows < 1:
            raise ValueError(f"image_arena_bytes is too small for images: {arena.size}")
        used = HEADER_BYTES + max_rows * self._row_bytes
        self.max_region_bytes = -(-used // ALIGNMENT) * ALIGNMENT
        self.max_job_bytes = (
            MAX_PIXELS * BYTES_PER_PIXEL + 3 * MAX_IMAGE_BYTES + model.workspace_bytes(max_rows)
        )

    def read(self, job: ImageJob) -> ImageDone:
        """Do a job. Its error is for the person whose image it is."""
        deadline = Deadline(job.timeout_s)
        try:
            return ImageDone(job.job, encoded=self._encode(job, deadline))
        except ImageError as error:
            reason = str(error)
            if error.__cause__ is not None:
                log.info("job %d: %s (%r)", job.job, reason, error.__cause__)
        except MemoryError:
            reason = "reading it takes too much memory"
        except Exception as error:
            log.exception("job %d failed", job.job)
            reason = f"the image worker failed on it ({type(error).__name__})"
        return ImageDone(job.job, error=reason)

    def _encode(self, job: ImageJob, deadline: Deadline) -> EncodedImage:
        data = self._fetcher.fetch(job.image, deadline)
        digest = hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
        picture = decode(data, deadline)
        encoded = self._model.encode(picture, self._rows_in(job.region.length), deadline)
        return EncodedImage(
            digest=digest,
            tokens=pack_int32(encoded.tokens),
            runs=pack_int32(encoded.runs),
            grid=encoded.grid,
            num_bytes=self._arena.write(job.region, encoded.embeddings),
        )

    def _rows_in(self, num_bytes: int) -> int:
        return max(0, num_bytes - HEADER_BYTES) // self._row_bytes
