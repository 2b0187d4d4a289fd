import { byId, h } from "./dom.js";
import { textOf } from "./tree.js";

export class Sidebar {
  #onOpen;

  constructor(onOpen) {
    this.#onOpen = onOpen;
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
    return h("li", {}, h("button", { type: "button", click: open, "aria-current": isCurrent ? "true" : null, title }, title));
  }
}
