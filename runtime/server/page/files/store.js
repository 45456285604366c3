// Conversations in the browser's storage. A conversation is a tree: a regenerated answer and an edited
// question are siblings of the first one, and `leaf` selects the path that is shown.

import { dataUrl, keepDataUrl } from "./attachments.js";

// The browser's storage, or memory where it is not allowed: the page then works until it is closed.
class Storage {
  #kept = new Map();

  constructor(find) {
    this.find = find; // gives the browser's own, or throws
  }

  get(name) {
    try {
      return this.find().getItem(name);
    } catch {
      return this.#kept.get(name) ?? null;
    }
  }

  // Throws where the browser's own is full.
  set(name, value) {
    let own;
    try {
      own = this.find();
    } catch {
      this.#kept.set(name, value);
      return;
    }
    own.setItem(name, value);
  }

  remove(name) {
    this.#kept.delete(name);
    try {
      this.find().removeItem(name);
    } catch {
      // it was in memory
    }
  }
}

export const local = new Storage(() => window.localStorage);
export const session = new Storage(() => window.sessionStorage);

const INDEX = "spark.conversations"; // [{id, title, at}], the newest first
export const ONE = "spark.conversation."; // and the id
const LAST = "spark.last"; // {settings} that a new conversation begins with

const PRESETS = "spark.presets";

export class Full extends Error {}

export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(9)), (b) => b.toString(36).padStart(2, "0")).join("");
}

