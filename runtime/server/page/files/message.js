// One message on the screen: its text, reasoning and tool calls, its figures, and what can be done.

import { filesView } from "./attachments.js";
import { copyButton, copyText, count, h, icon, iconButton, say, seconds } from "./dom.js";
import { Markdown } from "./markdown/markdown.js";

const ENDS = { length: "stopped at max tokens", abort: "stopped by the server", content_filter: "filtered" };

// `actions`: edit(node, text), again(node), turn(node, step), results(node, texts), cut(node),
// proceed(node).
export class MessageView {
  constructor(node, actions) {
    this.node = node;
    this.actions = actions;
    this.element = h("article", { class: `message ${node.role}`, "data-id": node.id });
    if (node.role === "assistant") this.#buildAnswer();
    else if (node.role === "tool") this.#buildResult();
    else this.#buildQuestion();
  }

  // `place`: {index, total} among the alternatives of a message; `last`: nothing follows.
  update(place, last) {
    if (place) this.place = place;
    if (last !== undefined) this.last = last;
    if (this.node.role === "assistant") this.#updateAnswer();
    else if (this.node.role === "user") this.#foot.replaceChildren(...this.#questionButtons());
  }

  #foot = h("footer", { class: "message-foot" });

  #buildQuestion() {
    this.element.setAttribute("aria-label", "You");
    this.bubble = h("div", { class: "bubble", dir: "auto" }, this.node.content);
    const { content, files } = this.node;
    const shown = [files?.length && filesView(files), content.trim() && this.bubble, this.#foot];
    this.element.replaceChildren(...shown.filter(Boolean));
  }

  #questionButtons() {
    const { node } = this;
    return [
      ...this.#turns(),
      h("span", { class: "buttons" }, copyButton("Copy", () => node.content), iconButton("edit", "Edit", () => this.edit()), this.#deleteButton()),
    ];
  }

