"""Converts conversations of the Anthropic API to the messages that chat templates take."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Literal

from glint.server.fields import Strict, check_count, refusal
from glint.server.limits import Limits

ChatMessage = dict[str, Any]


class CacheControl(Strict, tag_field="type", tag="ephemeral"):
    """A hint to the cache, which caches every prompt without it."""

    ttl: Literal["5m", "1h"] | None = None


class DirectCaller(Strict, tag_field="type", tag="direct"):
    """A call that the model itself made."""


class TextPart(Strict, tag_field="type", tag="text"):
    """Text."""

    text: str
    cache_control: CacheControl | None = None
    citations: tuple[()] | None = None


class ThinkingPart(Strict, tag_field="type", tag="thinking"):
    """The thinking of an earlier turn, as the response had it."""

    thinking: str
    signature: str = ""


class ToolUsePart(Strict, tag_field="type", tag="tool_use"):
    """A call that the model made."""

    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller | None = None
    cache_control: CacheControl | None = None


class ToolResultPart(Strict, tag_field="type", tag="tool_result"):
    """The result of a call. The model sees `Error:` before the text of an error."""

    tool_use_id: str
    content: str | list[TextPart] = ""
    is_error: bool = False
    cache_control: CacheControl | None = None

    def to_message(self) -> ChatMessage:
        """The message that the model sees; parts are separate lines."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        content = f"Error: {text}" if self.is_error else text
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": content}


ContentPart = TextPart | ThinkingPart | ToolUsePart | ToolResultPart

_ALLOWED: dict[str, tuple[type[Strict], ...]] = {
    "system": (TextPart,),
    "user": (TextPart, ToolResultPart),
    "assistant": (TextPart, ThinkingPart, ToolUsePart),
}


class MessageFields(Strict):
    """One message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentPart]


def read_conversation(
    system: str | list[TextPart] | None, messages: Sequence[MessageFields], limits: Limits
) -> list[ChatMessage]:
    """Convert a conversation to chat messages, after checking its size."""
    check_count("messages", len(messages), limits.messages, "messages")
    if not messages:
        raise refusal("messages is empty; give at least one message", "messages")
    read: list[ChatMessage] = []
    if isinstance(system, list):
        check_count("system", len(system), limits.content_parts, "parts")
        system = "".join(part.text for part in system)
    if system:
        read.append({"role": "system", "content": system})
    for index, message in enumerate(messages):
        read += _read_message(message, f"messages[{index}].content", limits)
    return read


def _read_message(message: MessageFields, where: str, limits: Limits) -> list[ChatMessage]:
    """Convert one message. Each tool result becomes a message of its own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    check_count(where, len(message.content), limits.content_parts, "parts")
    if not message.content:
        raise refusal(f"{where} is empty; give at least one part", where)
    for index, part in enumerate(message.content):
        if not isinstance(part, _ALLOWED[message.role]):
            kind, field = part.__struct_config__.tag, f"{where}[{index}]"
            raise refusal(f"{field} is of type {kind!r}, which a message of the {message.role} cannot have", field)
    if message.role == "assistant":
        return [_read_assistant(message.content)]
    return list(_read_others(message.role, message.content))


def _read_assistant(parts: Sequence[ContentPart]) -> ChatMessage:
    """Convert the parts of an assistant's message to one message."""
    read: ChatMessage = {
        "role": "assistant",
        "content": "".join(part.text for part in parts if isinstance(part, TextPart)),
        "reasoning_content": "".join(part.thinking for part in parts if isinstance(part, ThinkingPart)),
        "tool_calls": [
            {"id": part.id, "type": "function", "function": {"name": part.name, "arguments": part.input}}
            for part in parts
            if isinstance(part, ToolUsePart)
        ],
    }
    return {name: value for name, value in read.items() if value or name == "content"}


def _read_others(role: str, parts: Sequence[ContentPart]) -> Iterator[ChatMessage]:
    """Convert other parts in order: adjacent texts to one message, each tool result to its own."""
    for is_text, group in groupby(parts, key=lambda part: isinstance(part, TextPart)):
        if is_text:
            yield {"role": role, "content": "".join(part.text for part in group if isinstance(part, TextPart))}
        else:
            yield from (part.to_message() for part in group if isinstance(part, ToolResultPart))
