"""POST /v1/responses of the OpenAI API.

Without a store (`--responses-store-size`) clients send a conversation whole, and `store` is false in every response.
With one, the server keeps a response unless the client says otherwise, and `previous_response_id` continues it;
instructions hold for one response alone. Reasoning is text in items of its own, which a client sends back unchanged.
With `include` "reasoning.encrypted_content" these items have the same text a second time, for clients that keep only
that field. There are no summaries and no tools but functions, alone or in namespaces. The server caches every prompt,
so it accepts the fields of the prompt cache and ignores them, Codex's `client_metadata` likewise. `top_k`, `min_p`,
`repetition_penalty`, `seed`, `clear_thinking`, `thinking_budget`, `thinking_closing_text`, `deadline_seconds`,
`priority` and `cache_salt` are additions.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import msgspec

from glint.server.auth import Tenant
from glint.server.fields import (
    Strict,
    check_cache_salt,
    check_metadata,
    check_schema,
    deadline_of,
    refusal,
    renamed_fields,
    thinking_budget,
    unsigned_seed,
)
from glint.server.generation.generation import CLIENT_LEFT, Generation
from glint.server.generation.parts import encode_events
from glint.server.generation.request import ChatPrompt, GenerationRequest
from glint.server.http.body import shorten
from glint.server.http.problems import Problem
from glint.server.http_call import HttpCall
from glint.server.openai.fields import CacheRetention, Effort, JsonObjectFormat, PromptCacheOptions, TextFormat
from glint.server.openai.responses_input import Item, as_items, read_input, resolve_references, store_items
from glint.server.openai.responses_stream import ResponseBuilder
from glint.server.openai.responses_tools import Choice, FunctionTool, NamespaceTool, ToolSet
from glint.server.response_store import OFF, ResponseStore, StoredItem, StoredResponse
from glint.server.state import ServerState
from glint.text.grammar import Constraint, JsonObject, JsonSchema

ENCRYPTED_REASONING = "reasoning.encrypted_content"
FIELD_NAMES = {"max_tokens": "max_output_tokens", "messages": "input", "response_format": "text.format"}
WAYS_OUT = {
    "tools[": "tools are functions, alone or in a namespace, and your program runs them: declare a function or leave "
    'the tool out (Codex: web_search = "disabled" in config.toml)',
    "tool_choice": "choose 'auto', 'none', 'required', or the types 'function' and 'allowed_tools'",
    "input[": "items are message (text alone), function_call, function_call_output, reasoning and item_reference",
    "include[": f"the one value is {ENCRYPTED_REASONING!r}",
    "text.verbosity": "the one value is 'medium'",
    "reasoning.summary": "the one value is 'auto', and there are no summaries: reasoning comes whole",
    "service_tier": "the values are 'auto' and 'default'",
    "background": "wait for the response, or stream it",
    "truncation": "shorten the input yourself where the context does not hold it",
}


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
    """Whether the model reasons: effort "none" turns it off, any other on, up to its budget of tokens.

    There are no summaries to choose.
    """

    effort: Effort | None = None
    summary: Literal["auto"] | None = None


class StreamOptions(Strict):
    """Events carry no padding."""

    include_obfuscation: Literal[False] | None = None


class ResponsesBody(Strict):
    """The body of a response."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    tools: list[FunctionTool | NamespaceTool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    clear_thinking: bool | None = None
    thinking_budget: int | None = None
    thinking_closing_text: str | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    truncation: Literal["disabled"] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    background: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    metadata: dict[str, str] | None = None
    client_metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: CacheRetention | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    safety_identifier: str | None = None
    user: str | None = None
    deadline_seconds: float | None = None
    priority: int | None = None
    cache_salt: str | None = None

    @property
    def tool_set(self) -> ToolSet:
        """The tools and the choice among them."""
        return ToolSet(self.tools, self.tool_choice, self.parallel_tool_calls is not False)

    def to_request(self, state: ServerState, earlier: Sequence[StoredItem] = ()) -> GenerationRequest:
        """The generation request of this body, after the items of earlier turns."""
        state.check_model(self.model)
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options is given, but stream is not true", "stream_options")
        check_metadata(self.metadata)
        params = state.sampling(
            max_tokens=self.max_output_tokens,
            thinking_budget=thinking_budget(self._effort, state, {"thinking_budget": self.thinking_budget}),
            thinking_closing_text=self.thinking_closing_text,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            seed=unsigned_seed(self.seed),
        )
        deadline = deadline_of(self.deadline_seconds, state.limits)
        return GenerationRequest(
            self.to_prompt(state, earlier),
            params,
            deadline,
            self.to_constraint(state),
            priority=self.priority or 0,
            cache_salt=check_cache_salt(self.cache_salt),
        )

    @property
    def _effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort

    def to_prompt(self, state: ServerState, earlier: Sequence[StoredItem] = ()) -> ChatPrompt:
        """The conversation that the model continues."""
        return ChatPrompt(
            messages=read_input(self.input, self.instructions, state.limits, earlier),
            tools=self.tool_set.offered(state),
            tool_choice=self.tool_set.choice(),
            enable_thinking=None if self._effort is None else self._effort != "none",
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
            "tools": [tool.describe() for tool in self.tools or []],
            "max_tool_calls": self.max_tool_calls,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "frequency_penalty": params.frequency_penalty,
            "presence_penalty": params.presence_penalty,
            "top_logprobs": 0,
            "max_output_tokens": self.max_output_tokens,
            "text": text | {"verbosity": "medium"},
            "reasoning": {"effort": asked.effort, "summary": None},
            "truncation": "disabled",
            "store": self.is_stored(call.state.responses),
            "background": False,
            "service_tier": "default",
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "safety_identifier": self.safety_identifier,
            "user": self.user,
        }

    def is_stored(self, store: ResponseStore) -> bool:
        """Whether the response is stored: where there is a store, unless the client says otherwise."""
        return store.is_on and self.store is not False

    def resolve_stored(self, state: ServerState, tenant: Tenant) -> tuple[StoredItem, ...]:
        """The items of the turns before this one. It puts stored items in the place of references to them."""
        store = state.responses
        if self.store and not store.is_on:
            raise refusal(f"store is true, but {OFF}, or leave store out or set it to false", "store")
        why = "it is not stored for this key" if store.is_on else OFF
        self.input = resolve_references(self.input, lambda item_id: store.find_item(tenant, item_id), why, state.limits)
        if self.previous_response_id is None:
            return ()
        previous = store.find(tenant, self.previous_response_id)
        if previous is None:
            missing = store.explain_missing(f"previous_response_id {shorten(self.previous_response_id)!r}")
            message = f"{missing}; send the whole conversation in input"
            raise Problem(400, message, "previous_response_not_found", "previous_response_id")
        return previous.context + previous.output


