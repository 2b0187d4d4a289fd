"""`glint bench rank`: one rank of a model at its true shapes on one GPU, with synthetic weights."""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from glint.bench.machine import check_writable
from glint.bench.rank_report import DecodeRow, PrefillRow, RankReport, as_json, project, show, write_json
from glint.bench.rank_shapes import BF16_BYTES, RankShape, find_model, shape_rank
from glint.bench.rank_speculation import (
    Speculation,
    SpeculationRow,
    check_speculation,
    show_speculation,
    speculation_json,
)
from glint.bench.rank_target import TargetGpu, project_target, show_target, target_json
from glint.bench.synthetic import SYNTHETIC_SEED
from glint.checkpoint.table import NATIVE_TENSOR
from glint.engine.loading import shown_loading
from glint.engine.memory_plan import plan_gpu
from glint.engine.native_options import kernels_name, native_options
from glint.engine.request import ActiveRequest
from glint.engine.settings import DEFAULT_PAGE_TOKENS, DEFAULT_STEP_TOKENS, EngineSettings
from glint.errors import EngineError, RequestError
from glint.flags import engine_args
from glint.native import abi
from glint.native.library import NativeEngine, StepOutcome, load_progress, open_library
from glint.sampling import SamplingParams
from glint.terminal import say

PEAK_READ_BYTES = 2**30
PREFILL_REPEATS = 5
DecodeShape = tuple[int, int]


def run(chosen: argparse.Namespace) -> int:
    """Measures every row that fits, prints the tables, and writes JSON where asked."""
    if chosen.json is not None:
        check_writable(chosen.json)
    shape = shape_rank(find_model(chosen.model), chosen.tp, chosen.expert_layout)
    check_speculation(chosen.speculative, chosen.acceptance, shape, chosen.model)
    rows, left_out = fit_rows(chosen, shape)
    settings = rank_settings(chosen, shape, rows)
    plain = replace(settings, num_speculative_tokens=0)
    with open_rank(chosen, shape, plain) as native:
        peak = native.measure_read(PEAK_READ_BYTES)
        bench = RankBench(native, shape.model.vocab_size, settings.max_step_tokens)
        decodes = []
        for batch, context in rows:
            say(f"decode of {batch} requests at context {context}")
            decodes.append(bench.measure_decode(batch, context, chosen.warm_up, chosen.steps, shape.num_moe_layers))
        stats = native.stats()
    speculation = measure_speculation(chosen, shape, settings, decodes) if chosen.speculative else None
    prefills = measure_prefills(chosen, shape, plain)
    report = RankReport(
        model=chosen.model,
        shape=shape,
        device=chosen.device,
        kernels=kernels_name(stats.kernels),
        weight_bytes=stats.weight_bytes_placed,
        peak_bytes_per_second=peak,
        decodes=tuple(decodes),
        prefills=prefills,
        all_reduce_us=chosen.all_reduce_us,
        collective_gbs=chosen.collective_gbs,
        page_element_bytes=1 if settings.kv_cache_dtype == "fp8" else BF16_BYTES,
        left_out=left_out,
    )
    load = (chosen.requests, chosen.prompt_len, chosen.gen_len)
    projection = project(report, *load)
    target = target_gpu(chosen)
    on_target = project_target(report, target, *load)
    show(report, projection)
    show_target(report, target, on_target)
    if speculation is not None:
        show_speculation(speculation)
    if chosen.json is not None:
        document = as_json(report, projection) | {f"projected_{target.name.lower()}": target_json(target, on_target)}
        document["speculation"] = None if speculation is None else speculation_json(speculation)
        write_json(chosen.json, document)
    return 0


def measure_speculation(
    chosen: argparse.Namespace, shape: RankShape, settings: EngineSettings, decodes: Sequence[DecodeRow]
) -> Speculation:
    """Measure every decode row once more, on an engine with the MTP layer.

    The rows without drafts come from an engine without it, for on a GPU the layer changes which kernels a step takes.
    """
    with open_rank(chosen, shape, settings) as native:
        bench = RankBench(native, shape.model.vocab_size, settings.max_step_tokens)
        rows = []
        for plain in decodes:
            say(f"decode of {plain.batch} requests at context {plain.context} with {chosen.speculative} drafts each")
            rows.append(bench.measure_speculation(plain, chosen.warm_up, chosen.speculative))
    return Speculation(chosen.speculative, chosen.acceptance, tuple(rows))


