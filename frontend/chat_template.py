"""Renders a model's chat template in jinja2's sandbox, within bounds.

The environment is the one the templates on the Hugging Face hub are written for: ``trim_blocks``,
``lstrip_blocks``, ``break``/``continue``, ``{% generation %}``, ``raise_exception``,
``strftime_now`` and a ``tojson`` that does not escape HTML.

A template comes with the model folder, its input from a user. The sandbox keeps it away from
Python's internals; the budget below ends loops and output that have no end. It does not promise to
stop a template that was written to exhaust the memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

MAX_RENDERED_CHARS = 16 << 20
MAX_LOOP_TURNS = 1_000_000
"""Turns of all loops and calls of all macros in one rendering."""

_TICK = "_tick"
_PROBE = "PROBE"


class PromptError(ValueError):
    """A prompt or a conversation that cannot become tokens; one line that says why."""


class ChatTemplate:
    """One template, compiled on first use.

    ``variables`` are the names every rendering sees, such as ``bos_token``.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self._source = source
        self._variables = dict(variables)
        self._compiled: jinja2.Template | None = None
        self._wants_parts: bool | None = None

    @property
    def wants_parts(self) -> bool:
        """Whether it loses a content that is a string, and wants a list of parts instead."""
        if self._wants_parts is None:
            parts = [{"type": "text", "text": _PROBE}]
            self._wants_parts = not self._tells(_PROBE) and self._tells(parts)
        return self._wants_parts

    def _tells(self, content: Any) -> bool:
        messages = [{"role": "user", "content": content}]
        try:
            text = self.render(messages, add_generation_prompt=True, extra={})
        except PromptError:
            return False
        return _PROBE in text and "'text'" not in text

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        extra: Mapping[str, Any],
    ) -> str:
        """Return the text of a conversation.

        ``extra`` holds further names for the template (``tools``, ``enable_thinking`` …).
        ``PromptError`` when the template refuses the conversation, is broken, or exceeds a bound.
        """
        template = self._template()
        values = {
            "tools": None,
            "documents": None,
            **self._variables,
            **extra,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            _TICK: _Budget().tick,
        }
        parts: list[str] = []
        length = 0
        try:
            for part in template.generate(values):
                length += len(part)
                if length > MAX_RENDERED_CHARS:
                    raise PromptError(
                        f"the chat template wrote more than {MAX_RENDERED_CHARS} characters"
                    )
                parts.append(part)
        except PromptError:
            raise
        except jinja2.exceptions.SecurityError as error:
            raise PromptError(f"the chat template is not safe: {_one_line(error)}") from error
        except jinja2.TemplateError as error:
            raise PromptError(f"the chat template refused: {_one_line(error)}") from error
        except Exception as error:
            # What a template does to a value of the wrong type can raise anything: TypeError,
            # RecursionError, ZeroDivisionError … Our own code does not run inside a rendering.
            raise PromptError(
                f"the chat template failed on this conversation: "
                f"{type(error).__name__}: {_one_line(error)}"
            ) from error
        return "".join(parts)

    def _template(self) -> jinja2.Template:
        if self._compiled is None:
            try:
                tree = _ENVIRONMENT.parse(self._source)
                tree = _CountTurns().visit(tree)
                code = _ENVIRONMENT.compile(tree, name="chat_template")
            except jinja2.TemplateSyntaxError as error:
                raise PromptError(
                    f"the chat template has a syntax error in line {error.lineno}: "
                    f"{_one_line(error)}"
                ) from error
            except RecursionError as error:
                raise PromptError("the chat template is nested too deeply") from error
            self._compiled = jinja2.Template.from_code(
                _ENVIRONMENT, code, _ENVIRONMENT.make_globals(None)
            )
        return self._compiled


class _Budget:
    """The loop turns one rendering has left."""

    def __init__(self) -> None:
        self._left = MAX_LOOP_TURNS

    def tick(self) -> bool:
        self._left -= 1
        if self._left < 0:
            raise PromptError(f"the chat template took more than {MAX_LOOP_TURNS} loop turns")
        return True


class _CountTurns(NodeTransformer):
    """Makes every loop turn and macro call tick, and every ``~`` check its length."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802
        self.generic_visit(node)
        # A loop's own filter runs also for turns it drops, so it ticks there when there is one.
        if node.test is not None:
            node.test = nodes.And(_tick_call(), node.test)
        else:
            node.body.insert(0, nodes.ExprStmt(_tick_call()))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Macro:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_tick_call()))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "_concatenated", [], [], None, None)


def _tick_call() -> nodes.Call:
    return nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)


class _Generation(jinja2.ext.Extension):
    """``{% generation %} … {% endgeneration %}``: marks for training, without effect here."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with bounds on the operators that make long values out of short ones."""

    intercepted_binops = frozenset(["*", "**", "+"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise PromptError("the chat template uses **, which is not allowed")
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    _check_chars(len(value) * times)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, str | list | tuple):
            _check_chars(len(result))
        return result


def _check_chars(length: int) -> None:
    if length > MAX_RENDERED_CHARS:
        raise PromptError(f"the chat template made a value longer than {MAX_RENDERED_CHARS}")


def _concatenated(values: list[Any]) -> str:
    texts = [str(value) for value in values]
    _check_chars(sum(map(len, texts)))
    return "".join(texts)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."


def _environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.filters["_concatenated"] = _concatenated
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()
