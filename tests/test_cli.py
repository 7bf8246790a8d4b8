"""The command line: each option arrives, results come in order, errors are one clear line."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer import Client, __version__
from deepinfer.frontend import bare_engine, batch_file, cli, llm_engine, terminal
from deepinfer.frontend.batch_file import BatchFile
from deepinfer.frontend.errors import EngineDownError
from deepinfer.frontend.outputs import RequestOutput
from deepinfer.frontend.terminal import Terminal
from deepinfer.frontend.timeline import timeline
from deepinfer.wire.config import EngineArgs
from deepinfer.wire.messages import StoryEvent
from deepinfer.wire.params import SamplingParams
from support.curve import free_endpoint
from support.patience import PATIENCE_S
from support.scripted_engine import ScriptedFolder
from support.word_engine import MAX_WORDS, WordEngine

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def deepinfer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Cli]:
    """Runs a command with a stand-in engine and a model folder ``m``: (status, stdout, stderr)."""
    folder = tmp_path / "home" / "models" / "m"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setenv("DEEPINFER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DEEPINFER_MODEL", "m")
    monkeypatch.setattr(llm_engine, "LLMEngine", WordEngine)

    def call(*argv: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["deepinfer", *map(str, argv)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    WordEngine.instances.clear()
    yield call
    assert all(engine.closed for engine in WordEngine.instances)


# ---- options ----------------------------------------------------------------------------------

OTHER_VALUES: dict[str, Any] = {
    "model": "m",
    "tokenizer": "m",
    "dtype": "float32",
    "device": "cpu",
    "quantization": "none",
    "policy": "priority",
    "kv_cache_dtype": "int8",
    "worker_cpus": "0",
    "profile": "folder",
    "heartbeat_timeout_s": 2.5,
    "start_timeout_s": 3.5,
    "worker_module": "some.module",
    "image_worker_module": "some.module",
    "image_arena_bytes": 1 << 20,
}
FIELDS = msgspec.structs.fields(EngineArgs)


def other_value(field: msgspec.structs.FieldInfo) -> Any:
    if field.name in OTHER_VALUES:
        return OTHER_VALUES[field.name]
    return not field.default if field.type is bool else 7


@pytest.mark.parametrize(
    "field",
    [field for field in FIELDS if field.name not in ("endpoint", "curve_keys")],
    ids=lambda field: field.name,
)
def test_every_engine_argument_is_a_flag_and_a_variable(
    deepinfer: Cli, field: msgspec.structs.FieldInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = other_value(field)
    flag = "--" + field.name.replace("_", "-")
    given = [flag if value else flag.replace("--", "--no-", 1)]
    given = given if isinstance(value, bool) else [flag, str(value)]
    assert deepinfer("run", "hi", *given)[0] == 0
    monkeypatch.setenv(f"DEEPINFER_{field.name.upper()}", str(value))
    assert deepinfer("run", "hi")[0] == 0
    assert [getattr(e.args, field.name) for e in WordEngine.instances] == [value, value]


def test_a_command_with_an_engine_of_its_own_offers_it_to_nobody(
    deepinfer: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint is where ``trace`` and programs find the engine that runs already."""
    assert deepinfer("run", "hi", "--endpoint", "tcp://127.0.0.1:1")[0] == 2
    monkeypatch.setenv("DEEPINFER_ENDPOINT", "tcp://127.0.0.1:1")
    assert deepinfer("run", "hi")[0] == 0
    assert WordEngine.instances[0].args.endpoint is None


