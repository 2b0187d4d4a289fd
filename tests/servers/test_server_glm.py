"""Thinking and tool calls as GLM models write them, with the sample model in GLM's clothes behind a real server.

The model was never taught these tokens, so biases make it think: a word is likeliest until its frequency penalty lets
`</think>` pass it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.e2e.glm_folder import write_glm_folder
from tests.e2e.questions import WEATHER_SCHEMA
from tests.e2e.served import Served, served

QUESTION: list[Any] = [{"role": "user", "content": "Name three colours of the rainbow."}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": WEATHER_SCHEMA,
    },
}
CALL = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"
HISTORY: list[Any] = [
    {"role": "system", "content": "SYS"},
    {"role": "user", "content": "Q1"},
    {"role": "assistant", "content": "A1", "reasoning_content": "R1"},
    {"role": "user", "content": "Q2"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "R2",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "now", "arguments": '{"zone": "UTC", "digits": 2}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "noon"},
    {"role": "tool", "tool_call_id": "1", "content": "late"},
]


class Glm:
    """A server on a GLM folder and what its tests ask of it."""

    def __init__(self, server: Served) -> None:
        self.server = server
        self.http = httpx.Client(base_url=server.url, timeout=120)
        self.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)

    def tokens(self, **fields: Any) -> list[int]:
        """The tokens of a text or of a conversation."""
        answer = self.http.post("/tokenize", json=fields)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["tokens"])

    def rendered(self, messages: list[Any], **arguments: bool) -> str:
        """The prompt of a conversation as the model sees it."""
        tokens = self.tokens(messages=messages, chat_template_kwargs=arguments)
        return str(self.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"])

    def token(self, text: str) -> int:
        """The one token of a text."""
        (found,) = self.tokens(prompt=text, add_special_tokens=False)
        return found

    @property
    def biases(self) -> dict[str, Any]:
        """What makes the model think for a while and then stop thinking."""
        bias = {str(self.token(" blue")): 100, str(self.token("</think>")): 82}
        return {"logit_bias": bias, "frequency_penalty": 2.0, "temperature": 0}

    def ask(self, **changes: Any) -> dict[str, Any]:
        """A chat, streamed and not, which must come to the same; gives the answer that was not streamed."""
        body = {"messages": QUESTION, "max_tokens": 60, "temperature": 0} | changes
        answer = self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        whole = dict(answer.json())
        streamed = self._streamed(body)
        message = whole["choices"][0]["message"]
        expected = {name: message.get(name) or "" for name in ("content", "reasoning_content")}
        calls = [call["function"]["name"] + call["function"]["arguments"] for call in message.get("tool_calls", [])]
        assert streamed == expected | {"calls": calls, "finish_reason": whole["choices"][0]["finish_reason"]}
        return whole

    def _streamed(self, body: dict[str, Any]) -> dict[str, Any]:
        gathered: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": [], "finish_reason": None}
        lines = self.http.post("/v1/chat/completions", json=body | {"stream": True}).text.splitlines()
        for line in lines:
            if not line.startswith("data: {"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            for name in ("content", "reasoning_content"):
                gathered[name] += choice["delta"].get(name) or ""
            for call in choice["delta"].get("tool_calls", []):
                if "id" in call:
                    gathered["calls"].append("")
                function = call["function"]
                gathered["calls"][call["index"]] += function.get("name", "") + function.get("arguments", "")
            gathered["finish_reason"] = choice["finish_reason"] or gathered["finish_reason"]
        return gathered


@pytest.fixture(scope="module", params=["glm47", "glm45"])
def glm(request: pytest.FixtureRequest, sample_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Glm]:
    """A server on each of the two layouts."""
    folder = write_glm_folder(sample_model, tmp_path_factory.mktemp("glm") / request.param, request.param)
    with served(folder.parent / "server.log", str(folder)) as running:
        made = Glm(running)
        with made.http, made.openai:
            yield made


def is_47(glm: Glm) -> bool:
    """Whether the layout is that of GLM-4.7."""
    return glm.server.model == "glm47"


def test_the_prompt_says_where_the_answer_begins(glm: Glm) -> None:
    ends = ("<|assistant|><think>", "<|assistant|></think>")
    if not is_47(glm):
        ends = ("<|assistant|>", "/nothink<|assistant|>\n<think></think>")
    assert glm.rendered(QUESTION).endswith(ends[0])
    assert glm.rendered(QUESTION, enable_thinking=True) == glm.rendered(QUESTION)
    assert glm.rendered(QUESTION, enable_thinking=False).endswith(ends[1])


def test_history_is_rendered_in_the_layout(glm: Glm) -> None:
    if is_47(glm):
        turns = (
            "<|user|>Q2<|assistant|><think>R2</think><tool_call>now<arg_key>zone</arg_key><arg_value>UTC</arg_value>"
            "<arg_key>digits</arg_key><arg_value>2</arg_value></tool_call><|observation|><tool_response>noon"
            "</tool_response><tool_response>late</tool_response><|assistant|><think>"
        )
        opening = "[gMASK]<sop><|system|>SYS<|user|>Q1<|assistant|>"
        assert glm.rendered(HISTORY) == f"{opening}</think>A1{turns}"
        assert glm.rendered(HISTORY, clear_thinking=True) == glm.rendered(HISTORY)
        assert glm.rendered(HISTORY, clear_thinking=False) == f"{opening}<think>R1</think>A1{turns}"
    else:
        assert glm.rendered(HISTORY) == (
            "[gMASK]<sop><|system|>\nSYS<|user|>\nQ1<|assistant|>\n<think>R1</think>\nA1<|user|>\nQ2<|assistant|>\n"
            "<think>R2</think>\n<tool_call>now\n<arg_key>zone</arg_key>\n<arg_value>UTC</arg_value>\n"
            "<arg_key>digits</arg_key>\n<arg_value>2</arg_value>\n</tool_call><|observation|>\n<tool_response>\nnoon\n"
            "</tool_response>\n<tool_response>\nlate\n</tool_response><|assistant|>"
        )


@pytest.mark.parametrize("glm", ["glm47"], indirect=True)
def test_clearing_changes_what_the_model_sees(glm: Glm) -> None:
    reasoning = "colours of light " * 20
    turns = [*QUESTION, {"role": "assistant", "content": "Red.", "reasoning_content": reasoning}, QUESTION[0]]
    prompts = {
        clears: glm.tokens(messages=turns, chat_template_kwargs={"clear_thinking": clears}) for clears in (False, True)
    }
    assert len(prompts[False]) > len(prompts[True]) + 20
    for clears in (False, True):
        answer = glm.http.post(
            "/v1/chat/completions", json={"messages": turns, "max_tokens": 1, "clear_thinking": clears}
        )
        assert answer.json()["usage"]["prompt_tokens"] == len(prompts[clears])


def test_reasoning_is_told_from_content(glm: Glm) -> None:
    biases = glm.biases
    if not is_47(glm):
        levels = {"<think>": 100, " blue": 80, "</think>": 60}
        biases["logit_bias"] = {str(glm.token(text)): level for text, level in levels.items()}
    answer = glm.ask(**biases)
    message, usage = answer["choices"][0]["message"], answer["usage"]
    reasoning = message["reasoning_content"]
    assert reasoning == " blue" * (len(reasoning) // 5) and len(reasoning) >= 5
    counted = usage["completion_tokens_details"]["reasoning_tokens"]
    assert len(reasoning) // 5 <= counted <= usage["completion_tokens"]
    if is_47(glm):
        assert counted == len(reasoning) // 5 + 1 and message["content"].strip(" blue") == ""


@pytest.mark.parametrize(
    "wish",
    [
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"enable_thinking": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning_effort": "none"},
    ],
)
def test_without_thinking_all_is_content(glm: Glm, wish: dict[str, Any]) -> None:
    answer = glm.ask(**glm.biases | wish | {"max_tokens": 6})
    message = answer["choices"][0]["message"]
    assert message["content"] == " blue" * 6 and "reasoning_content" not in message
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("glm", ["glm47"], indirect=True)
def test_reasoning_that_never_ends_stays_reasoning(glm: Glm) -> None:
    bias = {str(glm.token(" blue")): 100}
    choice = glm.ask(logit_bias=bias, max_tokens=5)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"] == {"role": "assistant", "content": "", "reasoning_content": " blue" * 5}


FORMATS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"response_format": {"type": "choice", "choices": ["yes", "no"]}}, ("yes", "no")),
    ({"structured_outputs": {"regex": "(red|green) light"}}, ("red light", "green light")),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "light", "schema": {"enum": ["red", "green"]}},
            }
        },
        ('"red"', '"green"'),
    ),
]


@pytest.mark.parametrize(("wish", "allowed"), FORMATS)
@pytest.mark.parametrize("thinks", [True, False])
def test_the_format_holds_after_the_reasoning(
    glm: Glm, wish: dict[str, Any], allowed: tuple[str, ...], thinks: bool
) -> None:
    answer = glm.ask(**glm.biases | wish | {"enable_thinking": thinks})
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] in allowed
    reasoning = choice["message"].get("reasoning_content", "")
    assert reasoning == " blue" * (len(reasoning) // 5) and bool(reasoning) == thinks


@pytest.mark.parametrize("thinks", [True, False])
def test_a_required_call(glm: Glm, thinks: bool) -> None:
    forced = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False, "enable_thinking": thinks}
    (choice,) = glm.ask(**glm.biases | forced | {"max_tokens": 120})["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] is None
    assert bool(message.get("reasoning_content")) == thinks
    (call,) = message["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert call["function"]["name"] == "get_weather" and arguments["city"] in ("Paris", "Rome")
    assert type(arguments["days"]) is int
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Sunny."}
    prompt = glm.rendered([*QUESTION, message, result], enable_thinking=thinks)
    assert f"<arg_value>{arguments['city']}</arg_value>" in prompt and "Sunny." in prompt
    assert ("blue" in prompt) == thinks


def test_the_official_client_shows_reasoning(glm: Glm) -> None:
    biases = glm.biases
    extra = {"response_format": {"type": "choice", "choices": ["yes", "no"]}}
    answer = glm.openai.chat.completions.create(
        model=glm.server.model, messages=QUESTION, max_tokens=60, extra_body=extra, **biases
    )
    message = answer.choices[0].message
    assert message.content in ("yes", "no") and message.model_extra is not None
    assert message.model_extra["reasoning_content"].startswith(" blue")
    usage = answer.usage
    assert usage is not None and usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == len(message.model_extra["reasoning_content"]) // 5 + 1


def test_choice_none_leaks_no_markup(glm: Glm) -> None:
    """The model is made to write a call; without tools it is text, with choice none it is dropped."""
    forced = {"structured_outputs": {"choice": [CALL]}, "enable_thinking": False, "max_tokens": 120}
    (silent,) = glm.ask(**forced, tools=[WEATHER], tool_choice="none")["choices"]
    assert silent["message"] == {"role": "assistant", "content": ""} and silent["finish_reason"] == "stop"
    (undeclared,) = glm.ask(**forced)["choices"]
    assert undeclared["message"] == {"role": "assistant", "content": CALL}


def test_tools_are_not_shown_with_choice_none(glm: Glm) -> None:
    def prompt_tokens(**fields: Any) -> int:
        body = {"messages": QUESTION, "max_tokens": 1} | fields
        return int(glm.http.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"])

    shown = prompt_tokens(tools=[WEATHER])
    assert prompt_tokens(tools=[WEATHER], tool_choice="none") == prompt_tokens()
    assert shown > prompt_tokens() or not is_47(glm)