function readJson(name, otherwise) {
  try {
    return JSON.parse(local.get(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

function writeJson(name, value) {
  try {
    local.set(name, JSON.stringify(value));
  } catch {
    throw new Full("The browser's storage is full: delete or export conversations.");
  }
}

export function list() {
  const rows = readJson(INDEX, []);
  return Array.isArray(rows) ? rows.filter((row) => row && typeof row.id === "string") : [];
}

export function create() {
  const { settings } = readJson(LAST, {});
  const now = Date.now();
  return { id: newId(), title: "", at: now, made: now, leaf: null, nodes: {}, settings: settings ?? {} };
}

export function load(id) {
  const found = readJson(ONE + id, null);
  if (found === null || typeof found.nodes !== "object" || found.nodes === null) return null;
  for (const node of Object.values(found.nodes)) if (node.state === "running") node.state = "cut";
  return found;
}

// Throws Full. An empty conversation is not kept.
export function save(conversation) {
  if (!Object.keys(conversation.nodes).length) return;
  writeJson(ONE + conversation.id, conversation);
  const { id, at } = conversation;
  const rows = list().filter((row) => row.id !== id);
  const row = { id, title: titleOf(conversation), at };
  writeJson(INDEX, [row, ...rows].sort((a, b) => b.at - a.at));
}

export function keepSettings(settings) {
  try {
    writeJson(LAST, { settings });
  } catch {
    // a new conversation begins without them
  }
}

// Named settings: {name: settings}.
export function presets() {
  const found = readJson(PRESETS, {});
  return typeof found === "object" && !Array.isArray(found) ? found : {};
}

// Keeps settings under a name; null deletes them.
export function keepPreset(name, settings) {
  const found = presets();
  if (settings) found[name] = { ...settings };
  else delete found[name];
  writeJson(PRESETS, found);
}

export function remove(id) {
  local.remove(ONE + id);
  writeJson(INDEX, list().filter((row) => row.id !== id));
}

export function titleOf(conversation) {
  if (conversation.title) return conversation.title;
  const first = Object.values(conversation.nodes).find((node) => node.role === "user");
  const words = (first?.content || first?.files?.[0].name || "").replace(/\s+/g, " ").trim();
  return words.length > 60 ? `${words.slice(0, 58).trimEnd()}…` : words || "New conversation";
}

// --- the tree ---

export function append(conversation, parent, node) {
  const made = { id: newId(), parent, at: Date.now(), ...node };
  conversation.nodes[made.id] = made;
  conversation.leaf = made.id;
  conversation.at = made.at;
  return made;
}

// From the first message to the one that is shown last.
export function path(conversation) {
  const found = [];
  for (let at = conversation.nodes[conversation.leaf]; at; at = conversation.nodes[at.parent]) {
    found.push(at);
    if (found.length > 10_000) break; // a file that was changed by hand may go round
  }
  return found.reverse();
}

export function siblings(conversation, node) {
  const others = Object.values(conversation.nodes).filter((n) => n.parent === node.parent);
  return others.sort((a, b) => a.at - b.at);
}

// Shows `node`, and below it what was written last.
export function show(conversation, node) {
  let at = node;
  for (let next = at; next; next = lastChild(conversation, at)) at = next;
  conversation.leaf = at.id;
}

function lastChild(conversation, node) {
  const children = Object.values(conversation.nodes).filter((n) => n.parent === node.id);
  return children.sort((a, b) => b.at - a.at)[0];
}

// Takes out `node` and everything below it; what is shown then is another version, or what was
// before it.
export function cut(conversation, node) {
  const [other] = siblings(conversation, node).filter((n) => n !== node).slice(-1);
  const gone = [node];
  for (const at of gone) gone.push(...Object.values(conversation.nodes).filter((n) => n.parent === at.id));
  for (const { id } of gone) delete conversation.nodes[id];
  if (other) show(conversation, other);
  else conversation.leaf = node.parent;
}

// --- files ---

const SPEAKERS = { user: "You", assistant: "Answer", tool: "Result" };

// The shown path as Markdown: thoughts are quoted, calls and files are named.
export function asMarkdown(conversation) {
  const parts = [`# ${titleOf(conversation)}`];
  for (const node of path(conversation)) {
    parts.push(`## ${SPEAKERS[node.role]}${node.role === "tool" ? ` of ${node.name}` : ""}`);
    for (const file of node.files ?? []) parts.push(`[${file.kind === "image" ? "image" : "file"}: ${file.name}]`);
    if (node.reasoning) parts.push(node.reasoning.trim().replace(/^/gm, "> "));
    if (node.content) parts.push(node.content.trim());
    for (const call of node.calls ?? []) parts.push(`Call of \`${call.name}\`:\n\n~~~~json\n${call.arguments}\n~~~~`);
  }
  return `${parts.join("\n\n")}\n`;
}

// The keys of a conversation's images.
export function imagesOf(conversation) {
  const files = Object.values(conversation?.nodes ?? {}).flatMap((node) => node.files ?? []);
  return files.filter((file) => file.kind === "image").map((file) => file.key);
}

export async function exportAll() {
  const all = list().map((row) => load(row.id)).filter(Boolean);
  const images = {};
  for (const key of all.flatMap(imagesOf)) images[key] = (await dataUrl(key)) ?? undefined;
  return JSON.stringify({ kind: "spark conversations", version: 1, conversations: all, images }, null, 1);
}

// How many conversations of an exported file were taken. Throws Error with words for the user.
export async function importAll(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  if (!Array.isArray(file?.conversations)) throw new Error("This file holds no conversations.");
  const known = new Set(list().map((row) => row.id));
  let taken = 0;
  for (const given of file.conversations) {
    if (!isConversation(given)) throw new Error("A conversation in this file is malformed.");
    if (known.has(given.id)) continue;
    for (const key of imagesOf(given)) if (file.images?.[key]) await keepDataUrl(key, file.images[key]);
    save(given);
    taken++;
  }
  return taken;
}

function isConversation(given) {
  if (typeof given?.id !== "string" || typeof given.nodes !== "object" || !given.nodes) return false;
  const roles = new Set(["user", "assistant", "tool"]);
  const isFile = (f) => typeof f?.name === "string" && typeof (f.kind === "image" ? f.key : f.text) === "string";
  const sound = (n) =>
    roles.has(n?.role) && (n.content === null || typeof n.content === "string") && (n.files ?? []).every(isFile);
  return Object.entries(given.nodes).every(([id, node]) => sound(node) && node.id === id);
}
