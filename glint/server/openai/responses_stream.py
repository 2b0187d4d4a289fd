"""Responses of POST /v1/responses, whole and as the events of a stream."""

from collections.abc import Callable, Mapping
from typing import Any

from glint.server.generation.generation import Usage
from glint.server.generation.parts import Part, Parts, WireEvent
from glint.server.http.problems import Problem
from glint.server.openai.responses_input import encode_reasoning

_ITEM_IDS = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}
_TEXT_EVENTS = {"reasoning": "response.reasoning_text", "text": "response.output_text"}


class ResponseWriter:
    """Writes the output items of a response and numbers the events. `call_name` gives the name fields of a call."""

    def __init__(self, adds_encrypted: bool, call_name: Callable[[str], dict[str, str]]) -> None:
        self._adds_encrypted = adds_encrypted
        self._call_name = call_name
        self._num_events = 0

    def event(self, kind: str, **fields: Any) -> WireEvent:
        """The next event of the stream."""
        number, self._num_events = self._num_events, self._num_events + 1
        return {"type": kind, **fields, "sequence_number": number}

    def opened(self, part: Part) -> list[WireEvent]:
        """An item is added, and its one content with it."""
        item = self.item(part)
        if part.kind == "call":
            return [self.event("response.output_item.added", output_index=part.index, item=item)]
        empty = item | {"content": []}
        return [
            self.event("response.output_item.added", output_index=part.index, item=empty),
            self.event("response.content_part.added", **_position(part), part=_content(part)),
        ]

    def grown(self, part: Part, text: str) -> list[WireEvent]:
        """A piece of an item."""
        if part.kind == "call":
            return [self.event("response.function_call_arguments.delta", **_item_position(part), delta=text)]
        more: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
        return [self.event(f"{_TEXT_EVENTS[part.kind]}.delta", **_position(part), delta=text, **more)]

    def closed(self, part: Part) -> list[WireEvent]:
        """An item is done."""
        done = self.event
        if part.kind == "call":
            name = "response.function_call_arguments.done"
            called = self._call_name(part.name)["name"]
            events = [done(name, **_item_position(part), name=called, arguments=part.text)]
        else:
            more: dict[str, Any] = {"logprobs": []} if part.kind == "text" else {}
            events = [
                done(f"{_TEXT_EVENTS[part.kind]}.done", **_position(part), text=part.text, **more),
                done("response.content_part.done", **_position(part), part=_content(part)),
            ]
        return [*events, done("response.output_item.done", output_index=part.index, item=self.item(part))]

    def item(self, part: Part) -> dict[str, Any]:
        """A part as an output item."""
        common = {"id": _ITEM_IDS[part.kind] + part.id, "status": part.status}
        if part.kind == "text":
            return {"type": "message", **common, "role": "assistant", "content": [_content(part)]}
        if part.kind == "call":
            call = {"call_id": f"call_{part.id}", **self._call_name(part.name), "arguments": part.text}
            return {"type": "function_call", **common, **call}
        item = {"type": "reasoning", **common, "summary": [], "content": [_content(part)]}
        if self._adds_encrypted:
            item["encrypted_content"] = encode_reasoning(part.text)
        return item


def _item_position(part: Part) -> dict[str, Any]:
    return {"item_id": _ITEM_IDS[part.kind] + part.id, "output_index": part.index}


def _position(part: Part) -> dict[str, Any]:
    return _item_position(part) | {"content_index": 0}


def _content(part: Part) -> dict[str, Any]:
    """The one content of a message or of reasoning."""
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


class ResponseBuilder:
    """A response while it is generated: its fixed fields, its items and the events of both."""

    def __init__(
        self, settings: Mapping[str, Any], adds_encrypted: bool, call_name: Callable[[str], dict[str, str]]
    ) -> None:
        self._settings = settings
        self._writer = ResponseWriter(adds_encrypted, call_name)
        self.parts = Parts(self._writer)

    def begun(self) -> list[WireEvent]:
        """The first events of a stream."""
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return [self._writer.event(kind, response=response) for kind in kinds]

    def ended(self, response: Mapping[str, Any]) -> WireEvent:
        """The last event of a stream: the whole response."""
        return self._writer.event(f"response.{response['status']}", response=response)

    def failed(self, problem: Problem) -> WireEvent:
        """The event of a response that failed: the output so far and the error."""
        error = {"code": problem.code, "message": problem.message, "param": problem.param, "type": problem.type}
        return self._writer.event("response.failed", response=self._response("failed") | {"error": error})

    def whole(self, usage: Usage, completed_at: int) -> dict[str, Any]:
        """The complete response."""
        last = self.parts.last
        is_cut = last is not None and last.finish_reason == "length"
        response = self._response("incomplete" if is_cut else "completed") | {"usage": _usage(usage)}
        ending = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {"completed_at": completed_at}
        return response | ending

    def _response(self, status: str) -> dict[str, Any]:
        return {
            **self._settings,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "completed_at": None,
            "output": [self._writer.item(part) for part in self.parts.all],
            "usage": None,
        }


def _usage(usage: Usage) -> dict[str, Any]:
    """Token counts. The server caches every prompt, so no tokens count as written to the cache on demand."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
