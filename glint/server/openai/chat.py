"""POST /v1/chat/completions of the OpenAI API, with the model's reasoning beside its content."""

import secrets
from typing import Any, Literal

import msgspec

from glint.server.fields import Strict, check_count, check_tools, refusal, renamed_fields
from glint.server.generation.generation import Delta, Generation
from glint.server.generation.request import ChatPrompt, GenerationRequest, ToolChoice
from glint.server.http_call import HttpCall
from glint.server.openai.fields import Effort, FunctionFields, SamplingFields
from glint.server.openai.output import DONE, StreamUsage, chat_logprobs, openai_usage, prompt_logprobs
from glint.server.state import ServerState
from glint.text.output import (
    ContentText,
    OutputEvent,
    ReasoningText,
    ToolCallArguments,
    ToolCallBegun,
)


class FunctionTool(Strict, tag_field="type", tag="function"):
    """A tool; functions are the only kind."""

    function: FunctionFields


class FunctionName(Strict):
    """The name of a function."""

    name: str


class NamedChoice(Strict, tag_field="type", tag="function"):
    """A tool choice of one function."""

    function: FunctionName


class TemplateArguments(Strict):
    """Arguments of the GLM-4.x chat templates."""

    enable_thinking: bool | None = None
    clear_thinking: bool | None = None


class Thinking(Strict):
    """Thinking in the form of the Z.ai API."""

    type: Literal["enabled", "disabled"]
    clear_thinking: bool | None = None


class Prediction(Strict, tag_field="type", tag="content"):
    """The text that a client expects as the answer. OpenAI's service is faster for it; this server is not."""

    content: str | list[dict[str, Any]]


