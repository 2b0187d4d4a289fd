"""Error responses, in the form of the API that was called.

A client may see a `Problem`. Any other exception becomes a fixed text with the id of the request; only the log has the
details.
"""

import logging
from collections.abc import Mapping
from functools import cached_property
from types import MappingProxyType

import msgspec
from starlette.types import Send

from glint.errors import GlintError, RequestError

_LOG = logging.getLogger("glint.server")

MAX_MESSAGE_CHARS = 1000

ANTHROPIC_PATHS = ("/v1/messages", "/v1/messages/count_tokens")

_TYPES: Mapping[int, str] = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        408: "timeout_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
        529: "overloaded_error",
    }
)


class Problem(GlintError):
    """An error response: the status, and a text that is safe to show to the client.

    `code` is one snake_case word for programs; `param` names the field at fault where one is; `headers` are added to
    the response. Of a long text the middle, which is the client's, is dropped.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _bounded(message)
        self.code = code
        self.param = param
        self.headers: dict[str, str] = dict(headers or {})

    @property
    def type(self) -> str:
        """The error type that OpenAI and Anthropic clients know for this status."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")

    @cached_property
    def openai_body(self) -> bytes:
        """The JSON body as OpenAI clients read it."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


def _bounded(message: str) -> str:
    if len(message) <= MAX_MESSAGE_CHARS:
        return message
    half = MAX_MESSAGE_CHARS // 2
    return f"{message[:half]} (cut) {message[-half:]}"


def anthropic_body(problem: Problem, request_id: str | None = None) -> bytes:
    """The JSON body of a problem as Anthropic clients read it."""
    error = {"type": problem.type, "message": problem.message}
    return msgspec.json.encode({"type": "error", "error": error, "request_id": request_id})


def body_for(path: str, problem: Problem, request_id: str | None = None) -> bytes:
    """The JSON body of a problem in the form of the route's API."""
    return anthropic_body(problem, request_id) if path in ANTHROPIC_PATHS else problem.openai_body


def problem_of(error: BaseException, request_id: str) -> Problem:
    """The problem to respond with for an exception of a request.

    A `Problem` stays as it is, and a `RequestError` becomes a 400. Any other exception is logged whole and shown as a
    fixed text.
    """
    if isinstance(error, Problem):
        return error
    if isinstance(error, RequestError):
        return Problem(400, str(error), "invalid_value", error.field)
    _LOG.error("request %s failed inside the server", request_id, exc_info=error)
    message = f"internal error; the server's log has the details under the request id {request_id}"
    return Problem(500, message, code="internal_error")


async def send_problem(send: Send, path: str, problem: Problem, request_id: str | None = None) -> None:
    """Send a problem as the response to a request that has none yet."""
    body = body_for(path, problem, request_id)
    headers = {"content-type": "application/json", "content-length": str(len(body)), **problem.headers}
    if request_id is not None:
        headers["request-id" if path in ANTHROPIC_PATHS else "x-request-id"] = request_id
    encoded = [(name.lower().encode("ascii"), value.encode("ascii")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})
