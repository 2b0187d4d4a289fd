"""What a run found: tables, promises that hold or not, and the same as JSON and Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

MEBIBYTE = 2**20
WARM_SHARE = 0.4
FEWEST_SAMPLES = 4


@dataclass
class Table:
    """Figures under named columns; the first column names the row."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        """Add a row; numbers are written with thousands apart."""
        assert len(cells) == len(self.columns), (self.columns, cells)
        self.rows.append([as_text(cell) for cell in cells])

    def markdown(self) -> str:
        """The table as Markdown."""
        lines = [self.columns, ["---", *["--:"] * (len(self.columns) - 1)], *self.rows]
        return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)

    def show(self, console: Console) -> None:
        """Print the table."""
        shown = RichTable(title=self.title, title_justify="left")
        for index, column in enumerate(self.columns):
            shown.add_column(column, justify="left" if index == 0 else "right")
        for row in self.rows:
            shown.add_row(*row)
        console.print(shown)


def as_text(cell: object) -> str:
    """A figure as a reader wants it."""
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}" if abs(cell) < 10 else f"{cell:.1f}"
    return str(cell)


@dataclass(frozen=True)
class Promise:
    """Something that must hold; `holds` is None where this run does not judge it."""

    text: str
    holds: bool | None
    found: str = ""


@dataclass
class PartReport:
    """The figures of one part."""

    name: str
    did: str
    tables: list[Table] = field(default_factory=list)
    promises: list[Promise] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def promise(self, text: str, holds: bool | None, found: object = "") -> None:
        """Note whether something holds, and what was found."""
        self.promises.append(Promise(text, holds, as_text(found)))

    def table(self, title: str, *columns: str) -> Table:
        """A new table of this part."""
        self.tables.append(Table(title, list(columns)))
        return self.tables[-1]

    @property
    def broken(self) -> list[Promise]:
        """The promises that do not hold."""
        return [promise for promise in self.promises if promise.holds is False]

    def promise_table(self) -> Table:
        """All promises as a table."""
        words = {True: "yes", False: "NO", None: "not judged"}
        table = Table("promises", ["promise", "holds", "found"])
        for promise in self.promises:
            table.add(promise.text, words[promise.holds], promise.found)
        return table

    def show(self, console: Console) -> None:
        """Print everything."""
        console.rule(f"{self.name} ({self.seconds:.0f} s)")
        console.print(self.did, highlight=False)
        for table in [*self.tables, self.promise_table()]:
            table.show(console)
        for problem in self.problems[:20]:
            console.print(f"problem: {problem}", markup=False, highlight=False)

    def as_dict(self) -> dict[str, Any]:
        """The part for JSON."""
        return {
            "name": self.name,
            "did": self.did,
            "seconds": self.seconds,
            "tables": [vars(table) for table in self.tables],
            "promises": [vars(promise) for promise in self.promises],
            "figures": self.figures,
            "problems": self.problems[:100],
        }

    @classmethod
    def from_dict(cls, part: dict[str, Any]) -> PartReport:
        """The part that was written as JSON."""
        tables = [Table(**table) for table in part["tables"]]
        promises = [Promise(**promise) for promise in part["promises"]]
        return cls(**part | {"tables": tables, "promises": promises})

    def markdown(self) -> str:
        """The section of this part."""
        titled = [f"{table.title}:\n\n{table.markdown()}" for table in self.tables]
        return "\n\n".join([f"### {self.name}", self.did, *titled, self.promise_table().markdown()])


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The nearest-rank percentile; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-len(ordered) * int(percent * 10) // 1000) - 1))]


@dataclass(frozen=True)
class MemoryTrend:
    """How resident memory moved after the warm-up: the least squares line over the samples."""

    first_bytes: int
    last_bytes: int
    bytes_per_second: float
    seconds: float

    @property
    def growth_mib(self) -> float:
        """What the line rises over its time, in MiB."""
        return self.bytes_per_second * self.seconds / MEBIBYTE

    @classmethod
    def of(cls, samples: Sequence[tuple[float, int]]) -> MemoryTrend:
        """The trend of what is left of the samples after the first 40% of the time."""
        begin = samples[0][0] + (samples[-1][0] - samples[0][0]) * WARM_SHARE
        kept = [sample for sample in samples if sample[0] >= begin]
        if len(kept) < FEWEST_SAMPLES:
            raise ValueError(f"{len(kept)} samples of memory after the warm-up; run for longer")
        slope = statistics.linear_regression([at for at, _ in kept], [num for _, num in kept]).slope
        return cls(kept[0][1], kept[-1][1], slope, kept[-1][0] - kept[0][0])

    def tell(self, report: PartReport, bound_mib: float) -> None:
        """Add the figures to a report, and the promise that memory is flat."""
        table = report.table("memory of the server after warm-up", "figure", "MiB")
        table.add("first", self.first_bytes / MEBIBYTE)
        table.add("last", self.last_bytes / MEBIBYTE)
        table.add("slope times time", self.growth_mib)
        report.promise(f"memory grows by at most {bound_mib:g} MiB", self.growth_mib <= bound_mib, self.growth_mib)
        report.figures["memory"] = vars(self) | {"growth_mib": self.growth_mib}


def document(runs: Sequence[dict[str, Any]], opening: str) -> str:
    """The document of one or more recorded runs."""
    sections = [opening.strip()]
    for run in runs:
        facts = "\n".join(f"| {name} | {value} |" for name, value in run["run"].items())
        sections.append(f"## {run['run']['machine']}\n\n| run | |\n|---|---|\n{facts}")
        sections += [PartReport.from_dict(part).markdown() for part in run["parts"]]
    return "\n\n".join(sections) + "\n"
