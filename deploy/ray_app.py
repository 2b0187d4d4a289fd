"""Glint on a Ray cluster: N replicas of the real server behind Ray Serve's own proxies and routers.

    serve run deploy.ray_app:app replicas=2 model=/models/GLM-4.7-FP8 device=cuda tp=8 api_key_file=keys.txt

Ray starts the replicas, routes to them, watches them by the engine's own health and replaces those that die.
"""

import asyncio
import logging
import os
import shlex
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glint.cli import make_parser
from glint.errors import RequestError
from glint.server.flags import read_settings
from glint.server.process.lifecycle import Startup
from glint.server.process.logs import make_handler
from glint.server.serve import Server
from glint.server.settings import ServerSettings

HEALTH_PERIOD_SECONDS = 2.0
WATCH_SECONDS = 0.1
TELL_SECONDS = 1.0
FLUSH_SECONDS = 0.2
EXIT_FAILED = 1
DRAIN_LOOP_SECONDS = 0.5
CLOSE_SECONDS = 15.0
RUNNING_REQUESTS = 1024
CLIENT_LEFT: Message = {"type": "http.disconnect"}
PROXY_FLAGS = frozenset({"--host", "--port", "--uds", "--ssl-certfile", "--ssl-keyfile"})
log = logging.getLogger("glint.ray")
ROUTERS: dict[str, dict[str, str]] = {
    "least-loaded": {},
    "session": {"request_router_class": "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"},
}


