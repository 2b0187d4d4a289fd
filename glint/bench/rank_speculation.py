"""Decode steps of a rank that verify and make drafts, beside those without, and what a given acceptance makes of them.

The steps are measured. Random weights say nothing about how many drafts are right, so acceptance is given. Hardly any
is right while steps are timed, so the first pass of the MTP layer has about one row of each request; right drafts would
add a row each to that one layer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from glint.bench.rank_shapes import RankShape
from glint.errors import RequestError
from glint.terminal import print_table

STEP_COLUMNS = ("decode", "rows verified", "ms/step", "p10", "p90", "replayed", "ms/step without")
TOKEN_COLUMNS = ("tokens/step, given", "ms/token", "gain")


@dataclass(frozen=True)
class SpeculationRow:
    """Decode steps of `batch` requests that verify `rows_verified` rows in all; `plain_ms` is a step without drafts."""

    batch: int
    context: int
    rows_verified: int
    median_ms: float
    p10_ms: float
    p90_ms: float
    steps_timed: int
    share_replayed: float
    plain_ms: float


@dataclass(frozen=True)
class Speculation:
    """The rows of one run; `acceptance` is the given chance that the first 1, 2 and more drafts are all right."""

    num_drafts: int
    acceptance: tuple[float, ...]
    rows: tuple[SpeculationRow, ...]

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a step brings a request by the given acceptance; None without it."""
        return 1.0 + sum(self.acceptance) if self.acceptance else None


def token_figures(row: SpeculationRow, tokens_per_step: float) -> tuple[float, float]:
    """Milliseconds of one token of a request, and how many times as long a step without drafts takes."""
    token_ms = row.median_ms / tokens_per_step
    return token_ms, row.plain_ms / token_ms


def check_speculation(num_drafts: int, acceptance: Sequence[float], shape: RankShape, model: str) -> None:
    """Refuse an acceptance that does not go with the drafts, and drafts of a model without an MTP layer."""
    if acceptance and len(acceptance) != num_drafts:
        given = ",".join(f"{chance:g}" for chance in acceptance)
        raise RequestError(
            f"--acceptance {given} has {len(acceptance)} chances and --speculative is {num_drafts}; give one chance "
            "for each draft, or leave --acceptance out"
        )
    if num_drafts and not shape.model.mtp_layers:
        raise RequestError(
            f"--speculative is {num_drafts}, but --model {model} has no MTP layer that makes drafts; leave "
            "--speculative out, or choose another model"
        )


def show_speculation(speculation: Speculation) -> None:
    """Print the table, and first that acceptance is given."""
    tokens_per_step = speculation.tokens_per_step
    drafts = f"each request verifies {speculation.num_drafts} drafts in a step and makes as many"
    print(f"\nspeculation: {drafts}; two steps in flight; this rank alone, without collectives")
    if tokens_per_step is None:
        print("acceptance: not given and not measured, for the weights are random; --acceptance gives it")
    else:
        chances = ", ".join(f"{chance:g}" for chance in speculation.acceptance)
        print(f"acceptance: given, not measured: {chances} that the first 1 to {speculation.num_drafts} are all right")
    columns = STEP_COLUMNS if tokens_per_step is None else STEP_COLUMNS + TOKEN_COLUMNS
    print_table("decode with speculation", columns, speculation_cells(speculation))


def speculation_cells(speculation: Speculation) -> Iterator[tuple[str, ...]]:
    """The table, row by row."""
    tokens_per_step = speculation.tokens_per_step
    for row in speculation.rows:
        steps = (
            f"{row.batch} at {row.context:,}",
            f"{row.rows_verified:,}",
            f"{row.median_ms:.2f}",
            f"{row.p10_ms:.2f}",
            f"{row.p90_ms:.2f}",
            f"{row.share_replayed:.0%}",
            f"{row.plain_ms:.2f}",
        )
        if tokens_per_step is None:
            yield steps
            continue
        token_ms, gain = token_figures(row, tokens_per_step)
        yield (*steps, f"{tokens_per_step:.2f}", f"{token_ms:.2f}", f"{gain:.2f}x")


def speculation_json(speculation: Speculation) -> dict[str, Any]:
    """Everything as plain values; what rests on the given acceptance is null without it."""
    tokens_per_step = speculation.tokens_per_step
    rows = []
    for row in speculation.rows:
        token_ms, gain = (None, None) if tokens_per_step is None else token_figures(row, tokens_per_step)
        rows.append(asdict(row) | {"ms_per_token_by_given_acceptance": token_ms, "gain_by_given_acceptance": gain})
    return {
        "drafts": speculation.num_drafts,
        "given_acceptance": list(speculation.acceptance) or None,
        "tokens_per_step_by_given_acceptance": tokens_per_step,
        "rows": rows,
    }
