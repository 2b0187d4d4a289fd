"""Running a server: load, warm up, serve, drain."""

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import uvicorn
import uvloop

from glint.checkpoint.table import Checkpoint, open_checkpoint
from glint.engine import Engine, StepSummary
from glint.errors import EngineError, GlintError
from glint.server.app import make_app
from glint.server.connection import BoundedConnection
from glint.server.lifecycle import FrontDoor, Lifecycle, Startup
from glint.server.limits import Admission
from glint.server.metrics import EngineReading, Metrics
from glint.server.outcomes import OutcomeLog
from glint.server.service import EngineService
from glint.server.settings import ServerSettings
from glint.server.state import ServerState
from glint.sizing import size_engine
from glint.text.grammar import GrammarCompiler
from glint.text.tokenizer import Tokenizer

log = logging.getLogger("glint.server")
NUM_WORKERS = 2
KEEP_ALIVE_SECONDS = 75
BACKLOG = 2048
TICK_SECONDS = 0.5
SEND_BUFFER_BYTES = 256 * 1024
SPARE_FILES = 128
EXIT_FAILED = 1
FAILED_DRAIN_SECONDS = 2
GIVE_UP_SECONDS = 4.0
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(settings: ServerSettings) -> int:
    """Serve until a signal ends it; the exit code is 0 after a drain and 1 after a failure."""
    startup = Startup()
    startup.mark("python and imports")
    _set_up_logging(settings.log_level)
    max_connections = _raise_file_limit() - SPARE_FILES
    for warning in settings.keys.warnings:
        log.warning(warning)
    if settings.host not in LOOPBACK and len(settings.keys) == 0:
        log.warning(
            "listening on %s without an API key: whoever reaches the port may use the model; set GLINT_API_KEY or "
            "--api-key-file",
            settings.host,
        )
    listener = _listen(settings)
    startup.mark("listen")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(Server(settings, startup, max_connections).run_to_end(listener))


def _set_up_logging(level: str) -> None:
    form = "%(asctime)s %(levelname)s %(name)s %(message)s"
    logging.basicConfig(stream=sys.stderr, level=level.upper(), format=form)
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _raise_file_limit() -> int:
    """Allow this process as many open files as the system lets it have; gives their number."""
    _, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, highest))
    return highest


def _listen(settings: ServerSettings) -> socket.socket:
    """Bind the address before anything is loaded, so that one in use is known at once.

    Connections inherit the size of the send buffer, which bounds what the kernel keeps for a client that does not read.
    """
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as problem:
        raise EngineError(
            f"cannot listen on {settings.host} port {settings.port}: {problem.strerror or problem}; give another "
            "--host or --port, or stop what uses it"
        ) from problem
    listener.set_inheritable(True)
    return listener


