// The page: its views, the key, the theme, the server's health, and shortcuts.

import { getJson, health, isKeyKept, key, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { h, icon, iconButton, saveFile, toast } from "./dom.js";
import { Live } from "./live.js";
import { showReport } from "./report.js";
import * as store from "./store.js";

const VIEWS = ["chat", "live", "engine"];
const HEALTH_MS = 10_000;
const THEMES = { auto: "System theme", light: "Light theme", dark: "Dark theme" };
const SHORTCUTS = [
  ["Enter", "send"],
  ["Shift + Enter", "new line"],
  ["Esc", "stop the answer"],
  ["↑", "edit the last message (in an empty message box)"],
  ["/", "focus the message box"],
  ["Alt + N", "new conversation"],
  ["Alt + ↑ ↓", "previous or next conversation"],
  ["Alt + C", "copy the last answer"],
  ["Alt + S", "settings"],
  ["Alt + 1 2 3", "chat, live figures, engine"],
  ["?", "this list"],
];

const find = (id) => document.getElementById(id);
const app = { models: [], defaults: {}, limit: 0, vision: false, needKey };
const chat = new Chat(app);
const live = new Live(find("live"), () => chat.jobs.size > 0);
let view = "";

// --- views ---

function route() {
  const [name, id] = location.hash.slice(1).split("/");
  const next = VIEWS.includes(name) ? name : "chat";
  for (const each of VIEWS) find(each).hidden = each !== next;
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === next) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (next === "chat") chat.open(id);
  else document.title = `${next === "live" ? "Live" : "Engine"} – Spark`;
  find("open-side").hidden = next !== "chat"; // it opens what only the chat has
  live.setShown(next === "live");
  if (next === "engine" && view !== "engine") showReport(find("engine")).catch(() => needKey());
  view = next;
  closeSide();
}

// --- the server ---

async function showHealth() {
  if (document.hidden) return;
  const { ok, reason } = await health();
  const box = find("health");
  box.classList.toggle("bad", !ok);
  box.title = ok ? "The server is ready" : `Not ready: ${reason}`;
  const words = ok ? (app.models[0] ?? "") : reason;
  const label = box.querySelector(".model");
  if (label.textContent !== words) label.textContent = words;
  if (ok && !app.models.length && !find("key").open) await ask();
}

async function ask() {
  try {
    const { data } = await getJson("v1/models");
    app.models = data.map((model) => model.id);
    app.limit = data[0]?.max_model_len ?? 0;
    const { generation, vision } = await getJson("report");
    app.defaults = generation ?? {};
    app.vision = Boolean(vision);
    chat.composer.show();
    showHealth();
    if (!store.path(chat.conversation).length) chat.render();
  } catch (problem) {
    if (problem.status === 401) needKey();
  }
}

// --- the key ---

function needKey() {
  openKey(key() ? "The server does not take this key." : "This server asks for an API key.");
}

function openKey(words) {
  const dialog = find("key");
  if (dialog.open) return;
  const input = h("input", { id: "key-input", type: "password", autocomplete: "off", value: key(), spellcheck: "false" });
  const keep = h("input", { type: "checkbox", checked: isKeyKept() });
  const save = (event) => {
    event.preventDefault();
    setKey(input.value.trim(), keep.checked);
    dialog.close();
    app.models = [];
    ask();
    if (view === "engine") showReport(find("engine")).catch(() => needKey());
  };
  const buttons = h(
    "div",
    { class: "edit-row" },
    h("button", { type: "button", class: "button", onclick: () => dialog.close() }, "Cancel"),
    h("button", { type: "submit", class: "button strong" }, "Save"),
  );
  const form = h(
    "form",
    { onsubmit: save },
    words && h("p", null, words),
    h("label", { for: "key-input" }, "Key"),
    input,
    h("label", { class: "check" }, keep, "Keep it in this browser"),
    h("p", { class: "hint" }, "Else it is forgotten with this tab. It goes to this server alone."),
    buttons,
  );
  dialog.replaceChildren(h("h2", { id: "key-title" }, "API key"), form);
  dialog.showModal();
}

