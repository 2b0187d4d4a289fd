import { newId } from "./dom.js";

export const ROOT = "root";
const MAX_TITLE = 80;

export function newConversation(settings) {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, settings: { ...settings }, messages: {}, selected: {} };
}

export function addMessage(conversation, parent, fields) {
  const message = { id: newId(), parent, content: "", ...fields };
  conversation.messages[message.id] = message;
  conversation.selected[parent] = message.id;
  conversation.updated = Date.now();
  return message;
}

export function childrenOf(conversation, parent) {
  return Object.values(conversation.messages).filter((message) => message.parent === parent);
}

export function siblingsOf(conversation, message) {
  return childrenOf(conversation, message.parent);
}

export function selectSibling(conversation, message, step) {
  const siblings = siblingsOf(conversation, message);
  const next = siblings[siblings.indexOf(message) + step];
  if (next) conversation.selected[message.parent] = next.id;
}

export function pathOf(conversation) {
  const path = [];
  let parent = ROOT;
  while (true) {
    const message = conversation.messages[conversation.selected[parent]] ?? childrenOf(conversation, parent).at(-1);
    if (!message) return path;
    path.push(message);
    parent = message.id;
  }
}

export function pathTo(conversation, message) {
  const path = [];
  for (let at = message; at; at = conversation.messages[at.parent]) path.unshift(at);
  return path;
}

export function titleFrom(text) {
  const line = text.trim().split("\n")[0].replace(/\s+/g, " ");
  return line.length > MAX_TITLE ? line.slice(0, MAX_TITLE).replace(/\s\S*$/, "") : line;
}

export function textOf(conversation) {
  const parts = Object.values(conversation.messages).map((message) => message.content);
  return [conversation.title, ...parts].join("\n").toLowerCase();
}
