#!/usr/bin/env python3
"""Draws docs/results.svg from the table of decode steps in docs/results.md."""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parents[1] / "docs"
HEAD = re.compile(
    r"^\| decode step, requests \| ms at context ([\d,]+) \| .* \| ms at context ([\d,]+) \| share \|$", re.MULTILINE
)
ROW = re.compile(r"^\| (\d+) \| ([\d.]+) \| (\d+)% \| ([\d.]+) \| (\d+)% \|$", re.MULTILINE)
TITLE = "GLM-4.7-FP8, one rank of eight on an H200: decode step as a share of peak bandwidth"
COLOURS = ("#1f77b4", "#ff7f0e")
WIDTH = 760
LABEL_WIDTH = 120
BAR_HEIGHT = 16
GROUP_HEIGHT = 48
TOP = 40


@dataclass(frozen=True)
class DecodeStep:
    """One step of the table: a number of requests at a context."""

    requests: int
    context: str
    milliseconds: str
    percent: int


def read_steps(document: str) -> list[DecodeStep]:
    """The steps of the table, row by row."""
    head = HEAD.search(document)
    if head is None:
        raise ValueError("docs/results.md has no line '| decode step, requests | ms at context N |'; add the table")
    steps = []
    for row in ROW.finditer(document, head.end()):
        steps.append(DecodeStep(int(row[1]), head[1], row[2], int(row[3])))
        steps.append(DecodeStep(int(row[1]), head[2], row[4], int(row[5])))
    return steps


def draw(steps: list[DecodeStep]) -> str:
    """An SVG document with one group of bars for each number of requests and one colour for each context."""
    requests = sorted({step.requests for step in steps})
    contexts = list(dict.fromkeys(step.context for step in steps))
    height = TOP + GROUP_HEIGHT * len(requests) + 28
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(12, 22, TITLE, 'font-weight="bold"'),
    ]
    for step in steps:
        top = TOP + GROUP_HEIGHT * requests.index(step.requests) + BAR_HEIGHT * contexts.index(step.context)
        length = (WIDTH - LABEL_WIDTH - 120) * step.percent / 100
        colour = COLOURS[contexts.index(step.context) % len(COLOURS)]
        parts.append(
            f'<rect x="{LABEL_WIDTH}" y="{top}" width="{length:.0f}" height="{BAR_HEIGHT - 2}" fill="{colour}"/>'
        )
        parts.append(_text(LABEL_WIDTH + length + 6, top + 11, f"{step.percent}%, {step.milliseconds} ms"))
    for index, count in enumerate(requests):
        label = "1 request" if count == 1 else f"{count} requests"
        parts.append(_text(LABEL_WIDTH - 8, TOP + GROUP_HEIGHT * index + 19, label, 'text-anchor="end"'))
    for index, context in enumerate(contexts):
        left = LABEL_WIDTH + 150 * index
        parts.append(f'<rect x="{left}" y="{height - 22}" width="10" height="10" fill="{COLOURS[index]}"/>')
        parts.append(_text(left + 16, height - 13, f"context {context}"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" {attributes}>{escape(text)}</text>'


def main() -> None:
    """Write the chart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=DOCS / "results.md", help="document with the table")
    parser.add_argument("--out", type=Path, default=DOCS / "results.svg", help="where the chart goes")
    given = parser.parse_args()
    given.out.write_text(draw(read_steps(given.results.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
