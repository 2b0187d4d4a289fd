import { requestJson } from "./api.js";
import { askForKey } from "./dialogs.js";
import { byId } from "./dom.js";
import { MessageView } from "./message.js";
import { toolsOf } from "./settings.js";
import { Answer, streamChat } from "./stream.js";
import { ROOT, addMessage, pathOf, pathTo, selectSibling, siblingsOf, titleFrom } from "./tree.js";

const SAVE_MILLISECONDS = 2000;
const NEAR_THE_END = 80;
const MAX_ANNOUNCED = 2000;

export class Chat {
  conversation = null;
  #views = new Map();
  #running = null;
  #frame = null;
  #onChange;

  constructor(onChange) {
    this.#onChange = onChange;
  }

  get isRunning() {
    return this.#running !== null;
  }

  isAnswering(conversation) {
    return this.#running?.conversation === conversation;
  }

  open(conversation) {
    this.conversation = conversation;
    this.render();
    this.#scrollToEnd();
  }

  render() {
    const path = pathOf(this.conversation);
    this.#views = new Map(path.map((message) => [message.id, this.#viewOf(message)]));
    byId("messages").replaceChildren(...[...this.#views.values()].map((view) => view.element));
    byId("empty").hidden = path.length > 0;
    this.#views.get(this.#running?.message.id)?.update(true);
  }

  #viewOf(message) {
    const siblings = siblingsOf(this.conversation, message);
    return new MessageView(message, { at: siblings.indexOf(message), count: siblings.length }, this);
  }

  send(text) {
    const parent = pathOf(this.conversation).at(-1)?.id ?? ROOT;
    addMessage(this.conversation, parent, { role: "user", content: text });
    if (!this.conversation.title) this.conversation.title = titleFrom(text);
    return this.#answerLast();
  }

  edit(message, text) {
    if (!text.trim() || this.isRunning) return;
    addMessage(this.conversation, message.parent, { role: "user", content: text });
    this.#answerLast();
  }

  editLast() {
    const last = [...this.#views.values()].filter((view) => view.message.role === "user").at(-1);
    if (!this.isRunning) last?.edit();
  }

  regenerate(message) {
    if (!this.isRunning) this.#answer(message.parent);
  }

  regenerateLast() {
    const last = pathOf(this.conversation).at(-1);
    if (last?.role === "assistant") this.regenerate(last);
  }

  giveResults(message, results) {
    let parent = message.id;
    for (const [at, call] of message.toolCalls.entries()) {
      parent = addMessage(this.conversation, parent, { role: "tool", content: results[at], toolCallId: call.id }).id;
    }
    this.#answer(parent);
  }

  select(message, step) {
    if (this.isRunning) return;
    selectSibling(this.conversation, message, step);
    this.#onChange(this.conversation);
    this.render();
  }

  goOn(message) {
    if (!this.isRunning) this.#run(message);
  }

  stop() {
    this.#running?.controller.abort();
  }

  #answerLast() {
    return this.#answer(pathOf(this.conversation).at(-1).id);
  }

  #answer(parent) {
    const seed = this.conversation.settings.seed ?? crypto.getRandomValues(new Uint32Array(1))[0];
    const message = addMessage(this.conversation, parent, { role: "assistant", seed });
    return this.#run(message);
  }

  async #run(message) {
    const conversation = this.conversation;
    const running = { conversation, message, controller: new AbortController(), savedAt: performance.now() };
    this.#running = running;
    message.error = null;
    message.finish = null;
    this.render();
    this.#scrollToEnd();
    this.#onChange(conversation);
    const problem = await this.#receive(running);
    this.#running = null;
    this.#finish(conversation, message);
    if (problem?.needsKey && (await askForKey(problem.message))) await this.#run(message);
  }

  async #receive({ conversation, message, controller }) {
    const answer = new Answer();
    const before = { content: message.content, reasoning: message.reasoning ?? "" };
    try {
      for await (const chunk of streamChat(requestBody(conversation, message), controller.signal)) {
        answer.add(chunk);
        take(message, answer, before);
        this.#show();
      }
      Object.assign(message, { content: answer.content, reasoning: answer.reasoning, finish: answer.finish });
      return null;
    } catch (error) {
      if (error.name === "AbortError") message.finish = "stopped";
      else message.error = error.message;
      return error;
    } finally {
      Object.assign(message, { usage: answer.usage ?? message.usage, timing: answer.timing ?? message.timing });
    }
  }

  #show() {
    const running = this.#running;
    if (performance.now() - running.savedAt > SAVE_MILLISECONDS) {
      running.savedAt = performance.now();
      this.#onChange(running.conversation);
    }
    this.#frame ??= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.#frame = null;
    const isAtEnd = this.#isAtEnd();
    this.#views.get(this.#running?.message.id)?.update(true);
    if (isAtEnd) this.#scrollToEnd();
  }

  #finish(conversation, message) {
    conversation.updated = Date.now();
    this.#onChange(conversation);
    if (conversation !== this.conversation) return;
    const isAtEnd = this.#isAtEnd();
    const view = this.#views.get(message.id);
    view?.update(false);
    if (isAtEnd) this.#scrollToEnd();
    const text = message.error ?? `Answer: ${view?.text ?? ""}`;
    byId("announcement").textContent = text.slice(0, MAX_ANNOUNCED);
  }

  #isAtEnd() {
    const log = byId("log");
    return log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_THE_END;
  }

  #scrollToEnd() {
    const log = byId("log");
    log.scrollTop = log.scrollHeight;
  }
}

function take(message, answer, before) {
  message.content = before.content.startsWith(answer.content) ? before.content : answer.content;
  message.reasoning = before.reasoning.startsWith(answer.reasoning) ? before.reasoning : answer.reasoning;
  message.toolCalls = answer.toolCalls;
}

export function requestBody(conversation, message) {
  const { settings } = conversation;
  const earlier = pathTo(conversation, conversation.messages[message.parent]);
  const messages = earlier.filter((one) => one.content || one.toolCalls?.length || one.role === "tool").map(asSent);
  if (settings.system) messages.unshift({ role: "system", content: settings.system });
  const body = { messages, chat_template_kwargs: { enable_thinking: settings.thinking }, seed: message.seed };
  if (settings.temperature !== null) body.temperature = settings.temperature;
  if (settings.topP !== null) body.top_p = settings.topP;
  if (settings.maxTokens !== null) body.max_tokens = settings.maxTokens;
  if (settings.thinkingBudget !== null) body.thinking_budget = settings.thinkingBudget;
  const tools = toolsOf(settings.tools);
  if (tools) body.tools = tools;
  return body;
}

function asSent(message) {
  const { role, content } = message;
  if (role === "tool") return { role, content, tool_call_id: message.toolCallId };
  if (!message.toolCalls?.length) return { role, content };
  const calls = message.toolCalls.map((call) => ({
    id: call.id,
    type: "function",
    function: { name: call.name, arguments: call.arguments },
  }));
  return { role, content, reasoning_content: message.reasoning || undefined, tool_calls: calls };
}

export async function servedModel() {
  return (await requestJson("v1/models")).data[0];
}