def test_run_reads_its_prompt_from_stdin_where_it_is_a_dash(
    deepinfer: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = []
    for prompt in ("-", "two words"):
        monkeypatch.setattr("sys.stdin", io.StringIO("two words"))
        answers.append(deepinfer("run", "-q", "--raw", prompt))
    assert answers[0] == answers[1]
    assert answers[0] != deepinfer("run", "-q", "--raw", "other words")


def test_without_options_the_arguments_are_the_defaults(deepinfer: Cli) -> None:
    deepinfer("run", "hi")
    assert WordEngine.instances[0].args == EngineArgs(model="m")


@pytest.mark.parametrize("columns", [80, 200])
def test_each_option_is_described_by_its_field_with_its_variable(
    deepinfer: Cli, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    status, out, _ = deepinfer("engine", "--help")
    assert status == 0
    text = " ".join(out.split())
    assert "Requests that may wait; more are refused" in text
    for field in FIELDS:
        shown = field.name not in ("worker_module", "image_worker_module")
        assert (f"--{field.name.replace('_', '-')} " in text) is shown
        assert bool(re.search(rf"\bDEEPINFER_{field.name.upper()}\b", text)) is shown


def test_the_version_is_told(deepinfer: Cli) -> None:
    assert deepinfer("--version") == (0, f"deepinfer {__version__}\n", "")


def test_make_run_hands_over_the_prompt_as_it_was_written(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "deepinfer"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "<%s>" "$@"\n')
    program.chmod(0o755)
    (tmp_path / "installed").touch()
    command = ["make", "-s", "run", f"VENV={tmp_path}", 'PROMPT=-n Say "hi" for $$5 `now`, it\'s']
    done = subprocess.run(
        command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout == '<run><--><-n Say "hi" for $5 `now`, it\'s>'


def test_help_needs_none_of_the_heavy_packages() -> None:
    code = (
        "import sys; sys.argv = ['deepinfer', '--help']\n"
        "from deepinfer.frontend.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = 'torch numba transformers PIL numpy tokenizers gguf zmq asyncio'.split()\n"
        "print('loaded:', [name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "loaded: []" in done.stdout


@pytest.mark.parametrize(
    ("module", "later"),
    [
        ("deepinfer.frontend.llm_engine", "numpy tokenizers jinja2 asyncio rich"),
        ("deepinfer.frontend.llm", "numpy tokenizers jinja2 asyncio rich"),
        ("deepinfer.frontend.terminal", "numpy tokenizers jinja2 asyncio rich"),
        ("deepinfer.frontend.batch_file", "numpy tokenizers jinja2 asyncio rich"),
        ("deepinfer.frontend.engine", "numpy tokenizers jinja2"),
        ("deepinfer.scheduler.worker_process", "numpy zmq asyncio"),
        ("deepinfer.gpu_worker.process", "numpy numba"),
        ("deepinfer.gpu_worker.weight_cache", "numba"),
    ],
)
def test_what_starts_a_process_or_a_thread_imports_little_before(module: str, later: str) -> None:
    """Slow imports come while the other process starts, or the weights are read."""
    code = f"import sys, {module}; print([name for name in {later.split()} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# ---- errors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["run", "hi", "--model", "nowhere"], "nowhere"),
        (["run", "hi", "--block-size", "0"], "block_size"),
        (["run", "hi", "--dtype", "int3"], "dtype"),
        (["run", "hi", "--max-tokens", "0"], "max_tokens"),
        (["run", "hi", "--temperature", "-1"], "temperature"),
        (["run", " ".join("word" for _ in range(MAX_WORDS + 1))], "limit"),
        (["pull", "./nothing.gguf"], "nothing.gguf"),
        (["trace", "x", "--endpoint", "tcp://192.0.2.1:5"], "endpoint"),
        (["engine", "--endpoint", "nonsense"], "endpoint"),
    ],
)
def test_bad_input_is_one_line_and_status_2(deepinfer: Cli, argv: list[str], named: str) -> None:
    status, _, err = deepinfer(*argv)
    assert status == 2
    assert re.fullmatch(rf"error: .*{re.escape(named)}.*\n", err)


@pytest.mark.parametrize("argv", [["run"], ["run", "hi", "--no-such"], ["run", "hi", "-n", "x"]])
def test_wrong_usage_is_status_2(deepinfer: Cli, argv: list[str]) -> None:
    assert deepinfer(*argv)[0] == 2


def test_a_dead_engine_is_one_line_and_status_1(
    deepinfer: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(args: EngineArgs) -> None:
        raise EngineDownError("the scheduler exited with status 3")

    monkeypatch.setattr(llm_engine, "LLMEngine", down)
    status, _, err = deepinfer("run", "hi")
    assert (status, err) == (1, "error: the scheduler exited with status 3\n")


def test_a_missing_file_is_one_line_and_status_1(deepinfer: Cli, tmp_path: Path) -> None:
    missing = tmp_path / "none.jsonl"
    status, _, err = deepinfer("batch", missing, tmp_path / "out.jsonl")
    assert (status, err) == (1, f"error: No such file or directory: {missing}\n")
    assert not (tmp_path / "out.jsonl").exists()


# ---- run and chat -----------------------------------------------------------------------------


def test_run_answers_through_the_chat_template(deepinfer: Cli) -> None:
    status, out, err = deepinfer("run", "a b", "--system", "be kind")
    assert (status, out) == (0, "b a chat:\n")
    assert re.fullmatch(
        r"3 tokens, first after \d+\.\d\d s, then \d+\.\d tok/s, ended by eos\n", err
    )
    messages = WordEngine.instances[0].prompts[0]
    assert [message["role"] for message in messages] == ["system", "user"]


def test_run_raw_continues_the_text(deepinfer: Cli) -> None:
    status, out, err = deepinfer("run", "a b", "--raw", "-n", 1, "--stop", "x", "--stop", "y", "-q")
    assert (status, out, err) == (0, "b\n", "")
    params = WordEngine.instances[0].params[0]
    assert params == SamplingParams(max_tokens=1, temperature=0.0, stop=["x", "y"])


def test_speed_is_counted_from_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long wait for the first token is told apart from the speed of the others."""
    now = 0.0

    class Slow(WordEngine):
        def step(self) -> list[RequestOutput]:
            nonlocal now
            now += 10.0 if now == 0 else 0.5
            return super().step()

    monkeypatch.setattr(terminal, "time", types.SimpleNamespace(monotonic=lambda: now))
    for prompt, told in (
        ("a b c", "3 tokens, first after 10.00 s, then 2.0 tok/s"),
        ("a", "1 tok"),
    ):
        now = 0.0
        answer = Terminal(Slow(), lambda _: None).answer(prompt, SamplingParams())  # type: ignore[arg-type]
        assert answer.summary().startswith(told)
        assert ("tok/s" in answer.summary()) is (prompt != "a")


def test_run_continues_the_text_when_there_is_no_template(
    deepinfer: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plain(WordEngine):
        def __init__(self, args: EngineArgs) -> None:
            super().__init__(args)
            self.tokenizer.has_chat_template = False

    monkeypatch.setattr(llm_engine, "LLMEngine", Plain)
    assert deepinfer("run", "a b")[1] == "b a\n"
    status, _, err = deepinfer("chat")
    assert status == 2
    assert "no chat template" in err


def test_run_fetches_the_default_model_when_it_is_missing(
    deepinfer: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepinfer.frontend import pull as pull_module

    asked: list[str] = []
    monkeypatch.setattr(pull_module, "pull", lambda name, progress: asked.append(name))
    assert deepinfer("run", "hi", "--model", "smollm2-135m")[0] == 0
    assert asked == ["smollm2-135m"]


class Interrupted(WordEngine):
    """Ctrl-C comes after its first word."""

    def __init__(self, args: EngineArgs) -> None:
        super().__init__(args)
        self.interrupt_after = 1


def test_an_interrupted_run_says_nothing_more(
    deepinfer: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm_engine, "LLMEngine", Interrupted)
    status, out, err = deepinfer("run", "a b")
    assert status == 130
    assert out == "b \n"
    assert "Traceback" not in err
    assert WordEngine.instances[0].dropped == ["answer-1"]


def conversation(engine: WordEngine, lines: list[str], system: str | None = None) -> str:
    shown: list[str] = []
    typed = iter(lines)

    def read() -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    Terminal(engine, shown.append).converse(SamplingParams(), system, read)  # type: ignore[arg-type]
    return "".join(shown)


def test_a_chat_remembers_what_was_said() -> None:
    engine = WordEngine()
    assert conversation(engine, ["a", "  ", "b", "/exit", "c"], "sys") == "a chat:\nb chat:\n"
    said = [(message["role"], message["content"]) for message in engine.prompts[-1]]
    assert said[:2] == [("system", "sys"), ("user", "a")]
    assert ("assistant", "a chat:") in said
    assert len(engine.prompts) == 2


def test_a_refused_message_does_not_stay_in_the_chat() -> None:
    engine = WordEngine()
    shown = conversation(engine, ["a", "w " * 20, "b"])
    assert "error: prompt has 21 tokens" in shown
    assert [m["content"] for m in engine.prompts[-1] if m["role"] == "user"] == ["a", "b"]


def test_interrupting_an_answer_does_not_end_the_chat() -> None:
    engine = WordEngine()
    engine.interrupt_after = 1
    shown = conversation(engine, ["a b", "c"])
    assert shown == "b \nc chat:\n\n"
    assert [m["content"] for m in engine.prompts[-1] if m["role"] == "user"] == ["a b", "c"]


# ---- batch ------------------------------------------------------------------------------------


def run_batch(lines: list[str], seed: int = 0) -> tuple[list[dict[str, Any]], WordEngine]:
    engine, target = WordEngine(seed=seed), io.BytesIO()
    source = io.BytesIO("".join(line + "\n" for line in lines).encode())
    BatchFile(engine).run(source, target, lambda: None)  # type: ignore[arg-type]
    assert not engine.open
    return [json.loads(line) for line in target.getvalue().splitlines()], engine


GOOD = st.builds(
    lambda words, n: {"prompt": " ".join(words), "n": n},
    st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=MAX_WORDS),
    st.integers(1, 3),
)
BAD = st.sampled_from(
    ["{", "[]", "7", "null", '"x"', "{}", '{"prompt": ""}', '{"prompt": 5}', "\x00", "[" * 5000]
    + ['{"prompt": "a", "messages": []}', '{"prompt": "a", "temperature": -1}']
    + ['{"prompt": "a", "no_such_parameter": 1}', '{"prompt": "a a a a a a a a a a"}']
)


@settings(max_examples=200, deadline=None)
@given(lines=st.lists(GOOD | BAD | st.just("  ")), seed=st.integers(0, 1000))
def test_results_stand_in_input_order_whatever_ends_first(
    lines: list[dict[str, Any] | str], seed: int
) -> None:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    results, _ = run_batch(texts, seed)
    expected: list[tuple[int, str | None]] = []
    for number, line in enumerate(lines, 1):
        if isinstance(line, dict):
            answer = " ".join(line["prompt"].split()[::-1])
            expected += [(number, answer)] * line["n"]
        elif line.strip():
            expected.append((number, None))
    assert [(r["line"], r.get("text")) for r in results] == expected
    for result in results:
        assert ("text" in result) is not ("error" in result)
        if "error" in result:
            assert result["error"].startswith(f"line {result['line']}: ")


def test_a_result_carries_id_and_end() -> None:
    results, engine = run_batch(
        ['{"id": {"any": 1}, "messages": [{"role": "user", "content": "a"}], "max_tokens": 5}']
    )
    assert results == [
        {
            "line": 1,
            "id": {"any": 1},
            "text": "a chat:",
            "index": 0,
            "finish_reason": "stop",
            "finish_detail": "eos",
            "num_prompt_tokens": 3,
            "num_output_tokens": 2,
        }
    ]
    assert engine.params == [SamplingParams(max_tokens=5)]


def test_token_ids_and_parameters_with_integer_keys_are_taken() -> None:
    results, engine = run_batch(['{"prompt": [5, 6], "logit_bias": {"7": 1.5}}'])
    assert results[0]["text"] == "6 5"
    assert engine.params[0].logit_bias == {7: 1.5}


def test_the_engine_holds_a_bounded_part_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_file, "_MAX_RUNNING", 10)
    lines = [json.dumps({"prompt": f"p{i} x", "n": 2}) for i in range(100)]
    results, engine = run_batch(lines)
    assert len(results) == 200
    assert engine.most_open <= 10 + 1


def test_one_slow_line_does_not_gather_the_whole_file_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch_file, "_MAX_AHEAD", 5)
    engine, reads = WordEngine(), 0

    def lines() -> Iterator[bytes]:
        nonlocal reads
        for number in range(50):
            reads += 1
            yield json.dumps({"prompt": f"{number}"}).encode()

    class Target(io.BytesIO):
        def write(self, data: Any) -> int:
            nonlocal written
            written += 1
            assert reads - written <= 5 + 1
            return super().write(data)

    written = 0
    BatchFile(engine).run(lines(), Target(), lambda: None)  # type: ignore[arg-type]
    assert written == reads == 50


def test_batch_recomputes_what_is_preempted_and_counts_failures(
    deepinfer: Cli, tmp_path: Path
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a b"}\n{"prompt": 1}\n')
    status, _, err = deepinfer("batch", source, target)
    assert status == 1
    assert "2 lines, 1 failed" in err
    assert [json.loads(line)["line"] for line in target.read_text().splitlines()] == [1, 2]
    assert WordEngine.instances[0].args.stop_preempted_request is False


def test_a_batch_without_a_failed_line_is_status_0(deepinfer: Cli, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a b"}\n')
    target.write_text("old\n")
    target.chmod(0o600)
    (tmp_path / "link").symlink_to(target)
    assert deepinfer("batch", source, tmp_path / "link")[0] == 0
    assert json.loads(target.read_text())["text"] == "b a"
    assert (target.stat().st_mode & 0o777, (tmp_path / "link").is_symlink()) == (0o600, True)
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_a_batch_without_lines_starts_no_engine(deepinfer: Cli, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n  \n")
    assert deepinfer("batch", source, target) == (0, "", "0 lines\n")
    assert target.read_text() == ""
    assert not WordEngine.instances


def test_a_batch_that_cannot_start_leaves_the_old_results(deepinfer: Cli, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n')
    target.write_text("old\n")
    assert deepinfer("batch", source, target, "--model", "nowhere")[0] == 2
    assert target.read_text() == "old\n"
    assert not (tmp_path / "out.jsonl.partial").exists()


def test_an_interrupted_batch_leaves_the_old_results_and_keeps_the_new_apart(
    deepinfer: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(llm_engine, "LLMEngine", Interrupted)
    monkeypatch.setattr(batch_file, "_MAX_RUNNING", 1)
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    target.write_text("old\n")
    assert deepinfer("batch", source, target)[0] == 130
    assert target.read_text() == "old\n"
    assert json.loads((tmp_path / "out.jsonl.partial").read_text())["text"] == "a"


def test_a_batch_writes_to_and_reads_from_pipes(deepinfer: Cli, tmp_path: Path) -> None:
    """A pipe can be read once and cannot be replaced: neither is counted, renamed nor removed."""
    source, target = tmp_path / "in", tmp_path / "out"
    os.mkfifo(source)
    os.mkfifo(target)
    got: list[bytes] = []
    other_ends = [
        threading.Thread(target=source.write_bytes, args=(b'{"prompt": "a b"}\n',), daemon=True),
        threading.Thread(target=lambda: got.append(target.read_bytes()), daemon=True),
    ]
    for thread in other_ends:
        thread.start()
    assert deepinfer("batch", source, target)[0] == 0
    for thread in other_ends:
        thread.join(PATIENCE_S)
    assert json.loads(got[0])["text"] == "b a"
    assert target.is_fifo()


def test_batch_does_not_overwrite_its_own_input(deepinfer: Cli, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n')
    (tmp_path / "link").symlink_to(source)
    assert deepinfer("batch", source, tmp_path / "link")[0] == 2
    partial = tmp_path / "out.jsonl.partial"
    source.rename(partial)
    assert deepinfer("batch", partial, tmp_path / "out.jsonl")[0] == 2
    assert partial.read_text() == '{"prompt": "a"}\n'


# ---- engine and trace -------------------------------------------------------------------------


def test_an_engine_does_not_push_another_from_its_endpoint(deepinfer: Cli, tmp_path: Path) -> None:
    path = tmp_path / "e.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen()
        status, _, err = deepinfer("engine", "--endpoint", f"ipc://{path}")
    assert status == 2
    assert "in use by another engine" in err


def test_trace_says_at_once_that_nobody_listens(deepinfer: Cli, tmp_path: Path) -> None:
    path = tmp_path / "e.sock"
    endpoint = f"ipc://{path}"
    told = (
        f"error: no engine answers at {endpoint}; "
        f"start one with `deepinfer engine --endpoint {endpoint}`\n"
    )
    assert deepinfer("trace", "x", "--endpoint", endpoint) == (1, "", told)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    assert deepinfer("trace", "x", "--endpoint", endpoint) == (1, "", told)


def test_trace_says_that_nobody_answers(deepinfer: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bare_engine, "_ANSWER_S", 0.1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        status, _, err = deepinfer("trace", "x", "--endpoint", endpoint)
    assert status == 1
    assert f"no engine answers at {endpoint}; start one with" in err


def test_keys_are_made_and_none_is_overwritten(deepinfer: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    status, out, _ = deepinfer("keys", folder)
    assert status == 0
    assert (folder / "server.pub").read_text().strip() in out
    status, out, _ = deepinfer("keys", folder, "--client", "anna")
    assert status == 0
    secret = folder / "clients" / "anna.key"
    assert str(secret) in out
    assert secret.read_text().strip() not in out
    status, out, _ = deepinfer("keys", folder, "--client", "root", "--operator")
    assert status == 0
    assert str(folder / "operators" / "root.pub") in out and "into operators/" in out
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert len(before) == 6
    status, _, err = deepinfer("keys", folder, "--operator")
    assert status == 2
    assert "--client" in err
    for argv, named in (
        ([], "server.key"),
        (["--client", "anna"], "anna.pub"),
        (["--client", "root"], "root.pub"),
    ):
        status, _, err = deepinfer("keys", folder, *argv)
        assert status == 1
        assert named in err
    status, _, err = deepinfer("keys", folder, "--client", "../anna")
    assert status == 2
    assert "client must be a name" in err
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.process
def test_trace_takes_keys_and_says_when_they_are_refused(tmp_path: Path) -> None:
    """The whole way over tcp: ``keys``, ``engine --curve-keys``, ``trace`` with and without."""
    folder = ScriptedFolder(tmp_path / "model")
    keys, endpoint = tmp_path / "keys", free_endpoint()
    command = [sys.executable, "-m", "deepinfer"]
    for argv in ([], ["--client", "anna"], ["--client", "otto"]):
        subprocess.run([*command, "keys", keys, *argv], check=True, stdout=subprocess.DEVNULL)
    (keys / "clients" / "otto.pub").unlink()
    options = ["--model", str(folder.path), "--worker-module", "support.scripted_worker"]
    engine = subprocess.Popen(
        [*command, "engine", "--endpoint", endpoint, "--curve-keys", "keys", *options],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    try:
        assert engine.stdout is not None
        assert engine.stdout.readline() == f"ready at {endpoint}\n"

        def trace(name: str) -> subprocess.CompletedProcess[str]:
            environment = os.environ | {
                "DEEPINFER_ENDPOINT": endpoint,
                "DEEPINFER_SERVER_KEY": str(keys / "server.pub"),
            }
            own = ["--secret-key", str(keys / "clients" / f"{name}.key")]
            return subprocess.run(
                [*command, "trace", "nothing", *own],
                capture_output=True,
                text=True,
                check=False,
                env=environment,
            )

        served, refused = trace("anna"), trace("otto")
        assert (served.returncode, served.stderr) == (
            2,
            "error: no story of request 'nothing'; one of a gateway with tenants is called "
            "TENANT/ID\n",
        )
        assert refused.returncode == 1
        assert "does not know the key" in refused.stderr
    finally:
        engine.send_signal(signal.SIGINT)
        assert engine.wait(PATIENCE_S) == 0


def test_a_timeline_shows_when_what_and_why() -> None:
    story = [
        StoryEvent(0.0, "arrived", {"prompt_tokens": 5}),
        StoryEvent(12.34, "preempted", {"by": "other", "share": 0.25}),
    ]
    header, first, second = timeline(story)
    assert header.split() == ["at", "ms", "+ms", "event"]
    assert first.split() == ["0.0", "0.0", "arrived", "prompt_tokens", "5"]
    assert second.split() == ["12.3", "12.3", "preempted", "by", "other", "share", "0.2"]


@pytest.mark.process
def test_an_engine_serves_its_endpoint_until_it_is_told_to_stop(tmp_path: Path) -> None:
    """The whole way: ``engine`` in one process, a client, ``trace`` in another, Ctrl-C."""
    folder = ScriptedFolder(tmp_path)
    endpoint = f"ipc://{tmp_path}/e.sock"
    options = ["--model", str(folder.path), "--worker-module", "support.scripted_worker"]
    command = [sys.executable, "-m", "deepinfer"]
    engine = subprocess.Popen(
        [*command, "engine", "--endpoint", endpoint, *options], stdout=subprocess.PIPE, text=True
    )
    try:
        assert engine.stdout is not None
        assert engine.stdout.readline() == f"ready at {endpoint}\n"

        async def ask() -> list[int]:
            async with Client(endpoint) as client:
                outputs = client.generate([5, 6], SamplingParams(temperature=0, max_tokens=3), "r1")
                return [output.token_id async for output in outputs]

        assert asyncio.run(ask()) == folder.reference([5, 6], 3)
        trace = [*command, "trace", "--endpoint", endpoint]
        told = subprocess.run([*trace, "r1"], capture_output=True, text=True, check=True)
        assert re.search(r"first_token(.|\n)*ended", told.stdout)
        unknown = subprocess.run([*trace, "r2"], capture_output=True, text=True, check=False)
        assert (unknown.returncode, unknown.stdout) == (2, "")
        assert re.fullmatch(r"error: .*r2.*\n", unknown.stderr)
    finally:
        engine.send_signal(signal.SIGINT)
        assert engine.wait(PATIENCE_S) == 0


@pytest.mark.process
@pytest.mark.parametrize("how", ["once", "twice", "to all its processes"])
def test_the_engine_command_finishes_what_is_open_or_ends_it_at_the_second_signal(
    tmp_path: Path, how: str
) -> None:
    folder = ScriptedFolder(tmp_path)
    endpoint = f"ipc://{tmp_path}/e.sock"
    options = ["--model", str(folder.path), "--worker-module", "support.scripted_worker"]
    engine = subprocess.Popen(
        [sys.executable, "-m", "deepinfer", "engine", "--endpoint", endpoint, *options],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert engine.stdout is not None
    try:
        assert engine.stdout.readline() == f"ready at {endpoint}\n"

        async def ask() -> list[RequestOutput]:
            params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
            async with Client(endpoint) as client:
                with folder.held(after=1):
                    outputs = client.generate([5, 6], params)
                    got = [await anext(outputs)]
                    if how == "to all its processes":
                        os.killpg(engine.pid, signal.SIGTERM)
                    else:
                        engine.send_signal(signal.SIGTERM)
                    assert engine.stdout is not None
                    line = await asyncio.to_thread(engine.stdout.readline)
                    assert line.startswith("finishing 1 open requests, for 30 s at most")
                    if how == "twice":
                        engine.send_signal(signal.SIGTERM)
                        got += [output async for output in outputs]
                return got + [output async for output in outputs]

        outputs = asyncio.run(ask())
        if how != "twice":
            assert [output.token_id for output in outputs] == folder.reference([5, 6], 30)
        else:
            assert outputs[-1].finish_detail == "shutdown"
        assert engine.wait(PATIENCE_S) == 0
    finally:
        engine.kill()
        engine.wait()
        engine.stdout.close()


@pytest.mark.process
def test_run_and_batch_work_on_a_whole_engine(tmp_path: Path) -> None:
    folder = ScriptedFolder(tmp_path / "m")
    options = ["--model", str(folder.path), "--worker-module", "support.scripted_worker"]
    command = [sys.executable, "-m", "deepinfer"]
    run = [*command, "run", "--raw", "-q", "-n", "5", "hello", *options]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    outputs = folder.reference(folder.tokenizer.encode("hello"), 5)
    assert done.stdout == folder.tokenizer.decode(outputs) + "\n"

    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"id": i, "prompt": [i], "temperature": 0, "max_tokens": i} for i in range(5, 25)]
    lines.insert(7, {"id": 0, "prompt": []})
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    batch = [*command, "batch", source, target, *options]
    assert subprocess.run(batch, check=False, capture_output=True).returncode == 1
    results = [json.loads(line) for line in target.read_text().splitlines()]
    assert [result["id"] for result in results] == [line["id"] for line in lines]
    assert "line 8: prompt" in results.pop(7)["error"]
    for result in results:
        expected = folder.reference([result["id"]], result["id"])
        assert result["text"] == folder.tokenizer.decode(expected)
        assert result["num_output_tokens"] == len(expected)


@pytest.mark.process
def test_bench_measures_a_whole_engine(tmp_path: Path) -> None:
    folder = ScriptedFolder(tmp_path / "m", step_ms=2)
    options = ["--model", str(folder.path), "--worker-module", "support.scripted_worker"]
    sizes = ["--input-len", "9", "--output-len", "5", "--num-prompts", "3"]
    options += ["--quantization", "int4", "--kv-cache-dtype", "int8"]
    bench = [sys.executable, "-m", "deepinfer", "bench", *sizes, *options]
    done = subprocess.run([*bench, "--json"], capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (27, 15)
    assert result["completed"] == 3
    assert (result["quantization"], result["kv_cache_dtype"]) == ("int4", "int8")
    assert result["output_throughput"] * result["duration"] == pytest.approx(15)
    assert 2 <= result["median_ttft_ms"] <= result["p99_ttft_ms"] <= 1e3 * result["duration"]
    assert 2 <= result["median_tpot_ms"] <= result["p99_tpot_ms"]
    assert "load" in result["start_s"]
    done = subprocess.run(bench, capture_output=True, text=True, check=True)
    assert "int4 weights, int8 KV cache" in done.stdout
    for name in ("output tokens/s", "time to first token", "time per output token", "load"):
        assert name in done.stdout


@pytest.mark.process
def test_bench_refuses_what_the_model_cannot_hold(tmp_path: Path) -> None:
    folder = ScriptedFolder(tmp_path / "m", max_model_len=64)
    options = ["--model", str(folder.path), "--worker-module", "support.scripted_worker"]
    bench = [sys.executable, "-m", "deepinfer", "bench", *options]
    done = subprocess.run(bench, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "input_len and output_len must be at most 64 together" in done.stderr
