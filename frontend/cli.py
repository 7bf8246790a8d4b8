"""The command line. What a command needs is imported when it runs, so that help comes at once."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer.frontend.engine_options import takes_engine_args
from deepinfer.wire.config import EngineArgs

if TYPE_CHECKING:
    from deepinfer.frontend.model_cache import Progress
    from deepinfer.wire.params import SamplingParams

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Plain help: the one in boxes cuts long names short where the terminal has 80 columns.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="An LLM inference engine to embed, to talk to over ZeroMQ, or to put behind a gateway.",
)

MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Output tokens at most.")]
Temperature = Annotated[float, typer.Option(help="0 takes the most likely token each time.")]
TopP = Annotated[float, typer.Option(help="Sample among the most likely tokens of this mass.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends an answer; repeatable.")]
System = Annotated[str | None, typer.Option(help="System message of the chat.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only results, no progress.")]


def _show_version(asked: bool) -> None:
    if asked:
        from deepinfer import __version__

        typer.echo(f"deepinfer {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options of the program itself; its help is the app's."""


def main() -> None:
    """Run the command line; errors are one line on stderr and status 2 (bad input) or 1."""
    from deepinfer.frontend.errors import EngineError
    from deepinfer.frontend.pull import PullError

    try:
        app()
    except BrokenPipeError:
        # The reader of our output left, as `head` does. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except ValueError as error:
        _fail(str(error), 2)
    except (PullError, EngineError) as error:
        _fail(str(error), 1)
    except OSError as error:
        named = f": {error.filename}" if error.filename else ""
        _fail(f"{error.strerror or error}{named}", 1)
    except KeyboardInterrupt:
        sys.exit(130)


@app.command()
def pull(
    name: Annotated[
        str,
        typer.Argument(help="A known name, a Hugging Face id, a model folder or a .gguf file."),
    ] = "smollm2-135m",
    quiet: Quiet = False,
) -> None:
    """Bring a model into the local cache."""
    from deepinfer.frontend.pull import pull as pull_model

    with _progress(quiet) as progress:
        folder = pull_model(name, progress)
    typer.echo(folder)


@app.command()
@takes_engine_args(without=("endpoint",))
def run(
    args: EngineArgs,
    prompt: Annotated[
        str,
        typer.Argument(help="What to answer or, with --raw, to continue; - reads it from stdin."),
    ],
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text; no chat template.")
    ] = False,
    system: System = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    stop: Stop = None,
    quiet: Quiet = False,
) -> None:
    """Answer one prompt, streamed to the terminal."""
    params = _params(max_tokens, temperature, top_p, stop)
    if prompt == "-":
        prompt = sys.stdin.read()
    _bring_model(args, quiet)
    from deepinfer.frontend.llm_engine import LLMEngine
    from deepinfer.frontend.terminal import Terminal

    with LLMEngine(args) as engine:
        terminal = Terminal(engine)
        if raw or not terminal.can_chat():
            answer = terminal.answer(prompt, params)
        else:
            messages = [{"role": "system", "content": system}] if system is not None else []
            messages.append({"role": "user", "content": prompt})
            answer = terminal.answer(messages, params)
        if answer.last is None:
            raise KeyboardInterrupt
        if not quiet:
            typer.secho(answer.summary(), err=True, dim=True)
        if answer.last.error:
            _fail(answer.last.error, 1)


@app.command()
@takes_engine_args(without=("endpoint",))
def chat(
    args: EngineArgs,
    system: System = None,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    stop: Stop = None,
    quiet: Quiet = False,
) -> None:
    """Talk with a model. Ctrl-C ends an answer, Ctrl-D or /exit the chat."""
    params = _params(max_tokens, temperature, top_p, stop)
    _bring_model(args, quiet)
    from deepinfer.frontend.llm_engine import LLMEngine
    from deepinfer.frontend.terminal import Terminal, read_line

    with LLMEngine(args) as engine:
        terminal = Terminal(engine)
        if not terminal.can_chat():
            raise ValueError(f"model {args.model} has no chat template; try `deepinfer run --raw`")
        terminal.converse(params, system, read_line)


