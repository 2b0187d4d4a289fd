"""POST /v1/messages and /v1/messages/count_tokens of the Anthropic API.

Differences from Anthropic's service: the server caches every prompt, so it accepts `cache_control` and ignores it.
Without `thinking` the model's chat template decides. `budget_tokens` may be any number from 0 on, also above
`max_tokens`. The model goes on in a last message of the assistant. `seed`, `min_p`, `clear_thinking`,
`thinking_budget`, `thinking_closing_text`, `deadline_seconds` and `priority` are additions.
"""

from typing import Any, Literal

import msgspec

from glint.server.anthropic.input import CacheControl, MessageFields, TextPart, read_conversation
from glint.server.anthropic.stream import MessageWriter, message_end, message_start, whole_message
from glint.server.fields import (
    Strict,
    check_count,
    check_schema,
    check_tools,
    deadline_of,
    refusal,
    renamed_fields,
    thinking_budget,
    unsigned_seed,
)
from glint.server.generation.generation import Generation
from glint.server.generation.parts import Parts, encode_events
from glint.server.generation.prepare import encode_chat
from glint.server.generation.request import ChatPrompt, GenerationRequest, ToolChoice
from glint.server.http.problems import Problem, anthropic_body
from glint.server.http_call import HttpCall
from glint.server.state import ServerState
from glint.text.grammar import JsonSchema
from glint.text.tools import Tool

FIELD_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}


class ToolFields(Strict):
    """A tool of the client."""

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    eager_input_streaming: Literal[True] | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    cache_control: CacheControl | None = None

    def to_tool(self) -> Tool:
        """The tool in the form of every API."""
        return Tool(self.name, self.description, self.input_schema, bool(self.strict))


class AutoChoice(Strict, tag_field="type", tag="auto"):
    """The model decides whether to call tools."""

    disable_parallel_tool_use: bool = False


class AnyChoice(Strict, tag_field="type", tag="any"):
    """The model must call a tool."""

    disable_parallel_tool_use: bool = False


class NamedChoice(Strict, tag_field="type", tag="tool"):
    """The model must call this tool."""

    name: str
    disable_parallel_tool_use: bool = False


class NoChoice(Strict, tag_field="type", tag="none"):
    """The model must not call tools."""


class ThinkingEnabled(Strict, tag_field="type", tag="enabled"):
    """The model thinks for at most `budget_tokens` tokens."""

    budget_tokens: int
    display: Literal["summarized"] | None = None


class ThinkingAdaptive(Strict, tag_field="type", tag="adaptive"):
    """The model thinks as long as it chooses."""

    display: Literal["summarized"] | None = None


class ThinkingDisabled(Strict, tag_field="type", tag="disabled"):
    """The model does not think."""


class ClearThinking(Strict, tag_field="type", tag="clear_thinking_20251015"):
    """The thinking of earlier turns stays in the prompt."""

    keep: Literal["all"]


class ContextManagement(Strict):
    """How the server edits a long conversation."""

    edits: list[ClearThinking] | None = None


class SchemaFormat(Strict, tag_field="type", tag="json_schema"):
    """JSON that fits a schema."""

    schema: dict[str, Any]


class OutputConfig(Strict):
    """The form of the output. The effort sets a budget of thinking; from "high" on there is none."""

    format: SchemaFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class Metadata(Strict):
    """The user of the request."""

    user_id: str | None = None


