"""The results of `glint bench rank`: shares of the peak bandwidth, projections, tables and JSON."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from glint.bench.machine import refusing_unwritable
from glint.bench.rank_collectives import CollectiveCount, count_collectives, projected_decode_ms, projected_prefill_ms
from glint.bench.rank_shapes import (
    BF16_BYTES,
    Projection,
    RankShape,
    expected_experts,
    prefill_operations,
    project_load,
    step_bytes,
)
from glint.terminal import print_table

DECODE_COLUMNS = (
    "decode",
    "ms/step",
    "p10",
    "p90",
    "experts/layer",
    "uniform",
    "GB/step",
    "GB/s",
    "of peak",
    "replayed",
    "tok/s, this rank",
    "collectives",
    "MB sent",
    "projected ms",
    "projected tok/s",
)
PREFILL_COLUMNS = ("prefill", "ms", "TFLOP", "TFLOP/s", "collectives", "MB sent", "projected ms")


@dataclass(frozen=True)
class DecodeRow:
    """Decode steps of `batch` requests whose prompts had `context` tokens; `mean_context` is over the timed steps."""

    batch: int
    context: int
    mean_context: float
    median_ms: float
    p10_ms: float
    p90_ms: float
    experts_per_layer: float
    steps_timed: int
    share_replayed: float


@dataclass(frozen=True)
class PrefillRow:
    """One step of `tokens` tokens of one request after `cached` others."""

    tokens: int
    cached: int
    median_ms: float


@dataclass(frozen=True)
class ProjectedLoad:
    """One load twice: with a stated time for every collective of decode, and with its bytes at a stated rate."""

    by_count: Projection
    by_bytes: Projection


@dataclass(frozen=True)
class RankReport:
    """Everything one run measured, and what its projections assume."""

    model: str
    shape: RankShape
    device: str
    kernels: str
    weight_bytes: int
    peak_bytes_per_second: float
    decodes: tuple[DecodeRow, ...]
    prefills: tuple[PrefillRow, ...]
    all_reduce_us: float
    collective_gbs: float
    page_element_bytes: int = BF16_BYTES
    left_out: tuple[str, ...] = ()

    def bytes_of_parts(self, row: DecodeRow) -> dict[str, float]:
        """Bytes that a step of this row reads, by part."""
        return step_bytes(self.shape, row.batch, row.mean_context, row.experts_per_layer, self.page_element_bytes)

    def touched_bytes(self, row: DecodeRow) -> float:
        """Bytes that a step of this row reads."""
        return sum(self.bytes_of_parts(row).values())

    def decode_ms(self, row: DecodeRow) -> float:
        """A step of all ranks, projected."""
        return projected_decode_ms(self.shape, row.median_ms, row.batch, self.all_reduce_us)

    def decode_ms_by_bytes(self, row: DecodeRow) -> float:
        """The same, with the bytes of its collectives at the rate of prefill instead of a time for each."""
        return row.median_ms + self.decode_collectives(row).bytes_sent / (self.collective_gbs * 1e6)

    def prefill_ms(self, row: PrefillRow) -> float:
        """A prefill step of all ranks, projected."""
        return projected_prefill_ms(self.shape, row.median_ms, row.tokens, self.collective_gbs)

    def decode_collectives(self, row: DecodeRow) -> CollectiveCount:
        """The collectives of this rank in a step of this row."""
        return count_collectives(self.shape, row.batch, row.batch)

    def prefill_collectives(self, row: PrefillRow) -> CollectiveCount:
        """The collectives of this rank in a prefill step, of which one row is sampled."""
        return count_collectives(self.shape, row.tokens, 1)

    def rate(self, row: PrefillRow) -> float:
        """TFLOP/s of a prefill step."""
        return prefill_operations(self.shape, row.tokens, row.cached) / row.median_ms * 1e-9


def rows_of_load(report: RankReport, requests: int, longest: int) -> tuple[DecodeRow, PrefillRow] | None:
    """The rows that a load of `requests` requests of up to `longest` tokens is projected from; None without them.

    The decode row is that of `requests` requests with the shortest context that holds a whole request, so that its
    steps are rather longer than those of the load; the prefill row is the longest step over no context.
    """
    decodes = [row for row in report.decodes if row.batch == requests and row.context >= longest]
    prefills = [row for row in report.prefills if row.cached == 0]
    if not decodes or not prefills:
        return None
    return min(decodes, key=lambda row: row.context), max(prefills, key=lambda row: row.tokens)


def project(report: RankReport, requests: int, prompt_tokens: int, output_tokens: int) -> ProjectedLoad | None:
    """Project a load on GPUs like the measured one from the rows that fit it; None where they were not measured."""
    rows = rows_of_load(report, requests, prompt_tokens + output_tokens)
    if rows is None:
        return None
    decode, prefill = rows
    by_count, by_bytes = (
        project_load(
            requests,
            prompt_tokens,
            output_tokens,
            decode_ms=decode_ms,
            prefill_ms=report.prefill_ms(prefill),
            prefill_tokens=prefill.tokens,
        )
        for decode_ms in (report.decode_ms(decode), report.decode_ms_by_bytes(decode))
    )
    return ProjectedLoad(by_count, by_bytes)


def show(report: RankReport, projection: ProjectedLoad | None) -> None:
    """Print the tables and what a reader needs to know about them."""
    shape = report.shape
    print(f"\nrank       1 of {shape.tp} of {report.model}, experts by {shape.expert_layout}, synthetic weights")
    print(f"engine     device {report.device}, kernels {report.kernels}, {report.weight_bytes / 1e9:.1f} GB of weights")
    print(f"peak read  {report.peak_bytes_per_second / 1e9:,.0f} GB/s read, measured in this run")
    for difference in shape.differences:
        print(f"difference {difference}")
    for sentence in report.left_out:
        print(f"left out   {sentence}")
    print(
        f"projected  for {shape.tp} such GPUs, not measured: {report.all_reduce_us:g} us for each collective of a "
        f"decode step, {report.collective_gbs:g} GB/s for the bytes that a rank sends in a prefill step\n"
    )
    if report.decodes:
        print_table("decode", DECODE_COLUMNS, decode_cells(report))
    if report.prefills:
        print_table("prefill", PREFILL_COLUMNS, prefill_cells(report))
    print()
    print(describe_projection(report, projection))


def describe_projection(report: RankReport, projection: ProjectedLoad | None) -> str:
    """The projected load in a sentence, or why there is none."""
    if projection is None:
        return (
            "projected load: none, for it needs a decode row of as many requests (--batch) whose --context holds "
            "prompt and answer, and a --prefill row over no context"
        )
    load = projection.by_count
    return (
        f"projected load on {report.shape.tp} such GPUs, {load.requests} requests of {load.prompt_tokens} + "
        f"{load.output_tokens} tokens: {load.tokens_per_second:,.0f} output tok/s "
        f"({load.prefill_seconds:.2f} s prefill, {load.decode_seconds:.2f} s decode); with the bytes of decode at "
        f"{report.collective_gbs:g} GB/s instead of {report.all_reduce_us:g} us a collective: "
        f"{projection.by_bytes.tokens_per_second:,.0f}"
    )


def decode_cells(report: RankReport) -> Iterator[tuple[str, ...]]:
    """The decode table, row by row."""
    for row in report.decodes:
        touched = report.touched_bytes(row)
        rate = touched / row.median_ms * 1e3
        projected_ms = report.decode_ms(row)
        yield (
            f"{row.batch} at {row.context:,}",
            f"{row.median_ms:.2f}",
            f"{row.p10_ms:.2f}",
            f"{row.p90_ms:.2f}",
            f"{row.experts_per_layer:.1f}",
            f"{expected_experts(report.shape, row.batch):.1f}",
            f"{touched / 1e9:.2f}",
            f"{rate / 1e9:,.0f}",
            f"{rate / report.peak_bytes_per_second:.0%}",
            f"{row.share_replayed:.0%}",
            f"{row.batch / row.median_ms * 1e3:,.0f}",
            *_collective_cells(report.decode_collectives(row)),
            f"{projected_ms:.2f}",
            f"{row.batch / projected_ms * 1e3:,.0f}",
        )


def prefill_cells(report: RankReport) -> Iterator[tuple[str, ...]]:
    """The prefill table, row by row."""
    for row in report.prefills:
        yield (
            f"{row.tokens:,} over {row.cached:,}",
            f"{row.median_ms:.2f}",
            f"{prefill_operations(report.shape, row.tokens, row.cached) / 1e12:.1f}",
            f"{report.rate(row):,.0f}",
            *_collective_cells(report.prefill_collectives(row)),
            f"{report.prefill_ms(row):.2f}",
        )


def _collective_cells(count: CollectiveCount) -> tuple[str, str]:
    return f"{count.collectives:,}", f"{count.bytes_sent / 1e6:,.1f}"


def as_json(report: RankReport, projection: ProjectedLoad | None) -> dict[str, Any]:
    """Everything as plain values; what is projected is called so."""
    shape = report.shape
    return {
        "model": report.model,
        "tp": shape.tp,
        "expert_layout": shape.expert_layout,
        "local_experts": shape.local_experts,
        "weights": "synthetic",
        "differences": list(shape.differences),
        "left_out": list(report.left_out),
        "device": report.device,
        "kernels": report.kernels,
        "weight_bytes": report.weight_bytes,
        "peak_bytes_per_second": report.peak_bytes_per_second,
        "decode": [_decode_json(report, row) for row in report.decodes],
        "prefill": [
            asdict(row)
            | asdict(report.prefill_collectives(row))
            | {"tflops_per_second": report.rate(row), "projected_ms": report.prefill_ms(row)}
            for row in report.prefills
        ],
        "projected": {
            "all_reduce_us": report.all_reduce_us,
            "collective_gbs": report.collective_gbs,
            "load": None if projection is None else _load_json(projection.by_count),
            "load_by_bytes": None if projection is None else _load_json(projection.by_bytes),
        },
    }


def _load_json(load: Projection) -> dict[str, Any]:
    return asdict(load) | {"output_tokens_per_second": load.tokens_per_second}


def _decode_json(report: RankReport, row: DecodeRow) -> dict[str, Any]:
    touched = report.touched_bytes(row)
    rate = touched / row.median_ms * 1e3
    return (
        asdict(row)
        | asdict(report.decode_collectives(row))
        | {
            "expected_experts_per_layer": expected_experts(report.shape, row.batch),
            "bytes_per_step": report.bytes_of_parts(row),
            "bytes_per_second": rate,
            "share_of_peak": rate / report.peak_bytes_per_second,
            "tokens_per_second_of_this_rank": row.batch / row.median_ms * 1e3,
            "projected_ms": report.decode_ms(row),
            "projected_tokens_per_second": row.batch / report.decode_ms(row) * 1e3,
        }
    )


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write everything to a file."""
    with refusing_unwritable(path):
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
