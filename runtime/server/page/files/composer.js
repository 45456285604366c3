// The message box: what is typed and attached, the tokens it would take, and the button that sends.

import { countTokens } from "./answer.js";
import { Attachments, deleteUnused } from "./attachments.js";
import { count, h, icon } from "./dom.js";
import { summary } from "./settings.js";
import * as store from "./store.js";

const COUNTED_MS = 500; // after the last key: then the tokens of what is typed are counted

const find = (id) => document.getElementById(id);

export class Composer {
  // `chat`: {app, conversation, jobs, send(), stop(), editLast(), openSettings()}
  constructor(chat) {
    this.chat = chat;
    this.text = find("composer-text");
    this.text.addEventListener("input", () => this.#grow());
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        chat.send();
      } else if (event.key === "ArrowUp" && !this.text.value) {
        event.preventDefault();
        chat.editLast();
      }
    });
    find("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#running) chat.stop();
      else chat.send();
    });
    this.#wireFiles();
    find("open-settings").append(icon("sliders"), "Settings");
    find("open-settings").addEventListener("click", () => chat.openSettings());
  }

  // Files come from a dialog, the clipboard, or are dropped anywhere on the chat.
  #wireFiles() {
    const chooser = find("attach-file");
    this.attachments = new Attachments(find("attached"), () => this.chat.app.vision, () => this.show());
    find("attach").append(icon("clip"));
    find("attach").addEventListener("click", () => chooser.click());
    chooser.addEventListener("change", async () => {
      await this.attachments.add(chooser.files);
      chooser.value = "";
    });
    this.text.addEventListener("paste", (event) => {
      const { files } = event.clipboardData;
      if (!files.length) return;
      event.preventDefault();
      this.attachments.add([...files]);
    });
    const area = find("chat");
    const dropping = (event, on) => {
      if (!event.dataTransfer.types.includes("Files")) return;
      event.preventDefault();
      area.classList.toggle("dropping", on);
    };
    area.addEventListener("dragover", (event) => dropping(event, true));
    area.addEventListener("dragleave", (event) => !area.contains(event.relatedTarget) && dropping(event, false));
    area.addEventListener("drop", (event) => {
      dropping(event, false);
      if (event.defaultPrevented) this.attachments.add([...event.dataTransfer.files]);
    });
    const used = store.list().flatMap((row) => store.imagesOf(store.load(row.id)));
    deleteUnused(new Set(used));
  }

  #grow() {
    this.text.style.height = "auto";
    this.text.style.height = `${Math.min(this.text.scrollHeight, 240)}px`;
    this.show();
  }

  // What was typed and attached, as a message keeps it; the box is empty then.
  async take() {
    const content = this.text.value;
    this.text.value = "";
    const files = this.attachments.files.length ? await this.attachments.take() : undefined;
    this.#grow();
    return { content, files };
  }

  get empty() {
    return !this.text.value.trim() && !this.attachments.files.length;
  }

  get #running() {
    return this.chat.jobs.has(this.chat.conversation.id);
  }

  // Shows what can be done now, and what is set.
  show() {
    const running = this.#running;
    const send = find("send");
    send.replaceChildren(icon(running ? "stop" : "send"));
    const label = running ? "Stop (Esc)" : "Send";
    send.setAttribute("aria-label", label);
    send.title = label;
    send.disabled = !running && this.empty;
    const chips = summary(this.chat.conversation.settings);
    find("chips").replaceChildren(...chips.map((words) => h("span", null, words)));
    find("used").textContent = this.#usedWords();
    this.#countSoon(running);
  }

  // Counts the tokens of the conversation with what is typed, as the server would.
  #countSoon(running) {
    clearTimeout(this.countTimer);
    this.counting?.abort();
    if (running || this.empty || !this.chat.app.models.length) return;
    this.countTimer = setTimeout(async () => {
      this.counting = new AbortController();
      const { settings } = this.chat.conversation;
      const files = this.attachments.files;
      const nodes = [...store.path(this.chat.conversation), { role: "user", content: this.text.value, files }];
      const images = nodes.flatMap((node) => node.files ?? []).filter((file) => file.kind === "image").length;
      const more = images ? ` and ${images} image${images === 1 ? "" : "s"}` : "";
      try {
        const tokens = await countTokens(nodes, settings, this.counting.signal);
        const limit = this.chat.app.limit ? ` of ${count(this.chat.app.limit)}` : "";
        find("used").textContent = `${count(tokens)}${limit} tokens${more}`;
        find("used").classList.toggle("over", this.chat.app.limit > 0 && tokens >= this.chat.app.limit);
      } catch {
        // settings that are wrong, a key that is missing: sending says so
      }
    }, COUNTED_MS);
  }

  // How full the context was with the last answer, once that is worth knowing.
  #usedWords() {
    const last = store.path(this.chat.conversation).findLast((node) => node.stats?.prompt);
    const used = last ? last.stats.prompt + (last.stats.tokens ?? 0) : 0;
    if (!this.chat.app.limit || used < 0.5 * this.chat.app.limit) return "";
    return `${Math.round((100 * used) / this.chat.app.limit)} % of the context used`;
  }
}
