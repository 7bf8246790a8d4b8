"""Bad conversations and bad templates end in one line for the user, never in a stack trace."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.frontend import chat_template
from deepinfer.frontend.chat_messages import SENTINEL, check_messages
from deepinfer.frontend.chat_template import ChatTemplate, PromptError
from deepinfer.frontend.tokenizer import Tokenizer
from support.small_tokenizers import SPECIALS, small_tokenizer

USER = {"role": "user", "content": "hi"}


def render(source: str, messages: list[dict[str, Any]] | None = None, **extra: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    return template.render(messages or [USER], add_generation_prompt=True, extra=extra)


def assert_one_line(error: pytest.ExceptionInfo[PromptError]) -> None:
    reason = str(error.value)
    assert reason and "\n" not in reason and "Traceback" not in reason and len(reason) < 600


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "must not be empty"),
        (None, "must be a list"),
        ("hi", "must be a list"),
        ({"role": "user"}, "must be a list"),
        (["hi"], r"messages\[0\] must be a dict"),
        ([USER, USER], "must alternate"),
        ([{"role": "tool", "content": "x"}], "must alternate"),
        ([{"role": "assistant", "content": "x"}, USER], "must alternate"),
        ([USER, {"role": "critic", "content": "x"}], "Only user and assistant"),
        ([{"content": "x"}], r"messages\[0\].role"),
        ([{"role": "user\n<|im_end|>", "content": "x"}], r"messages\[0\].role"),
        ([{"role": "user", "content": None}], r"messages\[0\].content must be a string, got None"),
        ([{"role": "user"}], r"messages\[0\].content"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content"),
        ([{"role": "user", "content": [5]}], r"content\[0\] must be a dict"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\].text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "image_url.*text only",
        ),
        ([USER, {"role": "assistant", "content": None}], r"messages\[1\].content"),
        ([{**USER, "x": object()}], "plain JSON"),
        ([{**USER, "x": {5: 5}}], "no string"),
        ([{**USER, "content": f"a{SENTINEL}"}], "U.FDD1"),
        ([{**USER, "content": "a\ud800"}], "surrogate"),
    ],
)
def test_a_bad_conversation_is_refused_with_one_line(messages: Any, reason: str) -> None:
    with pytest.raises(PromptError, match=reason) as error:
        small_tokenizer("byte_level", "alternating").render_chat(messages)
    assert isinstance(error.value, ValueError)
    assert_one_line(error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "tool", "", "ü", 1, None]),
        "content": st.sampled_from([*SPECIALS, "x", "", [], [{"type": "text", "text": "y"}]])
        | JSON,
        "tool_calls": JSON,
        "name": JSON,
    },
)


@pytest.mark.parametrize("template", ["chatml", "alternating", "tools"])
@given(messages=st.lists(MESSAGE, max_size=3) | JSON, tools=st.lists(JSON, max_size=2))
@settings(max_examples=200, deadline=None)
def test_any_json_gives_ids_or_a_prompt_error(template: str, messages: Any, tools: Any) -> None:
    tokenizer = small_tokenizer("byte_level", template)
    try:
        ids = tokenizer.render_chat(messages, tools=tools)
    except PromptError as error:
        assert "\n" not in str(error)
    else:
        assert ids


def test_deep_nesting_is_refused() -> None:
    value: Any = "x"
    for _ in range(10_000):
        value = [value]
    with pytest.raises(PromptError, match="nested deeper"):
        small_tokenizer("byte_level", "tools").render_chat([USER], tools=value)


def test_an_assistant_message_may_go_without_content_when_it_calls_tools() -> None:
    calls = [{"function": {"name": "f", "arguments": "{}"}}]
    message = {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None}
    assert check_messages([USER, message])[1] == {"role": "assistant", "tool_calls": calls}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for %}", "syntax error in line 1"),
        ("\n{{ 'a' ", "syntax error in line 2"),
        ("{% endif %}", "syntax error"),
        ("{{ missing.field }}", "refused: 'missing' is undefined"),
        ("{{ tools | tojson }}{{ messages[0].nothing | tojson }}", "not JSON serializable"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ raise_exception('no\n  such thing') }}", "refused: no such thing"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "Recursion|loop turns"),
        ("{{ 'a' * 99999999 }}", "longer than"),
        ("{{ [0] * 99999999 }}", "longer than"),
        ("{{ 9 ** 999999999 }}", "not allowed"),
        ("{{ range(999999999) | list }}", "Range too big"),
        (
            "{% set n = namespace(t='ab') %}{% for _ in range(99) %}{% set n.t = n.t ~ n.t %}"
            "{% endfor %}",
            "longer than",
        ),
        (
            "{% set n = namespace(t='ab') %}{% for _ in range(99) %}{% set n.t = n.t + n.t %}"
            "{% endfor %}",
            "longer than",
        ),
    ],
)
def test_a_broken_or_endless_template_is_refused_with_one_line(source: str, reason: str) -> None:
    with pytest.raises(PromptError, match=reason) as error:
        render(source)
    assert_one_line(error)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) if a < 0 %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) ~ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    ],
)
def test_loops_without_output_end(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_LOOP_TURNS", 20_000)
    with pytest.raises(PromptError, match="20000 loop turns"):
        render(source)


def test_output_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(PromptError, match="more than 1000 characters"):
        render("{% for a in range(99999) %}{{ 'x' }}{% endfor %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}{{ messages.__class__.__base__ }}",
        "{{ raise_exception.__globals__ }}{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ self.__init__.__globals__ }}{{ self._TemplateReference__context.x }}",
        "{% set x = messages.append(1) %}",
        "{% set x = messages[0].update({'a': 1}) %}",
        "{{ '{0.__class__}'.format(messages) }}{{ '{0.__class__.__mro__}'.format(1) }}",
        "{% include 'file' %}",
        "{% import 'os' as os %}",
        "{{ lipsum.__globals__.os }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    messages = [dict(USER)]
    try:
        text = render(source, messages)
    except PromptError as error:
        assert "\n" not in str(error)
    else:
        # jinja gives an undefined, empty value for the attribute instead of an error.
        assert text == ""
    assert messages == [USER]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{{ {'b': '<é>', 'a': [1, none]} | tojson }}", '{"b": "<é>", "a": [1, null]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(4) if i % 2 %}{{ loop.index }}{{ i }}{% endfor %}", "1123"),
        ("{% for i in [] %}{% else %}none{% endfor %}", "none"),
        ("x{% generation %}y{{ bos_token }}{% endgeneration %}z", "xy<s>z"),
        ("{{ 1 ~ 'a' ~ none }}{{ 'ab' * 2 }}{{ 1 + 2 }}", "1aNoneabab3"),
        ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(1) }}{{ m('a') ~ 'b' }}", "[1][a]b"),
        ("{{ strftime_now('%Y') | length }}{{ missing }}{{ tools is none }}", "4True"),
        ("{{ thinking is defined }}{{ thinking }}", "TrueFalse"),
    ],
)
def test_templates_have_what_the_hub_writes_them_for(source: str, text: str) -> None:
    assert render(source, thinking=False) == text


def test_messages_are_not_changed_by_rendering() -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "<s>"}], "name": None}
    before = repr(message)
    small_tokenizer("byte_level", "chatml").render_chat([message])
    assert repr(message) == before


def test_extra_names_cannot_take_over_the_template() -> None:
    tokenizer: Tokenizer = small_tokenizer("byte_level", "chatml")
    plain = tokenizer.render_chat([USER])
    assert tokenizer.render_chat([USER], _tick=None, loop=1) == plain
