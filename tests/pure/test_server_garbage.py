"""Requests leave no reference cycles: their memory is free at once, and the garbage collector has nothing to do."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from glint.server.admission import Admission
from glint.server.auth import TENANT, Tenant
from glint.server.http.problems import Problem
from glint.server.http_call import GeneratingRoute, HttpCall
from glint.server.in_flight import RequestsInFlight
from glint.server.limits import Limits
from glint.server.openai.output import stream_error
from glint.server.outcomes import OutcomeLog
from glint.server.state import ServerState
from glint.text.output import OutputParser, OutputStart
from glint.text.tools import Tool


class Body(msgspec.Struct):
    """Any body."""


async def answer(call: HttpCall) -> None:
    """Read and answer."""
    await call.read(Body)
    await call.reply(b"{}")


async def refuse(call: HttpCall) -> None:
    """Read and refuse."""
    await call.read(Body)
    raise Problem(400, "the field 'n' is 0; it must be above 0", code="invalid_value")


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("handle", [answer, refuse])
def test_a_call_is_free_once_it_is_answered(handle: Callable[[HttpCall], Awaitable[None]]) -> None:
    limits = Limits()
    state = SimpleNamespace(
        outcomes=OutcomeLog(),
        metrics=SimpleNamespace(record=id),
        admission=Admission(limits),
        limits=limits,
        in_flight=RequestsInFlight(),
    )
    calls: list[weakref.ref[HttpCall]] = []

    async def remember(call: HttpCall) -> None:
        calls.append(weakref.ref(call))
        await handle(call)

    async def run() -> None:
        received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        received.put_nowait({"type": "http.request", "body": b"{}", "more_body": False})

        async def send(message: Any) -> None:
            """Drop it."""

        scope = {
            "type": "http",
            "path": "/generate",
            "headers": [(b"content-type", b"application/json")],
            TENANT: Tenant(0),
        }
        await GeneratingRoute(cast(ServerState, state), "gen", remember, stream_error)(scope, received.get, send)
        await asyncio.sleep(0.01)

    asyncio.run(run())
    (call,) = calls
    assert call() is None


def test_a_parser_is_free_once_its_output_has_ended() -> None:
    parser = OutputParser(OutputStart.CONTENT, [Tool("now", {"type": "object", "properties": {}})])
    parser.push("It is <tool_call>now<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>")
    parser.finish()
    reference = weakref.ref(parser)
    del parser
    assert reference() is None
