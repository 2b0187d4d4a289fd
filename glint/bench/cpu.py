"""`glint bench cpu`: prefill and decode on this machine, against its measured ceilings and against llama.cpp."""

import argparse
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from glint.bench.llama_peer import LlamaPeer, PeerFigures
from glint.bench.machine import processor_name, refusing_unwritable
from glint.bench.speculation import SpeculationRow, measure_speculation, render_speculation
from glint.checkpoint.config import ModelConfig
from glint.checkpoint.layout import Dtype, Part, Role
from glint.checkpoint.table import Checkpoint, TableEntry, open_checkpoint
from glint.engine.args import EngineArgs
from glint.engine.engine import Engine
from glint.engine.settings import DEFAULT_NUM_SEQS, DEFAULT_PAGE_TOKENS, EngineSettings, token_cache_bytes
from glint.errors import EngineError, RequestError
from glint.sampling import SamplingParams
from glint.terminal import say

BATCHES = (1, 2, 4, 8, 32)
SPECULATION_BATCHES = (1, 8, 32)
PROMPT_OF_DECODE = 64
STEPS_TO_ADMIT = 2 * max(BATCHES)
PEAK_READ_BYTES = 512 << 20
PREFILL_REPEATS = 3
TURNS = 3
ROUTED = (Role.GATE, Role.UP, Role.DOWN)


@dataclass(frozen=True)
class Work:
    """What one step must do: bytes of weights and cache to read, multiply-adds, and E4M3 weights to decode."""

    read_bytes: float
    multiply_adds: float
    fp8_weights: float


@dataclass(frozen=True)
class Ceilings:
    """What all threads reach in this run: reads, multiply-adds, and products of E4M3 weights with one token."""

    read_bytes_per_second: float
    multiply_adds_per_second: float
    fp8_weights_per_second: float

    def least_seconds(self, work: Work, tokens: int) -> dict[str, float]:
        """Seconds that each ceiling alone asks of a step; decoding counts where each weight meets one token."""
        seconds = {
            "read": work.read_bytes / self.read_bytes_per_second,
            "arithmetic": work.multiply_adds / self.multiply_adds_per_second,
        }
        if tokens == 1:
            rest = (work.multiply_adds - work.fp8_weights) / self.multiply_adds_per_second
            seconds["decode"] = work.fp8_weights / self.fp8_weights_per_second + rest
        return seconds


@dataclass(frozen=True)
class Row:
    """One measured line: tokens per second, the work per second, and the share of the ceiling that binds."""

    name: str
    tokens_per_second: float
    bytes_per_second: float
    multiply_adds_per_second: float
    share: float
    limit: str


Figures = TypeVar("Figures", Ceilings, Row)


@dataclass(frozen=True)
class Turn:
    """What one turn of the engine measured."""

    ceilings: Ceilings
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Report:
    """Everything one run measured: medians over the turns; a ratio to the peer is the median of the turns' ratios."""

    model: str
    processor: str
    kernels: str
    threads: int
    ceilings: Ceilings
    rows: tuple[Row, ...]
    peer: PeerFigures | None
    peer_problem: str | None
    peer_ratios: tuple[float, ...] | None = None
    speculation: tuple[SpeculationRow, ...] = ()


def run(chosen: argparse.Namespace, args: EngineArgs) -> int:
    """Measures, prints a table, and writes JSON where asked."""
    checkpoint = open_checkpoint(Path(chosen.model))
    plain = replace(args, num_speculative_tokens=0)
    settings = bench_settings(Path(chosen.model), checkpoint.config, chosen.prompt_tokens, chosen.decode_tokens, plain)
    report = measure_turns(chosen, checkpoint, settings)
    if checkpoint.mtp_tensors and args.num_speculative_tokens:
        rows = measure_speculation(
            checkpoint, Path(chosen.model), args, chosen.engine, SPECULATION_BATCHES, 2 * chosen.decode_tokens
        )
        report = replace(report, speculation=rows)
    print(render(report))
    if report.speculation:
        print("\n" + render_speculation(report.speculation, args.num_speculative_tokens))
    if chosen.json is not None:
        with refusing_unwritable(chosen.json):
            chosen.json.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return 0


