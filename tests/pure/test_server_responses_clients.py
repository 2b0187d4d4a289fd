"""/v1/responses as OpenAI's client, its agents and Codex use it, against the real server with a scripted model.

The cases are those of public lists: the compliance tests of Open Responses, the shapes that Codex sends, the fields of
OpenAI's reference, and what other servers got wrong.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from glint.server.http.problems import Problem
from tests.pure.scripted_model import CACHED_TOKENS, CONTEXT, MODEL, Scripted, serving, without_ids

OPEN_RESPONSES_FIELDS = (
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "error", "model", "output"),
    *("previous_response_id", "instructions", "tools", "tool_choice", "parallel_tool_calls", "max_tool_calls"),
    *("top_p", "temperature", "presence_penalty", "frequency_penalty", "top_logprobs", "max_output_tokens"),
    *("text", "reasoning", "usage", "truncation", "store", "background", "service_tier", "metadata"),
    *("safety_identifier", "prompt_cache_key"),
)
WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
NOW: Any = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
AGENTS: Any = {
    "type": "namespace",
    "name": "agents",
    "description": "Tools for helpers.",
    "tools": [{**NOW, "name": "spawn", "description": "Starts one."}, {**NOW, "name": "close"}],
}
THINKS = "I must look.</think>"
CALL = "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"
OTHER_CALL = "<tool_call>now</tool_call>"
QUESTION = {"type": "message", "role": "user", "content": "Is it warm in Rome?"}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    """A server that stores nothing."""
    with serving(tmp_path_factory.mktemp("scripted")) as server:
        yield server


@pytest.fixture(scope="module")
def client(scripted: Scripted) -> Iterator[openai.OpenAI]:
    """The official client."""
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


def ask(scripted: Scripted, client: openai.OpenAI, answer: str, **fields: Any) -> Response:
    """The response to a request, whole and streamed, which must come to the same; gives the whole one."""
    asked = {"model": MODEL, "input": "Hi", **fields}
    scripted.say(answer, answer)
    whole = client.responses.create(**asked)
    events = list(client.responses.create(stream=True, **asked))
    prompt, streamed_prompt = scripted.service.prompts[-2:]
    assert prompt == streamed_prompt
    check_events(events)
    assert without_ids(events[-1].response) == without_ids(whole)
    return whole


def check_events(events: list[Any]) -> None:
    """The order, numbers and ids of a stream: what an item was called when it was added, it is called to the end."""
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1].response
    assert {event.response.id for event in (*events[:2], events[-1])} == {final.id}
    added = [event for event in events if event.type == "response.output_item.added"]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in added] == [event.output_index for event in done]
    assert [event.output_index for event in added] == list(range(len(final.output)))
    assert [event.item.id for event in added] == [event.item.id for event in done] == [i.id for i in final.output]
    assert [event.item for event in done] == final.output
    for begun, item in zip(added, final.output, strict=True):
        own = [event for event in events if getattr(event, "item_id", None) == item.id]
        assert {event.output_index for event in own} == {begun.output_index}
        pieces = [event.delta for event in own if event.type.endswith(".delta")]
        text = item.arguments if item.type == "function_call" else item.content[0].text
        assert "".join(pieces) == text
        if item.type == "function_call":
            assert own[-1].type == "response.function_call_arguments.done" and own[-1].arguments == text
            assert begun.item.call_id == item.call_id and begun.item.arguments == ""
        else:
            kinds = [event.type.rpartition(".")[2] for event in own]
            assert kinds == ["added", *["delta"] * len(pieces), "done", "done"]


def test_a_basic_response_has_every_field_of_open_responses(scripted: Scripted, client: openai.OpenAI) -> None:
    response = ask(scripted, client, "</think>Hello, dear you.", input=[{**QUESTION, "content": "Say hello."}])
    assert (response.status, response.output_text, response.object) == ("completed", "Hello, dear you.", "response")
    found = response.to_dict()
    assert [field for field in OPEN_RESPONSES_FIELDS if field not in found] == []
    for field in ("top_p", "temperature", "presence_penalty", "frequency_penalty", "top_logprobs"):
        assert isinstance(found[field], int | float), field


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_prompt(scripted: Scripted, client: openai.OpenAI, role: str) -> None:
    ask(scripted, client, "</think>Ahoy.", input=[{"type": "message", "role": role, "content": "A pirate."}, QUESTION])
    assert "<|system|>A pirate.<|user|>Is it warm in Rome?<|assistant|>" in scripted.prompt


def test_instructions_come_before_all(scripted: Scripted, client: openai.OpenAI) -> None:
    response = ask(scripted, client, "</think>Ahoy.", instructions="A pirate.", input="Hi")
    assert "<sop><|system|>A pirate.<|user|>Hi<|assistant|>" in scripted.prompt
    assert response.instructions == "A pirate."


@pytest.mark.parametrize(
    "content",
    [
        "Ann here.",
        [{"type": "output_text", "text": "Ann "}, {"type": "output_text", "text": "here.", "annotations": [{"a": 1}]}],
        [{"type": "refusal", "refusal": "Ann here."}],
    ],
)
def test_a_conversation_of_several_turns(scripted: Scripted, client: openai.OpenAI, content: Any) -> None:
    said = {"type": "message", "role": "assistant", "content": content, "status": "completed", "phase": "final_answer"}
    parts = [{"type": "input_text", "text": "And"}, {"type": "input_text", "text": " now?"}]
    ask(scripted, client, "</think>Yes.", input=[QUESTION, said, {"role": "user", "content": parts}])
    assert "Rome?<|assistant|></think>Ann here.<|user|>And now?<|assistant|>" in scripted.prompt


def test_an_image_is_refused_by_name(scripted: Scripted, client: openai.OpenAI) -> None:
    parts = [{"type": "input_text", "text": "What is it?"}, {"type": "input_image", "image_url": "data:image/png,"}]
    with pytest.raises(openai.BadRequestError, match="text alone") as refused:
        client.responses.create(model=MODEL, input=[{"role": "user", "content": parts}])
    assert refused.value.param == "input[0].content[1].type"


def test_a_tool_call_and_its_result(scripted: Scripted, client: openai.OpenAI) -> None:
    response = ask(scripted, client, f"{THINKS}Looking.{CALL}", input=[QUESTION], tools=[WEATHER])
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    call: Any = response.output[2]
    assert (call.name, json.loads(call.arguments), call.status) == ("get_weather", {"city": "Rome"}, "completed")
    history = [QUESTION, *(item.to_dict() for item in response.output)]
    for output in ("Warm.", [{"type": "input_text", "text": "Warm."}]):
        result = {"type": "function_call_output", "call_id": call.call_id, "output": output}
        ask(scripted, client, "</think>It is.", input=[*history, result], tools=[WEATHER])
        said = f"<|assistant|><think>I must look.</think>Looking.{CALL}<|observation|><tool_response>Warm.</tool"
        assert said in scripted.prompt


def test_calls_at_the_same_time(scripted: Scripted, client: openai.OpenAI) -> None:
    response = ask(scripted, client, f"</think>{CALL}{OTHER_CALL}", input=[QUESTION], tools=[WEATHER, NOW])
    calls: Any = response.output
    assert [call.name for call in calls] == ["get_weather", "now"] and calls[0].call_id != calls[1].call_id
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": call.name} for call in calls]
    history: Any = [QUESTION, *(call.to_dict() for call in calls), *results]
    ask(scripted, client, "</think>It is.", input=history, tools=[WEATHER, NOW])
    assert f"{CALL}{OTHER_CALL}<|observation|><tool_response>get_weather</tool_response>" in scripted.prompt


def test_a_call_without_arguments_streams_them(scripted: Scripted, client: openai.OpenAI) -> None:
    response = ask(scripted, client, f"</think>{OTHER_CALL}", tools=[NOW])
    call: Any = response.output[0]
    assert call.arguments == "{}"


@pytest.mark.parametrize(
    ("choice", "offers", "is_held"),
    [
        ("auto", ["get_weather", "now"], False),
        ("none", [], False),
        ("required", ["get_weather", "now"], True),
        ({"type": "function", "name": "now"}, ["get_weather", "now"], True),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}, ["now"], False),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}, ["now"], True),
    ],
)
def test_tool_choices(scripted: Scripted, client: openai.OpenAI, choice: Any, offers: list[str], is_held: bool) -> None:
    response = ask(scripted, client, "</think>Fine.", tools=[WEATHER, NOW], tool_choice=choice)
    shown = [name for name in ("get_weather", "now") if f'"name": "{name}"' in scripted.prompt]
    assert shown == offers
    assert (scripted.service.requests[-1].grammar is not None) == is_held
    assert response.to_dict()["tool_choice"] == choice
    assert [tool["name"] for tool in response.to_dict()["tools"]] == ["get_weather", "now"]


def test_one_call_at_most(scripted: Scripted, client: openai.OpenAI) -> None:
    response = ask(scripted, client, "</think>Fine.", tools=[NOW], parallel_tool_calls=False)
    assert not response.parallel_tool_calls and scripted.service.requests[-1].grammar is not None


def test_functions_of_a_namespace(scripted: Scripted, client: openai.OpenAI) -> None:
    answer = "</think><tool_call>agents.spawn</tool_call>"
    response = ask(scripted, client, answer, input=[QUESTION], tools=[AGENTS, NOW])
    call: Any = response.output[0]
    assert (call.name, call.namespace) == ("spawn", "agents")
    assert "Tools for helpers.\\n\\nStarts one." in scripted.prompt and '"agents.close"' in scripted.prompt
    assert [tool["type"] for tool in response.to_dict()["tools"]] == ["namespace", "function"]
    result = {"type": "function_call_output", "call_id": call.call_id, "name": "spawn", "output": "started"}
    ask(scripted, client, "</think>So.", input=[QUESTION, call.to_dict(), result], tools=[AGENTS])
    assert "<tool_call>agents.spawn</tool_call><|observation|><tool_response>started<" in scripted.prompt


@pytest.mark.parametrize("keeps", ["content", "encrypted_content"])
def test_reasoning_comes_back(scripted: Scripted, client: openai.OpenAI, keeps: str) -> None:
    include: Any = ["reasoning.encrypted_content"]
    response = ask(scripted, client, f"{THINKS}{OTHER_CALL}", input=[QUESTION], tools=[NOW], include=include)
    thought, call = (item.to_dict() for item in response.output)
    assert base64.b64decode(str(thought["encrypted_content"])).decode() == "I must look."
    kept = {name: value for name, value in thought.items() if name in ("type", "summary", keeps)}
    if keeps == "content":
        kept["encrypted_content"] = None
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "noon"}
    ask(scripted, client, "</think>Noon.", input=[QUESTION, kept, call, result], tools=[NOW], store=False)
    assert "<|assistant|><think>I must look.</think><tool_call>now</tool_call>" in scripted.prompt


def test_a_summary_of_another_server_is_read(scripted: Scripted, client: openai.OpenAI) -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "He looked."}]}
    call = {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "noon"}
    ask(scripted, client, "</think>Noon.", input=[QUESTION, thought, call, result], tools=[NOW])
    assert "<think>He looked.</think><tool_call>now" in scripted.prompt


def test_reasoning_that_another_server_encrypted_is_refused(client: openai.OpenAI) -> None:
    items: Any = [QUESTION, {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAABo-x_yz=="}]
    with pytest.raises(openai.BadRequestError, match="leave the item out") as refused:
        client.responses.create(model=MODEL, input=items)
    assert refused.value.param == "input[1].encrypted_content"


def test_what_codex_sends(scripted: Scripted, client: openai.OpenAI) -> None:
    """The first request of a session of Codex 0.169, shortened, without its web search."""
    body = {
        "model": MODEL,
        "stream": True,
        "input": [
            {"type": "message", "id": f"msg_{index}", "role": role, "content": [{"type": "input_text", "text": text}]}
            for index, (role, text) in enumerate((("developer", "A coding agent."), ("user", "Say hello.")))
        ],
        "tools": [{**WEATHER, "strict": False}, {**AGENTS, "tools": [{**NOW, "strict": False}]}],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "01a1",
        "client_metadata": {"x-codex-installation-id": "5fa3", "x-codex-turn-metadata": "{}"},
    }
    scripted.say(f"{THINKS}Hello.")
    answer = httpx.post(f"{scripted.url}/v1/responses", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["reasoning", "message"] and done[0]["summary"] == []
    usage = events[-1]["response"]["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == CACHED_TOKENS
    assert usage["output_tokens_details"]["reasoning_tokens"] > 0


@pytest.mark.parametrize(
    "tool", [{"type": "web_search"}, {"type": "custom", "name": "patch"}, {"type": "local_shell"}, {"type": "mcp"}]
)
def test_tools_that_are_no_functions_are_refused_with_the_way_out(client: openai.OpenAI, tool: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="declare a function or leave the tool out") as refused:
        client.responses.create(model=MODEL, input="Hi", tools=[NOW, tool])
    assert refused.value.param == "tools[1].type" and tool["type"] in refused.value.message


@pytest.mark.parametrize("kind", ["local_shell_call", "custom_tool_call", "web_search_call", "compaction"])
def test_items_that_are_not_supported_are_refused_by_name(client: openai.OpenAI, kind: str) -> None:
    with pytest.raises(openai.BadRequestError, match="items are message") as refused:
        client.responses.create(model=MODEL, input=[QUESTION, {"type": kind}])
    assert refused.value.param == "input[1].type" and kind in refused.value.message


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"background": True}, "background", "stream it"),
        ({"truncation": "auto"}, "truncation", "shorten the input"),
        ({"include": ["file_search_call.results"]}, "include[0]", "reasoning.encrypted_content"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "medium"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "comes whole"),
        ({"service_tier": "flex"}, "service_tier", "default"),
        ({"tool_choice": {"type": "custom", "name": "a"}}, "tool_choice.type", "allowed_tools"),
        ({"tools": [NOW], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice", "no"),
        (
            {"tools": [NOW], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [WEATHER]}},
            "tool_choice.tools[0].description",
            "not supported",
        ),
        (
            {
                "tools": [NOW],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "no"}],
                },
            },
            "tool_choice.tools",
            "does not declare it",
        ),
        (
            {"tools": [NOW], "text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 3}}}},
            "text.format",
            "JSON schema",
        ),
        ({"conversation": "conv_1"}, "conversation", "remove it"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "remove it"),
        ({"top_logprobs": 3}, "top_logprobs", "remove it"),
        ({"store": True}, "store", "--responses-store-size"),
        ({"previous_response_id": "resp-1"}, "previous_response_id", "--responses-store-size"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id", "--responses-store-size"),
    ],
)
def test_refusals_name_the_field_and_the_way_out(
    client: openai.OpenAI, fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        client.responses.create(**{"model": MODEL, "input": "Hi"} | fields)
    assert refused.value.param == param
    assert refused.value.body["type"] == "invalid_request_error" and refused.value.code


@pytest.mark.parametrize("num_words", [CONTEXT, 20 * CONTEXT])
def test_a_prompt_beyond_the_context_has_the_code_that_agents_look_for(client: openai.OpenAI, num_words: int) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="shorten") as refused:
            client.responses.create(model=MODEL, input="word " * num_words, stream=stream)
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")


def test_another_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL) as missing:
        client.responses.create(model="gpt", input="Hi")
    assert missing.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_output_tokens", 400),
        ("max_tool_calls", 3),
        ("temperature", 0.5),
        ("top_p", 0.25),
        ("metadata", {"topic": "weather"}),
        ("user", "ann"),
        ("safety_identifier", "ann"),
        ("prompt_cache_key", "key"),
        ("service_tier", "default"),
        ("truncation", "disabled"),
        ("background", False),
        ("parallel_tool_calls", True),
        ("store", False),
        ("text", {"format": {"type": "text"}, "verbosity": "medium"}),
    ],
)
def test_a_response_repeats_its_settings(scripted: Scripted, client: openai.OpenAI, name: str, value: Any) -> None:
    assert ask(scripted, client, "</think>Fine.", **{name: value}).to_dict()[name] == value


def test_penalties_reach_the_engine(scripted: Scripted, client: openai.OpenAI) -> None:
    wanted = {"frequency_penalty": 0.5, "presence_penalty": -1.0}
    found = ask(scripted, client, "</think>Fine.", extra_body=wanted).to_dict()
    params = scripted.service.requests[-1].params
    assert {name: found[name] for name in wanted} == wanted
    assert (params.frequency_penalty, params.presence_penalty) == (0.5, -1.0)


def test_structured_output(scripted: Scripted, client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]}
    for form in ({"type": "json_schema", "name": "weather", "schema": schema}, {"type": "json_object"}):
        response = ask(scripted, client, '</think>{"warm": true}', text={"format": form})
        assert json.loads(response.output_text) == {"warm": True}
        assert scripted.service.requests[-1].grammar is not None
        echoed = response.to_dict()["text"]["format"]
        assert {name: echoed[name] for name in form} == form


@pytest.mark.parametrize("answer", ['</think>{"warm": true}', f"{THINKS}{OTHER_CALL}"])
def test_structured_output_beside_tools(scripted: Scripted, client: openai.OpenAI, answer: str) -> None:
    schema = {"type": "object", "properties": {"warm": {"type": "boolean"}}, "required": ["warm"]}
    form = {"type": "json_schema", "name": "weather", "schema": schema}
    response = ask(scripted, client, answer, tools=[NOW], text={"format": form})
    assert response.output[-1].type == ("function_call" if "now" in answer else "message")
    assert scripted.service.requests[-1].grammar is not None and '"name": "now"' in scripted.prompt


@pytest.mark.parametrize(
    ("answer", "num_tokens", "kind"),
    [("</think>A long answer", 3, "message"), ("Much to think", 2, "reasoning"), (f"</think>{CALL}", 9, None)],
)
def test_an_answer_that_reaches_its_length(
    scripted: Scripted, client: openai.OpenAI, answer: str, num_tokens: int, kind: str | None
) -> None:
    response = ask(scripted, client, answer, tools=[WEATHER], max_output_tokens=num_tokens)
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None and response.usage.output_tokens == num_tokens
    if kind is not None:
        assert [(item.type, item.status) for item in response.output] == [(kind, "incomplete")]


def test_usage(scripted: Scripted, client: openai.OpenAI) -> None:
    usage = ask(scripted, client, f"{THINKS}Fine.").usage
    assert usage is not None and usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.input_tokens == len(scripted.service.requests[-1].prompt_tokens)
    assert usage.input_tokens_details.cached_tokens == CACHED_TOKENS
    assert 0 < usage.output_tokens_details.reasoning_tokens < usage.output_tokens


def test_a_stream_that_fails_tells_why(scripted: Scripted, client: openai.OpenAI) -> None:
    scripted.say(Problem(504, "too late", code="deadline_exceeded"), Problem(504, "too late", code="deadline_exceeded"))
    with pytest.raises(openai.APIStatusError) as failed:
        client.responses.create(model=MODEL, input="Hi")
    assert (failed.value.status_code, failed.value.code) == (504, "deadline_exceeded")
    seen: list[Any] = []
    with pytest.raises(openai.APIError, match="too late"):
        for event in client.responses.create(model=MODEL, input="Hi", stream=True):
            seen.append(event)
    assert seen[-1].type == "response.failed" and seen[-1].response.error.message == "too late"
    assert [event.sequence_number for event in seen] == list(range(len(seen)))


def test_a_server_without_a_store_says_so(client: openai.OpenAI, scripted: Scripted) -> None:
    assert ask(scripted, client, "</think>Fine.").to_dict()["store"] is False
    for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
        with pytest.raises(openai.NotFoundError, match="start it with --responses-store-size") as missing:
            call("resp-1")
        assert missing.value.code == "response_not_found"
