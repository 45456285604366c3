// The list of conversations: by day, with a name that can be changed, and an undo for deletions.

import { h, iconButton, saveFile, toast } from "./dom.js";
import * as store from "./store.js";

// `actions`: open(id), removed(id). `busy(id)` says whether an answer is being written there.
export class Side {
  constructor(box, actions, busy) {
    this.box = box;
    this.actions = actions;
    this.busy = busy;
    this.words = [];
    this.search = document.getElementById("search");
    this.search.addEventListener("input", () => {
      this.words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
      this.show(this.current);
    });
  }

  show(current) {
    this.current = current;
    const all = store.list();
    this.search.hidden = all.length < 2;
    const rows = this.words.length ? all.filter((row) => this.#matches(row)) : all;
    if (!rows.length && all.length) {
      this.box.replaceChildren(h("p", { class: "hint" }, "No conversation has these words."));
      return;
    }
    if (!rows.length) {
      this.box.replaceChildren(h("p", { class: "hint" }, "Conversations are kept in this browser alone."));
      return;
    }
    const groups = new Map();
    for (const row of rows) {
      const day = dayOf(row.at);
      if (!groups.has(day)) groups.set(day, []);
      groups.get(day).push(this.#row(row));
    }
    const parts = [...groups].map(([day, made]) => [h("h2", null, day), h("ul", null, made)]);
    this.box.replaceChildren(...parts.flat());
  }

  // Whether every word of the search is in the title or in a message.
  #matches({ id, title }) {
    const nodes = Object.values(store.load(id)?.nodes ?? {});
    const texts = nodes.flatMap((node) => [node.content, ...(node.files ?? []).map((file) => file.name)]);
    const text = [title, ...texts].join("\n").toLowerCase();
    return this.words.every((word) => text.includes(word));
  }

  #row({ id, title }) {
    const open = h("a", { href: `#chat/${id}`, "aria-current": id === this.current ? "page" : null, title }, title);
    const busy = this.busy(id) && h("i", { class: "busy", title: "An answer is being written" });
    const rename = iconButton("edit", `Rename ${title}`, () => this.#rename(item, id, title));
    const remove = iconButton("bin", `Delete ${title}`, () => this.#remove(id, title));
    const save = iconButton("save", `Save ${title} as Markdown`, () => {
      saveFile(`${title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60)}.md`, "text/markdown", store.asMarkdown(store.load(id)));
    });
    const item = h("li", { class: id === this.current ? "current" : null }, open, busy, h("span", { class: "row-buttons" }, rename, save, remove));
    return item;
  }

  #rename(item, id, title) {
    const input = h("input", { type: "text", value: title, "aria-label": "Name of the conversation", maxlength: 120 });
    let done = false;
    const end = (keep) => {
      if (done) return;
      done = true;
      if (keep) this.actions.rename(id, input.value.trim());
      this.show(this.current);
    };
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") end(false);
      if (event.key === "Enter" || event.key === "Escape") event.stopPropagation();
    });
    input.addEventListener("blur", () => end(true));
    item.replaceChildren(input);
    input.focus();
    input.select();
  }

  #remove(id, title) {
    const kept = this.actions.remove(id);
    if (!kept) return;
    toast(`Deleted “${title}”.`, "Undo", () => this.actions.restore(kept));
  }
}

function dayOf(at) {
  const days = Math.floor((startOfDay(Date.now()) - startOfDay(at)) / 86_400_000 + 0.5);
  if (days <= 0) return "Today";
  if (days === 1) return "Yesterday";
  if (days < 7) return "This week";
  return new Date(at).toLocaleDateString("en", { month: "long", year: "numeric" });
}

function startOfDay(at) {
  return new Date(at).setHours(0, 0, 0, 0);
}