def measure_turns(chosen: argparse.Namespace, checkpoint: Checkpoint, settings: EngineSettings) -> Report:
    """Lets the engine and the peer take turns: a machine that is slower at one time is so for both."""
    peer = None
    turns = []
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(checkpoint, settings, None, chosen.engine))
        if chosen.peer is not None:
            sizes = (chosen.prompt_tokens, chosen.decode_tokens, BATCHES)
            peer = stack.enter_context(LlamaPeer(chosen.peer_python, settings.threads, *sizes))
        for turn in range(TURNS):
            say(f"turn {turn + 1} of {TURNS}: ceilings, prefill and decode")
            turns.append(measure_turn(engine, checkpoint, chosen.prompt_tokens, chosen.decode_tokens, turn))
            if peer is not None:
                say(f"turn {turn + 1} of {TURNS}: {chosen.peer}")
                peer.measure_turn()
        kernels = engine.kernels
    figures = None if peer is None else peer.figures()
    return Report(
        model=str(chosen.model),
        processor=processor_name(),
        kernels=kernels,
        threads=settings.threads,
        ceilings=median_of([turn.ceilings for turn in turns]),
        rows=tuple(median_of(rows) for rows in zip(*(turn.rows for turn in turns), strict=True)),
        peer=figures,
        peer_problem=None if peer is None else peer.problem,
        peer_ratios=None if figures is None else peer_ratios(turns, figures),
    )


def measure_turn(engine: Engine, checkpoint: Checkpoint, prompt_tokens: int, decode_tokens: int, turn: int) -> Turn:
    """The ceilings of this moment, a prefill, and decode at every batch size."""
    ceilings = measure_ceilings(engine)
    rows = [measure_prefill(engine, checkpoint, prompt_tokens, ceilings, turn)]
    rows += [measure_decode(engine, checkpoint, batch, decode_tokens, ceilings, turn) for batch in BATCHES]
    return Turn(ceilings, tuple(rows))


def median_of(turns: Sequence[Figures]) -> Figures:
    """The median of every figure; what is no figure comes from the first turn."""
    columns = {field.name: [getattr(turn, field.name) for turn in turns] for field in fields(turns[0])}
    medians = {name: statistics.median(values) for name, values in columns.items() if isinstance(values[0], float)}
    return replace(turns[0], **medians)


def peer_ratios(turns: Sequence[Turn], figures: PeerFigures) -> tuple[float, ...]:
    """For each row the median of the turns' ratios to the peer."""
    ratios = [
        [row.tokens_per_second / speed for row, speed in zip(turn.rows, speeds, strict=True)]
        for turn, speeds in zip(turns, figures.turns, strict=True)
    ]
    return tuple(statistics.median(column) for column in zip(*ratios, strict=True))


