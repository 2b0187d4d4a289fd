"""The real server with a model whose answers a test writes: routes, prompts and parsing are the server's own.

The tokenizer is a small one with the layout of GLM-4.7, so that a prompt shows what the model read.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from openai.types.responses import Response

from glint.engine.request import StepOutput
from glint.server.admission import Admission
from glint.server.app import make_app
from glint.server.auth import ApiKeys
from glint.server.http.connection import BoundedConnection
from glint.server.http.problems import Problem
from glint.server.in_flight import RequestsInFlight
from glint.server.limits import Limits
from glint.server.metrics import EngineReading, Metrics
from glint.server.outcomes import OutcomeLog
from glint.server.response_store import ResponseStore
from glint.server.service import EngineRequest, OutputStream
from glint.server.settings import ServerSettings
from glint.server.state import ServerState
from glint.text.grammar import GrammarCompiler
from glint.text.tokenizer import Tokenizer
from tests.pure.text_folder import GLM_TEMPLATE, write_tokenizer

MODEL = "scripted"
CONTEXT = 20_000
PIECE_CHARS = 5
CACHED_TOKENS = 8
START_SECONDS = 30.0


class ScriptedService:
    """Answers each request with the next text of the script, in pieces of a few characters, one token each.

    A step has `step_tokens` of them; with several, all but the first were drafts that were right. A problem in the
    script ends its request where its text would begin. `prompts` are those that the model read.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.script: list[str | Problem] = []
        self.prompts: list[str] = []
        self.requests: list[EngineRequest] = []
        self.step_tokens = 1
        self._tokenizer = tokenizer
        self._ids = itertools.count()

    async def submit(self, requests: Sequence[EngineRequest], on_start: Callable[[int], None]) -> OutputStream:
        """Take the next answer and put all of it into a stream."""
        (request,) = requests
        self.requests.append(request)
        self.prompts.append(self._tokenizer.decode(list(request.prompt_tokens), skip_special_tokens=False))
        stream, request_id = OutputStream(on_start), next(self._ids)
        stream.choices = {request_id: 0}
        stream.start(request_id, time.monotonic())
        answer = self.script.pop(0)
        if isinstance(answer, Problem):
            stream.push(_output(request_id, ["I "], None), time.monotonic())
            asyncio.get_running_loop().call_soon(stream.end, answer)
            return stream
        pieces = [answer[at : at + PIECE_CHARS] for at in range(0, len(answer), PIECE_CHARS)] or [""]
        limit = min(request.params.max_tokens or len(pieces), len(pieces))
        for begin in range(0, limit, self.step_tokens):
            end = min(begin + self.step_tokens, limit)
            reason = None if end < limit else "length" if limit < len(pieces) else "stop"
            stream.push(_output(request_id, pieces[begin:end], reason), time.monotonic())
        return stream

    def cancel(self, stream: OutputStream) -> None:
        """Nothing computes."""


def _output(request_id: int, pieces: list[str], reason: Any) -> StepOutput:
    output = StepOutput(request_id, "".join(pieces), (1,) * len(pieces), None, None, CACHED_TOKENS, reason, None)
    if len(pieces) == 1:
        return output
    return output._replace(pieces=tuple(pieces), draft_tokens=len(pieces) - 1, accepted_tokens=len(pieces) - 1)


class Scripted:
    """A running server: its address, and the model behind it."""

    def __init__(self, url: str, service: ScriptedService, state: ServerState) -> None:
        self.url = url
        self.service = service
        self.state = state

    def say(self, *answers: str | Problem) -> None:
        """Set the next answers of the model, as it writes them."""
        self.service.script = list(answers)

    @property
    def prompt(self) -> str:
        """The prompt that the model read last."""
        return self.service.prompts[-1]


def make_state(folder: Path, stored_responses: int, workers: ThreadPoolExecutor) -> ServerState:
    """The state of a server with a scripted model."""
    tokenizer = Tokenizer(write_tokenizer(folder, GLM_TEMPLATE))
    service: Any = ScriptedService(tokenizer)
    limits = Limits()
    size = tokenizer.vocab_size
    return ServerState(
        model_names=(MODEL,),
        created=1,
        tokenizer=tokenizer,
        max_model_len=CONTEXT,
        vocab_size=size,
        longest_prompt_bytes=CONTEXT * tokenizer.longest_token_bytes,
        sampling_defaults={},
        limits=limits,
        service=service,
        compiler=GrammarCompiler(tokenizer, size, tokenizer.eos_token_ids),
        admission=Admission(limits),
        metrics=Metrics(MODEL, lambda: EngineReading(0, 0, 0, 0, 0, 0, {}), {}),
        outcomes=OutcomeLog(),
        workers=workers,
        in_flight=RequestsInFlight(),
        about={},
        responses=ResponseStore(stored_responses),
    )


@contextmanager
def serving(folder: Path, stored_responses: int = 0, keys: Sequence[str] = ()) -> Iterator[Scripted]:
    """A server on a free port of the loopback address, in a thread of its own, for the time of a block."""
    settings = ServerSettings(folder, (MODEL,), ApiKeys(keys))
    with ThreadPoolExecutor(2) as workers, socket.create_server(("127.0.0.1", 0)) as listener:
        state = make_state(folder, stored_responses, workers)
        config = uvicorn.Config(make_app(state, settings), http=BoundedConnection, lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not server.started:
            assert thread.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        service: Any = state.service
        try:
            yield Scripted(f"http://127.0.0.1:{listener.getsockname()[1]}", service, state)
        finally:
            server.should_exit = True
            thread.join(START_SECONDS)


def without_ids(response: Response) -> dict[str, Any]:
    """A response with nothing in it that is drawn anew for each, nor what only the client adds."""
    found = response.to_dict()
    for item in found["output"]:
        for field in ("id", "call_id", "parsed_arguments"):
            item.pop(field, None)
        for part in item.get("content", []):
            part.pop("parsed", None)
    return {name: value for name, value in found.items() if name not in ("id", "created_at", "completed_at")}
