import { copyButton, h } from "./dom.js";
import { renderInline } from "./inline.js";

const MAX_DEPTH = 12;
const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:\s+(.*)|\s*)$/;
const DIVIDER = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;

export class MarkdownView {
  element = h("div", { class: "markdown" });
  #shown = [];

  update(text) {
    const blocks = splitBlocks(text.split(/\r\n|\n|\r/));
    const sources = blocks.map((block) => JSON.stringify(block));
    let same = 0;
    while (same < sources.length && sources[same] === this.#shown[same]) same += 1;
    while (this.element.childNodes.length > same) this.element.lastChild.remove();
    for (const block of blocks.slice(same)) this.element.append(renderBlock(block, 0));
    this.#shown = sources;
  }
}

export function renderMarkdown(text) {
  const view = new MarkdownView();
  view.update(text);
  return view.element;
}

function renderLines(lines, depth) {
  if (depth > MAX_DEPTH) return [h("p", {}, lines.join("\n"))];
  return splitBlocks(lines).map((block) => renderBlock(block, depth));
}

export function splitBlocks(lines) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const taken = lines[at].trim() === "" ? { end: at + 1 } : takeBlock(lines, at);
    if (taken.block) blocks.push(taken.block);
    at = taken.end;
  }
  return blocks;
}

function takeBlock(lines, at) {
  if (FENCE.test(lines[at])) return takeFence(lines, at);
  if (HEADING.test(lines[at])) return { block: { kind: "heading", text: lines[at] }, end: at + 1 };
  if (RULE.test(lines[at])) return { block: { kind: "rule" }, end: at + 1 };
  if (QUOTE.test(lines[at])) return takeQuote(lines, at);
  if (ITEM.test(lines[at])) return takeList(lines, at);
  if (isTable(lines, at)) return takeTable(lines, at);
  return takeParagraph(lines, at);
}

function takeFence(lines, at) {
  const [, indent, fence, language] = FENCE.exec(lines[at]);
  const body = [];
  let end = at + 1;
  while (end < lines.length && !closesFence(lines[end], fence)) body.push(dedent(lines[end++], indent.length));
  return { block: { kind: "code", language: language.trim().split(/\s/)[0], text: body.join("\n") }, end: end + 1 };
}

function closesFence(line, fence) {
  const text = line.trim();
  return text.length >= fence.length && text === fence[0].repeat(text.length);
}

function dedent(line, width) {
  let cut = 0;
  while (cut < width && line[cut] === " ") cut += 1;
  return line.slice(cut);
}

function takeQuote(lines, at) {
  const inner = [];
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) inner.push(QUOTE.exec(lines[end++])[1]);
  return { block: { kind: "quote", lines: inner }, end };
}

function takeList(lines, at) {
  const first = ITEM.exec(lines[at]);
  const indent = first[1].length;
  const isOrdered = /\d/.test(first[2]);
  const items = [];
  let end = at;
  while (end < lines.length && startsItem(lines[end], indent, isOrdered)) {
    const item = takeItem(lines, end, indent);
    items.push(item.lines);
    end = item.end;
  }
  const block = { kind: "list", isOrdered, start: Number.parseInt(first[2], 10) || 0, items };
  return { block, end };
}

function startsItem(line, indent, isOrdered) {
  const item = ITEM.exec(line);
  return item !== null && !RULE.test(line) && Math.abs(item[1].length - indent) < 2 && /\d/.test(item[2]) === isOrdered;
}

function takeItem(lines, at, indent) {
  const item = ITEM.exec(lines[at]);
  const width = item[1].length + item[2].length + 1;
  const inner = [item[3] ?? ""];
  let end = at + 1;
  while (end < lines.length && belongsToItem(lines, end, indent)) inner.push(dedent(lines[end++], width));
  while (inner.length > 1 && inner.at(-1).trim() === "") inner.pop();
  return { lines: inner, end };
}

