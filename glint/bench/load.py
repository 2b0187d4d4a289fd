"""Puts a load on an OpenAI-compatible server over HTTP and keeps its answers.

With a duration the load is a closed loop: as many requests as the concurrency, each followed by the next, until the
time is over. What is then in flight is cancelled: it does not count as complete and gives no latencies, but the tokens
that arrived within the time count for the throughput. Warm-up requests are over before the time starts.
"""

import asyncio
import json
import random
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Literal, TypeVar

from glint.bench.prompts import (
    OPENING,
    Encode,
    PromptKind,
    PromptMaker,
    encode_by_server,
    encode_locally,
    read_questions,
)
from glint.bench.report import LoadReport, Measurement, ServerCounters, summarise
from glint.bench.stream import Endpoint, Link, Reply, StreamedAnswer, connection_problem, error_message
from glint.errors import RequestError

Route = Literal["completions", "chat"]
PATHS: dict[Route, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
SECONDS_AFTER_FAILURE = 0.2
FAILURES_TO_GIVE_UP = 3
Result = TypeVar("Result")


@dataclass(frozen=True)
class LoadSettings:
    """One load: where, how many at once, for how long or how many, and of which lengths in tokens.

    Either `duration_seconds` or `num_prompts` is given. `request_rate` is in requests per second, None for no limit
    but the concurrency. `label` numbers the run, so that another run of the same seed has other prompts. Questions have
    lengths of their own: `prompt_tokens` is 0 then, and `output_tokens` the most of an answer.
    """

    base_url: str
    api_key: str | None = None
    model: str | None = None
    endpoint: Route = "completions"
    concurrency: int = 64
    duration_seconds: float | None = 60.0
    num_prompts: int | None = None
    request_rate: float | None = None
    prompt_tokens: int = 256
    output_tokens: int = 256
    prompts: PromptKind = "random"
    tokenizer: Path | None = None
    seed: int = 0
    label: str = ""
    warmup: int = 1
    temperature: float = 0.0
    ignores_eos: bool = True
    percentiles: tuple[float, ...] = (50.0, 90.0, 99.0)
    goodput: tuple[tuple[str, float], ...] = ()
    timeout_seconds: float = 600.0

    @property
    def lengths(self) -> str:
        """The lengths of the requests in words."""
        if self.prompts == "questions":
            return f"questions, answers of up to {self.output_tokens} tokens"
        return f"{self.prompt_tokens} + {self.output_tokens} tokens each"


@dataclass(frozen=True)
class Workload:
    """The requests for one server: the model's name there, and bodies by label."""

    model: str
    make_body: Callable[[str], bytes]


def run_load(settings: LoadSettings) -> LoadReport:
    """Runs one load on the server at `settings.base_url` and gives its figures.

    Raises RequestError if there is no server, no model, or no way to make prompts; failed requests are counted and
    named in the report.
    """
    return run_in_loop(measure(settings))


def run_in_loop(work: Awaitable[Result]) -> Result:
    """Runs to the end in an event loop of its own, uvloop's where it is installed."""

    async def wait() -> Result:
        return await work

    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(wait())
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(wait())


async def measure(settings: LoadSettings) -> LoadReport:
    """Prepares, warms up, loads and sums up."""
    endpoint = Endpoint.parse(settings.base_url, settings.api_key)
    control = Link(endpoint)
    try:
        try:
            workload = await prepare(settings, control)
        except OSError as problem:
            raise RequestError(
                f"{settings.base_url} does not answer ({connection_problem(problem)}); start the server, or name it "
                "with --base-url"
            ) from problem
        await warm_up(settings, endpoint, workload)
        before = await read_counters(control)
        load = Load(settings, endpoint, workload)
        await load.run()
        after = await read_counters(control)
    finally:
        control.close()
    measured = load.measurement(workload.model, None if before is None or after is None else after.since(before))
    return summarise(measured, settings.percentiles, settings.goodput)


async def prepare(settings: LoadSettings, control: Link) -> Workload:
    """Asks for the model's name and makes what the prompts are taken from."""
    model = settings.model or await first_model(control)
    if settings.prompts == "questions":
        return prepare_questions(settings, model)
    if settings.tokenizer is not None:
        encode: Encode | None = encode_locally(settings.tokenizer)
    else:
        encode = await encode_by_server(control, model)
    if encode is None:
        raise RequestError(
            f"{settings.base_url} has no /tokenize, so that prompts of exactly {settings.prompt_tokens} tokens cannot "
            "be made; give the model folder with --tokenizer DIR"
        )
    is_chat = settings.endpoint == "chat"
    maker = await PromptMaker.prepare(settings.prompts, settings.seed, encode, needs_words=is_chat)
    if is_chat:
        return await prepare_chat(settings, control, model, maker)
    fields = request_fields(settings, model)

    def make_body(label: str) -> bytes:
        return json.dumps({**fields, "prompt": maker.token_ids(label, settings.prompt_tokens)}).encode()

    return Workload(model, make_body)


def prepare_questions(settings: LoadSettings, model: str) -> Workload:
    """Short questions in chat, drawn by seed and label.

    The model's own repetition penalty is off, so that the answers are greedy ones.
    """
    questions = read_questions()
    fields = {**request_fields(settings, model), "repetition_penalty": 1.0}

    def make_body(label: str) -> bytes:
        draw = random.Random(f"{settings.seed}/{label}")
        return json.dumps({**fields, "messages": messages(draw.choice(questions))}).encode()

    return Workload(model, make_body)


async def prepare_chat(settings: LoadSettings, control: Link, model: str, maker: PromptMaker) -> Workload:
    """Finds how many tokens the chat template adds, by one short request, and makes messages that much shorter."""
    probe = {"model": model, "messages": messages(OPENING), "max_tokens": 1, "temperature": 0.0}
    reply = await control.call("POST", PATHS["chat"], probe)
    document = reply.document()
    if reply.status != 200 or not isinstance(document, dict) or not isinstance(document.get("usage"), dict):
        raise RequestError(
            f"a chat of one token at {settings.base_url} was answered {reply.status}: {error_message(reply.body)}; "
            "check --model, or use --endpoint completions"
        )
    length = settings.prompt_tokens - int(document["usage"]["prompt_tokens"])
    if length < 1:
        raise RequestError(
            f"--prompt-len {settings.prompt_tokens} leaves no room: the chat template alone takes "
            f"{settings.prompt_tokens - length} tokens; give more"
        )
    fields = request_fields(settings, model)

    def make_body(label: str) -> bytes:
        return json.dumps({**fields, "messages": messages(maker.text(label, length))}).encode()

    return Workload(model, make_body)


def messages(text: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": text}]


def request_fields(settings: LoadSettings, model: str) -> dict[str, Any]:
    """The fields that all requests of a load share."""
    fields: dict[str, Any] = {
        "model": model,
        "max_tokens": settings.output_tokens,
        "temperature": settings.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return {**fields, "ignore_eos": True} if settings.ignores_eos else fields


async def first_model(control: Link) -> str:
    """The first name in the server's list of models."""
    reply = await control.call("GET", "/v1/models")
    document = reply.document()
    try:
        return str(document["data"][0]["id"])
    except (TypeError, KeyError, IndexError):
        raise RequestError(
            f"/v1/models answered {reply.status}: {error_message(reply.body)}; give the name with --model, and the key "
            "with --api-key if the server asks for one"
        ) from None


async def read_counters(control: Link) -> ServerCounters | None:
    """The counters of a glint server's /stats, None where there are none."""
    try:
        reply: Reply = await control.call("GET", "/stats")
    except OSError:
        return None
    return ServerCounters.read(reply.document()) if reply.status == 200 else None


async def warm_up(settings: LoadSettings, endpoint: Endpoint, workload: Workload) -> None:
    """Sends the warm-up requests, as many at once as the load will have, and forgets them.

    A warm-up request that fails is named on standard error; the load that follows counts its own failures.
    """
    if settings.warmup == 0:
        return
    limited = replace(
        settings,
        concurrency=min(settings.concurrency, settings.warmup),
        duration_seconds=None,
        num_prompts=settings.warmup,
        request_rate=None,
        label=f"{settings.label}/warm-up",
    )
    load = Load(limited, endpoint, workload)
    await load.run()
    failures = [answer.failure for answer in load.answers if answer.failure is not None]
    if failures:
        print(f"glint: {len(failures)} warm-up requests failed: {failures[0]}", file=sys.stderr)


class Load:
    """Keeps requests in flight, one per worker, and holds every answer from its beginning."""

    def __init__(self, settings: LoadSettings, endpoint: Endpoint, workload: Workload) -> None:
        self.answers: list[StreamedAnswer] = []
        self._settings = settings
        self._endpoint = endpoint
        self._workload = workload
        self._draw = random.Random(settings.seed)
        self._failures_in_a_row = 0
        self._has_given_up = False
        self._seconds = 0.0
        self._cpu_seconds = 0.0

    async def run(self) -> None:
        """Runs until the time is over or all prompts are answered, or nothing but failures comes back."""
        count = self._settings.concurrency
        links = [Link(self._endpoint) for _ in range(count)]
        cpu_start = process_time()
        self._start = self._next_arrival = perf_counter()
        workers = [asyncio.create_task(self._work(link)) for link in links]
        try:
            await asyncio.wait(workers, timeout=self._settings.duration_seconds)
            self._seconds = perf_counter() - self._start
        finally:
            for link in links:
                link.close()
            for worker in workers:
                worker.cancel()
        self._cpu_seconds = process_time() - cpu_start
        for outcome in await asyncio.gather(*workers, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    async def _work(self, link: Link) -> None:
        settings = self._settings
        path = PATHS[settings.endpoint]
        while not self._has_given_up:
            if settings.num_prompts is not None and len(self.answers) >= settings.num_prompts:
                return
            answer = StreamedAnswer()
            body = self._workload.make_body(f"{settings.label}/{len(self.answers)}")
            self.answers.append(answer)
            await self._wait_for_arrival()
            try:
                async with asyncio.timeout(settings.timeout_seconds):
                    await link.stream(path, body, answer)
            except TimeoutError:
                answer.failure = f"no complete answer within {settings.timeout_seconds:g} s"
                link.close()
            await self._note_outcome(answer)

    async def _wait_for_arrival(self) -> None:
        if self._settings.request_rate is None:
            return
        self._next_arrival += self._draw.expovariate(self._settings.request_rate)
        await asyncio.sleep(max(0.0, self._next_arrival - perf_counter()))

    async def _note_outcome(self, answer: StreamedAnswer) -> None:
        if answer.failure is None:
            self._failures_in_a_row = 0
            return
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= FAILURES_TO_GIVE_UP * self._settings.concurrency:
            self._has_given_up = True
        await asyncio.sleep(SECONDS_AFTER_FAILURE)

    def measurement(self, model: str, counters: ServerCounters | None) -> Measurement:
        """The measurement, for the report."""
        settings = self._settings
        return Measurement(
            base_url=settings.base_url,
            model=model,
            endpoint=settings.endpoint,
            prompts=settings.prompts,
            concurrency=settings.concurrency,
            request_rate=settings.request_rate,
            prompt_tokens=settings.prompt_tokens,
            output_tokens=settings.output_tokens,
            start=self._start,
            seconds=self._seconds,
            answers=tuple(answer for answer in self.answers if answer.started is not None or answer.failure),
            has_given_up=self._has_given_up,
            client_cpu_seconds=self._cpu_seconds,
            server=counters,
        )
