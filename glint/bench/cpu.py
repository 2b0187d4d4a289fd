"""`glint bench cpu`: prefill and decode on this machine, against its measured peak bandwidth and against llama.cpp."""

import argparse
import json
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from glint.bench.llama_peer import PeerFigures, measure_llama
from glint.bench.machine import processor_name, refusing_unwritable
from glint.checkpoint.config import ModelConfig
from glint.checkpoint.layout import Role
from glint.checkpoint.table import TableEntry, open_checkpoint
from glint.engine.args import EngineArgs
from glint.engine.engine import Engine
from glint.engine.settings import DEFAULT_NUM_SEQS, DEFAULT_PAGE_TOKENS, EngineSettings, token_cache_bytes
from glint.errors import EngineError, RequestError
from glint.sampling import SamplingParams

BATCHES = (1, 8, 32)
PROMPT_OF_DECODE = 64
STEPS_TO_ADMIT = 2 * max(BATCHES)
PEAK_READ_BYTES = 512 << 20
PREFILL_REPEATS = 3
ROUTED = (Role.GATE, Role.UP, Role.DOWN)


@dataclass(frozen=True)
class Row:
    """One measured line: tokens per second, and bytes of weights and cache read per second where that limits."""

    name: str
    tokens_per_second: float
    bytes_per_second: float | None


@dataclass(frozen=True)
class Report:
    """Everything one run measured."""

    model: str
    processor: str
    kernels: str
    threads: int
    peak_bytes_per_second: float
    rows: tuple[Row, ...]
    peer: PeerFigures | None
    peer_problem: str | None


def run(chosen: argparse.Namespace, args: EngineArgs) -> int:
    """Measures, prints a table, and writes JSON where asked; the engine first, then the peer on the idle machine."""
    checkpoint = open_checkpoint(Path(chosen.model))
    settings = bench_settings(Path(chosen.model), checkpoint.config, chosen.prompt_tokens, chosen.decode_tokens, args)
    with Engine(checkpoint, settings, None, chosen.engine) as engine:
        peak = engine.measure_read(PEAK_READ_BYTES)
        rows = [measure_prefill(engine, checkpoint.config, chosen.prompt_tokens)]
        for batch in BATCHES:
            touched = touched_bytes(checkpoint.tensors, checkpoint.config, batch)
            rows.append(measure_decode(engine, checkpoint.config, batch, chosen.decode_tokens, touched))
        kernels = engine.kernels
    peer, problem = None, None
    if chosen.peer is not None:
        peer, problem = measure_llama(
            chosen.peer_python, settings.threads, chosen.prompt_tokens, chosen.decode_tokens, BATCHES
        )
    report = Report(
        model=str(chosen.model),
        processor=processor_name(),
        kernels=kernels,
        threads=settings.threads,
        peak_bytes_per_second=peak,
        rows=tuple(rows),
        peer=peer,
        peer_problem=problem,
    )
    print(render(report))
    if chosen.json is not None:
        with refusing_unwritable(chosen.json):
            chosen.json.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return 0


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


def touched_bytes(tensors: Iterable[TableEntry], config: ModelConfig, batch: int) -> int:
    """Bytes of weights one decode step reads: all but the embedding table, and the experts that `batch` tokens hit.

    Distinct experts are the mean for uniform routing; it is exact where every expert is always taken.
    """
    share = 1.0 - (1.0 - config.experts_per_token / config.num_experts) ** batch if config.num_experts else 0.0
    total = 0.0
    for entry in tensors:
        is_routed = entry.role in ROUTED and entry.expert is not None
        if entry.role != Role.EMBEDDING:
            total += entry.byte_count * (share if is_routed else 1.0)
    return int(total)


def greedy(count: int) -> SamplingParams:
    """Exactly `count` greedy tokens."""
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)


def random_prompt(config: ModelConfig, count: int, seed: int) -> list[int]:
    """Tokens that no other prompt of the run shares, so that nothing is found in the prefix cache."""
    generator = np.random.default_rng(seed)
    return [int(token) for token in generator.integers(0, config.vocab_size, count)]


def measure_prefill(engine: Engine, config: ModelConfig, prompt_tokens: int) -> Row:
    """One prompt in one step, to its first token; the best of a few."""
    seconds = []
    for repeat in range(PREFILL_REPEATS):
        engine.submit(random_prompt(config, prompt_tokens, repeat), greedy(1))
        start = time.perf_counter()
        while engine.has_work:
            engine.step()
        seconds.append(time.perf_counter() - start)
    return Row(f"prefill, {prompt_tokens} tokens", prompt_tokens / min(seconds), None)


def measure_decode(engine: Engine, config: ModelConfig, batch: int, count: int, weight_bytes: int) -> Row:
    """`batch` requests together; the median of `count` steps after every prompt is in."""
    lengths: dict[int, int] = {}
    for index in range(batch):
        prompt = random_prompt(config, PROMPT_OF_DECODE, 1000 * batch + index)
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
    step = statistics.median(seconds)
    cache_bytes = (sum(lengths.values()) + batch * count // 2) * token_cache_bytes(config, "cpu")
    return Row(f"decode, {batch} at once", batch / step, (weight_bytes + cache_bytes) / step)


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
    """The table a person reads: figures with units, share of the peak bandwidth, and the ratio to the peer."""
    peak = report.peak_bytes_per_second
    lines = [
        f"model      {report.model}",
        f"processor  {report.processor}, {report.threads} threads, kernels {report.kernels}",
        f"peak read  {peak / 1e9:.1f} GB/s read by {report.threads} threads, measured in this run",
        "",
        f"{'':22}{'tok/s':>10}{'GB/s':>8}{'of peak':>12}{'llama.cpp':>12}{'ratio':>8}",
    ]
    for index, row in enumerate(report.rows):
        speed = f"{row.tokens_per_second:.1f}"
        rate = "-" if row.bytes_per_second is None else f"{row.bytes_per_second / 1e9:.1f}"
        share = "-" if row.bytes_per_second is None else f"{row.bytes_per_second / peak:.0%}"
        other = None if report.peer is None else report.peer.tokens_per_second[index]
        peer = "-" if other is None else f"{other:.1f}"
        ratio = "-" if other is None else f"{row.tokens_per_second / other:.2f}x"
        lines.append(f"{row.name:22}{speed:>10}{rate:>8}{share:>12}{peer:>12}{ratio:>8}")
    if report.peer is not None:
        lines += ["", f"llama.cpp  {report.peer.description}"]
    if report.peer_problem is not None:
        lines += ["", f"llama.cpp  not measured: {report.peer_problem}"]
    return "\n".join(lines)
