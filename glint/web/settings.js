import { askForKey } from "./dialogs.js";
import { byId } from "./dom.js";

const NUMBERS = ["temperature", "topP", "maxTokens", "thinkingBudget", "seed"];
const TEXTS = ["system", "tools"];

export class SettingsDialog {
  #dialog = byId("settings");
  #form = byId("settings-form");
  #onSave = null;

  constructor() {
    this.#form.addEventListener("submit", (event) => this.#submit(event));
    byId("settings-cancel").addEventListener("click", () => this.#dialog.close());
    byId("set-key").addEventListener("click", () => askForKey("The key is kept until this tab closes."));
  }

  open(settings, onSave) {
    this.#onSave = onSave;
    for (const name of [...NUMBERS, ...TEXTS]) this.#form.elements[name].value = settings[name] ?? "";
    this.#showError(null);
    this.#dialog.showModal();
  }

  #submit(event) {
    const problem = toolsProblem(this.#form.elements.tools.value);
    if (problem) {
      event.preventDefault();
      this.#showError(problem);
      return;
    }
    const read = Object.fromEntries(TEXTS.map((name) => [name, this.#form.elements[name].value.trim()]));
    for (const name of NUMBERS) read[name] = numberOf(this.#form.elements[name].value);
    this.#onSave(read);
  }

  #showError(text) {
    byId("settings-error").textContent = text ?? "";
    byId("settings-error").hidden = text === null;
  }
}

function numberOf(text) {
  return text.trim() === "" ? null : Number(text);
}

export function toolsOf(text) {
  return text.trim() === "" ? null : JSON.parse(text);
}

function toolsProblem(text) {
  try {
    const tools = toolsOf(text);
    return tools === null || Array.isArray(tools) ? null : "The tools are not a list. Write them between [ and ].";
  } catch (error) {
    return `The tools are not valid JSON: ${error.message}.`;
  }
}
