import { button, byId, h } from "./dom.js";
import { textOf } from "./tree.js";

export class Sidebar {
  #onOpen;
  #actions;
  #shown = "";

  constructor(onOpen, actions) {
    this.#onOpen = onOpen;
    this.#actions = actions;
    byId("search").addEventListener("input", () => this.onSearch?.());
    byId("open-side").addEventListener("click", () => this.toggle(true));
    byId("veil").addEventListener("click", () => this.toggle(false));
  }

  get isOpen() {
    return document.body.classList.contains("side-open");
  }

  toggle(isOpen) {
    document.body.classList.toggle("side-open", isOpen);
    byId("open-side").setAttribute("aria-expanded", String(isOpen));
    if (isOpen) byId("search").focus();
  }

  show(conversations, current) {
    const wanted = byId("search").value.trim().toLowerCase();
    const found = conversations.filter((conversation) => !wanted || textOf(conversation).includes(wanted));
    const state = JSON.stringify([wanted, found.map(({ id, title }) => [id, title]), current.id]);
    if (state === this.#shown) return;
    this.#shown = state;
    const items = found.map((conversation) => this.#item(conversation, conversation === current));
    const text = wanted ? "No conversation has this text" : "No conversations yet";
    byId("list").replaceChildren(...(items.length ? items : [h("li", { class: "none small" }, text)]));
  }

  #item(conversation, isCurrent) {
    const open = () => {
      this.toggle(false);
      this.#onOpen(conversation);
    };
    const title = conversation.title || "Untitled";
    const name = { type: "button", class: "title", click: open, "aria-current": isCurrent ? "true" : null, title };
    const own = Object.entries(this.#actions).map(([label, action]) => button(label, () => action(conversation)));
    return h("li", {}, h("button", name, title), isCurrent ? h("div", { class: "own" }, ...own) : null);
  }
}
