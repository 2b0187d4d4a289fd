"""Runs a server: load, warm up, serve, drain."""

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, cast

import uvicorn
import uvloop

from glint import __version__
from glint.checkpoint.table import Checkpoint, open_checkpoint
from glint.engine.engine import Engine, StepSummary
from glint.engine.memory_plan import SizedEngine, size_engine
from glint.engine.request import StepOutput
from glint.engine.thinking import encode_closing, find_thinking_tokens
from glint.errors import GlintError, InternalFailure, RankFailed, RequestError
from glint.sampling import SamplingParams
from glint.server.admission import Admission
from glint.server.app import make_app
from glint.server.http.connection import BoundedConnection
from glint.server.http.listener import Acceptor, listening
from glint.server.http.problems import MAX_MESSAGE_CHARS, Problem
from glint.server.in_flight import RequestsInFlight
from glint.server.metrics import EngineReading, Metrics
from glint.server.outcomes import OutcomeLog
from glint.server.process.lifecycle import Lifecycle, ReadinessGate, Startup
from glint.server.process.link import SupervisedOutcomeLog, SupervisorLink
from glint.server.response_store import ResponseStore
from glint.server.service import EngineService
from glint.server.settings import ServerSettings
from glint.server.state import ServerState
from glint.server.web import WebFiles, page_addresses, read_files
from glint.text.grammar import GrammarCompiler
from glint.text.tags import Tag
from glint.text.tokenizer import Tokenizer

log = logging.getLogger("glint.server")
NUM_WORKERS = 2
KEEP_ALIVE_SECONDS = 75
TICK_SECONDS = 0.5
SPARE_FILES = 128
EXIT_FAILED = 1
FAILED_DRAIN_SECONDS = 2
FINAL_ERROR_SECONDS = 1
EXIT_SECONDS = 4.0
FAULTS = (RankFailed, InternalFailure, Problem)


def serve(
    settings: ServerSettings,
    link: SupervisorLink | None = None,
    open_model: Callable[[Path], Checkpoint] = open_checkpoint,
) -> int:
    """Serve until a signal. The exit code is 0 after a drain and 1 after a failure.

    `open_model` gives the checkpoint of the model folder; a bench gives one without files.
    """
    startup = Startup(None if link is None else link.inherited.began)
    startup.mark("python and imports")
    max_connections = _raise_file_limit() - SPARE_FILES
    if settings.commit is not None:
        log.info("model %s, commit %s, in %s", settings.repository, settings.commit, settings.model_dir)
    for warning in settings.warnings:
        log.warning(warning)
    server = Server(settings, startup, max_connections, link, open_model)
    own = listening(settings.host, settings.port, settings.uds, settings.uds_mode)
    with ExitStack() as opened:
        listener = opened.enter_context(own) if link is None else link.listener
        server.release = opened.close
        startup.mark("listen")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(server.run_to_end(listener))


def _raise_file_limit() -> int:
    """Raise the limit of open files to the most that the system allows; returns the limit."""
    _, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, highest))
    return highest