@app.command()
@takes_engine_args(without=("endpoint",), stop_preempted_request=False)
def batch(
    args: EngineArgs,
    source: Annotated[Path, typer.Argument(help="JSON lines: prompt or messages, id, parameters.")],
    target: Annotated[Path, typer.Argument(help="Where the results go, in the same order.")],
    quiet: Quiet = False,
) -> None:
    """Answer a file of prompts.

    A line is a JSON object: prompt or messages, an id of your own, and any
    sampling parameter. Without them max_tokens is 16 and temperature is 1.0.

    TARGET is replaced at the end. Until then the results are in
    TARGET.partial, and there they stay when the run is cut short.

    A line that cannot be served gets an error in its place. Exit status: 0
    when every line was answered, 1 when some failed or the engine did, 2 for
    bad options.
    """
    from deepinfer.frontend.batch_file import BatchFile, count_lines, replaced_at_end

    with source.open("rb") as lines, replaced_at_end(target, source) as results:
        total = count_lines(lines)
        if total == 0:
            if not quiet:
                typer.echo("0 lines", err=True)
            return
        _bring_model(args, quiet)
        from deepinfer.frontend.llm_engine import LLMEngine

        with LLMEngine(args) as engine, _progress(quiet) as progress:
            run, started = BatchFile(engine), time.monotonic()
            run.run(lines, results, lambda: progress("answering", run.done, total or 0))
    if not quiet:
        rate = run.tokens / max(time.monotonic() - started, 1e-6)
        failed = f", {run.failed} failed" if run.failed else ""
        typer.echo(f"{run.done} lines{failed}, {run.tokens} tokens, {rate:.1f} tok/s", err=True)
    if run.failed:
        raise typer.Exit(1)


@app.command()
@takes_engine_args(without=("endpoint",), stop_preempted_request=False)
def bench(
    args: EngineArgs,
    input_len: Annotated[int, typer.Option(help="Tokens of each prompt, random.")] = 128,
    output_len: Annotated[int, typer.Option(help="Tokens of each answer, greedy.")] = 64,
    num_prompts: Annotated[int, typer.Option(help="Requests; all arrive at once.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON line, no table.")] = False,
    quiet: Quiet = False,
) -> None:
    """Measure a whole engine: tokens a second, time to the first and per output token.

    With --profile FOLDER also where a step's time goes, and a trace of all
    processes in FOLDER/trace.json, which https://ui.perfetto.dev shows.
    """
    from deepinfer.frontend.bench import Workload, run_workload
    from deepinfer.frontend.llm_engine import LLMEngine
    from deepinfer.frontend.profile_report import gather
    from deepinfer.wire import recorder

    workload = Workload(input_len, output_len, num_prompts)
    _bring_model(args, quiet)
    if args.profile is not None:
        recorder.clear(Path(args.profile))
    with LLMEngine(args) as engine:
        result = run_workload(engine, workload, args.seed or 0)
    if args.profile is not None:
        result.trace, result.profile = gather(Path(args.profile))
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(result).decode())
        return
    for line in result.lines():
        typer.echo(line)


@app.command()
@takes_engine_args(
    help_for={"endpoint": "Where clients connect; a socket in the cache folder when not given."}
)
def engine(args: EngineArgs, quiet: Quiet = False) -> None:
    """Run an engine for clients over ZeroMQ.

    Ctrl-C or SIGTERM ends it: open requests may finish within --drain-timeout-s, a second signal
    ends them too.
    """
    from deepinfer.frontend.bare_engine import default_endpoint, serve_forever

    if args.endpoint is None:
        args.endpoint = default_endpoint()
    _bring_model(args, quiet)
    serve_forever(
        args,
        lambda: typer.echo(f"ready at {args.endpoint}"),
        lambda live: typer.echo(
            f"finishing {live} open requests, for {args.drain_timeout_s:g} s at most; "
            "Ctrl-C or SIGTERM again ends them now"
        ),
    )


@app.command()
def trace(
    request_id: Annotated[str, typer.Argument(help="The request, running or finished lately.")],
    endpoint: Annotated[
        str | None,
        typer.Option(envvar="DEEPINFER_ENDPOINT", help="The engine; that of `deepinfer engine`."),
    ] = None,
) -> None:
    """Show what happened to a request and why."""
    from deepinfer.frontend.bare_engine import default_endpoint, fetch_story
    from deepinfer.frontend.timeline import timeline

    for line in timeline(fetch_story(endpoint or default_endpoint(), request_id)):
        typer.echo(line)


def _params(
    max_tokens: int, temperature: float, top_p: float, stop: list[str] | None
) -> SamplingParams:
    from deepinfer.wire.params import SamplingParams

    return SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, stop=stop or None
    )


def _bring_model(args: EngineArgs, quiet: bool) -> None:
    """Find the model, and fetch or convert it first where that is needed."""
    from deepinfer.frontend.model_cache import resolve
    from deepinfer.frontend.pull import KNOWN_MODELS
    from deepinfer.frontend.pull import pull as pull_model

    with _progress(quiet) as progress:
        if args.model in KNOWN_MODELS:
            pull_model(args.model, progress)
        else:
            resolve(args.model, progress)


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Progress]:
    """A progress bar on stderr that is gone afterwards; none when nobody would see it."""
    from deepinfer.frontend.model_cache import no_progress

    if quiet or not sys.stderr.isatty():
        yield no_progress
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None, visible=False)

        def show(stage: str, done: int, total: int) -> None:
            bar.update(task, description=stage, completed=done, total=total or None, visible=True)

        yield show


def _fail(message: str, status: int) -> None:
    typer.echo(f"error: {message}", err=True)
    sys.exit(status)
