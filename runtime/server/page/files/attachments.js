// Files of a message: read and checked in the message box, kept in the browser, sent as its parts.

import { bytes, h, icon, iconButton, toast } from "./dom.js";

const IMAGES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"];
const MOST_FILES = 16; // of a message
const MOST_IMAGE = 10 << 20; // bytes; the server's own limit of an image
const MOST_TEXT = 512 << 10; // bytes; the browser keeps about 5 MiB of all conversations
const DATABASE = "spark";
const TABLE = "images";
const UNUSED_MS = 3_600_000; // an image that no conversation names is deleted after this time

// --- images in the browser's database, or in memory where there is none ---

const inMemory = new Map();
const shown = new Map(); // object URLs by key
let opened = null;

function database() {
  opened ??= new Promise((resolve, reject) => {
    const asked = indexedDB.open(DATABASE, 1);
    asked.onupgradeneeded = () => asked.result.createObjectStore(TABLE);
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
  return opened;
}

async function table(mode, act) {
  const found = await database();
  return new Promise((resolve, reject) => {
    const transaction = found.transaction(TABLE, mode);
    const asked = act(transaction.objectStore(TABLE));
    transaction.oncomplete = () => resolve(asked.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

async function keepImage(key, blob) {
  try {
    await table("readwrite", (store) => store.put(blob, key));
  } catch {
    inMemory.set(key, blob); // private windows and full disks: until the page is closed
  }
}

async function imageOf(key) {
  try {
    return (await table("readonly", (store) => store.get(key))) ?? inMemory.get(key);
  } catch {
    return inMemory.get(key);
  }
}

// Deletes old images that `used`, a set of keys, does not name.
export async function deleteUnused(used) {
  try {
    const keys = await table("readonly", (store) => store.getAllKeys());
    const old = keys.filter((key) => !used.has(key) && Date.now() - parseInt(key, 36) > UNUSED_MS);
    if (old.length) await table("readwrite", (store) => old.map((key) => store.delete(key)).at(-1));
  } catch {
    // without a database there is nothing to delete
  }
}

export async function dataUrl(key) {
  const blob = await imageOf(key);
  if (!blob) return null;
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });
}

// Keeps an image of an imported file under its key.
export async function keepDataUrl(key, url) {
  const [, type, data] = /^data:(image\/[a-z]+);base64,([A-Za-z0-9+/=]*)$/.exec(url) ?? [];
  if (!IMAGES.includes(type)) throw new Error("An image in this file is malformed.");
  await keepImage(key, new Blob([Uint8Array.from(atob(data), (c) => c.charCodeAt(0))], { type }));
}

function newKey() {
  const random = crypto.getRandomValues(new Uint32Array(2));
  return `${Date.now().toString(36)}.${random[0].toString(36)}${random[1].toString(36)}`;
}

// --- the message box ---

export class Attachments {
  // `box` shows them; `canSee()`: whether the model reads images; `changed` is called after each change.
  constructor(box, canSee, changed) {
    this.box = box;
    this.canSee = canSee;
    this.changed = changed;
    this.files = [];
  }

  async add(files) {
    for (const file of files) {
      if (this.files.length === MOST_FILES) {
        toast(`A message has at most ${MOST_FILES} files.`);
        break;
      }
      const found = await this.#read(file);
      if (typeof found === "string") toast(`${file.name || "The file"}: ${found}`);
      else this.files.push(found);
    }
    this.#show();
  }

  // The files as a message keeps them; the box is empty then.
  async take() {
    const taken = this.files;
    this.files = [];
    this.#show();
    for (const file of taken.filter((f) => f.kind === "image")) {
      await keepImage(file.key, file.blob);
      delete file.blob;
    }
    return taken;
  }

  // What is attached, or words that say why it cannot be.
  async #read(file) {
    const name = file.name || "image";
    if (IMAGES.includes(file.type)) {
      if (!this.canSee()) return "this model reads no images.";
      if (file.size > MOST_IMAGE) return `an image has at most ${bytes(MOST_IMAGE)}; this one has ${bytes(file.size)}.`;
      return { kind: "image", name, key: newKey(), blob: file };
    }
    if (file.type.startsWith("image/") && file.type !== "image/svg+xml") return "send PNG, JPEG, WebP, GIF or BMP.";
    if (file.size > MOST_TEXT) return `a text file has at most ${bytes(MOST_TEXT)}; this one has ${bytes(file.size)}.`;
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (!text.includes("\0")) return { kind: "text", name, text };
    } catch {
      // not UTF-8, or a folder
    }
    return "this is neither an image nor text in UTF-8.";
  }

  #show() {
    const rows = this.files.map((file) => {
      const remove = iconButton("close", `Remove ${file.name}`, () => {
        this.files = this.files.filter((other) => other !== file);
        this.#show();
      });
      return h("li", null, file.kind === "image" ? picture(file) : h("span", { class: "file-name" }, icon("file"), file.name), remove);
    });
    this.box.replaceChildren(...rows);
    this.box.hidden = !rows.length;
    this.changed();
  }
}

// --- in the conversation ---

function picture(file) {
  const made = h("img", { class: "thumb", alt: file.name, title: file.name });
  showImage(made, file).catch(() => {});
  return made;
}

async function showImage(element, file) {
  if (!shown.has(file.key)) {
    const blob = file.blob ?? (await imageOf(file.key));
    if (!blob) {
      element.replaceWith(h("span", { class: "file-name" }, icon("file"), `${file.name} (not in this browser)`));
      return;
    }
    shown.set(file.key, URL.createObjectURL(blob));
  }
  element.src = shown.get(file.key);
}

// The files of a message, as elements.
export function filesView(files) {
  return h("div", { class: "files" }, files.map((file) => (file.kind === "image" ? opener(file) : textView(file))));
}

function opener(file) {
  return h("button", { type: "button", class: "thumb-button", "aria-label": `Show ${file.name}`, onclick: () => enlarge(file) }, picture(file));
}

function enlarge(file) {
  const dialog = document.getElementById("picture");
  const close = iconButton("close", "Close", () => dialog.close());
  dialog.replaceChildren(h("header", null, h("h2", { id: "picture-title" }, file.name), close), picture(file));
  dialog.showModal();
}

function textView(file) {
  const head = h("summary", null, icon("file"), ` ${file.name} · ${bytes(new Blob([file.text]).size)}`);
  return h("details", { class: "result" }, head, h("pre", { tabindex: "0" }, file.text));
}

// The content of a request's message: a text, or parts where it has images and they are wanted.
export async function contentOf({ content, files = [] }, wanted) {
  const texts = files.filter((file) => file.kind === "text").map(fenced);
  const images = [];
  for (const file of files.filter((f) => wanted && f.kind === "image")) {
    const url = await dataUrl(file.key);
    if (url) images.push({ type: "image_url", image_url: { url } });
    else texts.push(`[the image ${file.name} is no longer in this browser]`);
  }
  const text = [...texts, content].filter((words) => words.trim()).join("\n\n");
  if (!images.length) return text;
  return text ? [...images, { type: "text", text }] : images;
}

// A text file as Markdown; the fence is longer than any in the file.
function fenced({ name, text }) {
  const longest = Math.max(2, ...Array.from(text.matchAll(/`+/g), (run) => run[0].length));
  const fence = "`".repeat(longest + 1);
  const kind = /\.(\w+)$/.exec(name)?.[1] ?? "";
  return `${name}\n${fence}${kind}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}
