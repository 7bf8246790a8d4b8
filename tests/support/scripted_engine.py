"""Whole engines over a scripted model: real processes and sockets, an instant model.

    folder = ScriptedFolder(tmp_path)
    async with AsyncEngine(folder.args(max_num_seqs=4)) as engine: ...

``folder.reference(prompt, max_tokens)`` is what a greedy request must yield; ``folder.held()``
holds the worker before its next step, ``folder.held(after=1)`` a request after its first token.
What a test does to a request that runs belongs into such a hold: on a busy machine the request
would else come to its end before.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from deepinfer import EngineArgs
from deepinfer.frontend.tokenizer import Tokenizer
from deepinfer.wire.columns import unpack_int32
from support.scripted_images import encoded, line_of, num_lines
from support.scripted_model import ScriptedModel, hash_chain, image_tokens
from support.small_tokenizers import add_special, save_folder

HIDDEN_SIZE = 4


class Hold:
    """A hold on the worker. ``let_pass(3)``: three more steps, whatever they compute."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def let_pass(self, steps: int) -> None:
        self.write(steps, counts=True)

    def write(self, steps: int, *, counts: bool) -> None:
        """Say how many steps pass, from now on (``counts``) or from the next prompt on."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        os.pwrite(self._descriptor, bytes([steps, counts]), 0)
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN)


class ScriptedFolder:
    """A model folder that the scripted worker serves, with a small byte-level tokenizer.

    With ``images`` it takes pictures of ``scripted_images``: one for each ``<image>``.
    """

    def __init__(self, path: Path, *, images: bool = False, **script: Any) -> None:
        self.path = save_folder("byte_level", "vision" if images else "chatml", path)
        if images:
            add_special(path, "<image>")
        self.tokenizer = Tokenizer.from_folder(path)
        self.placeholder = self.tokenizer.backend.token_to_id("<image>") if images else -1
        self.script: dict[str, Any] = {
            "vocab_size": self.tokenizer.vocab_size,
            "max_model_len": 1024,
            "eos_token_id": self.tokenizer.eos_token_id,
            "eos_odds": 0,
            "step_ms": 0,
            "poison": -1,
            "fail_load": "",
            "damaged": "",
            "images_fail": "",
            "image_ms": 0,
            "hidden_size": HIDDEN_SIZE,
            "placeholder": self.placeholder,
            **script,
        }
        (path / "scripted.json").write_text(json.dumps(self.script))
        (path / "hold").touch()
        config: dict[str, Any] = {"architectures": ["ScriptedForCausalLM"]}
        if images:
            config["vision_config"] = {}
        (path / "config.json").write_text(json.dumps(config))
        self._reference = ScriptedModel(
            self.script["vocab_size"],
            eos_token_ids=[self.script["eos_token_id"]],
            next_token=hash_chain(
                self.script["vocab_size"], self.script["eos_token_id"], self.script["eos_odds"]
            ),
        )

    def args(self, **fields: Any) -> EngineArgs:
        return EngineArgs(
            model=str(self.path),
            worker_module="support.scripted_worker",
            image_worker_module="support.scripted_image_worker",
            **fields,
        )

    def reference(
        self, prompt: list[int], max_tokens: int, pictures: Sequence[bytes] = ()
    ) -> list[int]:
        """Greedy outputs of a prompt, up to and with the first EOS.

        Each placeholder in it stands for the next of ``pictures``.
        """
        return self._reference.continuation(self.whole_prompt(prompt, pictures), max_tokens)

    def whole_prompt(self, prompt: list[int], pictures: Sequence[bytes]) -> list[int]:
        """What is computed for a prompt with pictures, as tokens of the scripted model."""
        whole: list[int] = []
        left = list(pictures)
        for token in prompt:
            if token != self.placeholder or not left:
                whole.append(token)
                continue
            data = left.pop(0)
            image = encoded(data, placeholder=self.placeholder)
            lines = iter(range(num_lines(data)))
            for own in unpack_int32(image.tokens).tolist():
                if own == self.placeholder:
                    line = line_of(data, next(lines), HIDDEN_SIZE)
                    own = int(image_tokens(line[None])[0])
                whole.append(own)
        return whole

    @contextmanager
    def held(self, *, after: int = 0) -> Iterator[Hold]:
        """Hold the worker before its next step, or let ``after`` steps pass first.

        These are counted from the next prompt on (none with a cached beginning): with ``after=1`` a
        request that is sent now yields its first token and surely no other.
        """
        with open(self.path / "hold", "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            hold = Hold(file.fileno())
            hold.write(after, counts=False)
            yield hold


def engine_processes() -> list[psutil.Process]:
    """Schedulers and workers that this process's engines run now."""
    return psutil.Process().children(recursive=True)


def process_of(module: str, of: psutil.Process | None = None) -> psutil.Process:
    """The one process that runs ``python -m MODULE`` for this test, or for a process of it."""
    words: dict[psutil.Process, list[str]] = {}
    for process in (of or psutil.Process()).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            words[process] = process.cmdline()
    found = [process for process in words if module in words[process]]
    # What has just been forked looks like its parent for a moment.
    parents = [process.pid for process in found]
    found = [process for process in found if process.ppid() not in parents]
    assert len(found) == 1, list(words.values())
    return found[0]