class Server(uvicorn.Server):
    """One model behind HTTP. The first SIGTERM or SIGINT drains, the second stops at once.

    Under a supervisor, to which `link` leads, the server accepts connections once it is ready; alone, at once. It calls
    `release` before it ends its process early.
    """

    def __init__(
        self,
        settings: ServerSettings,
        startup: Startup,
        max_connections: int | None = None,
        link: SupervisorLink | None = None,
        open_model: Callable[[Path], Checkpoint] = open_checkpoint,
    ) -> None:
        self._settings = settings
        self._startup = startup
        self._link = link
        self._open_model = open_model
        self.release: Callable[[], None] = lambda: None
        self._lifecycle = Lifecycle(settings.health_seconds)
        self._lifecycle.restarts = 0 if link is None else link.inherited.restarts
        self._files = read_files() if settings.serves_web else {}
        self.app = WebFiles(ReadinessGate(self._lifecycle), self._files)
        self._service: EngineService | None = None
        self._owns_process = False
        self._tls = None if settings.tls is None else settings.tls.make_context()
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
            limit_concurrency=max_connections,
            timeout_graceful_shutdown=round(settings.drain_seconds) + FINAL_ERROR_SECONDS,
        )
        super().__init__(config)

    async def run_to_end(self, listener: socket.socket) -> int:
        """Serve on a bound socket until the end; returns the exit code.

        Once the engine has failed, the process ends within 5 s whatever hangs.
        """
        self._owns_process = True
        if self._link is not None:
            self._link.open(self.handle_exit)
        serving = None if self._link is not None else asyncio.create_task(self.serve(sockets=[listener]))
        try:
            await self.start()
            settings = self._settings
            if self._link is not None:
                await self._link.take_over()
                serving = asyncio.create_task(self.serve(sockets=[listener]))
            log.info("ready: %s on %s", settings.model_names[0], settings.address)
            pages = self._files if settings.uds is None else {}
            for address in page_addresses(settings.scheme, settings.host, settings.port, pages):
                log.info("page: %s", address)
        except Exception as problem:
            self._fail_to_start(problem)
        if serving is not None:
            await serving
        has_closed = await self.close()
        if self._link is not None:
            self._link.finish()
        if not has_closed:
            self._exit_now("a step of the engine does not end")
        if self._lifecycle.phase != "failed":
            return 0
        if self._link is not None or self._service is None:
            self._end_process(EXIT_FAILED)
        return EXIT_FAILED

    def _fail_to_start(self, problem: Exception) -> None:
        """Log why the server cannot start. A supervisor does not retry an error that the user must mend."""
        log.error(
            "cannot serve %s: %s", self._settings.model_dir, problem, exc_info=not isinstance(problem, GlintError)
        )
        is_fault = isinstance(problem, FAULTS)
        if self._link is not None and isinstance(problem, GlintError) and not is_fault:
            self._link.send("refused")
        self._fail(f"the start failed: {problem}" if is_fault else "the start failed, the log says why")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain on the first signal, stop on the second. A server that is not ready yet stops on the first."""
        if self._lifecycle.phase in ("loading", "warming"):
            log.info("signal %d: nothing is served yet, the process ends", sig)
            self._end_process(0)
        if self.should_exit:
            self.force_exit = True
            return
        log.info("signal %d: draining, up to %g s; a second signal stops at once", sig, self._settings.drain_seconds)
        if self._lifecycle.phase == "ready":
            self._lifecycle.phase = "draining"
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle the signals while serving; unlike uvicorn, raise none of them again afterwards.

        Under a supervisor the server handles no signal: the supervisor handles them and forwards them.
        """
        if self._link is not None:
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections on the sockets; uvicorn closes the acceptors like its own servers."""
        await super().startup(sockets=[])
        acceptors = [Acceptor(listener, self._make_connection, self._tls) for listener in sockets or []]
        for acceptor in acceptors:
            acceptor.open()
        self.servers = cast(Any, acceptors)

    def _make_connection(self) -> BoundedConnection:
        return BoundedConnection(self.config, self.server_state, {})

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain. When the time is up, streams that are still open end with an error."""
        seconds = max(0, (self.config.timeout_graceful_shutdown or 0) - FINAL_ERROR_SECONDS)
        final_errors = asyncio.get_running_loop().call_later(seconds, self._end_streams)
        await super().shutdown(sockets)
        final_errors.cancel()

    def _end_streams(self) -> None:
        if self._service is not None:
            self._service.end_streams()

    async def main_loop(self) -> None:
        """Serve until a signal asks for the end or the engine stalls; then a supervisor may restart the server."""
        while not await self.on_tick(0):
            self.fail_if_stalled()
            await asyncio.sleep(TICK_SECONDS)

    def fail_if_stalled(self) -> None:
        """Once the engine stalls, end every stream with an error and end the server."""
        if self._lifecycle.is_healthy or self._lifecycle.failure is not None:
            return
        stalled = self._lifecycle.stalled_seconds()
        log.error("no step has completed for %.0f s, longer than --health-timeout allows", stalled)
        failure = f"no step of the engine has completed for {stalled:.0f} s"
        if self._service is not None:
            self._service.fail_all(failure)
        self._fail(failure)

    @property
    def is_healthy(self) -> bool:
        """Whether the engine has not failed and completes steps while there is work."""
        return self._lifecycle.is_healthy

    async def close(self) -> bool:
        """End every request and free the engine. False: a step does not end, so the engine still runs."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        has_ended = self._service is None or await self._service.close()
        if self.server_state.tasks and self._lifecycle.failure is None:
            await asyncio.wait(self.server_state.tasks, timeout=FINAL_ERROR_SECONDS)
        return has_ended

    async def start(self) -> None:
        """Load the model and warm it up; from then on `app` answers, here or behind another server."""
        reading = asyncio.create_task(asyncio.to_thread(self._read_tokenizer))
        checkpoint, sized = await asyncio.to_thread(self._plan_engine)
        loading = asyncio.create_task(asyncio.to_thread(self._load_engine, checkpoint, sized))
        try:
            tokenizer = await reading
        except BaseException:
            loading.add_done_callback(_close_loaded)
            raise
        engine = await loading
        self._startup.mark("weights, memory, tokenizer")
        engine.use_tokenizer(tokenizer)
        state = self._make_state(checkpoint, engine, tokenizer, _describe(engine, sized))
        service = self._service = state.service
        self._lifecycle.stalled_seconds = service.stalled_seconds
        self._lifecycle.phase = "warming"
        if self._link is not None:
            self._link.send("phase", "warming")
        await service.start()
        self._startup.mark("warm-up")
        if self._link is not None:
            state.metrics.set_history(self._link.inherited.restarts, self._link.inherited.lost)
        state.metrics.set_startup(self._startup.seconds | {"all": self._startup.total_seconds})
        self._lifecycle.app = make_app(state, self._settings)
        if self._owns_process:
            _freeze_loaded()
        if not self.should_exit:
            self._lifecycle.phase = "ready"
        self._workers.submit(state.compiler.prepare)
        log.info("start-up:\n%s", self._startup.table())

    def _plan_engine(self) -> tuple[Checkpoint, SizedEngine]:
        """Read the headers of the checkpoint and plan the memory."""
        settings = self._settings
        checkpoint = self._open_model(settings.model_dir)
        self._startup.mark("checkpoint headers")
        sized = size_engine(
            settings.model_dir,
            checkpoint.config,
            checkpoint.files,
            settings.engine_args,
            settings.library_path,
            bool(checkpoint.mtp_tensors),
        )
        sized.show()
        if checkpoint.mtp_tensors and not sized.settings.num_speculative_tokens:
            log.info("the checkpoint's MTP layer is not used; --num-speculative-tokens N lets it draft N tokens a step")
        self._startup.mark("memory plan")
        return checkpoint, sized

    def _load_engine(self, checkpoint: Checkpoint, sized: SizedEngine) -> Engine:
        """Load the weights."""
        return Engine(checkpoint, sized.settings, None, self._settings.library_path, log.info)

    def _read_tokenizer(self) -> Tokenizer:
        """Read the tokenizer and prepare what the server needs of it, while the engine loads."""
        tokenizer = Tokenizer(self._settings.model_dir)
        _check_thinking(self._settings, tokenizer)
        _ = tokenizer.longest_token_bytes
        return tokenizer

    def _make_state(
        self, checkpoint: Checkpoint, engine: Engine, tokenizer: Tokenizer, about: Mapping[str, Any]
    ) -> ServerState:
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
            sampling_defaults={
                **checkpoint.generation.sampling(),
                "thinking_closing_text": settings.thinking_closing_text,
            },
            limits=settings.limits,
            service=service,
            compiler=GrammarCompiler(tokenizer, checkpoint.config.vocab_size, checkpoint.eos_token_ids),
            admission=admission,
            metrics=self._metrics,
            outcomes=OutcomeLog() if self._link is None else SupervisedOutcomeLog(self._link),
            workers=self._workers,
            in_flight=RequestsInFlight(),
            about=about,
            responses=ResponseStore(settings.stored_responses),
            allows_special_tokens=settings.allows_special_tokens,
            max_thinking_tokens=settings.max_thinking_tokens,
            repository=settings.repository,
            commit=settings.commit,
        )

    def _count_step(self, summary: StepSummary, outputs: list[StepOutput], gaps: list[float]) -> None:
        self._metrics.observe_step(summary.num_tokens - summary.new_tokens, summary.new_tokens)
        for output in outputs:
            self._metrics.observe_drafts(output.draft_tokens, output.accepted_tokens)
        for gap, count in Counter(gaps).items():
            self._metrics.observe_gap(gap, count)

    def _fail(self, failure: str) -> None:
        """End the server. Every open stream has already got the reason."""
        if self._lifecycle.failure is not None:
            return
        self._lifecycle.fail(failure)
        if self._link is not None:
            self._link.send("failed", failure[:MAX_MESSAGE_CHARS])
        self.config.timeout_graceful_shutdown = FAILED_DRAIN_SECONDS
        self.should_exit = True
        if self._owns_process:
            watchdog = threading.Timer(EXIT_SECONDS, self._exit_now, ["the server does not end after its failure"])
            watchdog.daemon = True
            watchdog.start()

    def _exit_now(self, reason: str) -> NoReturn:
        """End the process although something in it still runs."""
        log.error("%s; the process ends without waiting for it", reason)
        self._end_process(EXIT_FAILED)

    def _end_process(self, code: int) -> NoReturn:
        """End the process at once. A supervisor waits for that, and the interpreter takes half a second to tidy up."""
        self.release()
        if self._link is not None:
            self._link.finish()
        logging.shutdown()
        os._exit(code)


def _close_loaded(loading: asyncio.Task[Engine]) -> None:
    """Free an engine that nobody waits for any more."""
    if not loading.cancelled() and loading.exception() is None:
        loading.result().close()


def _describe(engine: Engine, sized: SizedEngine) -> dict[str, Any]:
    """The engine and its memory, as /stats shows them."""
    settings, stats = sized.settings, engine.stats()
    described = {
        "version": __version__,
        "device": settings.device,
        "device_name": None if sized.plan is None else sized.plan.device_name,
        "kernels": engine.kernels,
        "ranks": settings.tp,
        "expert_layout": settings.expert_layout,
        "max_requests": settings.max_requests,
    }
    rows = [{"name": name, "amount": amount, "remark": remark} for name, amount, remark in sized.rows(stats)]
    return {"engine": described, "memory_plan": rows}


def _check_thinking(settings: ServerSettings, tokenizer: Tokenizer) -> None:
    """Refuse settings of thinking that the model cannot follow."""
    SamplingParams(thinking_closing_text=settings.thinking_closing_text)
    encode_closing(tokenizer, settings.thinking_closing_text)
    if settings.max_thinking_tokens is not None and find_thinking_tokens(tokenizer) is None:
        raise RequestError(
            f"--max-thinking-tokens is {settings.max_thinking_tokens}, but the model in {settings.model_dir} has no "
            f"token {Tag.THINK_END.value!r} to end its thinking; leave the flag out"
        )


def _freeze_loaded() -> None:
    """Exempt everything that is loaded from garbage collection: a full collection stops every stream for 0.1 s.

    The collector still walks through what comes later. Requests leave no cycles, so that this takes no time.
    """
    gc.collect()
    gc.freeze()