class Server(uvicorn.Server):
    """One model behind HTTP. The first SIGTERM or SIGINT drains, the second stops at once."""

    def __init__(self, settings: ServerSettings, startup: Startup, max_connections: int | None = None) -> None:
        self._settings = settings
        self._startup = startup
        self._lifecycle = Lifecycle(settings.health_seconds)
        self.app = FrontDoor(self._lifecycle)
        self._service: EngineService | None = None
        self._owns_process = False
        self._workers = ThreadPoolExecutor(NUM_WORKERS, thread_name_prefix="prepare")
        config = uvicorn.Config(
            self.app,
            http=BoundedConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            backlog=BACKLOG,
            limit_concurrency=max_connections,
            timeout_graceful_shutdown=max(1, round(settings.drain_seconds)),
        )
        super().__init__(config)

    async def run_to_end(self, listener: socket.socket) -> int:
        """Serve on a bound socket until the end; gives the exit code.

        Once the engine has failed, the process ends within 5 s whatever hangs.
        """
        self._owns_process = True
        serving = asyncio.create_task(self.serve(sockets=[listener]))
        try:
            await self.start()
            settings = self._settings
            log.info("ready: %s on http://%s:%d", settings.model_names[0], settings.host, settings.port)
        except Exception as problem:
            self._fail("the start failed, the log says why")
            log.error(
                "cannot serve %s: %s", self._settings.model_dir, problem, exc_info=not isinstance(problem, GlintError)
            )
        await serving
        if not await self.close():
            _give_up("a step of the engine does not end")
        return EXIT_FAILED if self._lifecycle.phase == "failed" else 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on the first signal, stop on the second; a server that answers nobody yet stops on the first."""
        if self._lifecycle.phase in ("loading", "warming"):
            log.info("signal %d: nothing is served yet, the process ends", sig)
            logging.shutdown()
            os._exit(0)
        if self.should_exit:
            self.force_exit = True
            return
        log.info("signal %d: draining, up to %g s; a second signal stops at once", sig, self._settings.drain_seconds)
        if self._lifecycle.phase == "ready":
            self._lifecycle.phase = "draining"
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take the signals over while serving; unlike uvicorn's own, none is raised again afterwards."""
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    async def main_loop(self) -> None:
        """Serve until the end is asked for or steps do not complete any more; then a supervisor may start anew."""
        while not await self.on_tick(0):
            self.fail_if_stalled()
            await asyncio.sleep(TICK_SECONDS)

    def fail_if_stalled(self) -> None:
        """Where steps do not complete any more, tell every request so and end the server."""
        if self._lifecycle.is_healthy or self._lifecycle.failure is not None:
            return
        stalled = self._lifecycle.stalled_seconds()
        log.error("no step has completed for %.0f s, longer than --health-timeout allows", stalled)
        failure = f"no step of the engine has completed for {stalled:.0f} s"
        if self._service is not None:
            self._service.give_up(failure)
        self._fail(failure)

    @property
    def is_healthy(self) -> bool:
        """Whether the engine has not failed and completes steps while there is work."""
        return self._lifecycle.is_healthy

    async def close(self) -> bool:
        """End every request and free the engine. False: a step does not end, so neither does the engine."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        return self._service is None or await self._service.close()

    async def start(self) -> None:
        """Load the model and compute the first tokens; from then on `app` answers, here or behind another server."""
        checkpoint, engine, tokenizer = await asyncio.to_thread(self._load)
        state = self._make_state(checkpoint, engine, tokenizer)
        service = self._service = state.service
        self._lifecycle.stalled_seconds = service.stalled_seconds
        self._lifecycle.phase = "warming"
        await service.start()
        self._startup.mark("warm-up")
        state.metrics.set_startup(self._startup.seconds | {"all": self._startup.total_seconds})
        settings = self._settings
        self._lifecycle.app = make_app(state, settings.keys, settings.guards_metrics, settings.origins)
        if not self.should_exit:
            self._lifecycle.phase = "ready"
        self._workers.submit(state.compiler.prepare)
        log.info("start-up:\n%s", self._startup.table())

    def _load(self) -> tuple[Checkpoint, Engine, Tokenizer]:
        """Everything that comes from files; the tokenizer is read while the headers are."""
        settings = self._settings
        with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as reader:
            reading = reader.submit(Tokenizer, settings.model_dir)
            checkpoint = open_checkpoint(settings.model_dir)
            self._startup.mark("checkpoint headers")
            sized = size_engine(
                settings.model_dir,
                checkpoint.config,
                checkpoint.files,
                settings.library_path,
                **settings.engine_options,
            )
            sized.show()
            self._startup.mark("memory plan")
            tokenizer = reading.result()
            self._startup.mark("rest of the tokenizer")
        engine = Engine(checkpoint, sized.settings, tokenizer, settings.library_path, log.info)
        self._startup.mark("weights and memory")
        return checkpoint, engine, tokenizer

    def _make_state(self, checkpoint: Checkpoint, engine: Engine, tokenizer: Tokenizer) -> ServerState:
        settings, resolved = self._settings, engine.settings
        service = EngineService(engine, self._count_step, self._fail)
        admission = Admission(settings.limits)
        cache_config = {
            "page_tokens": resolved.page_tokens,
            "num_pages": resolved.num_pages,
            "max_model_len": resolved.max_model_len,
            "device": resolved.device,
        }

        def read() -> EngineReading:
            stats = engine.stats()
            return EngineReading(
                num_running=engine.num_running,
                num_waiting=engine.num_waiting,
                pages_free=stats.pages_free,
                pages_held=stats.pages_held,
                pages_cached=stats.pages_cached,
                num_preemptions=engine.num_preemptions,
                cpu_seconds={"loop": time.thread_time(), "engine": service.cpu_seconds},
            )

        self._metrics = Metrics(settings.model_names[0], read, cache_config)
        return ServerState(
            model_names=settings.model_names,
            created=int(time.time()),
            tokenizer=tokenizer,
            max_model_len=resolved.max_model_len,
            vocab_size=checkpoint.config.vocab_size,
            longest_prompt_bytes=resolved.max_model_len * tokenizer.longest_token_bytes,
            sampling_defaults=checkpoint.generation.sampling(),
            limits=settings.limits,
            service=service,
            compiler=GrammarCompiler(tokenizer, checkpoint.config.vocab_size, checkpoint.eos_token_ids),
            admission=admission,
            metrics=self._metrics,
            outcomes=OutcomeLog(uses_json=settings.logs_json),
            workers=self._workers,
        )

    def _count_step(self, summary: StepSummary, gaps: list[float]) -> None:
        self._metrics.observe_step(summary.num_tokens - summary.new_tokens, summary.new_tokens)
        for gap, count in Counter(gaps).items():
            self._metrics.observe_gap(gap, count)

    def _fail(self, failure: str) -> None:
        """End the server: who still waits for an answer has been told why."""
        if self._lifecycle.failure is not None:
            return
        self._lifecycle.fail(failure)
        self.config.timeout_graceful_shutdown = FAILED_DRAIN_SECONDS
        self.should_exit = True
        if self._owns_process:
            watchdog = threading.Timer(GIVE_UP_SECONDS, _give_up, ["the server does not end after its failure"])
            watchdog.daemon = True
            watchdog.start()


def _give_up(reason: str) -> NoReturn:
    """End the process where something in it does not."""
    log.error("%s; the process is given up", reason)
    logging.shutdown()
    os._exit(EXIT_FAILED)
