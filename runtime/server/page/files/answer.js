// One answer: the request's body out of a conversation, and its stream into a node of it.

import { postJson, stream } from "./api.js";
import { contentOf } from "./attachments.js";
import { requestFields } from "./settings.js";

// The body for an answer below `nodes`, the messages from the first to the last.
async function requestBody(nodes, settings, more) {
  return {
    ...requestFields(settings),
    messages: await messagesOf(nodes, settings, true),
    ...more,
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
}

async function messagesOf(nodes, settings, images) {
  const system = settings.system?.trim() ? [{ role: "system", content: settings.system }] : [];
  const messages = await Promise.all(nodes.map((node) => message(node, images)));
  return [...system, ...messages.flat()];
}

// How many tokens a request with these messages would have, without its images.
export async function countTokens(nodes, settings, signal) {
  const { model, tools, chat_template_kwargs } = requestFields(settings);
  const messages = await messagesOf(nodes, settings, false);
  return (await postJson("tokenize", { model, tools, chat_template_kwargs, messages }, signal)).count;
}

async function message(node, images) {
  if (node.role === "user") return [{ role: "user", content: await contentOf(node, images) }];
  if (node.role === "tool") return [{ role: "tool", tool_call_id: node.call, content: node.content }];
  if (!node.content && !node.calls?.length) return []; // it failed, or was stopped before it began
  const made = { role: "assistant", content: node.content ?? "" };
  if (node.reasoning) made.reasoning_content = node.reasoning;
  if (node.calls?.length) {
    made.tool_calls = node.calls.map(({ id, name, arguments: text }) => {
      return { id, type: "function", function: { name, arguments: text || "{}" } };
    });
  }
  return [made];
}

export function emptyAnswer(settings) {
  const form = settings.schema?.trim() ? "json" : "";
  return { role: "assistant", content: "", reasoning: "", calls: [], state: "running", form, stats: {} };
}

// Runs the request for an answer below `nodes` into `node`, which may be the last of them: then it is
// continued. `changed` is called whenever it grew. Never throws.
export async function run(node, nodes, settings, signal, changed) {
  const clock = new Clock(node.stats);
  try {
    const more = nodes.at(-1) === node ? { add_generation_prompt: false, continue_final_message: true } : {};
    const body = await requestBody(nodes, settings, more);
    for await (const chunk of stream("v1/chat/completions", body, signal)) {
      take(node, chunk, clock);
      changed();
    }
    node.state = "done";
  } catch (problem) {
    if (problem.name === "AbortError") node.state = "stopped";
    else {
      node.state = "error";
      node.error = problem.message;
      node.status = problem.status;
      node.code = problem.code;
    }
  }
  clock.end();
  changed();
}

function take(node, chunk, clock) {
  const choice = chunk.choices?.[0];
  const delta = choice?.delta ?? {};
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (thought) {
    clock.thought();
    node.reasoning += thought;
  }
  if (delta.content) {
    clock.answered();
    node.content += delta.content;
  }
  for (const call of delta.tool_calls ?? []) {
    clock.answered();
    takeCall(node.calls, call);
  }
  if (delta.refusal) node.content += delta.refusal;
  if (choice?.finish_reason) node.finish = choice.finish_reason;
  if (chunk.usage) clock.usage(chunk.usage);
}

function takeCall(calls, { index = calls.length, id, function: part = {} }) {
  const call = (calls[index] ??= { id: id ?? "", name: "", arguments: "" });
  if (id) call.id = id;
  if (part.name) call.name = part.name;
  call.arguments += part.arguments ?? "";
}

// Times of an answer in seconds, and its counts, as `stats` keeps them.
class Clock {
  constructor(stats) {
    this.stats = stats;
    this.start = performance.now();
    this.first = this.last = this.thoughtStart = 0;
  }

  #token() {
    this.last = performance.now();
    if (this.first) return;
    this.first = this.last;
    this.stats.first = (this.first - this.start) / 1000;
  }

  thought() {
    this.#token();
    this.thoughtStart ||= this.last;
    this.stats.thought = (this.last - this.thoughtStart) / 1000;
  }

  answered() {
    this.#token();
    if (this.thoughtStart && !this.thoughtEnd) {
      this.thoughtEnd = this.last;
      this.stats.thought = (this.last - this.thoughtStart) / 1000;
    }
  }

  usage({ prompt_tokens: prompt, completion_tokens: tokens, prompt_tokens_details: found, completion_tokens_details: made }) {
    const { stats } = this;
    Object.assign(stats, { prompt, tokens });
    stats.cached = found?.cached_tokens ?? 0;
    if (made?.accepted_prediction_tokens !== undefined) {
      stats.kept = made.accepted_prediction_tokens;
      stats.rejected = made.rejected_prediction_tokens;
    }
    const spent = (this.last - this.first) / 1000;
    if (tokens > 1 && spent > 0) stats.rate = (tokens - 1) / spent;
  }

  end() {
    this.stats.total = (performance.now() - this.start) / 1000;
  }
}