  edit() {
    const area = h("textarea", { class: "edit", value: this.node.content, "aria-label": "Your message", rows: 3, dir: "auto" });
    const close = () => {
      this.#buildQuestion();
      this.update();
      this.element.querySelector('[aria-label="Edit"]').focus();
    };
    const send = () => (area.value.trim() || this.node.files?.length) && this.actions.edit(this.node, area.value);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });
    const row = h(
      "div",
      { class: "edit-row" },
      h("button", { type: "button", class: "button", onclick: close }, "Cancel"),
      h("button", { type: "button", class: "button strong", onclick: send }, "Send"),
    );
    this.element.replaceChildren(area, row);
    area.style.height = `${Math.min(area.scrollHeight + 2, 400)}px`;
    area.focus();
  }

  #buildResult() {
    const { node } = this;
    this.element.setAttribute("aria-label", `Result of ${node.name}`);
    const head = h("summary", null, icon("tool"), ` Result of ${node.name}`);
    this.element.replaceChildren(h("details", { class: "result" }, head, h("pre", { tabindex: "0" }, node.content)));
  }

  #buildAnswer() {
    this.element.setAttribute("aria-label", "Answer");
    this.summary = h("summary", null);
    const thought = h("div", { class: "thought-text" });
    this.thought = h("details", { class: "thought", hidden: true }, this.summary, thought);
    const content = h("div", { class: "content", dir: "auto" });
    this.calls = h("div", { class: "calls" });
    this.problem = h("div", { class: "problem", role: "alert", hidden: true });
    this.waiting = h("p", { class: "waiting", hidden: true }, h("i"), h("i"), h("i"), h("span", { class: "off-screen" }, "Waiting for the first token"));
    this.thoughtMarkdown = new Markdown(thought);
    this.markdown = new Markdown(content);
    this.element.replaceChildren(this.thought, content, this.calls, this.waiting, this.problem, this.#foot);
    // a folded thought is made into elements when it is opened
    this.thought.addEventListener("toggle", () => this.#updateThought());
  }

  #updateAnswer() {
    const { node } = this;
    const running = node.state === "running";
    this.element.setAttribute("aria-busy", String(running));
    this.thought.hidden = !node.reasoning;
    if (node.reasoning) this.#updateThought();
    this.markdown.set(node.form === "json" ? jsonBlock(node) : (node.content ?? ""));
    this.#updateCalls();
    this.waiting.hidden = !running || Boolean(node.content || node.reasoning || node.calls?.length);
    this.problem.hidden = node.state !== "error";
    if (node.state === "error") {
      // a conversation that is too long stays too long, whatever is tried again
      const [label, act] =
        node.code === "context_length_exceeded"
          ? ["New conversation", () => this.actions.startNew()]
          : ["Try again", () => this.actions.again(node)];
      const button = h("button", { type: "button", class: "button", onclick: act }, label);
      this.problem.replaceChildren(h("p", null, node.error ?? "The answer failed."), button);
    }
    this.#foot.replaceChildren(...this.#answerFoot());
  }

  #updateThought() {
    const { node } = this;
    const thinking = node.state === "running" && !node.content && !node.calls?.length;
    const spent = node.stats?.thought;
    const after = spent > 0 ? ` ${thinking ? "" : "for "}${seconds(spent)}` : "";
    this.summary.textContent = (thinking ? "Thinking" : "Thought") + after;
    this.summary.classList.toggle("live", thinking);
    if (this.thought.open) this.thoughtMarkdown.set(node.reasoning);
  }

  #updateCalls() {
    const { node } = this;
    const calls = (node.calls ?? []).filter(Boolean);
    const key = JSON.stringify([calls, node.state, this.last]);
    if (key === this.callsKey) return;
    this.callsKey = key;
    const open = node.state === "done" && this.last && calls.length > 0;
    const areas = [];
    const made = calls.map((call) => {
      const head = h("div", { class: "call-head" }, icon("tool"), h("strong", null, call.name), copyButton("Copy arguments", () => call.arguments));
      const box = h("div", { class: "call" }, head, h("pre", { tabindex: "0" }, pretty(call.arguments)));
      if (!open) return box;
      const area = h("textarea", { rows: 2, placeholder: "The tool's result", "aria-label": `Result of ${call.name}` });
      areas.push(area);
      box.append(area);
      return box;
    });
    const send = () => this.actions.results(node, areas.map((area) => area.value));
    const button = open && h("button", { type: "button", class: "button strong", onclick: send }, calls.length > 1 ? "Send results" : "Send result");
    this.calls.replaceChildren(...made, ...(button ? [button] : []));
  }

  #answerFoot() {
    const { node } = this;
    const figures = h("span", { class: "figures" }, figuresOf(node));
    if (node.state === "running") return [figures];
    if (node.state === "error" && !node.content) return [...this.#turns(), figures]; // it has a button
    const buttons = h(
      "span",
      { class: "buttons" },
      copyButton("Copy", () => node.content ?? ""),
      iconButton("again", "Regenerate", () => this.actions.again(node)),
      this.last && canContinue(node) && iconButton("play", "Continue", () => this.actions.proceed(node)),
      this.#deleteButton(),
    );
    return [...this.#turns(), figures, buttons];
  }

  #deleteButton() {
    return iconButton("bin", "Delete from here", () => this.actions.cut(this.node));
  }

  // ‹ 2 of 3 ›
  #turns() {
    const { index, total } = this.place ?? { index: 0, total: 1 };
    if (total < 2) return [];
    const turn = (step) => () => this.actions.turn(this.node, step);
    return [
      h(
        "span",
        { class: "turns" },
        iconButton("left", "Previous version", turn(-1), { disabled: index === 0 }),
        h("span", null, `${index + 1} of ${total}`),
        iconButton("right", "Next version", turn(1), { disabled: index === total - 1 }),
      ),
    ];
  }
}

// Whether an answer ended before its end, in its text: a thought or a call is made again.
function canContinue({ state, finish, content, calls }) {
  const early = state === "stopped" || state === "cut" || state === "error" || (state === "done" && finish === "length");
  return early && Boolean(content?.trim()) && !calls?.length;
}

// The figures of an answer, as short phrases.
function figuresOf({ stats = {}, state, finish }) {
  const words = [];
  if (state === "stopped") words.push("stopped");
  if (state === "cut") words.push("incomplete");
  if (ENDS[finish]) words.push(ENDS[finish]);
  if (stats.tokens) words.push(`${count(stats.tokens)} token${stats.tokens === 1 ? "" : "s"}`);
  if (stats.rate) words.push(`${count(stats.rate)} tokens/s`);
  if (state !== "running") {
    if (stats.first !== undefined) words.push(`TTFT ${seconds(stats.first)}`);
    if (stats.cached) words.push(`${count(stats.cached)} of ${count(stats.prompt)} prompt tokens cached`);
    const drafts = (stats.kept ?? 0) + (stats.rejected ?? 0);
    if (drafts) words.push(`${Math.round((100 * stats.kept) / drafts)} % of drafts kept`);
  }
  return words.join(" · ");
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function jsonBlock(node) {
  if (!node.content) return "";
  return "`````json\n" + (node.state === "done" ? pretty(node.content) : node.content);
}

// Copies the last answer of these nodes.
export async function copyLast(nodes) {
  const last = nodes.findLast((node) => node.role === "assistant" && node.content);
  if (last) say((await copyText(last.content)) ? "Copied" : "The browser did not allow copying");
}
