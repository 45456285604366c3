// The server's endpoints: the key, whole answers, streams of events, errors in words.

import { local, session } from "./store.js";

const KEY = "spark.key";

export function key() {
  return session.get(KEY) ?? local.get(KEY) ?? "";
}

export function isKeyKept() {
  return local.get(KEY) !== null;
}

// `keep`: until it is taken away; else until the tab is closed.
export function setKey(value, keep) {
  session.remove(KEY);
  local.remove(KEY);
  if (value) (keep ? local : session).set(KEY, value);
}

export class ApiError extends Error {
  constructor(message, status, param, code) {
    super(message);
    this.status = status; // 0: no answer came
    this.param = param;
    this.code = code;
  }
}

async function ask(path, init = {}) {
  const headers = { ...init.headers };
  if (key()) headers.Authorization = `Bearer ${key()}`;
  let response;
  try {
    response = await fetch(path, { ...init, headers, cache: "no-store" });
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new ApiError("The server does not answer. Is it still running?", 0);
  }
  if (response.ok) return response;
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // a proxy's own words are not shown
  }
  const words = error.message ?? `The server answered with status ${response.status}.`;
  throw new ApiError(words, response.status, error.param, error.code);
}

export async function getJson(path) {
  return (await ask(path)).json();
}

export async function postJson(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return (await ask(path, { method: "POST", headers, body: JSON.stringify(body), signal })).json();
}

// {ok, reason} of the server.
export async function health() {
  try {
    const response = await fetch("health", { cache: "no-store" });
    if (response.ok) return { ok: true, reason: "" };
    const body = await response.json().catch(() => ({}));
    return { ok: false, reason: body.reason ?? `status ${response.status}` };
  } catch {
    return { ok: false, reason: "the server does not answer" };
  }
}

// Server-sent events in a text that comes in pieces: `push` returns the data of those that ended.
export class Events {
  #rest = "";
  #data = [];

  push(text) {
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    const found = [];
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) found.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
    return found;
  }
}

// The chunks of a streamed answer, as objects. Throws ApiError; AbortError when `signal` says so.
export async function* stream(path, body, signal) {
  const response = await ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  const events = new Events();
  let ended = false;
  try {
    while (!ended) {
      const { done, value } = await read(reader);
      const text = done ? decoder.decode() + "\n\n" : decoder.decode(value, { stream: true });
      for (const data of events.push(text)) {
        if (data === "[DONE]") {
          ended = true;
          break;
        }
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(chunk.error.message, 200, chunk.error.param, chunk.error.code);
        yield chunk;
      }
      if (done && !ended) throw new ApiError("The connection ended before the answer did.", 0);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new ApiError("The connection broke before the answer ended.", 0);
  }
}
