"""Engines on small random checkpoints: opening them, and running requests on them step by step."""

import atexit
import ctypes
import random
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from glint.checkpoint.table import Checkpoint, open_checkpoint
from glint.native import abi
from glint.native.library import ItemOutcome, NativeEngine, StepOutcome, choose_library, load_library
from tests.reference.checkpoints import Mtp, Weights, make_checkpoint

SMALL_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 257,
}
VOCAB_SIZE: int = SMALL_SHAPE["vocab_size"]
NEUTRAL_SAMPLING: dict[str, Any] = {"top_p": 1.0, "repetition_penalty": 1.0, "has_logprobs": 1, "num_logprobs": 5}
DEFAULT_OPTIONS: dict[str, int] = {
    "kernels": abi.KERNELS_AUTO,
    "num_threads": 1,
    "num_ranks": 1,
    "row_slices": 1,
    "expert_layout": abi.EXPERT_LAYOUT_TP,
    "page_tokens": 8,
    "num_pages": 512,
    "max_step_tokens": 4096,
    "max_step_items": 64,
    "max_requests": 64,
    "max_context_tokens": 2048,
}
_MODEL_FIELDS = tuple(name for name, *_ in abi.Model._fields_ if name != "struct_bytes")
_FOLDER = tempfile.TemporaryDirectory(prefix="glint-small-")
atexit.register(_FOLDER.cleanup)


@cache
def small_model(weights: Weights = "fp8_channel", mtp: Mtp | None = None) -> Checkpoint:
    """The random checkpoint that most tests run: one dense layer, two of eight experts, 257 tokens."""
    folder = Path(_FOLDER.name) / f"{weights} {mtp}"
    return open_checkpoint(make_checkpoint(folder, "glm47", weights, mtp=mtp, **SMALL_SHAPE))


def engine_options(checkpoint: Checkpoint, **changes: int) -> abi.EngineOptions:
    """Options of an engine on the checkpoint; the struct keeps alive what it points to."""
    model = abi.sized(abi.Model, **{name: getattr(checkpoint.config, name) for name in _MODEL_FIELDS})
    files = (abi.File * len(checkpoint.files))(
        *(abi.sized(abi.File, path=bytes(file.path), byte_count=file.byte_count) for file in checkpoint.files)
    )
    return abi.sized(
        abi.EngineOptions,
        **(DEFAULT_OPTIONS | changes),
        file_count=len(files),
        model=ctypes.pointer(model),
        files=files,
    )


def open_engine(
    checkpoint: Checkpoint | None = None, library: ctypes.CDLL | None = None, **changes: int
) -> NativeEngine:
    """An engine on the checkpoint, the small FP8 one by default, with changed options."""
    chosen = small_model() if checkpoint is None else checkpoint
    loaded = load_library(choose_library("cpu")) if library is None else library
    options = engine_options(chosen, **changes)
    return NativeEngine(loaded, options, chosen.tensor_array(has_mtp=options.max_draft_tokens > 0))


@dataclass(frozen=True)
class Ask:
    """One request: what differs from a greedy one stands in `sampling`, by the field names of the header."""

    prompt: tuple[int, ...]
    max_new_tokens: int = 8
    sampling: tuple[tuple[str, Any], ...] = ()
    stop_tokens: tuple[int, ...] = ()
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    cache_salt: int = 0


def make_ask(prompt: Iterable[int], max_new_tokens: int = 8, **sampling: Any) -> Ask:
    """A request with the given sampling fields."""
    return Ask(tuple(prompt), max_new_tokens, tuple(sorted(sampling.items())))


def int_array(values: Sequence[int]) -> Any:
    """The values as a C array of 32-bit integers."""
    return (ctypes.c_int32 * len(values))(*values)


def native_sampling(changes: Mapping[str, Any]) -> abi.Sampling:
    """Sampling with the given fields changed from greedy with five log-probabilities."""
    return abi.sized(abi.Sampling, **(NEUTRAL_SAMPLING | dict(changes)))


def native_request(ask: Ask) -> abi.Request:
    """The request as the library takes it; the struct keeps alive what it points to."""
    return abi.sized(
        abi.Request,
        prompt_count=len(ask.prompt),
        prompt_tokens=int_array(ask.prompt),
        max_new_tokens=ask.max_new_tokens,
        stop_token_count=len(ask.stop_tokens),
        stop_tokens=int_array(ask.stop_tokens),
        stop_sequence_tokens=int_array([token for sequence in ask.stop_sequences for token in sequence]),
        stop_sequence_lengths=int_array([len(sequence) for sequence in ask.stop_sequences]),
        stop_sequence_count=len(ask.stop_sequences),
        cache_salt=ask.cache_salt,
        sampling=ctypes.pointer(native_sampling(dict(ask.sampling))),
    )