function belongsToItem(lines, at, indent) {
  const line = lines[at];
  if (line.trim() === "") {
    const next = lines.slice(at + 1, at + 3).find((later) => later.trim() !== "");
    return next !== undefined && (indentOf(next) >= indent + 2 || ITEM.test(next));
  }
  if (indentOf(line) >= indent + 2) return true;
  return lines[at - 1].trim() !== "" && !startsBlock(line);
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function startsBlock(line) {
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));
}

function isTable(lines, at) {
  const next = lines[at + 1];
  if (next === undefined || !lines[at].includes("|") || !next.includes("-") || !DIVIDER.test(next)) return false;
  return cellsOf(lines[at]).length === cellsOf(next).length;
}

function takeTable(lines, at) {
  const rows = [lines[at]];
  const alignments = cellsOf(lines[at + 1]).map(alignmentOf);
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) rows.push(lines[end++]);
  return { block: { kind: "table", alignments, rows: rows.map(cellsOf) }, end };
}

function alignmentOf(cell) {
  if (cell.endsWith(":")) return cell.startsWith(":") ? "center" : "right";
  return "left";
}

function cellsOf(line) {
  const cells = [""];
  for (let at = 0; at < line.length; at += 1) {
    if (line[at] === "\\" && line[at + 1] === "|") cells[cells.length - 1] += line[++at];
    else if (line[at] === "|") cells.push("");
    else cells[cells.length - 1] += line[at];
  }
  const trimmed = cells.map((cell) => cell.trim());
  if (trimmed[0] === "") trimmed.shift();
  if (trimmed.at(-1) === "") trimmed.pop();
  return trimmed;
}

function takeParagraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "" && !startsBlock(lines[end]) && !isTable(lines, end)) end += 1;
  return { block: { kind: "paragraph", text: lines.slice(at, end).join("\n") }, end };
}

function renderBlock(block, depth) {
  if (block.kind === "heading") return renderHeading(block.text);
  if (block.kind === "rule") return h("hr");
  if (block.kind === "code") return renderCode(block);
  if (block.kind === "quote") return h("blockquote", {}, renderLines(block.lines, depth + 1));
  if (block.kind === "list") return renderList(block, depth);
  if (block.kind === "table") return renderTable(block);
  return h("p", {}, renderInline(block.text.trim()));
}

function renderHeading(line) {
  const [, signs, text] = HEADING.exec(line);
  return h(`h${Math.min(6, signs.length + 2)}`, {}, renderInline(text));
}

function renderCode({ language, text }) {
  const label = language || "code";
  const head = h("div", { class: "code-head" }, h("span", {}, label), copyButton(() => text));
  return h("div", { class: "code" }, head, h("pre", { tabindex: "0", role: "region", "aria-label": label }, h("code", {}, text)));
}

function renderList({ isOrdered, start, items }, depth) {
  const isNumbered = isOrdered && start !== 1;
  const made = items.map((lines) => renderItem(lines, depth));
  return h(isOrdered ? "ol" : "ul", isNumbered ? { start } : {}, made);
}

function renderItem(lines, depth) {
  const task = /^\[([ xX])\]\s+(.*)$/.exec(lines[0]);
  const inner = task ? [task[2], ...lines.slice(1)] : lines;
  const nodes = unwrapFirst(renderLines(inner, depth + 1));
  if (!task) return h("li", {}, nodes);
  return h("li", { class: "task" }, task[1] === " " ? "\u2610 " : "\u2611 ", nodes);
}

function unwrapFirst(nodes) {
  const paragraphs = nodes.filter((node) => node.tagName === "P").length;
  if (nodes[0]?.tagName !== "P" || paragraphs > 1) return nodes;
  return [...nodes[0].childNodes, ...nodes.slice(1)];
}

function renderTable({ alignments, rows }) {
  const row = (cells, tag) =>
    h("tr", {}, alignments.map((side, at) => h(tag, { class: side }, renderInline(cells[at] ?? ""))));
  const body = rows.slice(1).map((cells) => row(cells, "td"));
  const table = h("table", {}, h("thead", {}, row(rows[0], "th")), h("tbody", {}, body));
  return h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, table);
}
