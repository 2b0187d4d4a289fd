import { h } from "./dom.js";

const MAX_DEPTH = 8;
const MAX_LABEL = 1000;
const MAX_ADDRESS = 2000;
const PROTOCOLS = new Set(["http:", "https:", "mailto:"]);
const SPECIAL = /[\\`*_~[!<h\n]/g;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const ADDRESS = /https?:\/\/[^\s<>"'`]+/y;
const MARKS = [
  ["***", ["strong", "em"]],
  ["**", ["strong"]],
  ["__", ["strong"]],
  ["~~", ["del"]],
  ["*", ["em"]],
  ["_", ["em"]],
];

export function safeAddress(text) {
  try {
    const url = new URL(text);
    return PROTOCOLS.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

export function link(address, children) {
  const safe = safeAddress(address);
  if (safe === null) return h("span", {}, children, ` (${address})`);
  return h("a", { href: safe, rel: "noopener noreferrer nofollow", target: "_blank" }, children);
}

export function renderInline(text, depth = 0) {
  return new InlineParser(text, depth).parse();
}

class InlineParser {
  #at = 0;
  #plain = "";
  #nodes = [];
  #unclosed = new Set();

  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
  }

  parse() {
    if (this.depth > MAX_DEPTH) return [this.text];
    while (this.#at < this.text.length) {
      this.#skipPlain();
      if (this.#at < this.text.length && !this.#takeSpecial()) this.#plain += this.text[this.#at++];
    }
    this.#flush();
    return this.#nodes;
  }

  #skipPlain() {
    SPECIAL.lastIndex = this.#at;
    const found = SPECIAL.exec(this.text);
    const end = found ? found.index : this.text.length;
    this.#plain += this.text.slice(this.#at, end);
    this.#at = end;
  }

  #flush() {
    if (this.#plain) this.#nodes.push(this.#plain);
    this.#plain = "";
  }

  #push(node, end) {
    this.#flush();
    this.#nodes.push(node);
    this.#at = end;
    return true;
  }

  #takeSpecial() {
    const sign = this.text[this.#at];
    if (sign === "\\") return this.#takeEscape();
    if (sign === "`") return this.#takeCode();
    if (sign === "\n") return this.#takeBreak();
    if (sign === "h" || sign === "<") return this.#takeAddress(sign === "<");
    if (sign === "[") return this.#takeLink(this.#at);
    if (sign === "!") return this.text[this.#at + 1] === "[" && this.#takeLink(this.#at + 1);
    return this.#takeMark();
  }

  #takeEscape() {
    const next = this.text[this.#at + 1] ?? "";
    if (next === "\n") return this.#push(h("br"), this.#at + 2);
    if (!ESCAPABLE.test(next)) return false;
    this.#plain += next;
    this.#at += 2;
    return true;
  }

  #takeCode() {
    const ticks = /`+/y;
    ticks.lastIndex = this.#at;
    const fence = ticks.exec(this.text)[0];
    const from = this.#at + fence.length;
    const end = this.#unclosed.has(fence) ? -1 : this.#findFence(fence, from);
    if (end < 0) {
      this.#unclosed.add(fence);
      this.#plain += fence;
      this.#at = from;
      return true;
    }
    const inner = this.text.slice(from, end).replaceAll("\n", " ");
    const isPadded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim() !== "";
    return this.#push(h("code", {}, isPadded ? inner.slice(1, -1) : inner), end + fence.length);
  }

  #findFence(fence, from) {
    let at = this.text.indexOf(fence, from);
    while (at >= 0) {
      let end = at + fence.length;
      while (this.text[end] === "`") end += 1;
      if (end === at + fence.length) return at;
      at = this.text.indexOf(fence, end);
    }
    return -1;
  }

  #takeBreak() {
    const isHard = this.#plain.endsWith("  ");
    this.#plain = this.#plain.trimEnd();
    return this.#push(isHard ? h("br") : "\n", this.#at + 1);
  }

  #takeAddress(isBracketed) {
    if (WORD.test(this.text[this.#at - 1] ?? " ")) return false;
    ADDRESS.lastIndex = this.#at + (isBracketed ? 1 : 0);
    const found = ADDRESS.exec(this.text)?.[0];
    if (!found) return false;
    const shown = isBracketed ? found : trimAddress(found);
    const end = ADDRESS.lastIndex - (found.length - shown.length);
    if (isBracketed && this.text[end] !== ">") return false;
    return this.#push(link(shown, [shown]), isBracketed ? end + 1 : end);
  }

  #takeLink(open) {
    const close = this.#findBracket(open);
    if (close < 0 || this.text[close + 1] !== "(") return false;
    const end = this.#findParenthesis(close + 1);
    if (end < 0) return false;
    const address = this.text.slice(close + 2, end).trim().split(/\s+["'(]/)[0].replace(/^<(.*)>$/, "$1");
    const label = this.text.slice(open + 1, close);
    return this.#push(link(address, renderInline(label || address, this.depth + 1)), end + 1);
  }

  #findBracket(open) {
    const last = Math.min(this.text.length, open + MAX_LABEL);
    let level = 0;
    for (let at = open; at < last; at += 1) {
      if (this.text[at] === "\\") at += 1;
      else if (this.text[at] === "[") level += 1;
      else if (this.text[at] === "]" && --level === 0) return at;
    }
    return -1;
  }

  #findParenthesis(open) {
    const last = Math.min(this.text.length, open + MAX_ADDRESS);
    let level = 0;
    for (let at = open; at < last && this.text[at] !== "\n"; at += 1) {
      if (this.text[at] === "(") level += 1;
      else if (this.text[at] === ")" && --level === 0) return at;
    }
    return -1;
  }

  #takeMark() {
    for (const [mark, tags] of MARKS) {
      if (!this.text.startsWith(mark, this.#at) || this.#unclosed.has(mark)) continue;
      const from = this.#at + mark.length;
      if (!this.#opens(mark, from)) continue;
      const end = this.#findMark(mark, from);
      if (end < 0) continue;
      const inner = renderInline(this.text.slice(from, end), this.depth + 1);
      const node = tags.reduce((inside, tag) => h(tag, {}, inside), inner);
      return this.#push(node, end + mark.length);
    }
    return false;
  }

  #opens(mark, from) {
    const isInWord = mark[0] === "_" && WORD.test(this.text[this.#at - 1] ?? " ");
    return /\S/.test(this.text[from] ?? " ") && !isInWord;
  }

  #findMark(mark, from) {
    let at = this.text.indexOf(mark, from + 1);
    while (at >= 0 && !this.#closes(mark, at)) at = this.text.indexOf(mark, at + this.#runLength(at));
    if (at < 0) this.#unclosed.add(mark);
    return mark.length === 2 && this.#runLength(at) === 3 ? at + 1 : at;
  }

  #closes(mark, at) {
    if (/\s/.test(this.text[at - 1])) return false;
    const after = at + mark.length;
    if (mark.length === 1 && this.#runLength(at) === 2) return false;
    return mark[0] !== "_" || !WORD.test(this.text[after] ?? " ");
  }

  #runLength(at) {
    let end = at;
    while (end >= 0 && this.text[end] === this.text[at]) end += 1;
    return end - at;
  }
}

function trimAddress(address) {
  let shown = address.replace(/[.,;:!?*_~]+$/, "");
  while (shown.endsWith(")") && count(shown, ")") > count(shown, "(")) shown = shown.slice(0, -1);
  return shown;
}

function count(text, sign) {
  return text.split(sign).length - 1;
}
