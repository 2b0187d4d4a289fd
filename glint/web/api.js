const KEY_NAME = "glint.key";

export class ApiError extends Error {
  constructor(message, status, code, retrySeconds) {
    super(message);
    this.status = status;
    this.code = code;
    this.retrySeconds = retrySeconds;
  }

  get needsKey() {
    return this.status === 401;
  }

  get isLost() {
    return this.status === 0;
  }
}

export function apiKey() {
  return sessionStorage.getItem(KEY_NAME) ?? "";
}

export function keepApiKey(key) {
  if (key) sessionStorage.setItem(KEY_NAME, key);
  else sessionStorage.removeItem(KEY_NAME);
}

export async function request(path, { body, method, signal } = {}) {
  const headers = {};
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const options = { method: method ?? (body === undefined ? "GET" : "POST"), headers, signal, cache: "no-store" };
  if (body !== undefined) options.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw lost();
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

export async function requestJson(path, options) {
  return (await request(path, options)).json();
}

export function lost() {
  return new ApiError("The server cannot be reached. It may have stopped, or the network is down.", 0, "lost", 2);
}

async function errorOf(response) {
  const retrySeconds = Number.parseInt(response.headers.get("Retry-After") ?? "", 10) || null;
  let problem = {};
  try {
    problem = (await response.json()).error ?? {};
  } catch {
    problem = {};
  }
  return new ApiError(sentence(response.status, problem, retrySeconds), response.status, problem.code, retrySeconds);
}

export function sentence(status, problem, retrySeconds) {
  const detail = typeof problem.message === "string" ? problem.message : `it answered with status ${status}`;
  const again = retrySeconds ? ` Try again in ${retrySeconds} s.` : " Try again in a moment.";
  if (status === 401) return "The server wants an API key, or the one that was given is wrong.";
  if (status === 429) return `The server's queue is full.${again}`;
  if (problem.code === "not_ready") return `The server is still loading its model.${again}`;
  if (status === 503) return `The server cannot take the request: ${detail}.${again}`;
  return `The server refused the request: ${detail}.`;
}
