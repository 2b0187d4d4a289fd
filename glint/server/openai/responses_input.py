"""Converts input items of the Responses API to the messages that chat templates take."""

import base64
import binascii
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from glint.server.fields import Strict, check_count, refusal
from glint.server.http.body import decode
from glint.server.limits import Limits

ChatMessage = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Strict, tag_field="type", tag="input_text"):
    """Text for the model."""

    text: str


class OutputText(Strict, tag_field="type", tag="output_text"):
    """Text of the model."""

    text: str
    annotations: tuple[()] | None = None
    logprobs: tuple[()] | None = None


class MessageItem(Strict, tag_field="type", tag="message"):
    """A message; `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText]
    id: str | None = None
    status: Status | None = None


class FunctionCallItem(Strict, tag_field="type", tag="function_call"):
    """A call that the model made."""

    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionOutputItem(Strict, tag_field="type", tag="function_call_output"):
    """The result of a call."""

    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: Status | None = None


class ReasoningText(Strict, tag_field="type", tag="reasoning_text"):
    """Reasoning of the model."""

    text: str


class ReasoningItem(Strict, tag_field="type", tag="reasoning"):
    """Reasoning of an earlier turn: its text, or the same text in the form of `encode_reasoning`."""

    id: str | None = None
    summary: tuple[()] = ()
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


InputItem = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem


class InputItems(Strict):
    """The list of items of a body."""

    input: list[InputItem]


def encode_reasoning(text: str) -> str:
    """Reasoning in base64, for clients that keep only `encrypted_content`. It is no secret and not encrypted."""
    return base64.b64encode(text.encode()).decode("ascii")


def decode_reasoning(encoded: str, where: str) -> str:
    """The reasoning that `encode_reasoning` encoded."""
    try:
        return base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, ValueError):
        message = f"{where} was not written by this server; leave the item out"
        raise refusal(message, where) from None


def read_input(items: str | list[dict[str, Any]], instructions: str | None, limits: Limits) -> list[ChatMessage]:
    """Convert the instructions and the input to chat messages."""
    first: list[ChatMessage] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(items, str):
        return [*first, {"role": "user", "content": items}]
    check_count("input", len(items), limits.messages, "items")
    if not items:
        raise refusal("input is empty; give at least one item", "input")
    typed = [item if "type" in item else item | {"type": "message"} for item in items]
    return first + _join_items(decode(msgspec.json.encode({"input": typed}), InputItems).input, limits)


def _join_items(items: Sequence[InputItem], limits: Limits) -> list[ChatMessage]:
    """Convert each item to a message, but adjacent reasoning, text and calls to one message of the assistant."""
    messages: list[ChatMessage] = []
    for index, item in enumerate(items):
        match item:
            case ReasoningItem():
                reasoning = _reasoning_of(item, f"input[{index}]", limits)
                messages.append({"role": "assistant", "content": "", "reasoning_content": reasoning})
            case MessageItem(role="assistant"):
                _assistant(messages, ("content", "tool_calls"))["content"] = _text_of(item, f"input[{index}]", limits)
            case MessageItem():
                role = "user" if item.role == "user" else "system"
                messages.append({"role": role, "content": _text_of(item, f"input[{index}]", limits)})
            case FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                calls = _assistant(messages, ()).setdefault("tool_calls", [])
                calls.append({"id": item.call_id, "type": "function", "function": function})
            case FunctionOutputItem(output=output):
                text = output if isinstance(output, str) else "\n".join(part.text for part in output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
    return messages


def _assistant(messages: list[ChatMessage], taken: tuple[str, ...]) -> ChatMessage:
    """The last message if it is the assistant's and has none of the fields yet; otherwise a new one."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or any(last.get(field) for field in taken):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    return last


def _text_of(item: MessageItem, where: str, limits: Limits) -> str:
    if isinstance(item.content, str):
        return item.content
    check_count(f"{where}.content", len(item.content), limits.content_parts, "parts")
    return "".join(part.text for part in item.content)


def _reasoning_of(item: ReasoningItem, where: str, limits: Limits) -> str:
    if item.content is not None:
        check_count(f"{where}.content", len(item.content), limits.content_parts, "parts")
        return "".join(part.text for part in item.content)
    encoded = item.encrypted_content
    return "" if encoded is None else decode_reasoning(encoded, f"{where}.encrypted_content")
