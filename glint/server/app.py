"""All routes of the server, with authentication around them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from difflib import get_close_matches

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from glint.server.anthropic import messages as anthropic
from glint.server.auth import Authentication, allow_origins
from glint.server.glint_api import StatusRoutes, handle_detokenize, handle_generate, handle_tokenize, served_paths
from glint.server.http.body import shorten
from glint.server.http.origin import AllowedHosts, SiteGuard
from glint.server.http.problems import Problem, body_for
from glint.server.http_call import GeneratingRoute, HttpCall, StreamError
from glint.server.in_flight import RequestRoutes
from glint.server.openai import responses
from glint.server.openai.chat import handle_chat
from glint.server.openai.completions import handle_text
from glint.server.openai.output import stream_error
from glint.server.openai.responses_routes import StoredResponseRoutes
from glint.server.outcomes import RequestOutcome
from glint.server.settings import ServerSettings
from glint.server.state import ServerState

Handle = Callable[[HttpCall], Awaitable[None]]
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
NEAR = 0.75


def make_app(state: ServerState, settings: ServerSettings) -> ASGIApp:
    """The whole application: every route but /health and /ready, which the `ReadinessGate` answers."""
    watch = StatusRoutes(state)
    requests = RequestRoutes(state.in_flight, settings.admin_access)
    stored = StoredResponseRoutes(state.responses)
    generating = {
        path: GeneratingRoute(state, prefix, handle, on_error) for path, prefix, handle, on_error in GENERATING
    }
    routes: list[BaseRoute] = [Route(path, endpoint, methods=["POST"]) for path, endpoint in generating.items()]
    routes += [
        Route("/", watch.show_routes, methods=["GET"]),
        Route("/version", watch.show_version, methods=["GET"]),
        Route("/tokenizer_info", watch.show_tokenizer, methods=["GET"]),
        Route("/v1/models", watch.list_models, methods=["GET"]),
        Route("/v1/models/{name:path}", watch.show_model, methods=["GET"]),
        Route("/metrics", watch.show_metrics, methods=["GET"]),
        Route("/stats", watch.show_stats, methods=["GET"]),
        Route("/v1/responses/{response_id}", stored.show, methods=["GET"]),
        Route("/v1/responses/{response_id}", stored.delete, methods=["DELETE"]),
        Route("/v1/responses/{response_id}/input_items", stored.list_input, methods=["GET"]),
        Route("/requests", requests.list_requests, methods=["GET"]),
        Route("/requests/{request_id}", requests.cancel_request, methods=["DELETE"]),
    ]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _answer_http, Problem: _answer_problem})
    app.router.redirect_slashes = False
    fast_path = FastPath(generating, app)
    record = _refusals_of(state)
    guarded = Authentication(fast_path, settings.keys, guards_metrics=settings.guards_metrics, on_refusal=record)
    hosts = AllowedHosts(settings.bind, settings.hosts)
    return SiteGuard(allow_origins(guarded, settings.origins), hosts, settings.origins, record)


class FastPath:
    """Passes a generating route straight to its endpoint, and every other route to the application.

    Every token of a stream resumes all layers around the endpoint, so the router is left out.
    """

    def __init__(self, endpoints: Mapping[str, ASGIApp], app: ASGIApp) -> None:
        self._endpoints = endpoints
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        endpoint = self._endpoints.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        await (endpoint or self._app)(scope, receive, send)


def _refusals_of(state: ServerState) -> Callable[[Scope, Problem], None]:
    """Records a request that authentication or the site guard refused, like any other refusal."""

    def record(scope: Scope, problem: Problem) -> None:
        outcome = RequestOutcome("-", scope["path"], "refused", problem.code, problem.status)
        state.outcomes.write(outcome)
        state.metrics.record(outcome)

    return record


async def _answer_http(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    path = request.url.path
    if status == 404:
        problem = Problem(404, _describe_unknown(path, served_paths(request)), code="not_found")
    elif status == 405:
        allowed = ", ".join(sorted(headers.get("Allow", "").split(", ")))
        headers["Allow"] = allowed
        message = f"{request.method} is not allowed on {shorten(path)}; use {allowed}"
        problem = Problem(405, message, code="method_not_allowed")
    else:
        problem = Problem(status, "the request cannot be served", code="refused")
    return Response(body_for(path, problem), status, headers, "application/json")


def _describe_unknown(path: str, served: Mapping[str, Sequence[str]]) -> str:
    """The message for an unknown path: the path that was probably meant, and where all are listed."""
    near = get_close_matches(path, [known for paths in served.values() for known in paths], 1, NEAR)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"there is no route {shorten(path)}; {meant}GET / lists all routes"


async def _answer_problem(request: Request, error: Exception) -> Response:
    problem = error if isinstance(error, Problem) else Problem(500, "the server failed", code="internal_error")
    return Response(body_for(request.url.path, problem), problem.status, problem.headers, "application/json")
