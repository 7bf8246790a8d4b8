"""A file of prompts in, a file of completions out, in the same order.

One JSON object a line: ``prompt`` (a string or token ids) or ``messages``, an ``id`` of the user's
own if he wants one, and any field of ``SamplingParams``. A line that cannot be served becomes an
error record that names it; the others go on.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from deepinfer.frontend.llm_engine import LLMEngine
from deepinfer.frontend.outputs import RequestOutput
from deepinfer.wire.checks import shown
from deepinfer.wire.params import SamplingParams

if TYPE_CHECKING:
    from deepinfer.frontend.session import PreparedPrompt

# Completions in the engine at a time: more would only lengthen its queue.
_MAX_RUNNING = 512
# Lines read and not yet written: bounds what waits behind one slow completion at the front.
_MAX_AHEAD = 8192


@dataclass(slots=True)
class _Line:
    """One line of the input and what came of it, one record a completion."""

    number: int
    id: Any = None
    error: str = ""
    records: list[dict[str, Any]] = field(default_factory=list)
    open: int = 0


class BatchFile:
    """One run over a file. ``done`` and ``failed`` count lines, ``tokens`` output tokens."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._running: dict[str, _Line] = {}
        self._samples = 0
        self._unwritten: dict[int, _Line] = {}
        self.done = 0
        self.failed = 0
        self.tokens = 0

    def run(self, source: IO[bytes], target: IO[bytes], on_progress: Callable[[], None]) -> None:
        """Answer every line of ``source``; results are written as soon as their turn comes.

        ``EngineError`` when the engine is gone; ``target`` holds what was answered until then.
        """
        limit = min(_MAX_RUNNING, self._engine.args.max_queue_len)
        lines = self._read(source)
        more = True
        while more or self._running:
            while more and self._samples < limit and len(self._unwritten) < _MAX_AHEAD:
                more = next(lines, None) is not None
            for output in self._engine.step():
                self._take(output)
            self._write(target)
            on_progress()

    def _read(self, source: IO[bytes]) -> Iterator[_Line]:
        """Read the lines and send each to the engine, or note why it cannot be sent."""
        for number, text in enumerate(source, 1):
            if not text.strip():
                continue
            line = _Line(number)
            self._unwritten[number] = line
            try:
                prepared = self._prepare(line, text)
                self._engine.add_prepared(str(number), prepared)
            except ValueError as error:
                line.error = f"line {number}: {error}"
            else:
                line.open = prepared.params.n
                line.records = [{} for _ in range(line.open)]
                self._samples += line.open
                self._running[str(number)] = line
            yield line

    def _prepare(self, line: _Line, text: bytes) -> PreparedPrompt:
        try:
            given = msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ValueError(f"not valid JSON: {error}") from None
        if not isinstance(given, dict):
            raise ValueError(f"must be a JSON object, got {shown(given)}")
        line.id = given.pop("id", None)
        prompts = [given.pop(name) for name in ("prompt", "messages") if name in given]
        if len(prompts) != 1:
            raise ValueError("must have either prompt or messages")
        try:
            params = msgspec.convert(given, SamplingParams, str_keys=True)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None
        return self._engine.prepare(prompts[0], params)

    def _take(self, output: RequestOutput) -> None:
        line = self._running[output.request_id]
        record = line.records[output.index]
        record["text"] = record.get("text", "") + output.text
        if not output.finished:
            return
        record |= {
            "index": output.index,
            "finish_reason": output.finish_reason,
            "finish_detail": output.finish_detail,
            "num_prompt_tokens": output.prompt_len,
            "num_output_tokens": output.num_output_tokens,
        }
        if output.error:
            record["error"] = f"line {line.number}: {output.error}"
        self.tokens += output.num_output_tokens
        self._samples -= 1
        line.open -= 1
        if line.open == 0:
            del self._running[output.request_id]

    def _write(self, target: IO[bytes]) -> None:
        """Write the results up to the first line that is still open."""
        for number, line in list(self._unwritten.items()):
            if line.open:
                break
            del self._unwritten[number]
            label = {"line": number} if line.id is None else {"line": number, "id": line.id}
            for record in line.records or [{"error": line.error}]:
                target.write(msgspec.json.encode(label | record) + b"\n")
            self.done += 1
            self.failed += bool(line.error) or any("error" in r for r in line.records)
        target.flush()


def count_lines(source: IO[bytes]) -> int | None:
    """How many lines hold a request; ``None`` for a pipe, which can be read only once."""
    if not source.seekable():
        return None
    count = sum(1 for line in source if line.strip())
    source.seek(0)
    return count


@contextlib.contextmanager
def replaced_at_end(target: Path, source: Path) -> Iterator[IO[bytes]]:
    """A file ``TARGET.partial`` to write, which takes the place of ``target`` when all went well.

    When it did not, ``target`` is as it was and the partial file stays if it holds anything: the
    answers in it were paid for. A target that is no regular file (a terminal, a pipe) is written
    directly. ``ValueError`` when writing would overwrite ``source``.
    """
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            yield file
        return
    # The file itself is replaced, and not a link to it.
    target = target.resolve()
    partial = target.with_name(target.name + ".partial")
    for path in (target, partial):
        if path.exists() and path.samefile(source):
            raise ValueError(f"target {target} would overwrite the source {source}")
    try:
        with partial.open("wb") as file:
            if target.exists():
                shutil.copymode(target, partial)
            yield file
        partial.replace(target)
    except BaseException:
        if partial.is_file() and partial.stat().st_size == 0:
            partial.unlink()
        raise
