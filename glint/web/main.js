import { Chat, servedModel } from "./chat.js";
import { ask, askForKey } from "./dialogs.js";
import { byId, h } from "./dom.js";
import { SettingsDialog } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import * as store from "./store.js";
import { switchTheme, watchTheme } from "./theme.js";
import { newConversation } from "./tree.js";

const RETRY_SECONDS = 2;
const FINE_POINTER = matchMedia("(pointer: fine)");

let conversations = store.loadConversations();
const chat = new Chat(keep);
const sidebar = new Sidebar(open, { Rename: rename, Export: exportOne, Delete: remove });
const deleted = new Set();
const settingsDialog = new SettingsDialog();

function keep(conversation) {
  if (!deleted.has(conversation.id)) {
    if (!conversations.includes(conversation)) conversations.push(conversation);
    store.newestFirst(conversations);
    attempt(() => store.keepConversation(conversation));
  }
  showState();
}

function attempt(action) {
  try {
    action();
  } catch (error) {
    if (!(error instanceof store.StoreError)) throw error;
    showBanner(error.message);
  }
}

function open(conversation) {
  chat.open(conversation);
  byId("thinking").checked = conversation.settings.thinking;
  showState();
}

function openNew() {
  sidebar.toggle(false);
  open(newConversation(store.loadSettings()));
  byId("prompt").focus();
}

function showState() {
  const current = chat.conversation;
  sidebar.show(conversations, current);
  byId("title").textContent = current.title || "New chat";
  document.title = current.title ? `${current.title} \u2013 glint` : "glint";
  byId("stop").hidden = !chat.isRunning;
  byId("send").hidden = chat.isRunning;
}

function showBanner(text) {
  byId("banner").textContent = text ?? "";
  byId("banner").hidden = !text;
}

async function send() {
  const text = byId("prompt").value;
  if (!text.trim() || chat.isRunning) return;
  byId("prompt").value = "";
  await chat.send(text);
  if (FINE_POINTER.matches) byId("prompt").focus();
}

async function rename(current) {
  const title = await ask({ title: "Rename", label: "Title", value: current.title, ok: "Rename" });
  if (title === null || !title.trim()) return;
  current.title = title.trim().slice(0, 200);
  keep(current);
}

async function remove(current) {
  const text = `"${current.title}" is deleted from this browser. This cannot be undone.`;
  if ((await ask({ title: "Delete the conversation?", text, ok: "Delete" })) === null) return;
  if (chat.isAnswering(current)) chat.stop();
  deleted.add(current.id);
  conversations = conversations.filter((one) => one !== current);
  store.deleteConversation(current.id);
  openNew();
}

function exportOne(conversation) {
  download([conversation], "conversation");
}

function download(list, name) {
  const url = URL.createObjectURL(new Blob([store.exportText(list)], { type: "application/json" }));
  h("a", { href: url, download: `${name}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

async function importFile() {
  const file = byId("import-file").files[0];
  byId("import-file").value = "";
  if (!file) return;
  try {
    if (file.size > store.MAX_FILE_BYTES) throw new store.StoreError("The file is larger than 20 MB.");
    const imported = store.importText(await file.text());
    imported.forEach(store.keepConversation);
    conversations = store.newestFirst([...imported, ...conversations]);
    showBanner(`Imported ${imported.length} conversations.`);
    showState();
  } catch (error) {
    showBanner(error instanceof store.StoreError ? error.message : "The file cannot be read.");
  }
}

function changeSettings(changes) {
  Object.assign(chat.conversation.settings, changes);
  attempt(() => store.keepSettings(chat.conversation.settings));
  if (conversations.includes(chat.conversation)) keep(chat.conversation);
}

function openSettings() {
  settingsDialog.open(chat.conversation.settings, changeSettings);
}

function showTheme(shown) {
  byId("theme").textContent = shown === "dark" ? "Light" : "Dark";
}

async function greet() {
  try {
    const model = await servedModel();
    byId("model-line").textContent = `${model.id}, up to ${model.max_model_len.toLocaleString("en")} tokens`;
    showBanner(null);
  } catch (error) {
    if (error.needsKey) return askAndGreet(error.message);
    showBanner(error.message);
    setTimeout(greet, 1000 * (error.retrySeconds ?? RETRY_SECONDS));
  }
}

async function askAndGreet(text) {
  if (await askForKey(text)) await greet();
  else showBanner("The server wants an API key. Settings, API key takes one.");
}

function onPromptKey(event) {
  if (event.isComposing) return;
  if (event.key === "Enter" && !event.shiftKey && FINE_POINTER.matches) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && byId("prompt").value === "") {
    event.preventDefault();
    chat.editLast();
  }
}

const SHORTCUTS = {
  "ctrl+k": () => (sidebar.toggle(true), byId("search").focus()),
  "alt+n": openNew,
  "alt+r": () => chat.regenerateLast(),
  "alt+s": openSettings,
  f1: () => byId("help").showModal(),
};

function onKey(event) {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") {
    if (sidebar.isOpen) sidebar.toggle(false);
    else chat.stop();
    return;
  }
  const modifier = event.ctrlKey || event.metaKey ? "ctrl+" : event.altKey ? "alt+" : "";
  const action = SHORTCUTS[modifier + (event.altKey ? event.code.replace("Key", "") : event.key).toLowerCase()];
  if (!action) return;
  event.preventDefault();
  action();
}

function onStorage(event) {
  const id = store.conversationOfEvent(event);
  if (id === null || conversations.some((one) => one.id === id && chat.isAnswering(one))) return;
  const found = store.loadConversation(id);
  const isCurrent = chat.conversation.id === id;
  conversations = conversations.filter((one) => one.id !== id);
  if (found) store.newestFirst(conversations).unshift(found);
  if (isCurrent && found) open(found);
  else showState();
}

function listen() {
  const onClick = (id, action) => byId(id).addEventListener("click", action);
  onClick("new", openNew);
  onClick("stop", () => chat.stop());
  onClick("export-all", () => download(conversations, "conversations"));
  onClick("import", () => byId("import-file").click());
  onClick("open-settings", openSettings);
  onClick("open-help", () => byId("help").showModal());
  onClick("theme", switchTheme);
  byId("import-file").addEventListener("change", importFile);
  byId("thinking").addEventListener("change", (event) => changeSettings({ thinking: event.target.checked }));
  byId("prompt").addEventListener("keydown", onPromptKey);
  byId("composer").addEventListener("submit", (event) => (event.preventDefault(), send()));
  document.addEventListener("keydown", onKey);
  window.addEventListener("storage", onStorage);
  window.addEventListener("pagehide", () => conversations.filter((one) => chat.isAnswering(one)).forEach(keep));
  sidebar.onSearch = showState;
}

listen();
watchTheme(showTheme);
if (conversations.length > 0) open(conversations[0]);
else openNew();
greet();
