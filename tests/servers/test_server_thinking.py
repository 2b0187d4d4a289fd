"""Thinking budgets in every API: official clients against real servers on a small random model in GLM's layouts.

The model answers at random but greedily, so a question has the same tokens in every API, streamed and whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import httpx
import openai
import pytest

from tests.e2e.glm_folder import GLM_45_TEMPLATE
from tests.e2e.served import START_SECONDS, Served, served, start
from tests.e2e.small_glm import write_small_glm

QUESTION: list[Any] = [{"role": "user", "content": "hello world"}]
COUNT = 48
BUDGETS = (0, 1, 17)
CLOSING = "\nthe quick fox"


class Answer(NamedTuple):
    """What every API tells of an answer."""

    reasoning: str
    content: str
    output_tokens: int
    reasoning_tokens: int


class Clients:
    """The official clients of one server."""

    def __init__(self, server: Served) -> None:
        self.server = server
        self.model = server.model
        self.http = httpx.Client(base_url=server.url, timeout=120)
        self.openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)
        self.anthropic = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120)

    def token(self, text: str) -> int:
        """The one token of a text."""
        body = {"prompt": text, "add_special_tokens": False}
        (found,) = self.http.post("/tokenize", json=body).json()["tokens"]
        return int(found)

    def prompt(self, **arguments: bool) -> list[int]:
        """The tokens of the question in the model's layout."""
        body = {"messages": QUESTION, "chat_template_kwargs": arguments}
        return list(self.http.post("/tokenize", json=body).json()["tokens"])

    def chat(self, extra: dict[str, Any], **fields: Any) -> Answer:
        """The question in the chat API, streamed and whole, which must be the same."""
        fields = {"model": self.model, "messages": QUESTION, "max_tokens": COUNT, "temperature": 0} | fields
        whole = self.openai.chat.completions.create(**fields, extra_body=extra)
        message = whole.choices[0].message
        found = Answer(getattr(message, "reasoning_content", ""), message.content or "", *_openai_counts(whole.usage))
        texts = {"reasoning_content": "", "content": ""}
        usage = None
        options = {"include_usage": True}
        for chunk in self.openai.chat.completions.create(
            **fields, extra_body=extra, stream=True, stream_options=options
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                for name in texts:
                    texts[name] += getattr(choice.delta, name, None) or ""
        assert found == Answer(*texts.values(), *_openai_counts(usage))
        return found

    def responses(self, extra: dict[str, Any], **fields: Any) -> Answer:
        """The question in the Responses API, streamed and whole."""
        fields = {"model": self.model, "input": QUESTION, "max_output_tokens": COUNT, "temperature": 0} | fields
        found = _read_response(self.openai.responses.create(**fields, extra_body=extra))
        texts = {"response.reasoning_text.delta": "", "response.output_text.delta": ""}
        for event in self.openai.responses.create(**fields, extra_body=extra, stream=True):
            if event.type in texts:
                texts[event.type] += event.delta
            if event.type in ("response.completed", "response.incomplete"):
                assert _read_response(event.response) == found
        assert list(texts.values()) == [found.reasoning, found.content]
        return found

    def messages(self, extra: dict[str, Any], **fields: Any) -> Answer:
        """The question in the Messages API, streamed and whole."""
        fields = {"model": self.model, "messages": QUESTION, "max_tokens": COUNT, "extra_body": extra} | fields
        fields["extra_body"] = {"temperature": 0} | extra
        found = _read_message(self.anthropic.messages.create(**fields))
        with self.anthropic.messages.stream(**fields) as stream:
            assert _read_message(stream.get_final_message()) == found
        return found

    def generate(self, **fields: Any) -> list[int]:
        """The tokens of the answer to the question, from the engine's own route."""
        body = {"prompt": self.prompt(), "max_tokens": COUNT, "temperature": 0} | fields
        answer = self.http.post("/generate", json=body)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])


def _openai_counts(usage: Any) -> tuple[int, int]:
    return usage.completion_tokens, usage.completion_tokens_details.reasoning_tokens


def _read_response(response: Any) -> Answer:
    reasoning = "".join(part.text for item in response.output if item.type == "reasoning" for part in item.content)
    usage = response.usage
    return Answer(reasoning, response.output_text, usage.output_tokens, usage.output_tokens_details.reasoning_tokens)


def _read_message(message: anthropic.types.Message) -> Answer:
    reasoning = "".join(block.thinking for block in message.content if block.type == "thinking")
    content = "".join(block.text for block in message.content if block.type == "text")
    details = message.usage.output_tokens_details
    assert details is not None
    return Answer(reasoning, content, message.usage.output_tokens, details.thinking_tokens)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose template opens thinking, as GLM-4.7's does."""
    return write_small_glm(tmp_path_factory.mktemp("thinking") / "glm47")


def clients_of(folder: Path, *flags: str) -> Iterator[Clients]:
    with served(folder.parent / "server.log", str(folder), *flags) as running:
        made = Clients(running)
        with made.http, made.openai, made.anthropic:
            yield made


@pytest.fixture(scope="module")
def glm(folder: Path) -> Iterator[Clients]:
    """A server on that model."""
    yield from clients_of(folder)


