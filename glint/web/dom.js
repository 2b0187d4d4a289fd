export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  return node;
}

export function button(label, onClick, attributes = {}) {
  return h("button", { type: "button", class: "quiet", click: onClick, ...attributes }, label);
}

export function byId(id) {
  return document.getElementById(id);
}

export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export async function copyText(text) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const area = h("textarea", { class: "unseen", "aria-hidden": "true" });
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

export function copyButton(textOf, label = "Copy") {
  const made = button(label, async () => {
    try {
      await copyText(textOf());
      made.textContent = "Copied";
    } catch {
      made.textContent = "Not copied";
    }
    setTimeout(() => (made.textContent = label), 1500);
  });
  return made;
}
