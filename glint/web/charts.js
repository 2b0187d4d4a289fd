import { h } from "./dom.js";
import { clock } from "./figures.js";

export const LONGEST_SPAN = 600;
const SPANS = [60, 120, 300, LONGEST_SPAN];
const GAP_SECONDS = 4;
const NUM_GRID_LINES = 2;
const MARGIN = { left: 46, right: 8, top: 8, bottom: 20 };
const STEPS = [1, 2, 4, 6, 8, 10];

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return STEPS.find((step) => step * power >= value * (1 - 1e-9)) * power;
}

export function spanOf(points) {
  const seconds = points.length === 0 ? 0 : points.at(-1).at - points[0].at;
  return SPANS.find((span) => span >= seconds) ?? LONGEST_SPAN;
}

export function segments(points, key) {
  const found = [];
  let open = null;
  let before = -Infinity;
  for (const point of points) {
    const value = point[key];
    if (typeof value !== "number") open = null;
    else if (open === null || point.at - before > GAP_SECONDS) found.push((open = [point]));
    else open.push(point);
    before = point.at;
  }
  return found;
}

export function nearest(points, at) {
  let best = null;
  for (const point of points) if (best === null || Math.abs(point.at - at) < Math.abs(best.at - at)) best = point;
  return best;
}

export function describe({ title, series, format }, points) {
  const parts = series.map(({ key, label }) => {
    const values = points.map((point) => point[key]).filter((value) => typeof value === "number");
    const name = series.length > 1 ? `${label}: ` : "";
    if (values.length === 0) return `${name}no values yet`;
    const [low, high] = [Math.min(...values), Math.max(...values)];
    return `${name}now ${format(values.at(-1))}, lowest ${format(low)}, highest ${format(high)}`;
  });
  return `${title}, last ${clock(spanOf(points))}. ${parts.join(". ")}.`;
}

export class Chart {
  constructor(spec, onCursor) {
    this.spec = spec;
    this.onCursor = onCursor;
    this.cursor = null;
    this.span = LONGEST_SPAN;
    this.values = spec.series.map(() => h("dd", {}, "-"));
    this.time = h("span", { class: "chart-time" });
    this.drawing = svg("svg", { role: "img", tabindex: "0" });
    const legend = spec.series.map(({ label }, index) => h("div", {}, h("dt", {}, label), this.values[index]));
    this.node = h(
      "figure",
      { class: "chart", "data-chart": spec.id },
      h(
        "figcaption",
        { class: "chart-head" },
        h("span", { class: "chart-title" }, spec.title),
        h("dl", { class: "chart-legend numbers" }, ...legend),
        this.time,
      ),
      this.drawing,
    );
    this.drawing.addEventListener("pointermove", (event) => this.point(event));
    this.drawing.addEventListener("pointerdown", (event) => this.point(event));
    this.drawing.addEventListener("pointerleave", () => onCursor(null));
    this.drawing.addEventListener("keydown", (event) => this.step(event));
    this.drawing.addEventListener("blur", () => onCursor(null));
  }

  point(event) {
    const box = this.drawing.getBoundingClientRect();
    const inner = box.width - MARGIN.left - MARGIN.right;
    const share = (event.clientX - box.left - MARGIN.left) / inner;
    this.onCursor(Math.min(1, Math.max(0, share)) * this.span - this.span);
  }

  step(event) {
    const seconds = { ArrowLeft: -this.span / 60, ArrowRight: this.span / 60 }[event.key];
    if (event.key === "Escape") this.onCursor(null);
    if (seconds === undefined) return;
    event.preventDefault();
    this.onCursor(Math.min(0, Math.max(-this.span, (this.cursor ?? 0) + seconds)));
  }

  draw(points, now, cursor) {
    const { series, format } = this.spec;
    this.cursor = cursor;
    this.span = spanOf(points);
    const isEmpty = !points.some((point) => series.some(({ key }) => typeof point[key] === "number"));
    this.node.hidden = Boolean(this.spec.isOptional) && isEmpty;
    if (this.node.hidden) return;
    const shown = cursor === null ? points.at(-1) : nearest(points, now + cursor);
    series.forEach(({ key }, index) => {
      const value = shown?.[key];
      this.values[index].textContent = typeof value === "number" ? format(value) : "-";
    });
    this.time.textContent = cursor === null || !shown ? "" : ago(now - shown.at);
    this.drawing.setAttribute("aria-label", describe(this.spec, points));
    this.paint(points, now, cursor === null ? null : shown);
  }

  paint(points, now, marked) {
    const { series, format, max, least } = this.spec;
    const width = this.drawing.clientWidth;
    const height = this.drawing.clientHeight;
    if (width === 0) return;
    const highest = points.flatMap((point) => series.map(({ key }) => point[key] ?? 0));
    const top = max ?? roundUp(Math.max(least ?? 0, ...highest));
    const bottom = height - MARGIN.bottom;
    const x = (at) => MARGIN.left + (1 + (at - now) / this.span) * (width - MARGIN.left - MARGIN.right);
    const y = (value) => bottom - (Math.min(value, top) / top) * (bottom - MARGIN.top);
    const place = (point, key) => `${x(point.at).toFixed(1)},${y(point[key]).toFixed(1)}`;
    const parts = [...grid(width, y, top, format, bottom, this.span)];
    series.forEach(({ key }, index) => {
      for (const run of segments(points, key)) {
        const path = run.map((point) => place(point, key)).join("L");
        const [first, last] = [x(run[0].at).toFixed(1), x(run.at(-1).at).toFixed(1)];
        if (index === 0) parts.push(svg("path", { class: "area", d: `M${path}L${last},${bottom}L${first},${bottom}Z` }));
        parts.push(svg("path", { class: `line line-${index}`, d: `M${path}` }));
      }
    });
    if (marked) {
      const at = x(marked.at);
      parts.push(svg("line", { class: "cursor", x1: at, x2: at, y1: MARGIN.top, y2: bottom }));
      series.forEach(({ key }, index) => {
        if (typeof marked[key] !== "number") return;
        parts.push(svg("circle", { class: `dot dot-${index}`, cx: at, cy: y(marked[key]), r: 4 }));
      });
    }
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.drawing.replaceChildren(...parts);
  }
}

function* grid(width, y, top, format, bottom, span) {
  for (let index = 0; index <= NUM_GRID_LINES; index += 1) {
    const value = (top * index) / NUM_GRID_LINES;
    const at = y(value);
    yield svg("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: at, y2: at });
    yield svg("text", { x: MARGIN.left - 6, y: at + 4, "text-anchor": "end" }, format(value));
  }
  const inner = width - MARGIN.left - MARGIN.right;
  const labels = [
    [0, "start", ago(span)],
    [0.5, "middle", ago(span / 2)],
    [1, "end", "now"],
  ];
  for (const [share, anchor, text] of labels) {
    yield svg("text", { x: MARGIN.left + share * inner, y: bottom + 15, "text-anchor": anchor }, text);
  }
}

function ago(seconds) {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 60) return `${whole} s ago`;
  const rest = whole % 60 === 0 ? "" : ` ${whole % 60} s`;
  return `${Math.floor(whole / 60)} min${rest} ago`;
}