class ChatBody(SamplingFields, kw_only=True):
    """The body of a chat completion. It accepts the thinking fields of several APIs. The model has one verbosity.

    `do_sample`, `tool_stream` and `user_id` are Z.ai's; tool calls are always streamed. `echo`, `add_special_tokens`
    and `include_reasoning` of vLLM, `separate_reasoning` and `stream_reasoning` of SGLang have their defaults alone.
    """

    messages: list[dict[str, Any]]
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    chat_template_kwargs: TemplateArguments | None = None
    thinking: Thinking | None = None
    enable_thinking: bool | None = None
    clear_thinking: bool | None = None
    reasoning_effort: Effort | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    parallel_tool_calls: bool | None = None
    verbosity: Literal["medium"] | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    modalities: list[Literal["text"]] | None = None
    prediction: Prediction | None = None
    do_sample: bool | None = None
    tool_stream: bool | None = None
    user_id: str | None = None
    echo: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    include_reasoning: Literal[True] | None = None
    separate_reasoning: Literal[True] | None = None
    stream_reasoning: Literal[True] | None = None

    def to_request(self, state: ServerState) -> GenerationRequest:
        """The generation request of this body."""
        state.check_model(self.model)
        self.check_whole()
        prompt = self.to_prompt(state)
        params = self.to_params(
            state,
            self.reasoning_effort,
            max_tokens=self._max_tokens(),
            logprobs=self._logprobs(),
            temperature=0.0 if self.do_sample is False else self.temperature,
        )
        return self.make_request(prompt, params, state)

    def _max_tokens(self) -> int | None:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise refusal("max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens")
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def _logprobs(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise refusal("top_logprobs is given, but logprobs is not true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def to_prompt(self, state: ServerState) -> ChatPrompt:
        """The conversation that the model continues."""
        check_messages(self.messages, state)
        self._check_continuation()
        return ChatPrompt(
            messages=[with_known_names(message) for message in self.messages],
            tools=check_tools([tool.function.to_tool() for tool in self.tools or []], state),
            tool_choice=self._tool_choice(),
            enable_thinking=_agreed("enable_thinking", self._thinking_settings()),
            clear_thinking=_agreed("clear_thinking", self._clear_thinking_settings()),
            continues=self.continue_final_message,
        )

    def _check_continuation(self) -> None:
        if self.add_generation_prompt is not None and self.add_generation_prompt == self.continue_final_message:
            shown = str(self.add_generation_prompt).lower()
            message = (
                f"add_generation_prompt and continue_final_message are both {shown}; one must be the other's opposite"
            )
            raise refusal(message, "add_generation_prompt")
        role = self.messages[-1].get("role") if self.messages else None
        if self.continue_final_message and role != "assistant":
            where = (
                f"messages[{len(self.messages) - 1}] is of the role {role!r}" if self.messages else "messages is empty"
            )
            message = f"continue_final_message is true, but {where}; end with an assistant's message, or leave it out"
            raise refusal(message, "continue_final_message")

    def _tool_choice(self) -> ToolChoice:
        if isinstance(self.tool_choice, NamedChoice):
            return ToolChoice("required", self.tool_choice.function.name, allows_several=False)
        if self.tool_choice == "required" and not self.tools:
            raise refusal(
                "tool_choice is 'required', but no tools are given; give some, or leave it out", "tool_choice"
            )
        return ToolChoice(self.tool_choice or "auto", None, self.parallel_tool_calls is not False)

    def _thinking_settings(self) -> list[bool | None]:
        arguments = self.chat_template_kwargs
        return [
            self.enable_thinking,
            None if arguments is None else arguments.enable_thinking,
            None if self.thinking is None else self.thinking.type == "enabled",
            None if self.reasoning_effort is None else self.reasoning_effort != "none",
        ]

    def _clear_thinking_settings(self) -> list[bool | None]:
        arguments = self.chat_template_kwargs
        return [
            self.clear_thinking,
            None if arguments is None else arguments.clear_thinking,
            None if self.thinking is None else self.thinking.clear_thinking,
        ]


def _agreed(name: str, settings: list[bool | None]) -> bool | None:
    """The one value of a setting that several fields may have; None where none has it."""
    values = {value for value in settings if value is not None}
    if len(values) > 1:
        raise refusal(f"{name} is asked for as true and as false in the same request; say it once", name)
    return values.pop() if values else None


def check_messages(messages: list[dict[str, Any]], state: ServerState) -> None:
    """Refuse more messages, or more parts in one, than the server allows."""
    check_count("messages", len(messages), state.limits.messages, "messages")
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            check_count(f"messages[{index}].content", len(content), state.limits.content_parts, "parts")


def with_known_names(message: dict[str, Any]) -> dict[str, Any]:
    """Rename OpenAI's newer role "developer" to "system", and vLLM's `reasoning` to `reasoning_content`."""
    if message.get("role") == "developer":
        return message | {"role": "system"}
    if message.get("reasoning") and message.get("reasoning_content") in (None, "", message["reasoning"]):
        return {name: value for name, value in message.items() if name != "reasoning"} | {
            "reasoning_content": message["reasoning"]
        }
    return message


def new_call_id() -> str:
    """An id for a tool call."""
    return f"call_{secrets.token_hex(12)}"


async def handle_chat(call: HttpCall) -> None:
    """Answer a chat completion, streamed or whole."""
    body = await call.read(ChatBody)
    call.user = body.user or body.safety_identifier or body.user_id
    names = {"logprobs": "top_logprobs"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    with renamed_fields(names):
        generation = await call.begin(body.to_request(call.state))
    if body.stream:
        await _stream(call, generation, body)
    else:
        await _reply(call, generation)


async def _reply(call: HttpCall, generation: Generation) -> None:
    choices = [_ChoiceBuilder(generation.params.logprobs) for _ in range(generation.num_choices)]
    known = None
    async for deltas in generation.deltas():
        for delta in deltas:
            choices[delta.choice].add_delta(delta, call)
            known = delta.output.prompt_logprobs or known
    body: dict[str, Any] = {
        "id": call.request_id,
        "object": "chat.completion",
        "created": call.created,
        "model": call.state.model_name,
        "choices": [choice.as_choice(index) for index, choice in enumerate(choices)],
        "usage": openai_usage(generation.usage),
    }
    if known is not None:
        count = generation.params.prompt_logprobs or 0
        body["prompt_logprobs"] = await prompt_logprobs(call.state, generation, 0, known, count)
    await call.reply(msgspec.json.encode(body))


class _ChoiceBuilder:
    """Collects the output of one choice for a whole response."""

    def __init__(self, num_logprobs: int | None) -> None:
        self._num_logprobs = num_logprobs
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []
        self._logprobs: list[dict[str, Any]] | None = None
        self._finish_reason: str | None = None

    def add_delta(self, delta: Delta, call: HttpCall) -> None:
        """Add the output of one step."""
        for event in delta.events:
            match event:
                case ContentText(text=text):
                    self._content.append(text)
                case ReasoningText(text=text):
                    self._reasoning.append(text)
                case ToolCallBegun(name=name):
                    function = {"name": name, "arguments": ""}
                    self._calls.append({"id": new_call_id(), "type": "function", "function": function})
                    self._arguments.append([])
                case ToolCallArguments(index=index, text=text):
                    self._arguments[index].append(text)
        entries = chat_logprobs(delta.output, call.state.tokenizer, self._num_logprobs)
        if entries is not None:
            self._logprobs = self._logprobs or []
            self._logprobs += entries
        self._finish_reason = delta.finish_reason or self._finish_reason

    def as_choice(self, index: int) -> dict[str, Any]:
        """The choice as the response has it."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not self._calls else None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            for made, pieces in zip(self._calls, self._arguments, strict=True):
                made["function"]["arguments"] = "".join(pieces)
            message["tool_calls"] = self._calls
        logprobs = None if self._logprobs is None else {"content": self._logprobs, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": self._finish_reason}


async def _stream(call: HttpCall, generation: Generation, body: ChatBody) -> None:
    usage = StreamUsage(generation, body.wants_continuous_usage)
    chunks = _Chunks(call, generation.params.logprobs, usage)
    await call.open_stream()
    first = [chunks.of(index, {"role": "assistant", "content": ""}) for index in range(generation.num_choices)]
    await call.send_events(b"".join(first))
    await call.stream(generation, chunks.of_delta)
    last = DONE
    if body.wants_usage:
        last = chunks.of_usage(generation) + DONE
    await call.send_events(last)
    await call.end_stream()


class _Chunks:
    """Writes the chunks of one stream. The fields that all chunks share are encoded once."""

    def __init__(self, call: HttpCall, num_logprobs: int | None, usage: StreamUsage) -> None:
        self._usage = usage
        self._tokenizer = call.state.tokenizer
        self._num_logprobs = num_logprobs
        opening = {
            "id": call.request_id,
            "object": "chat.completion.chunk",
            "created": call.created,
            "model": call.state.model_name,
        }
        self._opening = b"data: " + msgspec.json.encode(opening)[:-1] + b',"choices":['

    def of(self, choice: int, delta: dict[str, Any], logprobs: Any = None, finish_reason: str | None = None) -> bytes:
        """One chunk of one choice."""
        entry = {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._opening + msgspec.json.encode(entry) + b"]" + self._usage.end()

    def of_delta(self, delta: Delta) -> bytes:
        """The chunks of one step: one per event. The first has the log-probabilities, the last the finish reason."""
        self._usage.count(delta)
        entries = chat_logprobs(delta.output, self._tokenizer, self._num_logprobs)
        logprobs = None if entries is None else {"content": entries, "refusal": None}
        parts = []
        for event in delta.events:
            content = self._content_of(delta.choice, event)
            if content is not None:
                parts.append(self.of(delta.choice, content, logprobs))
                logprobs = None
        if delta.finish_reason is not None or logprobs is not None:
            parts.append(self.of(delta.choice, {}, logprobs, delta.finish_reason))
        return b"".join(parts)

    def of_usage(self, generation: Generation) -> bytes:
        """The last chunk of a stream with include_usage."""
        usage = msgspec.json.encode(openai_usage(generation.usage))
        return self._opening + b'],"usage":' + usage + b"}\n\n"

    def _content_of(self, choice: int, event: OutputEvent) -> dict[str, Any] | None:
        match event:
            case ContentText(text=text):
                return {"content": text}
            case ReasoningText(text=text):
                return {"reasoning_content": text}
            case ToolCallBegun(index=index, name=name):
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, "id": new_call_id(), "type": "function", "function": function}]}
            case ToolCallArguments(index=index, text=text):
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case _:
                return None