class PromptBody(Strict):
    """The fields of a prompt: the body of /v1/messages/count_tokens."""

    model: str
    messages: list[MessageFields]
    system: str | list[TextPart] | None = None
    tools: list[ToolFields] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoChoice | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None
    clear_thinking: bool | None = None

    def to_prompt(self, state: ServerState) -> ChatPrompt:
        """The conversation that the model continues."""
        state.check_model(self.model)
        self._check_prefill()
        self.to_budget(state)
        return ChatPrompt(
            messages=read_conversation(self.system, self.messages, state.limits),
            tools=check_tools([tool.to_tool() for tool in self.tools or []], state),
            tool_choice=self._tool_choice(),
            enable_thinking=None if self.thinking is None else not isinstance(self.thinking, ThinkingDisabled),
            clear_thinking=self._clear_thinking(),
            continues=bool(self.messages) and self.messages[-1].role == "assistant",
        )

    def to_budget(self, state: ServerState, budget: int | None = None) -> int | None:
        """The most tokens of thinking, by the fields of Anthropic and by `thinking_budget`."""
        asked = self.thinking.budget_tokens if isinstance(self.thinking, ThinkingEnabled) else None
        effort = None if self.output_config is None else self.output_config.effort
        return thinking_budget(effort, state, {"thinking.budget_tokens": asked, "thinking_budget": budget})

    def _check_prefill(self) -> None:
        """Refuse thinking before an answer that the client has begun, and space at its end, as Anthropic does."""
        if not self.messages or self.messages[-1].role != "assistant":
            return
        where, content = f"messages[{len(self.messages) - 1}]", self.messages[-1].content
        if isinstance(self.thinking, ThinkingEnabled):
            raise refusal(f"{where} begins the answer, so the model cannot think first; leave thinking out", "thinking")
        last = content if isinstance(content, str) else getattr(content[-1], "text", "") if content else ""
        if last != last.rstrip():
            raise refusal(f"{where}.content ends with space, which the model cannot go on from; remove it", where)

    def to_constraint(self, state: ServerState) -> JsonSchema | None:
        """The schema that the output must fit."""
        output_format = None if self.output_config is None else self.output_config.format
        if output_format is None:
            return None
        check_schema("output_config.format.schema", output_format.schema, state.limits)
        return JsonSchema(output_format.schema)

    def _tool_choice(self) -> ToolChoice:
        choice = self.tool_choice
        if choice is not None and not isinstance(choice, NoChoice) and not self.tools:
            raise refusal("tool_choice is given, but no tools are", "tool_choice")
        match choice:
            case NoChoice():
                return ToolChoice("none")
            case AnyChoice(disable_parallel_tool_use=is_single):
                return ToolChoice("required", None, not is_single)
            case NamedChoice(name=name, disable_parallel_tool_use=is_single):
                return ToolChoice("required", name, not is_single)
            case AutoChoice(disable_parallel_tool_use=is_single):
                return ToolChoice("auto", None, not is_single)
            case _:
                return ToolChoice()

    def _clear_thinking(self) -> bool | None:
        keeps_all = self.context_management is not None and bool(self.context_management.edits)
        if keeps_all and self.clear_thinking:
            raise refusal("clear_thinking is true, but context_management keeps all thinking", "clear_thinking")
        return False if keeps_all else self.clear_thinking


class MessagesBody(PromptBody, kw_only=True):
    """The body of /v1/messages."""

    max_tokens: int
    stream: bool = False
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    deadline_seconds: float | None = None
    thinking_budget: int | None = None
    thinking_closing_text: str | None = None
    priority: int | None = None

    def to_request(self, state: ServerState) -> GenerationRequest:
        """The generation request of this body."""
        stops = self.stop_sequences or []
        limits = state.limits
        check_count("stop_sequences", len(stops), limits.stops)
        check_count("stop_sequences", max(map(len, stops), default=0), limits.stop_chars, "characters in a stop string")
        prompt = self.to_prompt(state)
        params = state.sampling(
            max_tokens=self.max_tokens,
            thinking_budget=self.to_budget(state, self.thinking_budget),
            thinking_closing_text=self.thinking_closing_text,
            stop=stops,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=unsigned_seed(self.seed),
        )
        deadline = deadline_of(self.deadline_seconds, limits)
        return GenerationRequest(prompt, params, deadline, self.to_constraint(state), priority=self.priority or 0)


async def handle_messages(call: HttpCall) -> None:
    """Answer a conversation, streamed or whole."""
    body = await call.read(MessagesBody)
    call.user = None if body.metadata is None else body.metadata.user_id
    with renamed_fields(FIELD_NAMES):
        generation = await call.begin(body.to_request(call.state))
    if body.stream:
        await _stream(call, generation)
    else:
        await _reply(call, generation)


async def handle_count_tokens(call: HttpCall) -> None:
    """Count the tokens of a prompt without running it."""
    body = await call.read(PromptBody)
    tokens = await call.work(_count_tokens, call.state, body.to_prompt(call.state))
    await call.reply(msgspec.json.encode({"input_tokens": tokens}))


def stream_error(problem: Problem, request_id: str) -> bytes:
    """The last event of a stream that failed."""
    return b"event: error\ndata: " + anthropic_body(problem, request_id) + b"\n\n"


def _count_tokens(state: ServerState, prompt: ChatPrompt) -> int:
    return len(encode_chat(state, prompt))


async def _reply(call: HttpCall, generation: Generation) -> None:
    parts = Parts(MessageWriter())
    async for deltas in generation.deltas():
        for delta in deltas:
            parts.add_delta(delta)
    message = whole_message(call.request_id, call.state.model_name, parts, generation.usage)
    await call.reply(msgspec.json.encode(message))


async def _stream(call: HttpCall, generation: Generation) -> None:
    """Send events as they arrive. The first waits for the first tokens, since it has the number of cached tokens."""
    parts = Parts(MessageWriter())
    is_begun = False
    await call.open_stream()
    async for deltas in generation.deltas():
        events = [] if is_begun else [message_start(call.request_id, call.state.model_name, generation.usage)]
        is_begun = True
        for delta in deltas:
            events += parts.add_delta(delta)
        if events:
            await call.send_events(encode_events(events))
    await call.send_events(encode_events(message_end(parts, generation.usage)))
    await call.end_stream()