def bench_settings(
    folder: Path, config: ModelConfig, prompt_tokens: int, decode_tokens: int, args: EngineArgs
) -> EngineSettings:
    """Settings with room for one prefill, and for all decoding requests from their first prompt to the last step."""
    decode_room = PROMPT_OF_DECODE + STEPS_TO_ADMIT + decode_tokens + 1
    longest = max(prompt_tokens + 1, decode_room)
    if longest > config.max_positions:
        raise RequestError(
            f"--prompt-tokens {prompt_tokens} and --decode-tokens {decode_tokens} need {longest} positions, the model "
            f"knows {config.max_positions}; lower the larger"
        )
    prefill_pages, decode_pages = (room // DEFAULT_PAGE_TOKENS["cpu"] + 1 for room in (prompt_tokens + 1, decode_room))
    return EngineSettings.resolve(
        folder,
        config,
        replace(
            args,
            max_model_len=longest,
            num_pages=max(prefill_pages, (decode_pages + 1) * max(BATCHES)),
            max_step_tokens=max(prompt_tokens, PROMPT_OF_DECODE) + DEFAULT_NUM_SEQS["cpu"],
        ),
    )


def touched_experts(config: ModelConfig, batch: int) -> float:
    """The share of the routed experts that `batch` tokens hit, the mean for uniform routing."""
    return 1.0 - (1.0 - config.experts_per_token / config.num_experts) ** batch if config.num_experts else 0.0


def touched_bytes(tensors: Iterable[TableEntry], config: ModelConfig, batch: int) -> int:
    """Bytes of weights one decode step reads: all but the embedding table, and the experts that `batch` tokens hit.

    Distinct experts are the mean for uniform routing; it is exact where every expert is always taken.
    """
    share = touched_experts(config, batch)
    total = 0.0
    for entry in tensors:
        is_routed = entry.role in ROUTED and entry.expert is not None
        if entry.role != Role.EMBEDDING:
            total += entry.byte_count * (share if is_routed else 1.0)
    return int(total)


def weight_work(tensors: Iterable[TableEntry], config: ModelConfig, tokens: int, logit_rows: int) -> Work:
    """The work of a step's products: `tokens` rows through every layer, `logit_rows` of them through the head.

    A token meets `experts_per_token` of the routed experts.
    """
    entries = [entry for entry in tensors if entry.part == Part.WEIGHT and entry.rows > 1 and entry.cols > 1]
    routed_share = config.experts_per_token / config.num_experts if config.num_experts else 0.0
    touched_share = touched_experts(config, tokens)
    multiply_adds = fp8_weights = 0.0
    for entry in entries:
        if entry.role == Role.EMBEDDING:
            continue
        is_routed = entry.role in ROUTED and entry.expert is not None
        rows = logit_rows if entry.role == Role.LM_HEAD else tokens
        multiply_adds += entry.rows * entry.cols * rows * (routed_share if is_routed else 1.0)
        if entry.dtype == Dtype.F8_E4M3:
            fp8_weights += entry.rows * entry.cols * (touched_share if is_routed else 1.0)
    return Work(touched_bytes(tensors, config, tokens), multiply_adds, fp8_weights)


def step_work(checkpoint: Checkpoint, tokens: int, logit_rows: int, attended: float, cached: float) -> Work:
    """The work of a whole step, whose tokens attend to `attended` positions together, `cached` of them from memory."""
    config = checkpoint.config
    products = weight_work(checkpoint.tensors, config, tokens, logit_rows)
    attention = 2.0 * config.num_layers * config.num_heads * config.head_dim * attended
    return replace(
        products,
        read_bytes=products.read_bytes + cached * token_cache_bytes(config, "cpu"),
        multiply_adds=products.multiply_adds + attention,
    )


def measure_ceilings(engine: Engine) -> Ceilings:
    """What the engine's threads reach on this machine now."""
    arithmetic = engine.measure_arithmetic()
    return Ceilings(
        engine.measure_read(PEAK_READ_BYTES), arithmetic.multiply_adds_per_second, arithmetic.fp8_weights_per_second
    )


def make_row(name: str, tokens: int, seconds: float, work: Work, ceilings: Ceilings) -> Row:
    """The line of a step of `tokens` tokens that took `seconds`, with the ceiling that asks for the most time."""
    limit, least = max(ceilings.least_seconds(work, tokens).items(), key=lambda bound: bound[1])
    return Row(name, tokens / seconds, work.read_bytes / seconds, work.multiply_adds / seconds, least / seconds, limit)


def greedy(count: int) -> SamplingParams:
    """Exactly `count` greedy tokens."""
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def random_prompt(config: ModelConfig, count: int, seed: int) -> list[int]:
    """Tokens that no other prompt of the run shares, so that nothing is found in the prefix cache."""
    generator = np.random.default_rng(seed)
    return [int(token) for token in generator.integers(0, config.vocab_size, count)]


def measure_prefill(
    engine: Engine, checkpoint: Checkpoint, prompt_tokens: int, ceilings: Ceilings, turn: int = 0
) -> Row:
    """One prompt in one step, to its first token; the best of a few."""
    seconds = []
    for repeat in range(turn * PREFILL_REPEATS, (turn + 1) * PREFILL_REPEATS):
        engine.submit(random_prompt(checkpoint.config, prompt_tokens, repeat), greedy(1))
        start = time.perf_counter()
        while engine.has_work:
            engine.step()
        seconds.append(time.perf_counter() - start)
    work = step_work(checkpoint, prompt_tokens, 1, prompt_tokens * (prompt_tokens + 1) / 2, 0)
    return make_row(f"prefill, {prompt_tokens} tokens", prompt_tokens, min(seconds), work, ceilings)


def measure_decode(
    engine: Engine, checkpoint: Checkpoint, batch: int, count: int, ceilings: Ceilings, turn: int = 0
) -> Row:
    """`batch` requests together; the median of `count` steps after every prompt is in."""
    lengths: dict[int, int] = {}
    for index in range(batch):
        prompt = random_prompt(checkpoint.config, PROMPT_OF_DECODE, 1000 * batch + max(BATCHES) * turn + index)
        (request_id,) = engine.submit(prompt, greedy(STEPS_TO_ADMIT + count + 1))
        lengths[request_id] = PROMPT_OF_DECODE
    for _ in range(STEPS_TO_ADMIT):
        for output in engine.step():
            lengths[output.request_id] += len(output.token_ids)
        if min(lengths.values()) > PROMPT_OF_DECODE:
            break
    seconds = [timed_step(engine, batch) for _ in range(count)]
    for request_id in lengths:
        engine.abort(request_id)
    positions = sum(lengths.values()) + batch * count // 2
    work = step_work(checkpoint, batch, batch, positions, positions)
    return make_row(f"decode, {batch} at once", batch, statistics.median(seconds), work, ceilings)


def timed_step(engine: Engine, batch: int) -> float:
    """Seconds of one step, which must bring one token to each of `batch` requests."""
    start = time.perf_counter()
    outputs = engine.step()
    seconds = time.perf_counter() - start
    num_tokens = sum(len(output.token_ids) for output in outputs)
    if num_tokens != batch:
        reasons = (
            ", ".join(sorted({output.failure for output in outputs if output.failure})) or "the page cache is full"
        )
        raise EngineError(f"a step brought {num_tokens} tokens to {batch} requests: {reasons}; measure fewer tokens")
    return seconds


def render(report: Report) -> str:
    """The table a person reads: figures with units, share of the ceiling that binds, and the ratio to the peer."""
    ceilings = report.ceilings
    lines = [
        f"model      {report.model}",
        f"processor  {report.processor}, {report.threads} threads, kernels {report.kernels}",
        f"ceilings   of {report.threads} threads, measured in this run:",
        f"           read        {ceilings.read_bytes_per_second / 1e9:.1f} GB/s",
        f"           arithmetic  {ceilings.multiply_adds_per_second / 1e9:.1f} billion multiply-adds/s",
        f"           decode      {ceilings.fp8_weights_per_second / 1e9:.1f} billion E4M3 weights/s, times one token",
        "",
        f"{'':22}{'tok/s':>10}{'GB/s':>8}{'Gmadd/s':>9}{'share of':>9}  {'limit':10}{'llama.cpp':>12}{'ratio':>8}",
    ]
    for index, row in enumerate(report.rows):
        work = f"{row.bytes_per_second / 1e9:>8.1f}{row.multiply_adds_per_second / 1e9:>9.1f}"
        peer = ratio = "-"
        if report.peer is not None and report.peer_ratios is not None:
            peer = f"{statistics.median(speeds[index] for speeds in report.peer.turns):.1f}"
            ratio = f"{report.peer_ratios[index]:.2f}x"
        bound = f"{row.share:>9.0%}  {row.limit:10}"
        lines.append(f"{row.name:22}{row.tokens_per_second:>10.1f}{work}{bound}{peer:>12}{ratio:>8}")
    if report.peer is not None:
        lines += ["", f"llama.cpp  {report.peer.description}"]
    if report.peer_problem is not None:
        lines += ["", f"llama.cpp  not measured: {report.peer_problem}"]
    return "\n".join(lines)
