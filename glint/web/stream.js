import { ApiError, lost, request, sentence } from "./api.js";

const LINE_END = /\r\n|\n|\r/;

export class EventParser {
  #rest = "";
  #data = [];

  feed(text) {
    let pending = this.#rest + text;
    const heldBack = pending.endsWith("\r") ? "\r" : "";
    pending = pending.slice(0, pending.length - heldBack.length);
    const lines = pending.split(LINE_END);
    this.#rest = lines.pop() + heldBack;
    return lines.map((line) => this.#take(line)).filter((event) => event !== null);
  }

  #take(line) {
    if (line === "") {
      const event = this.#data.length > 0 ? this.#data.join("\n") : null;
      this.#data = [];
      return event;
    }
    if (line.startsWith("data:")) this.#data.push(line.slice(line[5] === " " ? 6 : 5));
    return null;
  }
}

async function* eventsOf(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  const parser = new EventParser();
  while (true) {
    const { done, value } = await read(reader);
    if (done) return;
    yield* parser.feed(decoder.decode(value, { stream: true }));
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw cutOff();
  }
}

function cutOff() {
  const error = lost();
  error.message = "The connection to the server was lost in the middle of the answer.";
  return error;
}

export async function* streamChat(body, signal) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await request("v1/chat/completions", { body: asked, signal });
  for await (const data of eventsOf(response)) {
    if (data === "[DONE]") return;
    const chunk = parse(data);
    if (chunk.error) throw streamError(chunk.error);
    yield chunk;
  }
  throw cutOff();
}

function parse(data) {
  try {
    return JSON.parse(data) ?? {};
  } catch {
    throw new ApiError("The server sent an event that is not JSON. Something between may have changed it.", 0, "broken");
  }
}

function streamError(problem) {
  const status = problem.type === "overloaded_error" ? 503 : 500;
  return new ApiError(sentence(status, problem, null), status, problem.code, null);
}

export class Answer {
  content = "";
  reasoning = "";
  toolCalls = [];
  finish = null;
  usage = null;
  #startedAt = performance.now();
  #firstAt = null;
  #lastAt = null;
  #reasonedAt = null;

  add(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const delta = choice.delta ?? {};
    this.content += delta.content ?? "";
    this.reasoning += delta.reasoning_content ?? "";
    for (const call of delta.tool_calls ?? []) this.#addCall(call);
    this.finish = choice.finish_reason ?? this.finish;
    if (delta.content || delta.reasoning_content || delta.tool_calls) this.#mark(delta);
  }

  #addCall(call) {
    const known = (this.toolCalls[call.index ?? 0] ??= { id: "", name: "", arguments: "" });
    known.id = call.id ?? known.id;
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }

  #mark(delta) {
    this.#lastAt = performance.now();
    this.#firstAt ??= this.#lastAt;
    if (delta.reasoning_content) this.#reasonedAt = this.#lastAt;
  }

  get timing() {
    if (this.#firstAt === null) return null;
    const seconds = (milliseconds) => Math.round(milliseconds) / 1000;
    return {
      first: seconds(this.#firstAt - this.#startedAt),
      rest: seconds(this.#lastAt - this.#firstAt),
      thinking: this.#reasonedAt === null ? null : seconds(this.#reasonedAt - this.#startedAt),
    };
  }
}