// --- theme ---

function showTheme() {
  const chosen = document.documentElement.dataset.theme ?? "auto";
  find("theme").replaceChildren(icon({ auto: "auto", light: "sun", dark: "moon" }[chosen]));
  find("theme").setAttribute("aria-label", THEMES[chosen]);
  find("theme").title = THEMES[chosen];
}

function nextTheme() {
  const names = Object.keys(THEMES);
  const chosen = document.documentElement.dataset.theme ?? "auto";
  const next = names[(names.indexOf(chosen) + 1) % names.length];
  if (next === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  store.local.set("spark.theme", next);
  showTheme();
}

// --- the side on narrow screens ---

function setSide(open) {
  find("side").classList.toggle("open", open);
  find("scrim").hidden = !open;
  find("open-side").setAttribute("aria-expanded", String(open));
  if (open) find("new").focus();
}

function closeSide() {
  if (find("side").classList.contains("open")) setSide(false);
}

// --- files and help ---

async function download() {
  saveFile("spark-conversations.json", "application/json", await store.exportAll());
}

async function upload(event) {
  const [file] = event.target.files;
  event.target.value = "";
  if (!file) return;
  try {
    const taken = await store.importAll(await file.text());
    toast(`${taken} conversation${taken === 1 ? "" : "s"} imported.`);
  } catch (problem) {
    toast(problem.message);
  }
  chat.side.show(chat.conversation.id);
}

function openHelp() {
  const rows = SHORTCUTS.map(([keys, words]) => h("div", null, h("dt", null, h("kbd", null, keys)), h("dd", null, words)));
  const head = h("header", null, h("h2", { id: "help-title" }, "Shortcuts"), iconButton("close", "Close", () => find("help").close()));
  find("help").replaceChildren(head, h("dl", { class: "shortcuts" }, rows));
  find("help").showModal();
}

// --- keys ---

const WITH_ALT = {
  KeyN: () => chat.startNew(),
  KeyC: () => chat.copyLast(),
  KeyS: () => chat.openSettings(),
  ArrowUp: () => chat.step(-1),
  ArrowDown: () => chat.step(1),
  Digit1: () => (location.hash = "#chat"),
  Digit2: () => (location.hash = "#live"),
  Digit3: () => (location.hash = "#engine"),
};

function onKey(event) {
  if (event.defaultPrevented || event.isComposing || document.querySelector("dialog[open]")) return;
  const typing = event.target.closest("input, textarea, select");
  const act = event.altKey && !event.ctrlKey && !event.metaKey && WITH_ALT[event.code];
  if (act) act();
  else if (event.key === "Escape") {
    closeSide();
    chat.stop();
  } else if (event.key === "/" && !typing && view === "chat") find("composer-text").focus();
  else if (event.key === "?" && !typing) openHelp();
  else return;
  event.preventDefault();
}

find("open-side").append(icon("menu"));
find("open-side").addEventListener("click", () => setSide(true));
find("scrim").addEventListener("click", closeSide);
find("open-key").append(icon("key"));
find("open-key").addEventListener("click", () => openKey(""));
find("theme").addEventListener("click", nextTheme);
find("export").addEventListener("click", download);
find("import").addEventListener("click", () => find("import-file").click());
find("import-file").addEventListener("change", upload);
find("open-help").addEventListener("click", openHelp);
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close()); // outside it
}
document.addEventListener("keydown", onKey);
window.addEventListener("hashchange", route);
document.addEventListener("visibilitychange", showHealth);
showTheme();
route();
showHealth();
setInterval(showHealth, HEALTH_MS);
if (matchMedia("(pointer: fine)").matches) find("composer-text").focus();
