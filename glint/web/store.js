import { newId } from "./dom.js";
import { ROOT } from "./tree.js";

const PREFIX = "glint.conversation.";
const SETTINGS_NAME = "glint.settings";
const FORMAT = "glint-conversations";
const MAX_CONVERSATIONS = 1000;
const MAX_MESSAGES = 10_000;
export const MAX_FILE_BYTES = 20 * 2 ** 20;
const ROLES = ["user", "assistant", "tool"];
const DEFAULTS = {
  system: "",
  temperature: null,
  topP: null,
  maxTokens: null,
  thinkingBudget: null,
  seed: null,
  thinking: true,
  tools: "",
};

export class StoreError extends Error {}

export function loadSettings() {
  try {
    return readSettings(JSON.parse(localStorage.getItem(SETTINGS_NAME)) ?? {});
  } catch {
    return { ...DEFAULTS };
  }
}

export function keepSettings(settings) {
  write(SETTINGS_NAME, settings);
}

export function loadConversations() {
  const names = Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  const found = names.map((name) => loadConversation(name.slice(PREFIX.length))).filter((one) => one !== null);
  found.forEach(markInterrupted);
  return newestFirst(found);
}

function markInterrupted(conversation) {
  for (const message of Object.values(conversation.messages)) {
    const isOpen = message.role === "assistant" && !message.finish && !message.error;
    if (isOpen) message.error = "The page was left before the answer was complete.";
  }
}

export function newestFirst(conversations) {
  return conversations.sort((a, b) => b.updated - a.updated);
}

export function loadConversation(id) {
  try {
    return readConversation(JSON.parse(localStorage.getItem(PREFIX + id)), "the stored conversation");
  } catch {
    return null;
  }
}

export function conversationOfEvent(event) {
  return event.key?.startsWith(PREFIX) ? event.key.slice(PREFIX.length) : null;
}

export function keepConversation(conversation) {
  write(PREFIX + conversation.id, conversation);
}

export function deleteConversation(id) {
  localStorage.removeItem(PREFIX + id);
}

function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {
    throw new StoreError("The browser's storage is full. Export conversations that you want to keep, then delete some.");
  }
}

export function exportText(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

export function importText(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new StoreError("The file is not JSON. Choose a file that this page exported.");
  }
  if (file?.format !== FORMAT || file.version !== 1 || !Array.isArray(file.conversations)) {
    throw new StoreError(`The file is not of the format "${FORMAT}", version 1. Choose a file that this page exported.`);
  }
  if (file.conversations.length > MAX_CONVERSATIONS) {
    throw new StoreError(`The file has ${file.conversations.length} conversations; the page takes ${MAX_CONVERSATIONS}.`);
  }
  const read = file.conversations.map((entry, at) => readConversation(entry, `conversation ${at + 1} of the file`));
  return read.map((conversation) => ({ ...conversation, id: newId() }));
}

function refuse(where, what) {
  throw new StoreError(`The page cannot use ${where}: ${what}.`);
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function readConversation(entry, where) {
  if (!isObject(entry) || !isObject(entry.messages)) refuse(where, "it has no messages");
  const given = Object.entries(entry.messages);
  if (given.length > MAX_MESSAGES) refuse(where, `it has ${given.length} messages, more than ${MAX_MESSAGES}`);
  const messages = Object.create(null);
  for (const [id, message] of given) messages[id] = readMessage(id, message, entry.messages, where);
  checkTree(messages, where);
  return {
    id: textField(entry.id, newId()),
    title: textField(entry.title, "").slice(0, 200),
    created: numberField(entry.created) ?? Date.now(),
    updated: numberField(entry.updated) ?? Date.now(),
    settings: readSettings(isObject(entry.settings) ? entry.settings : {}),
    messages,
    selected: readSelected(isObject(entry.selected) ? entry.selected : {}, messages),
  };
}

function readMessage(id, message, all, where) {
  if (id === ROOT || !isObject(message) || message.id !== id) refuse(where, `its message "${id.slice(0, 40)}" has another id`);
  if (!ROLES.includes(message.role)) refuse(where, `a message has a role that is not one of ${ROLES.join(", ")}`);
  if (typeof message.content !== "string") refuse(where, "a message has a content that is not text");
  if (message.parent !== ROOT && !Object.hasOwn(all, message.parent)) refuse(where, "a message has no parent");
  return {
    id,
    parent: message.parent,
    role: message.role,
    content: message.content,
    reasoning: textField(message.reasoning, ""),
    toolCalls: Array.isArray(message.toolCalls) ? message.toolCalls.filter(isObject).map(readCall) : [],
    toolCallId: textField(message.toolCallId, ""),
    finish: textField(message.finish, null),
    error: textField(message.error, null),
    seed: numberField(message.seed),
    usage: isObject(message.usage) ? readUsage(message.usage) : null,
    timing: isObject(message.timing) ? readNumbers(message.timing, ["first", "rest", "thinking"]) : null,
  };
}

function readCall(call) {
  return { id: textField(call.id, ""), name: textField(call.name, ""), arguments: textField(call.arguments, "") };
}

function readUsage(usage) {
  const { prompt_tokens_details: prompt, completion_tokens_details: completion } = usage;
  return {
    ...readNumbers(usage, ["prompt_tokens", "completion_tokens"]),
    prompt_tokens_details: readNumbers(isObject(prompt) ? prompt : {}, ["cached_tokens"]),
    completion_tokens_details: readNumbers(isObject(completion) ? completion : {}, [
      "reasoning_tokens",
      "accepted_prediction_tokens",
      "rejected_prediction_tokens",
    ]),
  };
}

function readNumbers(from, names) {
  return Object.fromEntries(names.map((name) => [name, numberField(from[name])]));
}

function readSelected(selected, messages) {
  const isKnown = ([parent, id]) => messages[id] !== undefined && messages[id].parent === parent;
  return Object.assign(Object.create(null), Object.fromEntries(Object.entries(selected).filter(isKnown)));
}

function readSettings(settings) {
  return {
    system: textField(settings.system, ""),
    temperature: numberField(settings.temperature),
    topP: numberField(settings.topP),
    maxTokens: numberField(settings.maxTokens),
    thinkingBudget: numberField(settings.thinkingBudget),
    seed: numberField(settings.seed),
    thinking: settings.thinking !== false,
    tools: textField(settings.tools, ""),
  };
}

function textField(value, otherwise) {
  return typeof value === "string" ? value : otherwise;
}

function numberField(value) {
  return typeof value === "number" && Number.isFinite(value) ? value : null;
}

function checkTree(messages, where) {
  const rooted = new Set([ROOT]);
  for (const message of Object.values(messages)) {
    const walked = [];
    let at = message;
    while (at && !rooted.has(at.id) && walked.length <= MAX_MESSAGES) {
      walked.push(at.id);
      at = messages[at.parent];
    }
    if (walked.length > MAX_MESSAGES) refuse(where, "its messages follow each other in a circle");
    for (const id of walked) rooted.add(id);
  }
}