def measure_prefills(chosen: argparse.Namespace, shape: RankShape, settings: EngineSettings) -> tuple[PrefillRow, ...]:
    """Measure every prefill row, on an engine that shards rows as a rank of several does."""
    with open_rank(chosen, shape, settings, shards_rows=True) as native:
        bench = RankBench(native, shape.model.vocab_size, settings.max_step_tokens)
        prefills = []
        for tokens in chosen.prefill:
            for cached in chosen.cached:
                say(f"prefill of {tokens} tokens over {cached}")
                prefills.append(bench.measure_prefill(tokens, cached))
    return tuple(prefills)


def target_gpu(chosen: argparse.Namespace) -> TargetGpu:
    """The GPU that is not at hand, as the command line assumes it."""
    return TargetGpu(
        name="B200",
        terabytes_per_second=chosen.b200_tbs,
        product_tflops=chosen.b200_tflops,
        all_reduce_us=chosen.b200_all_reduce_us,
        collective_gbs=chosen.b200_collective_gbs,
        measured_product_tflops=chosen.mma_tflops,
    )


def fit_rows(chosen: argparse.Namespace, shape: RankShape) -> tuple[list[DecodeShape], tuple[str, ...]]:
    """The decode rows whose pages fit beside the weights, and in a sentence each those that do not.

    A whole model leaves less room for pages than one of eight ranks does. Without any row that fits it is refused.
    """
    asked = [(batch, context) for context in chosen.context for batch in chosen.batch]
    settings = rank_settings(chosen, shape, asked)
    library = open_library(settings.device, chosen.engine)
    plan = plan_gpu(library, settings, rank_options(shape, settings), chosen.gpu_memory_utilization)
    pages = {row: row_pages(chosen, *row) for row in asked}
    rows = [row for row in asked if pages[row] <= plan.fitting_pages]
    if not rows:
        raise plan.refuse(
            f"the rank and the {min(pages.values()):,} pages of the smallest --batch and --context do not fit:",
            "lower --batch or --context",
        )
    left_out = tuple(
        f"decode of {batch} at {context:,} needs {pages[batch, context]:,} pages, {plan.fitting_pages:,} fit"
        for batch, context in asked
        if (batch, context) not in rows
    )
    for sentence in left_out:
        say(f"{sentence}: left out")
    return rows, left_out


def new_tokens(chosen: argparse.Namespace) -> int:
    """Tokens that a decode row adds to its prompts at most: with drafts, where all are right."""
    return most_new_tokens(chosen.warm_up, chosen.steps, chosen.speculative)


def most_new_tokens(warm_up: int, steps: int, num_drafts: int) -> int:
    """Room behind a prompt for all steps of a decode row, were all drafts right, and for the drafts of the last."""
    return (warm_up + steps + 3) * (1 + num_drafts)


