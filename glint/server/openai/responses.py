"""POST /v1/responses of the OpenAI API.

The server stores nothing: `store` is false in every response, and clients send a conversation whole. Reasoning is text
in items of its own, which a client sends back unchanged. With `include` "reasoning.encrypted_content" these items have
the same text a second time, for clients that keep only that field. There are no summaries and no tools but functions.
The server caches every prompt, so it accepts the fields of the prompt cache and ignores them. `top_k`,
`min_p`, `repetition_penalty`, `seed`, `clear_thinking`, `deadline_seconds`, `priority` and `cache_salt` are additions.
"""

import time
from typing import Any, Literal

import msgspec

from glint.server.fields import (
    CacheRetention,
    PromptCacheOptions,
    Strict,
    check_cache_salt,
    check_metadata,
    check_not_stored,
    check_schema,
    check_tools,
    deadline_of,
    refusal,
    renamed_fields,
    unsigned_seed,
)
from glint.server.generation.generation import CLIENT_LEFT, Generation
from glint.server.generation.parts import encode_events
from glint.server.generation.request import ChatPrompt, GenerationRequest, ToolChoice
from glint.server.http.problems import Problem
from glint.server.http_call import HttpCall
from glint.server.openai.fields import FunctionFields, JsonObjectFormat, TextFormat
from glint.server.openai.responses_input import read_input
from glint.server.openai.responses_stream import ResponseBuilder
from glint.server.state import ServerState
from glint.text.grammar import Constraint, JsonObject, JsonSchema

ENCRYPTED_REASONING = "reasoning.encrypted_content"
FIELD_NAMES = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}


class FunctionTool(FunctionFields, tag_field="type", tag="function"):
    """A tool; functions are the only kind."""


class NamedChoice(Strict, tag_field="type", tag="function"):
    """A tool choice of one function."""

    name: str


class JsonSchemaFormat(Strict, tag_field="type", tag="json_schema"):
    """JSON that fits a schema. The output always fits it, `strict` or not."""

    name: str
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class TextConfig(Strict):
    """The form of the text. The model has one verbosity."""

    format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Strict):
    """Whether the model reasons: effort "none" turns it off, any other on. There are no summaries to choose."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto"] | None = None


class StreamOptions(Strict):
    """Events carry no padding."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(Strict):
    """The body of a response."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    clear_thinking: bool | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    truncation: Literal["disabled"] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: CacheRetention | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    safety_identifier: str | None = None
    user: str | None = None
    deadline_seconds: float | None = None
    priority: int | None = None
    cache_salt: str | None = None

    def to_request(self, state: ServerState) -> GenerationRequest:
        """The generation request of this body."""
        state.check_model(self.model)
        self._check_storage()
        check_metadata(self.metadata)
        params = state.sampling(
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            seed=unsigned_seed(self.seed),
        )
        deadline = deadline_of(self.deadline_seconds, state.limits)
        return GenerationRequest(
            self.to_prompt(state),
            params,
            deadline,
            self.to_constraint(state),
            priority=self.priority or 0,
            cache_salt=check_cache_salt(self.cache_salt),
        )

    def to_prompt(self, state: ServerState) -> ChatPrompt:
        """The conversation that the model continues."""
        effort = None if self.reasoning is None else self.reasoning.effort
        return ChatPrompt(
            messages=read_input(self.input, self.instructions, state.limits),
            tools=check_tools([tool.to_tool() for tool in self.tools or []], state),
            tool_choice=self._tool_choice(),
            enable_thinking=None if effort is None else effort != "none",
            clear_thinking=self.clear_thinking,
        )

    def to_constraint(self, state: ServerState) -> Constraint | None:
        """The constraint of the output."""
        match None if self.text is None else self.text.format:
            case JsonObjectFormat():
                return JsonObject()
            case JsonSchemaFormat(schema=schema):
                check_schema("text.format.schema", schema, state.limits)
                return JsonSchema(schema)
            case _:
                return None

    def to_settings(self, call: HttpCall, generation: Generation) -> dict[str, Any]:
        """The fields of the response besides its output."""
        params = generation.params
        text = {"format": TextFormat() if self.text is None or self.text.format is None else self.text.format}
        asked = self.reasoning or Reasoning()
        return {
            "id": call.request_id,
            "object": "response",
            "created_at": call.created,
            "model": call.state.model_name,
            "instructions": self.instructions,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "tool_choice": self.tool_choice or "auto",
            "tools": [{"type": "function", **_function(tool)} for tool in self.tools or []],
            "temperature": params.temperature,
            "top_p": params.top_p,
            "max_output_tokens": self.max_output_tokens,
            "text": text | {"verbosity": "medium"},
            "reasoning": {"effort": asked.effort, "summary": None},
            "truncation": "disabled",
            "store": False,
            "background": False,
            "service_tier": "default",
            "previous_response_id": None,
            "prompt_cache_key": self.prompt_cache_key,
            "safety_identifier": self.safety_identifier,
            "user": self.user,
        }

    def _check_storage(self) -> None:
        check_not_stored(self.store)
        if self.previous_response_id is not None:
            message = "previous_response_id is given, but nothing is stored here; send the whole conversation in input"
            raise refusal(message, "previous_response_id")
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options is given, but stream is not true", "stream_options")

    def _tool_choice(self) -> ToolChoice:
        if isinstance(self.tool_choice, NamedChoice):
            return ToolChoice("required", self.tool_choice.name, allows_several=False)
        if self.tool_choice == "required" and not self.tools:
            raise refusal("tool_choice is 'required', but no tools are given", "tool_choice")
        return ToolChoice(self.tool_choice or "auto", None, self.parallel_tool_calls is not False)


def _function(tool: FunctionTool) -> dict[str, Any]:
    """A tool as the response repeats it."""
    return {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }


async def handle_responses(call: HttpCall) -> None:
    """Create a response, streamed or whole."""
    body = await call.read(ResponsesBody)
    call.user = body.user or body.safety_identifier
    with renamed_fields(FIELD_NAMES):
        generation = await call.begin(body.to_request(call.state))
    answer = ResponseBuilder(body.to_settings(call, generation), ENCRYPTED_REASONING in (body.include or ()))
    if not body.stream:
        async for deltas in generation.deltas():
            for delta in deltas:
                answer.parts.add_delta(delta)
        await call.reply(msgspec.json.encode(answer.whole(generation.usage, int(time.time()))))
        return
    try:
        await _stream(call, generation, answer)
    except Problem as problem:
        if problem.status != CLIENT_LEFT:
            await call.send_events(encode_events([answer.failed(problem)]))
        raise


def stream_error(problem: Problem, request_id: str) -> bytes:
    """The last event of a stream that failed."""
    error = {"type": problem.type, "code": problem.code, "message": problem.message, "param": problem.param}
    return encode_events([{"type": "error", "error": error, "request_id": request_id}])


async def _stream(call: HttpCall, generation: Generation, answer: ResponseBuilder) -> None:
    await call.open_stream()
    await call.send_events(encode_events(answer.begun()))
    async for deltas in generation.deltas():
        events = [event for delta in deltas for event in answer.parts.add_delta(delta)]
        if events:
            await call.send_events(encode_events(events))
    await call.send_events(encode_events([answer.ended(generation.usage, int(time.time()))]))
    await call.end_stream()
