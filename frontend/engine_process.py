"""A private engine: the scheduler process that an embedding app starts, and its directory."""

from __future__ import annotations

import itertools
import os
import uuid
from pathlib import Path

import msgspec

from deepinfer.frontend.model_cache import resolve
from deepinfer.wire.children import Child, remove_directory
from deepinfer.wire.config import EngineArgs, SchedulerConfig
from deepinfer.wire.curve import server_secret
from deepinfer.wire.sockets import check_endpoint, private_directory

_STOP_GRACE_S = 5.0
_FIRST_WORD_S = 30.0


class EngineProcess:
    """Starts the scheduler (which starts the workers) and ends it.

    ``ValueError`` when the model is unknown, or the endpoint or its keys are not fit.
    """

    def __init__(self, args: EngineArgs) -> None:
        if args.curve_keys is not None:
            args = _with_keys(args, args.curve_keys)
        if args.endpoint is not None:
            check_endpoint(args.endpoint, secured=args.curve_keys is not None)
        model = resolve(args.model)
        self.tokenizer = Path(args.tokenizer).absolute() if args.tokenizer else model
        """A folder with tokenizer.json."""
        if not (self.tokenizer / "tokenizer.json").is_file():
            raise ValueError(f"tokenizer: no tokenizer.json in {self.tokenizer}")
        self.args = msgspec.structs.replace(args, model=str(model), tokenizer=str(self.tokenizer))
        self.identity = uuid.uuid4().hex.encode()
        self._renewals = itertools.count(1)
        self._directory = private_directory()
        # Never ``args.endpoint``: another engine may answer there.
        self.endpoint = f"ipc://{self._directory}/engine"
        self._child = Child(
            "deepinfer.scheduler",
            SchedulerConfig(args=self.args, directory=str(self._directory), owner=self.identity),
        )

    def new_identity(self) -> bytes:
        """Return an identity for the owner when the scheduler has taken it for gone."""
        return self.identity + b"-%d" % next(self._renewals)

    def cause_of_death(self) -> str | None:
        """Say how the scheduler ended; ``None`` while it runs."""
        if self._child.poll() is None:
            return None
        return f"the scheduler {self._child.describe_exit()}"

    def finished(self) -> bool:
        """Whether the scheduler ended by itself, having nothing more to do."""
        return self._child.poll() == 0

    def silence_limit_s(self, heard: bool) -> float:
        """Return the seconds after which silence means death.

        The first word takes longer: the process still imports its libraries.
        """
        limit = self.args.heartbeat_timeout_s
        return limit if heard else max(limit, _FIRST_WORD_S)

    def end_descriptor(self) -> int:
        """Return a descriptor that becomes readable when the scheduler ends; close it after use."""
        return os.pidfd_open(self._child.pid)

    def kill(self) -> None:
        """End a scheduler that no longer answers. Its workers end by themselves."""
        self._child.kill()
        remove_directory(self._directory)

    def stop(self) -> None:
        """End the engine at once: all open requests, scheduler, workers and directory."""
        self._child.finish(_STOP_GRACE_S)
        remove_directory(self._directory)


def _with_keys(args: EngineArgs, folder: str) -> EngineArgs:
    """Check that there are keys; the scheduler finds them also when the app changes its folder."""
    if args.endpoint is None:
        raise ValueError("curve_keys are the keys of an endpoint: endpoint must be given, too")
    server_secret(folder)
    return msgspec.structs.replace(args, curve_keys=str(Path(folder).absolute()))
