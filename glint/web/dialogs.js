import { apiKey, keepApiKey } from "./api.js";
import { byId } from "./dom.js";

export function ask({ title, text = "", label = null, value = "", ok = "OK", type = "text" }) {
  const dialog = byId("ask");
  byId("ask-title").textContent = title;
  byId("ask-text").textContent = text;
  byId("ask-label").textContent = label ?? "";
  byId("ask-ok").textContent = ok;
  const input = byId("ask-input");
  input.type = type;
  input.value = value;
  byId("ask-field").hidden = label === null;
  dialog.returnValue = "";
  dialog.showModal();
  if (label !== null) input.select();
  return closing(dialog).then((isAccepted) => {
    const given = input.value;
    input.value = "";
    return isAccepted ? given : null;
  });
}

function closing(dialog) {
  const cancel = dialog.querySelector("[id$=-cancel]");
  return new Promise((resolve) => {
    let isAccepted = false;
    const submit = () => (isAccepted = true);
    const leave = () => dialog.close();
    dialog.addEventListener("submit", submit, { once: true });
    cancel.addEventListener("click", leave);
    dialog.addEventListener(
      "close",
      () => {
        dialog.removeEventListener("submit", submit);
        cancel.removeEventListener("click", leave);
        resolve(isAccepted);
      },
      { once: true },
    );
  });
}

export async function askForKey(text) {
  const key = await ask({ title: "API key", text, label: "Key", value: apiKey(), ok: "Use it", type: "password" });
  if (key === null) return false;
  keepApiKey(key.trim());
  return true;
}