class Arguments(BaseModel):
    """What `serve run deploy.ray_app:app NAME=VALUE` takes; an unknown name is refused.

    `model` is the checkpoint folder, at the same path on every node; without it the sample model is served. A CPU
    replica reserves `threads` cores, by default an equal share of this machine's; a CUDA replica reserves `gpus` GPUs,
    by default `tp`. `routing` is "least-loaded", or "session", which keeps all requests with the same x-session-id on
    one replica, where the pages of their common prefix are. `flags` are further flags of `glint serve`, in one string.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    replicas: int = Field(1, ge=1)
    model: Path | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    tp: int = Field(1, ge=1)
    expert_layout: Literal["tp", "ep"] = "tp"
    threads: int | None = Field(None, ge=1)
    gpus: int | None = Field(None, ge=1)
    api_key_file: Path | None = None
    routing: Literal["least-loaded", "session"] = "least-loaded"
    flags: str = ""


class Carrier:
    """ASGI middleware between Ray and a server: it closes the server at the end and tells it of clients that left.

    Where a client leaves, Ray cancels the task, or its `receive` fails, as the proxy no longer knows the request. Both
    become the message that ASGI has for it, so that a request ends by its own means and with an outcome that says why.
    """

    def __init__(self, app: ASGIApp, close: Callable[[], Awaitable[object]]) -> None:
        self._app = app
        self._close = close
        self._answering: set[asyncio.Future[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; returns when the application has ended it."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        departure: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        async def receive_or_leave() -> Message:
            receiving = asyncio.ensure_future(receive())
            try:
                await asyncio.wait([receiving, departure], return_when=asyncio.FIRST_COMPLETED)
                return departure.result() if departure.done() else receiving.result()
            except RayError:
                return CLIENT_LEFT
            finally:
                receiving.cancel()

        answering = asyncio.ensure_future(self._app(scope, receive_or_leave, send))
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)
        try:
            await asyncio.shield(answering)
        except asyncio.CancelledError:
            departure.set_result(CLIENT_LEFT)
            await asyncio.wait([answering])
            raise

    async def answer_all(self, seconds: float) -> None:
        """Wait until the requests of this moment have their answers, for so many seconds at most."""
        if self._answering:
            await asyncio.wait(set(self._answering), timeout=seconds)

    async def _live(self, receive: Receive, send: Send) -> None:
        """Close the server when Ray ends the lifespan, which is once the requests in flight have ended."""
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._close()
        await send({"type": "lifespan.shutdown.complete"})


class Glint:
    """One replica: the application of `glint serve`, with its keys, limits and outcome lines, behind Ray's proxy.

    A replica whose engine failed would refuse faster than others answer, and so draw requests to itself. Its process
    ends instead, once the requests that it had were told why: Ray notices that at once and starts another.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._log_level = settings.log_level
        self._logs_json = settings.logs_json
        self._server = Server(settings, Startup())
        self._carrier = Carrier(self._server.app, self._server.close)
        self._watching: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Load the model; what comes back is what Ray passes requests to. As in `glint serve`, PyTorch stays out."""
        cast("dict[str, object]", sys.modules).setdefault("torch", None)
        logging.basicConfig(level=self._log_level.upper(), handlers=[make_handler(self._logs_json)])
        await self._server.start()
        self._watching = asyncio.create_task(self._watch())
        return self._carrier

    async def check_health(self) -> None:
        """End this process where the engine has failed or makes no step."""
        if not self._server.is_healthy:
            self._server.fail_if_stalled()
            await self._carrier.answer_all(TELL_SECONDS)
            await asyncio.sleep(FLUSH_SECONDS)
            log.error("the engine of this replica failed or makes no step; the process ends, Ray starts another")
            logging.shutdown()
            os._exit(EXIT_FAILED)

    async def _watch(self) -> None:
        """Check more often than Ray does."""
        while True:
            await self.check_health()
            await asyncio.sleep(WATCH_SECONDS)


def app(arguments: Arguments) -> Application:
    """The application that Ray runs. Model, keys and limits are read here, once, and are the same in every replica.

    The requests that a replica may hold are bounded by glint's own queue, which answers 429; those that wait in a
    proxy while no replica is there are bounded by as many. Ray's proxies keep the router that they once had for a
    deployment's name, so the name says the routing.
    """
    settings = settings_of(arguments)
    waiting = settings.limits.waiting_requests
    deployment = serve.deployment(
        name=f"glint-{arguments.routing}",
        num_replicas=arguments.replicas,
        ray_actor_options=reserved(arguments),
        max_ongoing_requests=waiting + RUNNING_REQUESTS,
        max_queued_requests=waiting,
        graceful_shutdown_wait_loop_s=DRAIN_LOOP_SECONDS,
        graceful_shutdown_timeout_s=settings.drain_seconds + CLOSE_SECONDS,
        health_check_period_s=HEALTH_PERIOD_SECONDS,
        request_router_config=ROUTERS[arguments.routing],
    )
    return deployment(serve.ingress()(Glint)).bind(settings)


def settings_of(arguments: Arguments) -> ServerSettings:
    """The settings of every replica.

    Ray's proxy listens, at an address that glint does not know. With a key any host name is taken, as the key keeps web
    pages out; without one only names of this machine and those of --allowed-hosts.
    """
    settings = read_settings(make_parser().parse_args(["serve", *serve_flags(arguments)]))
    return replace(settings, hosts=settings.hosts or ("*",)) if len(settings.keys) > 0 else settings


def serve_flags(arguments: Arguments) -> list[str]:
    """The arguments as flags of `glint serve`, with absolute paths, as replicas run elsewhere."""
    further = shlex.split(arguments.flags)
    given = {flag.partition("=")[0] for flag in further}
    if given & PROXY_FLAGS:
        named = ", ".join(sorted(given & PROXY_FLAGS))
        raise RequestError(f"the argument flags has {named}, but Ray's proxy listens; set its address as Ray does")
    flags = ["--device", arguments.device, "--tp", str(arguments.tp), "--expert-layout", arguments.expert_layout]
    if arguments.device == "cpu":
        flags += ["--threads", str(num_threads(arguments))]
    for name, value in (("--model", arguments.model), ("--api-key-file", arguments.api_key_file)):
        flags += [] if value is None else [name, str(value.expanduser().absolute())]
    return flags + further


def num_threads(arguments: Arguments) -> int:
    """The cores of a CPU replica: those asked for, or an equal share of this machine's."""
    return arguments.threads or max(1, (os.cpu_count() or 1) // arguments.replicas)


def reserved(arguments: Arguments) -> dict[str, float]:
    """What Ray reserves for one replica."""
    if arguments.device == "cpu":
        return {"num_cpus": num_threads(arguments)}
    return {"num_cpus": 1, "num_gpus": arguments.gpus or arguments.tp}
