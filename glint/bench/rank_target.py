"""A rank projected onto a GPU that is not at hand, such as a B200, from what its kernels reach on the measured one.

Every figure here is projected. A part of a step takes the longer of its bytes at the target's bandwidth and its
operations at the target's product rate, each ceiling being reached by the share that was measured here. Collectives
are added as stated. Waiting that neither ceiling explains is part of the share, so that small batches, which mostly
wait, are projected rather too fast.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from glint.bench.rank_report import DecodeRow, PrefillRow, RankReport, rows_of_load
from glint.bench.rank_shapes import Projection, prefill_operations, project_load, step_operations
from glint.terminal import print_table

COLUMNS = (
    "projected",
    "GB",
    "TFLOP",
    "of bandwidth",
    "of products",
    "ms of one rank",
    "ms with collectives",
    "tok/s",
)
KERNELS = "portable"


@dataclass(frozen=True)
class TargetGpu:
    """The ceilings of a GPU that is not at hand, and the product rate of the measured GPU that they are compared with.

    Rates are of mma.sync, which the portable kernels compute with. `collective_gbs` is what a GPU sends in a prefill
    step, `all_reduce_us` the time of each collective of a decode step.
    """

    name: str
    terabytes_per_second: float
    product_tflops: float
    all_reduce_us: float
    collective_gbs: float
    measured_product_tflops: float


@dataclass(frozen=True)
class ProjectedStep:
    """One step of `tokens` tokens on the target; its shares are those that were reached on the measured GPU."""

    step: str
    tokens: int
    gigabytes: float | None
    tflop: float
    share_of_bandwidth: float | None
    share_of_products: float
    projected_ms_of_one_rank: float
    projected_ms: float


@dataclass(frozen=True)
class TargetProjection:
    """Every measured step on the target, and the load; None where no row holds it."""

    steps: tuple[ProjectedStep, ...]
    load: Projection | None


def project_target(
    report: RankReport, target: TargetGpu, requests: int, prompt_tokens: int, output_tokens: int
) -> TargetProjection | None:
    """Project every row; None where other kernels were measured than the target would run, or no prefill was.

    The product rate of decode is the best that a prefill step reached, for a decode step alone does not show it.
    """
    if report.kernels != KERNELS or not report.prefills:
        return None
    prefills = {row: project_prefill(report, target, row) for row in report.prefills}
    best = max(step.share_of_products for step in prefills.values())
    decodes = {row: project_decode(report, target, row, best) for row in report.decodes}
    rows = rows_of_load(report, requests, prompt_tokens + output_tokens)
    load = rows and project_load(
        requests,
        prompt_tokens,
        output_tokens,
        decode_ms=decodes[rows[0]].projected_ms,
        prefill_ms=prefills[rows[1]].projected_ms,
        prefill_tokens=rows[1].tokens,
    )
    return TargetProjection((*decodes.values(), *prefills.values()), load)


def project_decode(report: RankReport, target: TargetGpu, row: DecodeRow, share_of_products: float) -> ProjectedStep:
    """A decode step on the target: each part is bound by its bytes or by its operations."""
    byte_counts = report.bytes_of_parts(row)
    operations = step_operations(report.shape, row.batch, row.batch * row.mean_context, row.batch)
    touched = sum(byte_counts.values())
    share = touched / (row.median_ms * 1e-3 * report.peak_bytes_per_second)
    bytes_per_ms = target.terabytes_per_second * 1e9 * share
    operations_per_ms = target.product_tflops * 1e9 * share_of_products
    rank_ms = sum(
        max(count / bytes_per_ms, operations.get(part, 0.0) / operations_per_ms) for part, count in byte_counts.items()
    )
    exchange_ms = report.decode_collectives(row).collectives * target.all_reduce_us * 1e-3
    tflop = sum(operations.values()) / 1e12
    name = f"decode {row.batch} at {row.context:,}"
    total_ms = rank_ms + exchange_ms
    return ProjectedStep(name, row.batch, touched / 1e9, tflop, share, share_of_products, rank_ms, total_ms)


def project_prefill(report: RankReport, target: TargetGpu, row: PrefillRow) -> ProjectedStep:
    """A prefill step on the target, bound by its operations."""
    share = report.rate(row) / target.measured_product_tflops
    tflop = prefill_operations(report.shape, row.tokens, row.cached) / 1e12
    rank_ms = tflop / (target.product_tflops * share) * 1e3
    exchange_ms = report.prefill_collectives(row).bytes_sent / (target.collective_gbs * 1e6)
    name = f"prefill {row.tokens:,} over {row.cached:,}"
    return ProjectedStep(name, row.tokens, None, tflop, None, share, rank_ms, rank_ms + exchange_ms)


def show_target(report: RankReport, target: TargetGpu, projection: TargetProjection | None) -> None:
    """Print the projected steps and the load, or why there are none."""
    if projection is None:
        print(
            f"\nprojected for {target.name}: none; it has no wgmma and runs the portable kernels, measure those with "
            "--kernels portable"
        )
        return
    gpus = f"{report.shape.tp} x {target.name}"
    print(
        f"\nprojected for {gpus}, not measured: {target.terabytes_per_second:g} TB/s of memory, "
        f"{target.product_tflops:g} TFLOP/s of mma.sync, {target.all_reduce_us:g} us for each collective of a decode "
        f"step, {target.collective_gbs:g} GB/s sent in a prefill step; shares are of the "
        f"{report.peak_bytes_per_second / 1e9:,.0f} GB/s and {target.measured_product_tflops:g} TFLOP/s of the "
        "measured GPU\n"
    )
    print_table(f"projected for {gpus}", COLUMNS, _cells(projection))
    load = projection.load
    if load is not None:
        print(
            f"\nprojected load on {gpus}, {load.requests} requests of {load.prompt_tokens} + {load.output_tokens} "
            f"tokens: {load.tokens_per_second:,.0f} output tok/s ({load.prefill_seconds:.2f} s prefill, "
            f"{load.decode_seconds:.2f} s decode)"
        )


def _cells(projection: TargetProjection) -> Iterator[tuple[str, ...]]:
    for step in projection.steps:
        yield (
            step.step,
            "" if step.gigabytes is None else f"{step.gigabytes:.2f}",
            f"{step.tflop:.2f}",
            "" if step.share_of_bandwidth is None else f"{step.share_of_bandwidth:.0%}",
            f"{step.share_of_products:.0%}",
            f"{step.projected_ms_of_one_rank:.2f}",
            f"{step.projected_ms:.2f}",
            f"{step.tokens / step.projected_ms * 1e3:,.0f}",
        )


def target_json(target: TargetGpu, projection: TargetProjection | None) -> dict[str, Any]:
    """What is assumed and what follows from it, as plain values; without a projection the rest is None."""
    found: dict[str, Any] = {"assumed": asdict(target), "steps": None, "load": None}
    if projection is None:
        return found
    found["steps"] = [asdict(step) for step in projection.steps]
    if projection.load is not None:
        tokens = projection.load.tokens_per_second
        found["load"] = asdict(projection.load) | {"output_tokens_per_second": tokens}
    return found
