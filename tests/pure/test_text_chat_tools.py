"""Tools and calls under templates that know nothing of them: shown in GLM's format, or refused, never dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from glint.errors import TextError
from glint.text.chat import render_chat, render_prompt, shows_calls, shows_tools
from glint.text.output import OutputStart, parse_output
from glint.text.tokenizer import Tokenizer
from glint.text.tools import Tool
from tests.pure.chat_layouts import LAYOUTS, write_layout
from tests.pure.text_folder import write_tokenizer

USER = {"role": "user", "content": "Q"}
SYSTEM = {"role": "system", "content": "Be kind."}
WEATHER = Tool(
    "get_weather", "The weather of a city: é <b>", {"type": "object", "properties": {"city": {}, "days": {}}}
)
ARGUMENTS: dict[str, Any] = {"city": "Köln {x}", "days": [1, None]}
CALLED = {
    "role": "assistant",
    "content": "I look.",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}],
}


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_layout(tmp_path_factory.mktemp("chatml") / "model", "chatml"))


@pytest.mark.parametrize(
    ("layout", "tools", "calls"), [("chatml", 0, 0), ("glm45", 0, 1), ("glm46", 1, 1), ("glm47", 1, 1)]
)
def test_what_a_template_shows_is_found_out(tmp_path: Path, layout: str, tools: int, calls: int) -> None:
    tokenizer = Tokenizer(write_layout(tmp_path / "model", layout))
    assert (shows_tools(tokenizer), shows_calls(tokenizer)) == (bool(tools), bool(calls))
    assert layout in LAYOUTS


def test_tools_go_behind_the_system_message(chatml: Tokenizer) -> None:
    offered = [WEATHER.as_function()]
    rendered = render_chat(chatml, [SYSTEM, USER], tools=offered)
    begin, _, rest = rendered.partition("<tools>\n")
    shown, _, end = rest.partition("\n</tools>")
    assert begin.startswith("<|im_start|>system\nBe kind.\n\n# Tools\n") and json.loads(shown) == offered[0]
    assert "<tool_call>{function-name}\n<arg_key>" in end
    assert end.endswith("</tool_call><|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n")
    alone = render_chat(chatml, [USER], tools=offered)
    assert alone == rendered.replace("Be kind.\n\n", "")
    assert render_chat(chatml, [SYSTEM | {"content": ""}, USER], tools=offered) == alone


def test_calls_of_earlier_turns_are_shown_as_the_parser_reads_them(chatml: Tokenizer) -> None:
    rendered = render_chat(chatml, [USER, CALLED, {"role": "tool", "content": "rain", "tool_call_id": "1"}])
    text = rendered.partition("<|im_start|>assistant\n")[2].partition("<|im_end|>")[0]
    output = parse_output(text, OutputStart.CONTENT, [Tool("get_weather")])
    assert text.startswith("I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n")
    assert [call.name for call in output.calls] == ["get_weather"]
    assert json.loads(output.calls[0].arguments) == {"city": "Köln {x}", "days": "[1, null]"}
    assert "<|im_start|>tool\nrain<|im_end|>" in rendered


def test_no_part_of_a_call_or_tool_is_a_control_token(chatml: Tokenizer) -> None:
    call = {"function": {"name": "f<|im_end|>", "arguments": {"<|im_end|>": "<|im_end|>", "n": ["<|im_end|>"]}}}
    tool = Tool("f", "<|im_end|>", {"properties": {"<|im_end|>": {"enum": ["<|im_end|>"]}}}).as_function()
    for history, tools in (([USER, {"role": "assistant", "tool_calls": [call]}], None), ([USER], [tool])):
        prompt = render_prompt(chatml, history, tools=tools)
        end = chatml.token_to_id("<|im_end|>")
        own = prompt.text.count("<|im_end|>") - (4 if tools is None else 3)
        assert chatml.encode_prompt(prompt).count(end) == own


def test_a_template_that_shows_no_system_message_refuses_tools(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    tokenizer = Tokenizer(write_tokenizer(tmp_path, template))
    with pytest.raises(TextError, match=r"shows it neither tools nor a system message.*leave tools out"):
        render_chat(tokenizer, [USER], tools=[WEATHER.as_function()])
    assert render_chat(tokenizer, [USER]) == "Q"
