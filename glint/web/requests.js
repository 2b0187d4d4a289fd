import { request, requestJson } from "./api.js";
import { ask } from "./dialogs.js";
import { button, byId, h } from "./dom.js";
import { amount, clock } from "./figures.js";

const MAX_ROWS = 100;
const CELLS = ["id", "route", "state", "age", "choices", "prompt", "output"];

export class RequestTable {
  constructor(announce) {
    this.announce = announce;
    this.rows = new Map();
    this.isRefused = false;
  }

  async refresh(signal) {
    if (this.isRefused) return;
    try {
      const listing = await requestJson("requests", { signal });
      this.show(listing.data, listing.shown);
    } catch (error) {
      if (error.status !== 401 && error.status !== 403) throw error;
      this.isRefused = true;
      this.show([], null);
      byId("requests-note").textContent =
        error.status === 401 ? "They need the admin key: the button API key takes it." : error.message;
    }
  }

  show(entries, shown) {
    const listed = entries.slice(0, MAX_ROWS);
    const ids = new Set(listed.map((entry) => entry.id));
    for (const [id, row] of this.rows) {
      if (ids.has(id)) continue;
      row.node.remove();
      this.rows.delete(id);
    }
    for (const entry of listed) this.row(entry.id).fill(entry);
    byId("requests-table").hidden = listed.length === 0;
    const more = entries.length > MAX_ROWS ? ` The oldest ${MAX_ROWS} are listed.` : "";
    const whose = shown === "own" ? " Requests of this key; the admin key shows all." : "";
    byId("requests-note").textContent = `${entries.length === 0 ? "None." : `${entries.length} in flight.`}${more}${whose}`;
  }

  row(id) {
    let row = this.rows.get(id);
    if (row === undefined) {
      row = new Row(id, () => this.cancel(id));
      this.rows.set(id, row);
      byId("requests").append(row.node);
    }
    return row;
  }

  async cancel(id) {
    const text = "Its client gets an error, and its pages become free.";
    if ((await ask({ title: `Cancel ${id}?`, text, ok: "Cancel the request" })) === null) return;
    try {
      await request(`requests/${encodeURIComponent(id)}`, { method: "DELETE" });
      this.announce(`The request ${id} is cancelled.`);
    } catch (error) {
      this.announce(error.status === 404 ? `The request ${id} had already ended.` : error.message);
    }
  }
}

class Row {
  constructor(id, onCancel) {
    const kinds = { age: "amount", choices: "amount", prompt: "amount", output: "amount" };
    this.cells = Object.fromEntries(CELLS.map((name) => [name, h("td", { class: kinds[name] ?? "" })]));
    this.cells.id.append(h("code", {}, id));
    const cancel = button("Cancel", onCancel, { "aria-label": `Cancel ${id}` });
    this.node = h("tr", { "data-request": id }, ...Object.values(this.cells), h("td", {}, cancel));
  }

  fill(entry) {
    this.cells.route.textContent = entry.route;
    this.cells.state.textContent = entry.state;
    this.cells.age.textContent = clock(entry.age_seconds);
    this.cells.choices.textContent = entry.choices ?? "-";
    this.cells.prompt.textContent = entry.prompt_tokens === null ? "-" : amount(entry.prompt_tokens);
    this.cells.output.textContent = amount(entry.output_tokens);
  }
}
