"""The figures of loads as one SVG: tokens over time, latency distributions, and throughput against speed per user."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from glint.bench.report import LoadReport

PANEL_WIDTH = 460.0
PANEL_HEIGHT = 260.0
LEFT = 64.0
RIGHT = 16.0
TOP = 34.0
BOTTOM = 44.0
LINE_HEIGHT = 18.0
CURVE_POINTS = 200
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#e377c2")
Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """One curve; `notes` are written beside its points, one each, and make the points visible."""

    points: tuple[Point, ...]
    colour: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Axis:
    """One direction of a panel: maps a value to a share of its length."""

    low: float
    high: float
    is_logarithmic: bool

    @classmethod
    def over(cls, values: Sequence[float], is_logarithmic: bool) -> "Axis":
        """An axis that holds every value; from 0 on unless it is logarithmic, which leaves out what is not over 0."""
        if not is_logarithmic:
            high = max(values, default=1.0)
            return cls(0.0, high if high > 0.0 else 1.0, False)
        positive = [value for value in values if value > 0.0] or [1.0]
        low, high = min(positive), max(positive)
        return cls(low, high if high > low else low * 10.0, True)

    def share(self, value: float) -> float:
        """Where a value lies, 0 at the low end and 1 at the high end."""
        if not self.is_logarithmic:
            return (value - self.low) / (self.high - self.low)
        return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[float]:
        """Round values within the axis."""
        if self.is_logarithmic:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [factor * 10.0**power for power in powers for factor in (1.0, 2.0, 5.0)]
        else:
            unit = 10.0 ** math.floor(math.log10(self.high / 4.0))
            step = next(unit * factor for factor in (1.0, 2.0, 5.0, 10.0) if unit * factor * 5.0 >= self.high)
            found = [index * step for index in range(7)]
        return [value for value in found if self.low <= value <= self.high * 1.000001]


@dataclass(frozen=True)
class Panel:
    """A titled diagram with labelled axes."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    has_logarithmic_x: bool = False


def draw(runs: Sequence[LoadReport]) -> str:
    """An SVG document of all runs, each a colour; the last panel is there for several concurrencies only."""
    colours = [COLOURS[index % len(COLOURS)] for index in range(len(runs))]
    panels = [
        time_panel(runs, colours),
        latency_panel(runs, colours, "ttft", "Time to first token"),
        latency_panel(runs, colours, "itl", "Inter-token latency"),
    ]
    if len({run.measured.concurrency for run in runs}) > 1:
        panels.append(pareto_panel(runs))
    columns = 2
    rows = math.ceil(len(panels) / columns)
    width = columns * PANEL_WIDTH
    height = rows * PANEL_HEIGHT + (len(runs) + 1) * LINE_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
    ]
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        parts += [
            f'<g transform="translate({column * PANEL_WIDTH:g} {row * PANEL_HEIGHT:g})">',
            *draw_panel(panel),
            "</g>",
        ]
    for index, run in enumerate(runs):
        y = rows * PANEL_HEIGHT + (index + 1) * LINE_HEIGHT
        parts.append(f'<rect x="{LEFT:g}" y="{y - 9:g}" width="10" height="10" fill="{colours[index]}"/>')
        parts.append(_text(LEFT + 16.0, y, describe(run)))
    return "\n".join([*parts, "</svg>"]) + "\n"


def describe(run: LoadReport) -> str:
    """One line on what a run was."""
    measured = run.measured
    lengths = f"{measured.prompt_tokens} tokens in, {measured.output_tokens} out"
    if measured.prompts == "questions":
        lengths = f"questions, up to {measured.output_tokens} tokens out"
    return (
        f"{measured.base_url}, {measured.model}, {measured.concurrency} at once, {lengths}: "
        f"{run.output_throughput:.1f} output tok/s"
    )


def time_panel(runs: Sequence[LoadReport], colours: Sequence[str]) -> Panel:
    """Output tokens in every second of the load."""
    lines = [
        Line(tuple((second + 0.5, tokens) for second, tokens in enumerate(run.output_per_second)), colour)
        for run, colour in zip(runs, colours, strict=True)
    ]
    return Panel("Output tokens per second", "seconds", "tok/s", tuple(lines))


def latency_panel(runs: Sequence[LoadReport], colours: Sequence[str], name: str, title: str) -> Panel:
    """The share of requests or chunks that a latency is at most reached by."""
    lines = []
    for run, colour in zip(runs, colours, strict=True):
        distribution = run.latencies[name]
        if distribution is not None:
            values = distribution.values
            last = len(values) - 1
            picked = sorted({round(index * last / CURVE_POINTS) for index in range(CURVE_POINTS + 1)})
            points = tuple(
                (values[index], 100.0 * (index + 1) / len(values)) for index in picked if values[index] > 0.0
            )
            lines.append(Line(points, colour))
    return Panel(f"{title}: share within", "milliseconds", "percent", tuple(lines), has_logarithmic_x=True)


def pareto_panel(runs: Sequence[LoadReport]) -> Panel:
    """Throughput of the server against the speed one user sees, 1000 / median TPOT; one curve per server."""
    lines = []
    for index, url in enumerate(dict.fromkeys(run.measured.base_url for run in runs)):
        found = []
        for run in runs:
            tpot = run.median("tpot")
            if run.measured.base_url == url and tpot:
                found.append((1e3 / tpot, run.output_throughput, str(run.measured.concurrency)))
        found.sort()
        points = tuple((speed, throughput) for speed, throughput, _ in found)
        lines.append(Line(points, COLOURS[index % len(COLOURS)], tuple(note for _, _, note in found)))
    return Panel("Throughput against speed per user, by concurrency", "tok/s per user", "output tok/s", tuple(lines))


def draw_panel(panel: Panel) -> list[str]:
    """The elements of one panel, from its own origin."""
    x_axis = Axis.over([x for line in panel.lines for x, _ in line.points], panel.has_logarithmic_x)
    y_axis = Axis.over([y for line in panel.lines for _, y in line.points], False)
    right, bottom = PANEL_WIDTH - RIGHT, PANEL_HEIGHT - BOTTOM
    parts = [_text(LEFT, TOP - 12.0, panel.title, 'font-weight="bold"')]
    for tick in x_axis.ticks():
        x = LEFT + x_axis.share(tick) * (right - LEFT)
        parts += [_grid(x, TOP, x, bottom), _text(x, bottom + 14.0, f"{tick:g}", 'text-anchor="middle"')]
    for tick in y_axis.ticks():
        y = bottom - y_axis.share(tick) * (bottom - TOP)
        parts += [_grid(LEFT, y, right, y), _text(LEFT - 6.0, y + 4.0, f"{tick:g}", 'text-anchor="end"')]
    parts.append(_text(right, bottom + 30.0, panel.x_label, 'text-anchor="end"'))
    parts.append(_text(LEFT - 6.0, TOP - 12.0, panel.y_label, 'text-anchor="end"'))
    for line in panel.lines:
        places = [
            (LEFT + x_axis.share(x) * (right - LEFT), bottom - y_axis.share(y) * (bottom - TOP)) for x, y in line.points
        ]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{line.colour}" stroke-width="1.5"/>')
        for (x, y), note in zip(places, line.notes, strict=False):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{line.colour}"/>')
            parts.append(_text(x + 5.0, y - 5.0, note))
    return parts


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(text)}</text>'


def _grid(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'