def row_pages(chosen: argparse.Namespace, batch: int, context: int) -> int:
    """Pages that a decode row holds at its end."""
    return batch * (-(-(context + new_tokens(chosen)) // DEFAULT_PAGE_TOKENS[chosen.device]) + 1)


def rank_settings(chosen: argparse.Namespace, shape: RankShape, rows: Sequence[DecodeShape]) -> EngineSettings:
    """Settings with room for the largest of the rows, and steps as long as the longest prefill."""
    if chosen.device == "cpu":
        raise RequestError(
            "--device cpu cannot measure a rank: random weights are made on a GPU only; use --device cuda"
        )
    longest_row = max(context for _, context in rows) + new_tokens(chosen)
    longest = max(longest_row, max(chosen.prefill) + max(chosen.cached) + 1)
    if longest > shape.model.max_positions:
        raise RequestError(
            f"--context, --cached and --prefill need up to {longest} positions, the model knows "
            f"{shape.model.max_positions}; lower the largest"
        )
    decode_pages = max(row_pages(chosen, *row) for row in rows)
    most = max(batch for batch, _ in rows)
    return EngineSettings.resolve(
        Path(chosen.model),
        shape.model,
        replace(
            engine_args(chosen),
            tp=1,
            num_pages=max(decode_pages, -(-longest // DEFAULT_PAGE_TOKENS[chosen.device]) + 1),
            max_step_tokens=max(DEFAULT_STEP_TOKENS[chosen.device], *chosen.prefill, most * (1 + chosen.speculative)),
            num_speculative_tokens=chosen.speculative,
            max_num_seqs=most,
            max_model_len=longest,
        ),
    )


def rank_options(shape: RankShape, settings: EngineSettings, shards_rows: bool = False) -> abi.EngineOptions:
    """The options of the engine of one rank with synthetic weights."""
    options = native_options(settings, shape.model, ())
    options.synthetic_seed = SYNTHETIC_SEED
    options.local_experts = shape.local_experts if shape.expert_layout == "ep" else 0
    options.emulated_ranks = shape.tp if shards_rows and shape.tp > 1 else 0
    return options


def open_rank(
    chosen: argparse.Namespace, shape: RankShape, settings: EngineSettings, shards_rows: bool = False
) -> NativeEngine:
    """Make the engine of one rank with synthetic weights, having checked and shown that it fits.

    One that shards rows norms and routes its share of a long step, and takes copies of its own rows for the others'.
    That makes tokens alike, so the prompts of decode rows are computed by one that does not.
    """
    library = open_library(settings.device, chosen.engine)
    options = rank_options(shape, settings, shards_rows)
    plan = plan_gpu(library, settings, options, chosen.gpu_memory_utilization)
    if plan.fitting_pages < settings.num_pages:
        raise plan.refuse(
            f"the rank and {settings.num_pages:,} pages for the largest row of decode or prefill do not fit:",
            "lower --batch, --context, --prefill or --cached",
        )
    if not shards_rows:
        plan.show(settings)
    with shown_loading(lambda: load_progress(library), say):
        return NativeEngine(library, options, np.zeros(0, NATIVE_TENSOR))


@dataclass(frozen=True)
class StepLoad:
    """What the steps of a load took, without a server: those of the prompts, and those of decode."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    prefill_seconds: float
    decode_seconds: float
    decode_steps: int

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole time."""
        return self.requests * self.output_tokens / (self.prefill_seconds + self.decode_seconds)

    @property
    def decode_ms(self) -> float | None:
        """The mean decode step; None where the prompts brought all tokens."""
        return 1e3 * self.decode_seconds / self.decode_steps if self.decode_steps else None


class RankBench:
    """Times steps of an engine. Prompts are random and never repeat, so nothing is found in the prefix cache."""

    def __init__(self, native: NativeEngine, vocab_size: int, max_step_tokens: int) -> None:
        self._native = native
        self._vocab_size = vocab_size
        self._max_step_tokens = max_step_tokens
        self._random = random.Random(0)

    def measure_decode(self, batch: int, context: int, warm_up: int, steps: int, num_moe_layers: int) -> DecodeRow:
        """Time `steps` decode steps of `batch` requests, one submitted before the one ahead of it is collected."""
        requests = [self._add(context, most_new_tokens(warm_up, steps, 0)) for _ in range(batch)]
        self._fill(requests, context)
        self._decode(requests, warm_up)
        before = self._native.stats()
        collected_at = self._decode(requests, steps + 1)
        after = self._native.stats()
        self._free(requests)
        seconds = sorted(later - earlier for earlier, later in pairwise(collected_at))
        layer_steps = num_moe_layers * (steps + 1)
        return DecodeRow(
            batch=batch,
            context=context,
            mean_context=context + 1 + warm_up + (steps + 1) / 2,
            median_ms=1e3 * statistics.median(seconds),
            p10_ms=1e3 * percentile(seconds, 0.1),
            p90_ms=1e3 * percentile(seconds, 0.9),
            experts_per_layer=(after.experts_read - before.experts_read) / layer_steps if layer_steps else 0.0,
            steps_timed=steps,
            share_replayed=(after.steps_replayed - before.steps_replayed) / (steps + 1),
        )

    def measure_speculation(self, plain: DecodeRow, warm_up: int, num_drafts: int) -> SpeculationRow:
        """Time the steps of `plain` again, every one verifying and making `num_drafts` drafts for each request.

        The prompts are computed with drafts too, so that the MTP layer has all of their tokens.
        """
        steps = plain.steps_timed
        room = most_new_tokens(warm_up, steps, num_drafts)
        requests = [self._add(plain.context, room) for _ in range(plain.batch)]
        self._fill(requests, plain.context, num_drafts)
        self._decode(requests, warm_up, num_drafts)
        before = self._native.stats()
        collected_at = self._decode(requests, steps + 1, num_drafts)
        after = self._native.stats()
        self._free(requests)
        seconds = sorted(later - earlier for earlier, later in pairwise(collected_at))
        return SpeculationRow(
            batch=plain.batch,
            context=plain.context,
            rows_verified=plain.batch * (1 + num_drafts),
            median_ms=1e3 * statistics.median(seconds),
            p10_ms=1e3 * percentile(seconds, 0.1),
            p90_ms=1e3 * percentile(seconds, 0.9),
            steps_timed=steps,
            share_replayed=(after.steps_replayed - before.steps_replayed) / (steps + 1),
            plain_ms=plain.median_ms,
        )

    def measure_prefill(self, tokens: int, cached: int) -> PrefillRow:
        """Time the last `tokens` tokens of a prompt as one step, the `cached` ones before them being there already."""
        seconds = []
        for _ in range(PREFILL_REPEATS + 1):
            request = self._add(cached + tokens, 1)
            if cached:
                self._fill([request], cached)
            started = time.perf_counter()
            self._step([(request, tokens)])
            seconds.append(time.perf_counter() - started)
            self._free([request])
        return PrefillRow(tokens=tokens, cached=cached, median_ms=1e3 * statistics.median(seconds[1:]))

    def measure_load(self, requests: int, prompt_tokens: int, output_tokens: int) -> StepLoad:
        """Time a load of equal requests that come together: all prompts in full steps, then decode steps to the end.

        The steps of the prompts bring the first tokens.
        """
        ids = [self._add(prompt_tokens, output_tokens) for _ in range(requests)]
        started = time.perf_counter()
        self._fill(ids, prompt_tokens)
        filled = time.perf_counter()
        collected_at = self._decode(ids, output_tokens - 1) if output_tokens > 1 else []
        ended = time.perf_counter()
        self._free(ids)
        return StepLoad(
            requests=requests,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            prefill_seconds=filled - started,
            decode_seconds=ended - filled,
            decode_steps=len(collected_at),
        )

    def _add(self, prompt_tokens: int, max_new_tokens: int) -> int:
        request = ActiveRequest(
            request_id=0,
            prompt_tokens=tuple(self._random.choices(range(self._vocab_size), k=prompt_tokens)),
            params=SamplingParams(temperature=0.0, max_tokens=max_new_tokens, ignore_eos=True),
            seed=0,
            choice_index=0,
            cache_salt=0,
            stop_tokens=(),
            max_new_tokens=max_new_tokens,
            text=None,
        )
        return self._native.add_request(request.to_native())

    def _free(self, requests: Sequence[int]) -> None:
        for request in requests:
            self._native.free_request(request)

    def _fill(self, requests: Sequence[int], tokens: int, num_drafts: int = 0) -> None:
        """Compute the first `tokens` tokens of every prompt in steps as full as they may be."""
        room = self._max_step_tokens
        items: list[tuple[int, int]] = []
        for request in requests:
            missing = tokens
            while missing:
                advance = min(missing, room)
                items.append((request, advance))
                missing -= advance
                room -= advance
                if not room:
                    self._step(items, num_drafts)
                    room, items = self._max_step_tokens, []
        if items:
            self._step(items, num_drafts)

    def _step(self, items: Sequence[tuple[int, int]], num_drafts: int = 0) -> None:
        ticket = self._native.submit_step(items, [num_drafts] * len(items))
        self._native.sample_step(ticket)
        self._check(self._native.collect_step(ticket), num_drafts=num_drafts)

    def _decode(self, requests: Sequence[int], count: int, num_drafts: int = 0) -> list[float]:
        """Run `count` decode steps as the engine's own loop does; gives when each was collected.

        With drafts every step verifies those of the one before and makes new ones.
        """
        items = [(request, 1 + num_drafts) for request in requests]
        drafts = [num_drafts] * len(requests)
        collected_at = []
        ticket = following = self._native.submit_step(items, drafts)
        self._native.sample_step(ticket)
        for index in range(count):
            if index + 1 < count:
                following = self._native.submit_step(items, drafts)
                self._native.sample_step(following)
            outcome = self._native.collect_step(ticket)
            collected_at.append(time.perf_counter())
            self._check(outcome, None if num_drafts else len(requests), num_drafts)
            ticket = following
        return collected_at

    def _check(self, outcome: StepOutcome, new_tokens: int | None = None, num_drafts: int = 0) -> None:
        """Refuse to time steps that fail or bring too few tokens, or other than `num_drafts` drafts behind a token."""
        failed = sum(item.finish_reason == abi.FINISH_FAILED for item in outcome.items)
        found = sum(len(item.tokens) for item in outcome.items)
        if failed or (new_tokens is not None and found != new_tokens):
            raise EngineError(
                f"a step of {len(outcome.items)} requests failed {failed} of them and brought {found} tokens; the "
                "figures would mean nothing, check the engine with scripts/gpu_check.sh correct"
            )
        made = {len(item.drafts) for item in outcome.items if item.tokens}
        if made - {num_drafts}:
            raise EngineError(
                f"a step of {len(outcome.items)} requests made {min(made)} to {max(made)} drafts for each instead of "
                f"{num_drafts}; the figures would mean nothing, check the engine with scripts/gpu_check.sh correct"
            )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value at this share of sorted values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
