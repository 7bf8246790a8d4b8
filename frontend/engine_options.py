"""Every field of ``EngineArgs`` as a command-line option and a ``DEEPINFER_<FIELD>`` variable."""

from __future__ import annotations

import ast
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import typer

from deepinfer.wire.config import EngineArgs

# For tests and other devices; it would only puzzle who reads the help.
_HIDDEN = {"worker_module", "image_worker_module"}


def takes_engine_args(
    *, without: tuple[str, ...] = (), help_for: dict[str, str] | None = None, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a typer command that has a parameter ``args: EngineArgs``.

    The command line gets the fields, but for those in ``without``, as options in its place.
    ``defaults`` replace the fields' own
    for this command, and ``help_for`` their descriptions.
    """
    descriptions = _field_docs() | (help_for or {})
    options = [
        _option(field, defaults.get(field.name, field.default), descriptions.get(field.name, ""))
        for field in msgspec.structs.fields(EngineArgs)
        if field.name not in without
    ]
    names = {option.name for option in options}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        # Typer reads the signature, and the hints are strings in a module of postponed annotations.
        hints = typing.get_type_hints(command, include_extras=True)
        own = [
            parameter.replace(annotation=hints[name])
            for name, parameter in inspect.signature(command).parameters.items()
            if name != "args"
        ]

        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            args = EngineArgs(**{name: values.pop(name) for name in names})
            command(args=args, **values)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *options)]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
        return wrapper

    return decorate


def _option(field: msgspec.structs.FieldInfo, default: Any, description: str) -> inspect.Parameter:
    flag = "--" + field.name.replace("_", "-")
    names = [f"{flag}/--no-{flag[2:]}"] if field.type is bool else [flag]
    option = typer.Option(
        *names,
        envvar=f"DEEPINFER_{field.name.upper()}",
        help=description,
        hidden=field.name in _HIDDEN,
    )
    return inspect.Parameter(
        field.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[field.type, option],
    )


@functools.cache
def _field_docs() -> dict[str, str]:
    """The string under each field in the class body: the one place where a field is described."""
    (body,) = ast.parse(inspect.getsource(EngineArgs)).body
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match text:
                case ast.Expr(value=ast.Constant(value=str(doc))):
                    docs[field.target.id] = " ".join(doc.split())
    return docs