@contextmanager
def _ways_out() -> Iterator[None]:
    """Add the way out to the refusal of a value that this server does not have."""
    try:
        yield
    except Problem as problem:
        field = problem.param or ""
        way_out = next((text for prefix, text in WAYS_OUT.items() if field.startswith(prefix)), None)
        if problem.code != "invalid_value" or way_out is None:
            raise
        message = f"{problem.message}; {way_out}"
        raise Problem(problem.status, message, problem.code, problem.param, problem.headers) from problem


async def handle_responses(call: HttpCall) -> None:
    """Create a response, streamed or whole."""
    with _ways_out():
        body = await call.read(ResponsesBody)
    call.user = body.user or body.safety_identifier
    earlier = body.resolve_stored(call.state, call.tenant)
    with renamed_fields(FIELD_NAMES), _ways_out():
        generation = await call.begin(body.to_request(call.state, earlier))
    has_encrypted = ENCRYPTED_REASONING in (body.include or ())
    answer = ResponseBuilder(body.to_settings(call, generation), has_encrypted, body.tool_set.call_name)
    if not body.stream:
        async for deltas in generation.deltas():
            for delta in deltas:
                answer.parts.add_delta(delta)
        response = answer.whole(generation.usage, int(time.time()))
        _keep(call, body, earlier, response)
        await call.reply(msgspec.json.encode(response))
        return
    try:
        await _stream(call, generation, answer, body, earlier)
    except Problem as problem:
        if problem.status != CLIENT_LEFT:
            await call.send_events(encode_events([answer.failed(problem)]))
        raise


def _keep(call: HttpCall, body: ResponsesBody, earlier: tuple[StoredItem, ...], response: Item) -> None:
    """Store the response where it is to be stored."""
    if body.is_stored(call.state.responses):
        added, output = store_items(as_items(body.input)), store_items(response["output"])
        encoded = msgspec.json.encode(response)
        stored = StoredResponse(response["id"], encoded, earlier + added, len(added), output)
        call.state.responses.add(call.tenant, stored)


def stream_error(problem: Problem, request_id: str) -> bytes:
    """The last event of a stream that failed."""
    error = {"type": problem.type, "code": problem.code, "message": problem.message, "param": problem.param}
    return encode_events([{"type": "error", "error": error, "request_id": request_id}])


async def _stream(
    call: HttpCall,
    generation: Generation,
    answer: ResponseBuilder,
    body: ResponsesBody,
    earlier: tuple[StoredItem, ...],
) -> None:
    await call.open_stream()
    await call.send_events(encode_events(answer.begun()))
    async for deltas in generation.deltas():
        events = [event for delta in deltas for event in answer.parts.add_delta(delta)]
        if events:
            await call.send_events(encode_events(events))
    response = answer.whole(generation.usage, int(time.time()))
    _keep(call, body, earlier, response)
    await call.send_events(encode_events([answer.ended(response)]))
    await call.end_stream()
