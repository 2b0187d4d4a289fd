"""Converts input items of the Responses API to the messages that chat templates take."""

import base64
import binascii
import json
import secrets
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Literal

import msgspec

from glint.server.fields import Strict, check_count, refusal
from glint.server.http.body import check_structure, decode, shorten
from glint.server.http.problems import Problem
from glint.server.limits import Limits
from glint.server.openai.responses_tools import shown_name
from glint.server.response_store import StoredItem

ChatMessage = dict[str, Any]
Item = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]
ItemId = Annotated[str, msgspec.Meta(max_length=256)]
_ID_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_", "function_call_output": "fco_"}


class InputText(Strict, tag_field="type", tag="input_text"):
    """Text for the model."""

    text: str


class OutputText(Strict, tag_field="type", tag="output_text"):
    """Text of the model. The model does not read annotations and log-probabilities."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(Strict, tag_field="type", tag="refusal"):
    """Text of a model that refused; no model of this server marks it so."""

    refusal: str

    @property
    def text(self) -> str:
        """The text."""
        return self.refusal


class MessageItem(Strict, tag_field="type", tag="message"):
    """A message; `type` may be left out. `phase` changes nothing."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText | OutputText | Refusal]
    id: ItemId | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(Strict, tag_field="type", tag="function_call"):
    """A call that the model made."""

    call_id: str
    name: str
    arguments: str
    namespace: str | None = None
    id: ItemId | None = None
    status: Status | None = None


class FunctionOutputItem(Strict, tag_field="type", tag="function_call_output"):
    """The result of a call. The call has the name; that of the result changes nothing."""

    call_id: str
    output: str | list[InputText | OutputText]
    name: str | None = None
    namespace: str | None = None
    id: ItemId | None = None
    status: Status | None = None


class ReasoningText(Strict, tag_field="type", tag="reasoning_text"):
    """Reasoning of the model."""

    text: str


class SummaryText(Strict, tag_field="type", tag="summary_text"):
    """A summary of reasoning that another server wrote."""

    text: str


class ReasoningItem(Strict, tag_field="type", tag="reasoning"):
    """Reasoning of an earlier turn: its text, the same text in the form of `encode_reasoning`, or its summary."""

    id: ItemId | None = None
    summary: tuple[SummaryText, ...] = ()
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


def resolve_references(
    items: str | list[Item], find: Callable[[str], bytes | None], why: str, limits: Limits
) -> str | list[Item]:
    """The input with stored items in place of references to them; `why` says what a missing one means."""
    if isinstance(items, str):
        return items
    check_count("input", len(items), limits.messages, "items")
    bodies: dict[int, bytes] = {}
    for index, item in enumerate(items):
        if item.get("type") == "item_reference":
            item_id = item.get("id")
            body = find(item_id) if isinstance(item_id, str) else None
            if body is None:
                where = f"input[{index}]"
                named = f"{where} refers to the item {shorten(str(item_id))!r}"
                raise refusal(f"{named}, but {why}; send the item itself", f"{where}.id")
            bodies[index] = body
    found = zip(bodies, msgspec.json.decode(_joined(bodies.values(), "input", limits), type=list[Item]), strict=True)
    return [*(dict(enumerate(items)) | dict(found)).values()]


def _joined(bodies: Collection[bytes], field: str, limits: Limits) -> bytes:
    """Stored items as one list; refuses more than a body may have, which a few references could name otherwise."""
    if sum(map(len, bodies)) > limits.body_bytes:
        message = f"the stored items that {field} names have more than the {limits.body_bytes} bytes that are allowed"
        raise Problem(400, f"{message}; send what the model needs in input", "limit_exceeded", field)
    joined = b"[" + b",".join(bodies) + b"]"
    check_structure(joined, limits.body_depth, limits.body_containers)
    return joined


def read_input(
    items: str | list[Item], instructions: str | None, limits: Limits, earlier: Sequence[StoredItem] = ()
) -> list[ChatMessage]:
    """Convert the instructions, the items of earlier turns and the input to chat messages."""
    first: list[ChatMessage] = [] if instructions is None else [{"role": "system", "content": instructions}]
    items = as_items(items)
    check_count("input", len(earlier) + len(items), limits.messages, "items")
    if not items:
        raise refusal("input is empty; give at least one item", "input")
    known = _joined([item.body for item in earlier], "previous_response_id", limits)
    stored = msgspec.json.decode(known, type=list[InputItem])
    added = decode(msgspec.json.encode({"input": items}), InputItems).input
    return first + _join_items([*stored, *added], len(stored), limits)


def as_items(items: str | list[Item]) -> list[Item]:
    """The input as items that have types; a string is a message of the user."""
    if isinstance(items, str):
        return [{"type": "message", "role": "user", "content": items}]
    return [item if "type" in item else item | {"type": "message"} for item in items]


def store_items(items: Sequence[Item]) -> tuple[StoredItem, ...]:
    """Items as the store keeps them: each has an id, and the text of a message is a list of parts."""
    stored = []
    for item in items:
        kind = item["type"]
        item_id = item.get("id") or _ID_PREFIXES[kind] + secrets.token_hex(12)
        more: Item = {"id": item_id, "status": item.get("status") or "completed"}
        if kind == "message" and isinstance(item["content"], str):
            is_output = item["role"] == "assistant"
            part = {"type": "output_text", "annotations": []} if is_output else {"type": "input_text"}
            more["content"] = [part | {"text": item["content"]}]
        stored.append(StoredItem(item_id, msgspec.json.encode(item | more)))
    return tuple(stored)


def _join_items(items: Sequence[InputItem], num_stored: int, limits: Limits) -> list[ChatMessage]:
    """Convert each item to a message, but adjacent reasoning, text and calls to one message of the assistant.

    The first `num_stored` items are not of the request's own input.
    """
    messages: list[ChatMessage] = []
    for index, item in enumerate(items, -num_stored):
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
                _check_call(item, f"input[{index}]")
                function = {"name": shown_name(item.namespace, item.name), "arguments": item.arguments}
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


def _check_call(item: FunctionCallItem, where: str) -> None:
    """Refuse a call that no chat template can show."""
    try:
        arguments = json.loads(item.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        shown = shorten(item.arguments)
        raise refusal(f"{where}.arguments is {shown!r}; give a JSON object as text", f"{where}.arguments")
    if not item.name:
        raise refusal(f"{where}.name is empty; give the name of the function", f"{where}.name")


def _reasoning_of(item: ReasoningItem, where: str, limits: Limits) -> str:
    if item.content:
        check_count(f"{where}.content", len(item.content), limits.content_parts, "parts")
        return "".join(part.text for part in item.content)
    if item.encrypted_content is not None:
        return decode_reasoning(item.encrypted_content, f"{where}.encrypted_content")
    return "\n\n".join(part.text for part in item.summary)