@dataclass
class Answer:
    """What came out for a request. Two answers are equal when tokens, log-probabilities and the end are bitwise so.

    `logprobs` has, per absolute position, the pairs of token and log-probability in the order of the engine.
    """

    prompt_count: int
    tokens: list[int] = field(default_factory=list)
    logprobs: dict[int, tuple[tuple[int, float], ...]] = field(default_factory=dict)
    finish_reason: int = abi.FINISH_NONE
    failure: int = abi.FAILURE_NONE
    cached_tokens: int = field(default=0, compare=False)

    def without_prompt_logprobs(self) -> "Answer":
        """The same answer as if prompt log-probabilities had not been asked for."""
        kept = {position: entry for position, entry in self.logprobs.items() if position >= self.prompt_count}
        return Answer(self.prompt_count, self.tokens, kept, self.finish_reason, self.failure)

    def take_in(self, item: ItemOutcome) -> None:
        """Add what one step brought; nothing may come after the end, and no position twice."""
        assert self.finish_reason == abi.FINISH_NONE or not item.tokens
        assert not self.logprobs.keys() & item.logprobs.keys()
        self.tokens += item.tokens
        self.logprobs |= {position: tuple(entry.items()) for position, entry in item.logprobs.items()}
        self.cached_tokens = item.cached_tokens
        if item.finish_reason != abi.FINISH_NONE:
            self.finish_reason = item.finish_reason
            self.failure = item.failure


class Session:
    """Requests of one engine and their answers so far, by request id. Up to two steps may be in flight."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        self.answers: dict[int, Answer] = {}
        self.tickets: deque[abi.Ticket] = deque()

    @property
    def running(self) -> list[int]:
        """Ids of the requests that have not ended, in the order of their coming."""
        return [request_id for request_id, answer in self.answers.items() if answer.finish_reason == abi.FINISH_NONE]

    def add(self, ask: Ask) -> int:
        """Hand a request to the engine."""
        request_id = self.engine.add_request(native_request(ask))
        self.answers[request_id] = Answer(len(ask.prompt))
        return request_id

    def free(self, request_id: int) -> Answer:
        """Take a request from the engine and give its answer."""
        self.engine.free_request(request_id)
        return self.answers.pop(request_id)

    def submit(self, items: Sequence[tuple[int, int]], drafts: Sequence[int] = ()) -> None:
        """Start a step of (request id, tokens to advance) pairs and its sampling."""
        ticket = self.engine.submit_step(items, drafts)
        self.engine.sample_step(ticket)
        self.tickets.append(ticket)

    def collect(self) -> StepOutcome:
        """Take in the oldest step in flight."""
        outcome = self.engine.collect_step(self.tickets.popleft())
        for item in outcome.items:
            if item.request_id in self.answers:
                self.answers[item.request_id].take_in(item)
        return outcome

    def step(self, items: Sequence[tuple[int, int]], drafts: Sequence[int] = ()) -> StepOutcome:
        """Run one step from submit to collect."""
        self.submit(items, drafts)
        return self.collect()

    def run(self, chunk: int = 2048) -> None:
        """Run all requests to their end, at most `chunk` tokens of each per step."""
        while self.running:
            self.step([(request_id, chunk) for request_id in self.running])

    def run_overlapped(self, chunk: int = 2048) -> None:
        """Run all requests to their end with a second step submitted before the first is collected."""
        while self.running:
            self.submit([(request_id, chunk) for request_id in self.running])
            if len(self.tickets) == abi.MAX_STEPS_IN_FLIGHT:
                self.collect()
        while self.tickets:
            self.collect()


def run_at_random(session: Session, waiting: list[Ask], source: random.Random) -> dict[int, Ask]:
    """Run requests to their end in random steps: batch, order, chunks, preemption, overlap and coming are drawn."""
    owners: dict[int, Ask] = {}
    while waiting or session.running or session.tickets:
        while waiting and (not session.running or source.random() < 0.5):
            ask = waiting.pop()
            owners[session.add(ask)] = ask
        if session.tickets and (len(session.tickets) == 2 or source.random() < 0.6 or not session.running):
            session.collect()
            continue
        if not session.tickets and source.random() < 0.15:
            session.engine.release_pages(source.choice(session.running))
        chosen = source.sample(session.running, source.randint(1, len(session.running)))
        session.submit([(request_id, source.choice((1, 1, 3, 8, 17, 64))) for request_id in chosen])
    return owners


def answer_all(engine: NativeEngine, asks: Sequence[Ask], chunk: int = 2048) -> list[Answer]:
    """Answers to requests that run together on the engine, which forgets them afterwards."""
    session = Session(engine)
    ids = [session.add(ask) for ask in asks]
    session.run(chunk)
    return [session.free(request_id) for request_id in ids]


@cache
def answer_alone(ask: Ask, weights: Weights = "fp8_channel", **changes: int) -> Answer:
    """The answer of a fresh engine that does nothing else, prompt in one piece: what every other way must equal."""
    with open_engine(small_model(weights), **changes) as engine:
        (answer,) = answer_all(engine, [ask])
    return answer
