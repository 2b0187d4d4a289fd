"""Chat prompts through the folder's own template: the GLM-4.7 layout, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from glint.errors import TextError
from glint.text.chat import render_chat
from glint.text.tokenizer import Tokenizer
from tests.pure.text_folder import GLM_TEMPLATE, write_tokenizer

USER = {"role": "user", "content": "Q"}
NOW = {"function": {"name": "now", "arguments": "{}"}}


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("glm"), GLM_TEMPLATE))


def with_template(folder: Path, template: str) -> Tokenizer:
    """A tokenizer whose folder has this chat template."""
    return Tokenizer(write_tokenizer(folder, template))


def test_two_turns_with_a_tool_call(glm: Tokenizer) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "SYS"},
        {"role": "user", "content": "Q1"},
        {"role": "assistant", "content": " A1 ", "reasoning_content": "R1"},
        {"role": "user", "content": "Q2"},
        {"role": "assistant", "content": None, "reasoning_content": "R2", "tool_calls": [NOW]},
        {"role": "tool", "content": "noon", "tool_call_id": "1"},
    ]
    before = "[gMASK]<sop><|system|>SYS<|user|>Q1<|assistant|>"
    after = "A1<|user|>Q2<|assistant|><think>R2</think><tool_call>now</tool_call>"
    after += "<|observation|><tool_response>noon</tool_response>"
    assert render_chat(glm, messages) == f"{before}</think>{after}<|assistant|><think>"
    assert render_chat(glm, messages, enable_thinking=False) == f"{before}</think>{after}<|assistant|></think>"
    assert render_chat(glm, messages, enable_thinking=True) == f"{before}</think>{after}<|assistant|><think>"
    assert render_chat(glm, messages, add_generation_prompt=False) == f"{before}</think>{after}"
    kept = f"{before}<think>R1</think>{after}<|assistant|><think>"
    assert render_chat(glm, messages, clear_thinking=False) == kept
    assert render_chat(glm, messages, clear_thinking=True) != kept


def test_arguments_may_be_json_text_or_a_mapping(glm: Tokenizer) -> None:
    expected = "<tool_call>f<arg_key>a</arg_key><arg_value>é</arg_value>"
    expected += '<arg_key>b</arg_key><arg_value>[1, {"c": null}]</arg_value></tool_call>'
    for arguments in ('{"a": "é", "b": [1, {"c": null}]}', {"a": "é", "b": [1, {"c": None}]}):
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        rendered = render_chat(glm, [USER, {"role": "assistant", "content": "", "tool_calls": [call]}])
        assert expected in rendered
    for arguments in ("", None, {}):
        call = {"function": {"name": "f", "arguments": arguments}}
        rendered = render_chat(glm, [USER, {"role": "assistant", "tool_calls": [call]}])
        assert "<tool_call>f</tool_call>" in rendered


def test_tools_are_one_json_object_per_line(glm: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": name, "description": "é <b>"}} for name in ("f", "g")]
    lines = [f'{{"type": "function", "function": {{"name": "{name}", "description": "é <b>"}}}}' for name in "fg"]
    assert "<tools>\n" + "\n".join(lines) + "\n</tools><|user|>Q" in render_chat(glm, [USER], tools=tools)
    assert render_chat(glm, [USER], tools=[]) == render_chat(glm, [USER])


def test_text_parts_are_joined_and_none_is_empty(glm: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render_chat(glm, [{"role": "user", "content": parts}]) == "[gMASK]<sop><|user|>ab<|assistant|><think>"
    assert render_chat(glm, [USER, {"role": "assistant", "content": None}, USER]) == render_chat(
        glm, [USER, {"role": "assistant", "content": ""}, USER]
    )
    empty = {"refusal": None, "annotations": [], "provider_specific_fields": {"refusal": None}}
    assert render_chat(glm, [USER | empty]) == render_chat(glm, [USER])
    with pytest.raises(TextError, match="'extra', which a message of the role 'user' cannot have"):
        render_chat(glm, [USER | {"extra": {"refusal": None, "text": "no"}}])


def test_messages_are_not_changed(glm: Tokenizer) -> None:
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    render_chat(glm, messages)
    assert messages == [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert call["function"]["arguments"] == '{"a": 1}'


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "at least one message"),
        ("hello", "must be a list"),
        ({"role": "user"}, "must be a list"),
        (["hello"], r"messages\[0\] is str"),
        ([USER, {"content": "x"}], r"messages\[1\].role is None"),
        ([{"role": "robot", "content": "x"}], "'robot'; use one of system, user, assistant, tool"),
        ([{"role": ["user"], "content": "x"}], "role is"),
        ([{"role": "user"}], r"messages\[0\].content is missing"),
        ([{"role": "user", "content": None}], r"messages\[0\].content is null; give a string"),
        ([USER, {"role": "system", "content": None}], r"messages\[1\].content is null"),
        ([USER, {"role": "tool", "content": None}], r"messages\[1\].content is null"),
        ([{"role": "user", "content": 3}], "content is int"),
        ([{"role": "user", "content": {"type": "text"}}], "content is dict"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], r"content\[0\].*'image_url'"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\].*'str'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]"),
        (
            [{"role": "user", "content": "x", "tool_calls": [NOW]}],
            "field 'tool_calls', which a message of the role 'user'",
        ),
        ([{"role": "user", "content": "x", "colour": "red"}], "field 'colour'"),
        ([{"role": "assistant", "content": "x", "reasoning_content": 3}], "reasoning_content is int"),
        ([{"role": "assistant", "tool_calls": "now"}], "tool_calls is str"),
        ([{"role": "assistant", "tool_calls": [{"name": "f"}]}], r"tool_calls\[0\] needs a function"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}], "with a name"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], "not JSON"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}], "is list"),
    ],
)
def test_wrong_messages_are_named(glm: Tokenizer, messages: Any, said: str) -> None:
    with pytest.raises(TextError, match=said):
        render_chat(glm, messages)


@pytest.mark.parametrize("tool", ["f", {"name": "f"}, {"function": {}}, {"function": {"name": "f", "x": object()}}])
def test_wrong_tools_are_named(glm: Tokenizer, tool: Any) -> None:
    with pytest.raises(TextError, match=r"tools\[0\]"):
        render_chat(glm, [USER], tools=[tool])


def test_a_folder_without_a_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"chat_template\.jinja is missing and tokenizer_config\.json has none"):
        render_chat(Tokenizer(write_tokenizer(tmp_path)), [USER])


def test_the_template_may_refuse_in_its_own_words(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TextError, match="refuses these messages: roles must alternate"):
        render_chat(tokenizer, [USER])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for",
        "{{ messages[0].content + 1 }}",
        "{{ nothing.at.all }}",
    ],
)
def test_a_failing_template_shows_no_internals(tmp_path: Path, template: str) -> None:
    with pytest.raises(TextError, match="the chat template of") as caught:
        render_chat(with_template(tmp_path, template), [USER])
    said = str(caught.value)
    assert "Traceback" not in said and "object at" not in said and "\n" not in said
