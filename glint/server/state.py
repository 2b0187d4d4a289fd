"""The state that all routes share."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from glint.engine.share import Share
from glint.errors import RequestError, TextError
from glint.sampling import TOKEN_LIMIT, SamplingParams
from glint.server.admission import Admission
from glint.server.http.body import shorten
from glint.server.http.problems import Problem
from glint.server.in_flight import RequestsInFlight
from glint.server.limits import Limits
from glint.server.metrics import Metrics
from glint.server.outcomes import OutcomeLog
from glint.server.response_store import ResponseStore
from glint.server.service import EngineService
from glint.text.grammar import GrammarCompiler
from glint.text.tokenizer import Tokenizer

Result = TypeVar("Result")


@contextmanager
def errors_as_problems() -> Iterator[None]:
    """Turn glint's errors about a request into a `Problem` with status 400."""
    try:
        yield
    except RequestError as problem:
        raise Problem(400, str(problem), code="invalid_value", param=problem.field) from problem
    except TextError as problem:
        raise Problem(400, str(problem), code="invalid_value") from problem


@dataclass(frozen=True)
class ServerState:
    """Everything that the routes share.

    `about` describes the engine and its memory, as /stats shows them. A model that came by its id has a `repository`
    and a `commit` of the hub.
    """

    model_names: tuple[str, ...]
    created: int
    tokenizer: Tokenizer
    max_model_len: int
    vocab_size: int
    longest_prompt_bytes: int
    sampling_defaults: Mapping[str, Any]
    limits: Limits
    service: EngineService
    compiler: GrammarCompiler
    admission: Admission
    metrics: Metrics
    outcomes: OutcomeLog
    workers: Executor
    in_flight: RequestsInFlight
    about: Mapping[str, Any]
    responses: ResponseStore
    allows_special_tokens: bool = False
    max_thinking_tokens: int | None = None
    repository: str | None = None
    commit: str | None = None

    @property
    def model_name(self) -> str:
        """The name that responses carry."""
        return self.model_names[0]

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served. A request without a model means the served one."""
        if name is not None and name not in self.model_names:
            served = ", ".join(self.model_names)
            message = f"the model {shorten(name)!r} is not served here; use {served}"
            raise Problem(404, message, code="model_not_found", param="model")

    def sampling(self, **changes: Any) -> SamplingParams:
        """The model's default sampling with these changes. A change to None is ignored.

        Without `max_tokens` the output continues until the model ends it or the context is full. No thinking budget is
        above `max_thinking_tokens`.
        """
        changes = {name: value for name, value in changes.items() if value is not None}
        if self.max_thinking_tokens is not None:
            changes["thinking_budget"] = min(changes.get("thinking_budget", TOKEN_LIMIT), self.max_thinking_tokens)
        max_tokens = changes.get("max_tokens", 1)
        if not 1 <= max_tokens < TOKEN_LIMIT:
            room = f"what the prompt leaves of a context of {self.max_model_len} tokens"
            message = f"max_tokens is {max_tokens}; it must be an integer from 1 to {room}"
            raise Problem(400, message, code="invalid_value", param="max_tokens")
        with errors_as_problems():
            return SamplingParams(**({"max_tokens": None} | dict(self.sampling_defaults) | changes))

    def check_length(self, text: str, field: str) -> None:
        """Refuse, before it is tokenised, a text that cannot fit into the context whatever its tokens are."""
        if len(text) > self.longest_prompt_bytes or len(text.encode("utf-8", "replace")) > self.longest_prompt_bytes:
            limit = f"this model's maximum context length is {self.max_model_len} tokens"
            message = f"the prompt is too long: {limit}, and {field} alone has more; shorten it"
            raise Problem(400, message, code="context_length_exceeded", param=field)

    @contextmanager
    def preparing(self, share: Share) -> Iterator[None]:
        """Around the preparation of a request: an error in the request becomes a `Problem`.

        A full queue refuses the request first, so that the work that waits for a worker thread is bounded.
        """
        with errors_as_problems(), self.admission.preparing(share):
            yield

    async def work(self, share: Share, function: Callable[..., Result], *arguments: Any) -> Result:
        """Run a function on a worker thread, as part of preparing a request."""
        with self.preparing(share):
            return await asyncio.get_running_loop().run_in_executor(self.workers, function, *arguments)
