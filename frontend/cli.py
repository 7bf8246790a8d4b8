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
Endpoint = Annotated[
    str | None,
    typer.Option(envvar="DEEPINFER_ENDPOINT", help="The engine; that of `deepinfer engine`."),
]
ServerKey = Annotated[
    str | None,
    typer.Option(envvar="DEEPINFER_SERVER_KEY", help="Its public key, or the file of it."),
]
SecretKey = Annotated[
    str | None,
    typer.Option(envvar="DEEPINFER_SECRET_KEY", help="Your own key, or the file of it."),
]


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
@takes_engine_args(without=("endpoint", "curve_keys"))
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
@takes_engine_args(without=("endpoint", "curve_keys"))
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
@takes_engine_args(without=("endpoint", "curve_keys"), stop_preempted_request=False)
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
@takes_engine_args(without=("endpoint", "curve_keys"), stop_preempted_request=False)
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
    from deepinfer.frontend.bare_engine import serve_forever
    from deepinfer.frontend.client import default_endpoint

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
@takes_engine_args(stop_preempted_request=False)
def serve(
    args: EngineArgs,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name of the model for clients; repeatable. By default that of --model."),
    ] = None,
    tenants: Annotated[
        Path | None, typer.Option(help="TOML file of API keys and limits; see docs/gateway.md.")
    ] = None,
    usage_ledger: Annotated[
        Path | None, typer.Option(help="File that gets a JSON line for each ended request.")
    ] = None,
    open_to_all: Annotated[
        bool, typer.Option("--open-to-all", help="Let everybody in who reaches a public address.")
    ] = False,
    max_body_bytes: Annotated[
        int, typer.Option(min=1, help="Bytes of a request's body, at most.")
    ] = 8 << 20,
    quiet: Quiet = False,
) -> None:
    """Serve the OpenAI API over HTTP.

    Ctrl-C or SIGTERM ends it: open requests may finish within --drain-timeout-s, a second signal
    ends them too.
    """
    from deepinfer.frontend.gateway.server import serve as serve_http

    _bring_model(args, quiet)
    serve_http(
        args,
        host,
        port,
        served_model_name or [args.model],
        tenants,
        usage_ledger=usage_ledger,
        open_to_all=open_to_all,
        max_body_bytes=max_body_bytes,
        on_ready=lambda address: typer.echo(f"ready at {address}"),
    )


@app.command("api-key")
def api_key(
    name: Annotated[str, typer.Argument(help="Tenant that gets the key.")],
) -> None:
    """Make an API key, and print what stands for it in the tenants' file."""
    from deepinfer.frontend.gateway.tenant_file import check_name
    from deepinfer.frontend.gateway.tenants import new_key

    check_name("NAME", name)
    key, digest = new_key()
    typer.echo(f"key for {name}, shown only now: {key}", err=True)
    typer.echo(f'[tenants.{name}]\nkeys = ["{digest}"]')


@app.command()
def trace(
    request_id: Annotated[str, typer.Argument(help="The request, running or finished lately.")],
    endpoint: Endpoint = None,
    server_key: ServerKey = None,
    secret_key: SecretKey = None,
) -> None:
    """Show what happened to a request and why."""
    from deepinfer.frontend.bare_engine import fetch_story
    from deepinfer.frontend.client import default_endpoint
    from deepinfer.frontend.timeline import timeline

    story = fetch_story(
        endpoint or default_endpoint(), request_id, server_key=server_key, secret_key=secret_key
    )
    for line in timeline(story):
        typer.echo(line)


@app.command()
def top(
    endpoint: Endpoint = None,
    server_key: ServerKey = None,
    secret_key: SecretKey = None,
    interval_s: Annotated[float, typer.Option(min=0.1, max=60, help="Between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One look, as plain text.")] = False,
) -> None:
    """Watch a running engine: requests, tenants, KV blocks, steps.

    q or Ctrl-C ends it. `deepinfer serve` is watched at the --endpoint it was given.
    """
    from deepinfer.frontend.bare_engine import engine_at
    from deepinfer.frontend.client import default_endpoint
    from deepinfer.frontend.top import look_once, watch

    engine = engine_at(endpoint or default_endpoint(), server_key=server_key, secret_key=secret_key)
    if once:
        look_once(engine, interval_s)
    else:
        watch(engine, interval_s)


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="Where the keys of one engine lie.")],
    client: Annotated[
        str | None, typer.Option(help="Make the keys of a client of this name instead.")
    ] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="With --client: it may see what concerns others.")
    ] = False,
) -> None:
    """Make keys, so that clients reach an engine over a network.

    For the engine: FOLDER/server.key, its secret, and FOLDER/server.pub, which
    its clients need. With --client NAME: FOLDER/clients/NAME.key, the client's
    secret, and FOLDER/clients/NAME.pub, which lets it in as long as it lies in
    that folder on the engine's machine; one that comes or goes is noticed
    within a second. All that is secret can be read by you only.

    A client sees its own requests' stories. An operator, with --operator in
    FOLDER/operators/ instead, sees those of all, and `deepinfer top`.

    A client may make its keys on its own machine and send you NAME.pub.
    """
    from deepinfer.wire.curve import make_client_keys, make_server_keys

    if client is None:
        if operator:
            raise ValueError("operator: give --client NAME as well")
        public = make_server_keys(folder)
        typer.echo(f"server key: {public.decode()} (in {folder / 'server.pub'})")
        typer.echo(f"deepinfer engine --curve-keys {folder} --endpoint tcp://0.0.0.0:5757")
        return
    secret = make_client_keys(folder, client, operator=operator)
    typer.echo(f"secret key: {secret}, which belongs on the client's machine and nowhere else")
    public_file, kind = secret.with_suffix(".pub"), secret.parent.name
    typer.echo(f"public key: {public_file}, which belongs into {kind}/ on the engine's machine")


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
