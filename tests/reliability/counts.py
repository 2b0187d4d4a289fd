"""Whether the client's counts and the server's are the same: nothing lost, nothing told twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from tests.reliability.report import PartReport

Kind = Literal["finished", "cancelled", "refused", "failed", "lost"]
KINDS: tuple[Kind, ...] = ("finished", "cancelled", "refused", "failed", "lost")
COMPLETED = ("finished", "stopped", "length")


@dataclass(frozen=True)
class Ended:
    """How a request ended at the client, and its id where an answer told it."""

    kind: Kind
    request_id: str | None


def kind_of(outcome: str) -> Kind:
    """The kind of an outcome of the server."""
    return "finished" if outcome in COMPLETED else cast(Kind, outcome)


def by_kind(outcomes: Mapping[str, int]) -> Counter[str]:
    """Counts by outcome as counts by kind."""
    counts: Counter[str] = Counter()
    for outcome, count in outcomes.items():
        counts[kind_of(outcome)] += count
    return counts


def _kind(line: Mapping[str, str]) -> Kind:
    return "lost" if line.get("reason") == "lost" else kind_of(line["outcome"])


def compare(ended: Sequence[Ended], lines: Iterable[Mapping[str, str]]) -> list[str]:
    """What is wrong between the ends that clients saw and the outcome lines of the same time.

    A client that left may have been answered in full before the server knew; nothing else may differ.
    """
    lines = list(lines)
    kinds = {line["request_id"]: _kind(line) for line in lines}
    wrong = [
        f"{name} has {count} lines" for name, count in Counter(x["request_id"] for x in lines).items() if count > 1
    ]
    if len(lines) != len(ended):
        wrong.append(f"{len(ended)} requests were sent, {len(lines)} outcome lines were written")
    unnamed: Counter[str] = Counter()
    for one in ended:
        if one.request_id is None:
            unnamed[one.kind] += 1
            continue
        kind = kinds.pop(one.request_id, None)
        if kind is None:
            wrong.append(f"{one.request_id} has no line")
        elif kind != one.kind and not (one.kind == "cancelled" and kind == "finished"):
            wrong.append(f"{one.request_id} is {one.kind} at the client and {kind} at the server")
    rest = Counter(kinds.values())
    late = rest.pop("finished", 0)
    if rest["cancelled"] + late != unnamed["cancelled"] or set(rest) - {"cancelled"} or set(unnamed) - {"cancelled"}:
        wrong.append(f"without an id the client has {dict(unnamed)}, the server {dict(rest)} and {late} finished")
    return wrong


def tell(
    report: PartReport,
    ended: Sequence[Ended],
    lines: Sequence[Mapping[str, str]] | None,
    metrics: Mapping[str, int],
) -> None:
    """Add the counts to a report, and the promises that they are equal."""
    client = Counter(one.kind for one in ended)
    logged = by_kind(Counter(line["outcome"] for line in lines or ()))
    counted = by_kind(metrics)
    table = report.table("requests by end", "end", "client", "outcome lines", "metrics")
    for kind in KINDS:
        table.add(kind, client[kind], None if lines is None else logged[kind], counted[kind])
    table.add("all", len(ended), None if lines is None else len(lines), counted.total())
    report.figures["counts"] = {"client": client, "lines": logged, "metrics": counted}
    report.promise("no request failed or was lost", client["failed"] + counted["failed"] + counted["lost"] == 0)
    report.promise("as many in the metrics as were sent", counted.total() == len(ended), counted.total())
    if lines is not None:
        wrong = compare(ended, lines)
        report.problems += wrong
        report.promise(
            "exactly one outcome line for each request, of the kind that the client saw", not wrong, len(wrong)
        )
        report.promise("the metrics equal the lines by kind", logged == counted)
