const NAME = "glint.theme";
const prefersDark = matchMedia("(prefers-color-scheme: dark)");

let onChange = () => {};

export function watchTheme(callback) {
  onChange = callback;
  callback(theme());
}

function theme() {
  const chosen = localStorage.getItem(NAME);
  if (chosen === "light" || chosen === "dark") return chosen;
  return prefersDark.matches ? "dark" : "light";
}

function show() {
  document.documentElement.dataset.theme = theme();
  onChange(theme());
}

export function switchTheme() {
  const next = theme() === "dark" ? "light" : "dark";
  if (next === (prefersDark.matches ? "dark" : "light")) localStorage.removeItem(NAME);
  else localStorage.setItem(NAME, next);
  show();
}

prefersDark.addEventListener("change", show);
show();
