"""Responses of POST /v1/messages, whole and as the events of a stream."""

from typing import Any

import msgspec

from glint.server.generation.generation import Delta, Usage
from glint.server.generation.parts import Part, Parts, WireEvent

_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


class MessageWriter:
    """Writes the parts of a message. Thinking has an empty signature, since it is plain text."""

    def opened(self, part: Part) -> list[WireEvent]:
        """The start of a part."""
        return [{"type": "content_block_start", "index": part.index, "content_block": _content(part)}]

    def grown(self, part: Part, text: str) -> list[WireEvent]:
        """A piece of a part."""
        kind, field = _DELTAS[part.kind]
        return [{"type": "content_block_delta", "index": part.index, "delta": {"type": kind, field: text}}]

    def closed(self, part: Part) -> list[WireEvent]:
        """The end of a part."""
        stop: WireEvent = {"type": "content_block_stop", "index": part.index}
        if part.kind != "reasoning":
            return [stop]
        signature = {"type": "signature_delta", "signature": ""}
        return [{"type": "content_block_delta", "index": part.index, "delta": signature}, stop]


def _content(part: Part) -> dict[str, Any]:
    """A part as a content block. The arguments of a call keep their bytes."""
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    arguments = msgspec.Raw(part.text.encode() or b"{}")
    return {"type": "tool_use", "id": f"toolu_{part.id}", "name": part.name, "input": arguments}


def message_start(message_id: str, model: str, usage: Usage) -> WireEvent:
    """The first event of a stream: a message without content."""
    return {"type": "message_start", "message": whole_message(message_id, model, Parts(MessageWriter()), usage)}


def message_end(parts: Parts, usage: Usage) -> list[WireEvent]:
    """The last events of a stream: the stop reason and the token counts."""
    delta = {"type": "message_delta", "delta": _ending(parts.last), "usage": _usage(usage)}
    return [delta, {"type": "message_stop"}]


def whole_message(message_id: str, model: str, parts: Parts, usage: Usage) -> dict[str, Any]:
    """A message with all its parts."""
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [_content(part) for part in parts.all],
        **_ending(parts.last),
        "usage": _usage(usage),
    }


def _ending(last: Delta | None) -> dict[str, Any]:
    """The stop reason, and the stop sequence where one was reached."""
    if last is None:
        return {"stop_reason": None, "stop_sequence": None}
    if isinstance(last.output.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": last.output.stop_reason}
    reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn", None: None}
    return {"stop_reason": reasons[last.finish_reason], "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Token counts. Cached input tokens count apart from the others."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "service_tier": "standard",
    }
