// The chat: the conversation that is shown, answers that are being written, and the message box.

import { emptyAnswer, run } from "./answer.js";
import { Composer } from "./composer.js";
import { h, icon, say, toast } from "./dom.js";
import { MessageView, copyLast } from "./message.js";
import { fillDialog, firstFault } from "./settings.js";
import { Side } from "./side.js";
import * as store from "./store.js";

const SHOWN_MS = 60; // between two looks of an answer that grows
const SAVED_MS = 1500;
const NEAR = 80; // pixels from the end that still count as there

const find = (id) => document.getElementById(id);

export class Chat {
  constructor(app) {
    this.app = app; // {models, defaults, limit, needKey()}
    this.jobs = new Map(); // by the conversation's id: {conversation, node, controller}
    this.views = new Map(); // by the node's id
    this.side = new Side(find("conversations"), this, (id) => this.jobs.has(id));
    this.conversation = store.create();
    this.composer = new Composer(this);
    this.#wireScroll();
    find("new").append(icon("plus"), "New conversation");
    find("new").addEventListener("click", () => this.startNew());
    window.addEventListener("storage", (event) => this.#changedElsewhere(event.key));
    window.addEventListener("pagehide", () => this.#leave());
    window.addEventListener("pageshow", (event) => event.persisted && location.reload());
  }

  // --- which conversation ---

  // Shows the conversation `id`; without one a new one, or what is there already.
  open(id) {
    if (id && id !== this.conversation.id) {
      const running = this.jobs.get(id)?.conversation;
      const found = running ?? store.load(id);
      if (found) this.conversation = found;
      else {
        toast("This conversation is not in this browser.");
        location.hash = "#chat";
      }
    }
    this.render();
  }

  startNew() {
    this.conversation = store.create();
    location.hash = "#chat";
    this.render();
    this.composer.text.focus();
  }

  step(by) {
    const rows = store.list();
    const at = rows.findIndex((row) => row.id === this.conversation.id);
    const next = rows[at < 0 ? 0 : at + by];
    if (next) location.hash = `#chat/${next.id}`;
  }

  rename(id, title) {
    const found = id === this.conversation.id ? this.conversation : (this.jobs.get(id)?.conversation ?? store.load(id));
    if (!found) return;
    found.title = title;
    this.#save(found);
  }

  remove(id) {
    this.jobs.get(id)?.controller.abort();
    const kept = id === this.conversation.id ? this.conversation : store.load(id);
    store.remove(id);
    if (id === this.conversation.id) this.startNew();
    else this.side.show(this.conversation.id);
    return kept;
  }

  restore(conversation) {
    this.#save(conversation);
    location.hash = `#chat/${conversation.id}`;
    this.side.show(this.conversation.id);
  }

  // Another tab wrote something: it is shown, unless something is written or changed here.
  #changedElsewhere(key) {
    const { id } = this.conversation;
    if (key !== store.ONE + id) this.side.show(id);
    else if (!this.jobs.has(id) && !document.querySelector("textarea.edit, .call textarea:focus, #settings[open]")) {
      const found = store.load(id);
      if (found) this.conversation = found;
      this.render();
    }
  }

  // The page is closed: what is being written stays as far as it came.
  #leave() {
    this.jobs.forEach((job) => this.#save(job.conversation));
    this.left = true;
  }

  // --- messages ---

  render() {
    const nodes = store.path(this.conversation);
    this.views.clear();
    const thread = find("thread");
    thread.replaceChildren();
    if (!nodes.length) thread.append(this.#welcome());
    for (const node of nodes) {
      const view = new MessageView(node, this);
      this.views.set(node.id, view);
      view.update(this.#place(node), node === nodes.at(-1));
      thread.append(view.element);
    }
    this.side.show(this.conversation.id);
    this.composer.show();
    find("chat-title").textContent = store.titleOf(this.conversation);
    find("chat-title").hidden = !nodes.length; // else the welcome has the heading
    document.title = nodes.length ? `${store.titleOf(this.conversation)} – Spark` : "Spark";
    this.#toEnd(true);
  }

  #welcome() {
    const name = this.app.models[0];
    const words = name ? `${name} is ready.` : "What would you like to know?";
    return h("div", { class: "welcome" }, h("img", { src: "page/icon.svg", alt: "", width: 44, height: 44 }), h("h1", null, words),
      h("p", null, "Enter sends, Shift+Enter begins a new line, ? shows all shortcuts."));
  }

  #place(node) {
    const all = store.siblings(this.conversation, node);
    return { index: all.indexOf(node), total: all.length };
  }

  edit(node, text) {
    if (this.#blocked()) return;
    store.append(this.conversation, node.parent, { role: "user", content: text, files: node.files });
    this.#answer();
  }

  again(node) {
    if (this.#blocked()) return;
    this.conversation.leaf = node.parent;
    if (!node.content && !node.reasoning && !node.calls?.length) delete this.conversation.nodes[node.id];
    this.#answer();
  }

  // Deletes a message and what follows it.
  cut(node) {
    if (this.jobs.has(this.conversation.id)) return;
    const { conversation } = this;
    const kept = structuredClone(conversation);
    store.cut(conversation, node);
    this.#changed();
    toast("Deleted.", "Undo", () => {
      Object.assign(conversation, kept);
      this.#changed();
    });
  }

  #changed() {
    if (Object.keys(this.conversation.nodes).length) this.#save(this.conversation);
    else store.remove(this.conversation.id);
    this.render();
  }

  // Continues an answer where it ended.
  proceed(node) {
    if (this.#blocked()) return;
    const { content, reasoning, calls } = node;
    Object.assign(node, { ...emptyAnswer(this.conversation.settings), content, reasoning, calls, finish: undefined, error: undefined });
    this.#answer(this.conversation, node);
  }

  turn(node, by) {
    if (this.jobs.has(this.conversation.id)) return;
    const all = store.siblings(this.conversation, node);
    const next = all[all.indexOf(node) + by];
    if (!next) return;
    store.show(this.conversation, next);
    this.#save(this.conversation);
    const top = find("messages").scrollTop;
    this.render();
    find("messages").scrollTop = top;
  }

  results(node, texts) {
    if (this.#blocked()) return;
    let parent = node.id;
    node.calls.forEach((call, i) => {
      parent = store.append(this.conversation, parent, { role: "tool", call: call.id, name: call.name, content: texts[i] }).id;
    });
    this.#answer();
  }

  async send() {
    const { conversation } = this;
    if (this.composer.empty || this.#blocked()) return;
    const question = await this.composer.take();
    store.append(conversation, conversation.leaf, { role: "user", ...question });
    this.#answer(conversation);
  }

  stop() {
    this.jobs.get(this.conversation.id)?.controller.abort();
  }

  copyLast() {
    copyLast(store.path(this.conversation));
  }

  editLast() {
    const last = store.path(this.conversation).findLast((node) => node.role === "user");
    if (last) this.views.get(last.id)?.edit();
  }

  // Whether nothing can be sent now; says why.
  #blocked() {
    if (this.jobs.has(this.conversation.id)) return true;
    const wrong = firstFault(this.conversation.settings);
    if (!wrong) return false;
    toast(`${wrong.label}: ${wrong.words}`);
    this.openSettings();
    return true;
  }

  async #answer(conversation = this.conversation, continued = null) {
    const { settings } = conversation;
    const nodes = store.path(conversation);
    const node = continued ?? store.append(conversation, conversation.leaf, emptyAnswer(settings));
    const controller = new AbortController();
    this.jobs.set(conversation.id, { conversation, node, controller });
    this.#save(conversation);
    if (location.hash !== `#chat/${conversation.id}`) history.pushState(null, "", `#chat/${conversation.id}`);
    this.render();
    say("The answer is being written");
    const grown = this.#sometimes(conversation, node);
    await run(node, nodes, settings, controller.signal, grown);
    if (this.left) return;
    this.jobs.delete(conversation.id);
    if (store.list().some((row) => row.id === conversation.id)) this.#save(conversation);
    if (conversation === this.conversation) this.#show(node);
    this.side.show(this.conversation.id);
    this.composer.show();
    say(node.state === "done" ? "The answer is complete" : node.state === "stopped" ? "Stopped" : "The answer failed");
    if (node.status === 401) this.app.needKey();
  }

  // A function that shows the node soon, and keeps it now and then, however often it is called.
  #sometimes(conversation, node) {
    let waiting = false;
    let saved = performance.now();
    return () => {
      if (waiting) return;
      waiting = true;
      setTimeout(() => {
        waiting = false;
        if (conversation === this.conversation) this.#show(node);
        if (node.state !== "running" || performance.now() - saved < SAVED_MS) return;
        saved = performance.now();
        if (this.jobs.has(conversation.id)) this.#save(conversation);
      }, SHOWN_MS);
    };
  }

  #show(node) {
    const view = this.views.get(node.id);
    if (!view) return;
    view.update();
    if (this.following) this.#toEnd(false);
  }

  #save(conversation) {
    try {
      store.save(conversation);
    } catch (problem) {
      if (!(problem instanceof store.Full)) throw problem;
      toast(problem.message);
    }
  }

  openSettings() {
    const dialog = find("settings");
    const { settings } = this.conversation;
    const changed = () => {
      store.keepSettings(settings);
      this.#save(this.conversation);
      this.composer.show();
    };
    fillDialog(dialog, settings, this.app.models, this.app.defaults, changed);
    if (!dialog.open) dialog.showModal();
  }

  // --- scrolling ---

  #wireScroll() {
    const box = find("messages");
    const button = find("to-end");
    this.following = true;
    button.append(icon("down"));
    button.addEventListener("click", () => this.#toEnd(true));
    box.addEventListener("scroll", () => {
      this.following = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR;
      button.hidden = this.following;
    });
  }

  #toEnd(always) {
    const box = find("messages");
    if (always) this.following = true;
    box.scrollTop = box.scrollHeight;
  }
}