@pytest.fixture(scope="module")
def glm_45(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    """A server on a model that opens thinking by itself, as GLM-4.5 does."""
    folder = write_small_glm(tmp_path_factory.mktemp("thinking") / "glm45")
    (folder / "chat_template.jinja").write_text(GLM_45_TEMPLATE)
    yield from clients_of(folder)


@pytest.fixture(scope="module")
def bounded(folder: Path) -> Iterator[Clients]:
    """A server with an upper bound and a closing text of its own."""
    yield from clients_of(folder, "--max-thinking-tokens", "5", "--thinking-closing-text", CLOSING)


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_budget_is_the_same_in_every_api(glm: Clients, budget: int) -> None:
    close = glm.token("</think>")
    tokens = glm.generate(thinking_budget=budget)
    assert tokens.index(close) == budget and tokens[:budget] == glm.generate()[:budget]
    answers = [
        glm.chat({"thinking_budget": budget}),
        glm.responses({"thinking_budget": budget}),
        glm.messages({"thinking_budget": budget}),
        glm.messages({}, thinking={"type": "enabled", "budget_tokens": budget}),
        glm.messages({"thinking_budget": 30}, thinking={"type": "enabled", "budget_tokens": budget}),
    ]
    assert answers == [answers[0]] * len(answers)
    assert answers[0].reasoning_tokens == budget + 1 and answers[0].content
    assert bool(answers[0].reasoning) == (budget > 0)


def test_a_budget_beyond_the_answer_and_the_highest_effort_change_nothing(glm: Clients) -> None:
    free = glm.chat({})
    assert free.reasoning_tokens == free.output_tokens == COUNT
    answers = [
        glm.chat({"thinking_budget": COUNT}),
        glm.chat({"thinking_budget": 2**31 - 1}),
        *(glm.chat({}, reasoning_effort=effort) for effort in ("minimal", "low", "medium", "high", "xhigh")),
        glm.responses({"thinking_budget": 1000}),
        glm.responses({}, reasoning={"effort": "medium"}),
        glm.messages({}, thinking={"type": "enabled", "budget_tokens": 100_000}),
        glm.messages({}, thinking={"type": "adaptive"}, output_config={"effort": "low"}),
        glm.messages({"output_config": {"effort": "max"}}),
    ]
    assert answers == [free] * len(answers)


def test_an_effort_has_its_budget(glm: Clients) -> None:
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    endless = {"ignore_eos": True, "logit_bias": {str(glm.token(tag)): -100 for tag in tags}}
    minimal = glm.chat(endless, reasoning_effort="minimal", max_tokens=530)
    assert (minimal.output_tokens, minimal.reasoning_tokens) == (530, 513)
    assert glm.chat(endless | {"thinking_budget": 600}, reasoning_effort="minimal", max_tokens=530) == minimal
    assert glm.chat({"thinking_budget": 3}, reasoning_effort="minimal") == glm.chat({"thinking_budget": 3})


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_closing_text_ends_the_thinking(glm: Clients, budget: int) -> None:
    extra = {"thinking_budget": budget, "thinking_closing_text": CLOSING}
    body = {"prompt": CLOSING, "add_special_tokens": False}
    closing = [*glm.http.post("/tokenize", json=body).json()["tokens"], glm.token("</think>")]
    tokens = glm.generate(**extra)
    assert tokens[budget : budget + len(closing)] == closing
    chat = glm.chat(extra)
    assert chat == glm.responses(extra) == glm.messages(extra)
    assert chat.reasoning == glm.chat({"thinking_budget": budget}).reasoning + CLOSING
    assert chat.reasoning_tokens == budget + len(closing) and chat.content


def test_a_format_and_a_call_begin_behind_the_closed_thinking(glm: Clients) -> None:
    schema = {"enum": ["red", "green"]}
    named = {"type": "json_schema", "name": "light", "schema": schema}
    output = {"format": {"type": "json_schema", "schema": schema}}
    answers = [
        glm.chat({"thinking_budget": 17, "response_format": {"type": "json_schema", "json_schema": named_as(schema)}}),
        glm.responses({"thinking_budget": 17}, text={"format": named}),
        glm.messages({"output_config": output}, thinking={"type": "enabled", "budget_tokens": 17}),
    ]
    assert answers == [answers[0]] * 3
    assert answers[0].content in ('"red"', '"green"') and answers[0].reasoning_tokens == 18
    body = {"messages": QUESTION, "thinking_budget": 1, "max_tokens": 200, "temperature": 0}
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    asked = body | {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    answer = glm.http.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["now"]
    assert answer.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2


def named_as(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema as the chat API takes it."""
    return {"name": "light", "schema": schema}


def test_without_thinking_a_budget_has_no_effect(glm: Clients, glm_45: Clients) -> None:
    for clients in (glm, glm_45):
        free = clients.chat({}, reasoning_effort="none")
        answers = [
            clients.chat({"enable_thinking": False, "thinking_budget": 0, "thinking_closing_text": CLOSING}),
            clients.chat({"thinking": {"type": "disabled"}, "thinking_budget": 1}),
            clients.responses({"thinking_budget": 0}, reasoning={"effort": "none"}),
            clients.messages({"thinking_budget": 0}, thinking={"type": "disabled"}, output_config={"effort": "low"}),
        ]
        assert answers == [free] * len(answers)
        assert free.reasoning_tokens == 0 and free.content and not free.reasoning


@pytest.mark.parametrize("budget", [*BUDGETS, 100])
def test_thinking_that_the_model_opens_is_counted_from_there(glm_45: Clients, budget: int) -> None:
    """A bias makes the model open thinking; a penalty lets other tokens pass."""
    bias = {str(glm_45.token("<think>")): 100, str(glm_45.token("</think>")): -100}
    fields = {"logit_bias": bias, "frequency_penalty": 2, "logprobs": True}
    body = {"messages": QUESTION, "max_tokens": COUNT, "temperature": 0, "thinking_budget": budget} | fields
    answer = glm_45.http.post("/v1/chat/completions", json=body).json()
    tokens = [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]]
    assert tokens[0] == "<think>" and len(tokens) == COUNT
    assert "</think>" not in tokens[: budget + 1]
    assert tokens[budget + 1 : budget + 2] == ["</think>"] * (budget < COUNT)
    assert (
        glm_45.chat({"thinking_budget": budget, "logit_bias": bias, "frequency_penalty": 2}).reasoning_tokens
        == (answer["usage"]["completion_tokens_details"]["reasoning_tokens"])
    )


def test_the_flag_bounds_every_request(glm: Clients, bounded: Clients) -> None:
    text = {"thinking_closing_text": CLOSING}
    most = glm.chat({"thinking_budget": 5} | text)
    asks: list[Callable[[], Answer]] = [
        lambda: bounded.chat({}),
        lambda: bounded.chat({"thinking_budget": 17}),
        lambda: bounded.chat({}, reasoning_effort="high"),
        lambda: bounded.responses({}),
        lambda: bounded.messages({}, thinking={"type": "enabled", "budget_tokens": 17}),
    ]
    assert [ask() for ask in asks] == [most] * len(asks)
    assert bounded.chat({"thinking_budget": 1}) == glm.chat({"thinking_budget": 1} | text)
    assert bounded.messages({"thinking_closing_text": ""}) == glm.chat({"thinking_budget": 5})
    assert bounded.generate() == glm.generate(thinking_budget=5, **text)
    assert bounded.chat({}, reasoning_effort="none") == glm.chat({}, reasoning_effort="none")


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": QUESTION},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": QUESTION},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 4, "model": "glm47"},
    "/generate": {"prompt": "hello"},
}


@pytest.mark.parametrize("value", [-1, True, "17", 1.5, 2**31, 2**70, [3], {}])
def test_what_is_no_budget_is_refused_by_name(glm: Clients, bounded: Clients, value: Any) -> None:
    for clients in (glm, bounded):
        for route, body in ROUTES.items():
            _assert_refused(clients, route, body | {"thinking_budget": value}, "thinking_budget")
        for route in ("/v1/messages", "/v1/messages/count_tokens"):
            body = dict(ROUTES["/v1/messages"])
            if route.endswith("count_tokens"):
                del body["max_tokens"]
            wrong = body | {"thinking": {"type": "enabled", "budget_tokens": value}}
            _assert_refused(clients, route, wrong, "thinking.budget_tokens")


def test_what_is_no_effort_and_no_closing_text_is_refused_by_name(glm: Clients) -> None:
    for route, body in ROUTES.items():
        for text in (3, "x" * 1025, "a</think>b", "<|user|>"):
            wrong = body | {"thinking_budget": 1, "thinking_closing_text": text}
            _assert_refused(glm, route, wrong, "thinking_closing_text")
    for route, changes, field in (
        ("/v1/chat/completions", {"reasoning_effort": "some"}, "reasoning_effort"),
        ("/v1/responses", {"reasoning": {"effort": "some"}}, "reasoning.effort"),
        ("/v1/messages", {"output_config": {"effort": "minimal"}}, "output_config.effort"),
    ):
        _assert_refused(glm, route, ROUTES[route] | changes, field)


def _assert_refused(clients: Clients, route: str, body: dict[str, Any], field: str) -> None:
    answer = clients.http.post(route, json=body)
    assert answer.status_code == 400, (route, body, answer.text)
    assert field in answer.json()["error"]["message"]


def test_the_tokens_of_a_prompt_are_counted_with_any_budget(glm: Clients) -> None:
    count = glm.anthropic.messages.count_tokens(
        model=glm.model,
        messages=QUESTION,
        thinking={"type": "enabled", "budget_tokens": 0},
        output_config={"effort": "medium"},
    )
    assert count.input_tokens == len(glm.prompt())


def test_a_model_without_the_token_refuses_the_flag(sample_model: Path, tmp_path: Path) -> None:
    server = start(tmp_path / "log", str(sample_model), "--max-thinking-tokens", "5", wait=False)
    assert server.process.wait(START_SECONDS) != 0
    assert "--max-thinking-tokens is 5, but the model in" in server.log.read_text()
