"""The routes of the server, with authentication around them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from glint.server import anthropic, responses
from glint.server.auth import ApiKeys, Authentication, allow_origins
from glint.server.call import Call, GeneratingRoute, StreamError
from glint.server.openai_chat import handle_chat
from glint.server.openai_text import handle_text
from glint.server.outcomes import RequestOutcome
from glint.server.plain import Watch, handle_detokenize, handle_generate, handle_tokenize, stream_error
from glint.server.problems import Problem, body_for
from glint.server.state import ServerState

Handle = Callable[[Call], Awaitable[None]]
GENERATING: Sequence[tuple[str, str, Handle, StreamError]] = (
    ("/v1/chat/completions", "chatcmpl", handle_chat, stream_error),
    ("/v1/completions", "cmpl", handle_text, stream_error),
    ("/v1/responses", "resp", responses.handle_responses, responses.stream_error),
    ("/v1/messages", "msg", anthropic.handle_messages, anthropic.stream_error),
    ("/v1/messages/count_tokens", "count", anthropic.handle_count_tokens, anthropic.stream_error),
    ("/generate", "gen", handle_generate, stream_error),
    ("/tokenize", "tok", handle_tokenize, stream_error),
    ("/detokenize", "detok", handle_detokenize, stream_error),
)


def make_app(state: ServerState, keys: ApiKeys, guards_metrics: bool, origins: Sequence[str]) -> ASGIApp:
    """The whole application: every route but /health and /ready, which the front door answers."""
    watch = Watch(state)
    generating = {
        path: GeneratingRoute(state, prefix, handle, on_error) for path, prefix, handle, on_error in GENERATING
    }
    routes: list[BaseRoute] = [Route(path, endpoint, methods=["POST"]) for path, endpoint in generating.items()]
    routes += [
        Route("/v1/models", watch.list_models, methods=["GET"]),
        Route("/v1/models/{name:path}", watch.show_model, methods=["GET"]),
        Route("/metrics", watch.show_metrics, methods=["GET"]),
        Route("/stats", watch.show_stats, methods=["GET"]),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _answer_http, Problem: _answer_problem})
    app.router.redirect_slashes = False
    short_cut = ShortCut(generating, app)
    guarded = Authentication(short_cut, keys, guards_metrics=guards_metrics, on_refusal=_refusals_of(state))
    return allow_origins(guarded, origins)


class ShortCut:
    """Passes what generates straight to its endpoint, and the rest to the application.

    A stream is resumed through every layer around it, for each of its tokens.
    """

    def __init__(self, endpoints: Mapping[str, ASGIApp], app: ASGIApp) -> None:
        self._endpoints = endpoints
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (endpoint or self._app)(scope, receive, send)


def _refusals_of(state: ServerState) -> Callable[[Scope, Problem], None]:
    """Records a request without a valid key like any other refusal."""

    def record(scope: Scope, problem: Problem) -> None:
        outcome = RequestOutcome("-", scope["path"], "refused", problem.code, problem.status)
        state.outcomes.write(outcome)
        state.metrics.record(outcome)

    return record


async def _answer_http(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    known = {404: "there is no such route", 405: f"{request.method} is not allowed here"}
    problem = Problem(
        status, known.get(status, "the request cannot be served"), code="not_found" if status == 404 else "refused"
    )
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return Response(body_for(request.url.path, problem), status, headers, "application/json")


async def _answer_problem(request: Request, error: Exception) -> Response:
    problem = error if isinstance(error, Problem) else Problem(500, "the server failed", code="internal_error")
    return Response(body_for(request.url.path, problem), problem.status, problem.headers, "application/json")
