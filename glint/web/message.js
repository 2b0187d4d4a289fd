import { button, copyButton, h } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const SPEAKERS = { user: "You", assistant: "Answer", tool: "Result of a tool" };

export class MessageView {
  #reasoning = h("div", { class: "thought" });
  #reasoningLabel = h("summary", {}, "Thinking");
  #reasoningBox = h("details", { class: "reasoning" }, this.#reasoningLabel, this.#reasoning);
  #markdown = new MarkdownView();
  #calls = h("div");
  #waiting = h("p", { class: "waiting" }, "Waiting for the server");
  #problem = h("div");
  #actions = h("div", { class: "actions" });

  constructor(message, place, actions) {
    this.message = message;
    this.place = place;
    this.actions = actions;
    const name = h("span", { class: "unseen" }, `${SPEAKERS[message.role]}: `);
    const body = message.role === "assistant" ? this.#assistantBody() : [h("div", { class: "body" }, message.content)];
    this.element = h("li", { class: `message ${message.role}` }, name, ...body, this.#actions);
    this.update(false);
  }

  #assistantBody() {
    return [this.#reasoningBox, this.#waiting, this.#markdown.element, this.#calls, this.#problem];
  }

  get text() {
    return this.#markdown.element.textContent;
  }

  update(isRunning) {
    if (this.message.role === "assistant") this.#updateAnswer(isRunning);
    this.#actions.replaceChildren(...(isRunning ? [] : this.#footer()));
  }

  #updateAnswer(isRunning) {
    const { content, reasoning, toolCalls = [], error } = this.message;
    this.#reasoningBox.hidden = !reasoning;
    appendText(this.#reasoning, reasoning ?? "");
    this.#reasoningLabel.textContent = thinkingLabel(this.message, isRunning);
    this.#markdown.update(content);
    this.#waiting.hidden = !isRunning || Boolean(content || reasoning || toolCalls.length);
    this.#calls.replaceChildren(...toolCalls.filter(Boolean).map((call) => callNode(call)));
    this.#problem.replaceChildren(...(error && !isRunning ? [this.#errorNode(error)] : []));
  }

  #errorNode(error) {
    const label = this.message.content || this.message.reasoning ? "Go on" : "Try again";
    const again = button(label, () => this.actions.goOn(this.message), { class: "again" });
    return h("div", { class: "error", role: "alert" }, h("span", {}, error), again);
  }

  #footer() {
    const { role } = this.message;
    const parts = [...this.#branches(), copyButton(() => this.message.content)];
    if (role === "user") parts.push(button("Edit", () => this.edit()));
    if (role === "assistant") {
      parts.push(button("Again", () => this.actions.regenerate(this.message), { title: "Answer again, as a branch" }));
      if (this.message.toolCalls?.length) parts.push(button("Give results", () => this.#giveResults()));
      parts.push(h("span", { class: "figures small numbers" }, figures(this.message)));
    }
    return parts;
  }

  #branches() {
    const { at, count } = this.place;
    if (count < 2) return [];
    const step = (sign, label, by) =>
      button(sign, () => this.actions.select(this.message, by), { "aria-label": label, disabled: at + by < 0 || at + by >= count });
    const shown = h("span", { class: "small numbers" }, `${at + 1} / ${count}`);
    return [step("\u2039", "Previous version", -1), shown, step("\u203a", "Next version", 1)];
  }

  edit() {
    const area = h("textarea", { "aria-label": "Edited message" });
    area.value = this.message.content;
    this.#openForm([area], "Send as a branch", () => this.actions.edit(this.message, area.value));
  }

  #giveResults() {
    const areas = this.message.toolCalls.map((call) => h("textarea", { "aria-label": `Result of ${call.name}` }));
    this.#openForm(areas, "Send results", () => this.actions.giveResults(this.message, areas.map((area) => area.value)));
  }

  #openForm(areas, label, send) {
    const submit = (event) => {
      event.preventDefault();
      send();
    };
    const cancel = button("Cancel", () => this.update(false));
    const foot = h("div", { class: "dialog-foot" }, cancel, h("button", { type: "submit", class: "primary" }, label));
    this.#actions.replaceChildren(h("form", { submit }, ...areas, foot));
    areas[0].focus();
  }
}

function appendText(node, text) {
  const shown = node.textContent;
  if (text === shown) return;
  if (shown && text.startsWith(shown)) node.append(text.slice(shown.length));
  else node.textContent = text;
}

function thinkingLabel(message, isRunning) {
  if (isRunning && !message.content) return "Thinking, still at it";
  const seconds = message.timing?.thinking;
  return seconds ? `Thinking, ${seconds.toFixed(1)} s` : "Thinking";
}

function callNode(call) {
  return h("details", { class: "call", open: true }, h("summary", {}, `Calls ${call.name}`), h("pre", {}, h("code", {}, pretty(call.arguments))));
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

export function figures({ usage, timing, finish }) {
  const parts = [];
  if (finish === "length") parts.push("cut at the token limit");
  if (finish === "stopped") parts.push("stopped");
  if (usage) parts.push(...tokenFigures(usage));
  if (Number.isFinite(timing?.first)) parts.push(`first token ${timing.first.toFixed(2)} s`);
  const rate = timing?.rest > 0 && usage?.completion_tokens > 1 ? (usage.completion_tokens - 1) / timing.rest : null;
  if (rate) parts.push(`${rate.toFixed(1)} tok/s`);
  return parts.join(" \u00b7 ");
}

function tokenFigures(usage) {
  const cached = usage.prompt_tokens_details?.cached_tokens;
  const accepted = usage.completion_tokens_details?.accepted_prediction_tokens;
  const rejected = usage.completion_tokens_details?.rejected_prediction_tokens;
  const parts = [
    `${count(usage.completion_tokens)} tokens`,
    `prompt ${count(usage.prompt_tokens)}${cached ? `, ${count(cached)} cached` : ""}`,
  ];
  if (accepted) parts.push(`${count(accepted)}${rejected === undefined || rejected === null ? "" : ` of ${count(accepted + rejected)}`} drafts accepted`);
  return parts;
}

function count(number) {
  return (number ?? 0).toLocaleString("en");
}
