// What an answer is asked for with: the fields, their form, and how they become a request's body.

import { h, iconButton, toast } from "./dom.js";
import * as store from "./store.js";

// kind: text, area, number, choice, lines, json. An empty field is left to the model.
export const GROUPS = [
  {
    title: "Conversation",
    fields: [
      { name: "model", label: "Model", kind: "choice", choices: [] },
      { name: "system", label: "System prompt", kind: "area", rows: 4, hint: "Instructions for the whole conversation." },
      {
        name: "thinking",
        label: "Thinking",
        kind: "choice",
        choices: [["", "Default"], ["on", "On"], ["off", "Off"]],
      },
      { name: "thinking_budget", label: "Max thinking tokens", kind: "number", min: 0, whole: true, placeholder: "no limit" },
    ],
  },
  {
    title: "Sampling",
    fields: [
      { name: "temperature", label: "Temperature", kind: "number", min: 0, max: 2, placeholder: "1" },
      { name: "top_p", label: "Top p", kind: "number", min: 0, max: 1, placeholder: "1" },
      { name: "top_k", label: "Top k", kind: "number", min: -1, whole: true, placeholder: "all" },
      { name: "min_p", label: "Min p", kind: "number", min: 0, max: 1, placeholder: "0" },
      { name: "presence_penalty", label: "Presence penalty", kind: "number", min: -2, max: 2, placeholder: "0" },
      { name: "frequency_penalty", label: "Frequency penalty", kind: "number", min: -2, max: 2, placeholder: "0" },
      { name: "repetition_penalty", label: "Repetition penalty", kind: "number", min: 0.01, max: 10, placeholder: "1" },
      { name: "max_tokens", label: "Max tokens", kind: "number", min: 1, whole: true, placeholder: "as many as fit" },
      { name: "seed", label: "Seed", kind: "number", whole: true, placeholder: "random" },
      { name: "stop", label: "Stop sequences", kind: "lines", rows: 2, hint: "One per line." },
    ],
  },
  {
    title: "Output",
    fields: [
      {
        name: "schema",
        label: "JSON schema",
        kind: "json",
        rows: 6,
        type: "object",
        placeholder: '{"type": "object", "properties": {"city": {"type": "string"}}}',
        hint: "The answer follows this schema.",
      },
      {
        name: "tools",
        label: "Tools",
        kind: "json",
        rows: 6,
        type: "array",
        placeholder: '[{"type": "function", "function": {"name": "weather", "parameters": {}}}]',
        hint: "A list as in OpenAI's API. You type the result of each call.",
      },
    ],
  },
];

const FIELDS = GROUPS.flatMap((group) => group.fields);

// What is wrong with a field's text, in words; "" where nothing is.
export function fault(field, text) {
  if (!text) return "";
  if (field.kind === "number") {
    const value = Number(text);
    if (!Number.isFinite(value)) return "This is not a number.";
    if (field.whole && !Number.isInteger(value)) return "This must be a whole number.";
    if (field.min !== undefined && value < field.min) return `At least ${field.min}.`;
    if (field.max !== undefined && value > field.max) return `At most ${field.max}.`;
  }
  if (field.kind === "json") {
    let value;
    try {
      value = JSON.parse(text);
    } catch (problem) {
      return `This is not JSON: ${problem.message}`;
    }
    const array = Array.isArray(value);
    if (field.type === "array" && !array) return "This must be a list: [ … ]";
    if (field.type === "object" && (array || typeof value !== "object" || !value)) return "This must be an object: { … }";
  }
  return "";
}

// The first field that is wrong: {label, words}; null where all are sound.
export function firstFault(settings) {
  for (const field of FIELDS) {
    const words = fault(field, (settings[field.name] ?? "").trim());
    if (words) return { label: field.label, words };
  }
  return null;
}

// The body's fields for these settings, but for `messages`. Settings are sound.
export function requestFields(settings) {
  const body = {};
  for (const { name, kind } of FIELDS) {
    const text = (settings[name] ?? "").trim();
    if (text && kind === "number") body[name] = Number(text);
  }
  if (settings.model) body.model = settings.model;
  if (settings.thinking) body.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  const stops = (settings.stop ?? "").split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  if (settings.schema?.trim()) {
    const schema = JSON.parse(settings.schema);
    body.response_format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema } };
  }
  const tools = settings.tools?.trim() ? JSON.parse(settings.tools) : [];
  if (tools.length) body.tools = tools;
  return body;
}

// Words for what differs from the defaults, for the row under the message box.
export function summary(settings) {
  const words = [];
  if (settings.system?.trim()) words.push("System prompt");
  if (settings.thinking) words.push(`Thinking ${settings.thinking}`);
  if (settings.schema?.trim()) words.push("JSON schema");
  if (settings.tools?.trim()) words.push("Tools");
  const sampling = GROUPS[1].fields.filter((field) => settings[field.name]?.trim());
  if (sampling.length === 1) words.push(`${sampling[0].label} ${settings[sampling[0].name].split("\n")[0]}`);
  else if (sampling.length) words.push(`Sampling (${sampling.length})`);
  return words;
}

// Fills the dialog. `defaults` are the engine's own values, `changed` is called with each change.
export function fillDialog(dialog, settings, models, defaults, changed) {
  const groups = GROUPS.map((group) => {
    const rows = group.fields.map((field) => row(field, settings, models, defaults, changed));
    return h("fieldset", { class: group.title === "Sampling" ? "pairs" : null }, h("legend", null, group.title), rows);
  });
  const again = (given) => {
    for (const { name } of FIELDS) {
      if (typeof given[name] === "string") settings[name] = given[name];
      else delete settings[name];
    }
    changed();
    fillDialog(dialog, settings, models, defaults, changed);
  };
  dialog.replaceChildren(
    h("header", null, h("h2", { id: "settings-title" }, "Settings"), iconButton("close", "Close", () => dialog.close())),
    h("div", { class: "drawer-body" }, presets(settings, again), groups),
    h(
      "footer",
      null,
      h("p", { class: "hint" }, "These settings apply to this conversation and to new ones."),
      h("button", { type: "button", class: "link", onclick: () => again({}) }, "Reset all to defaults"),
    ),
  );
}

// Named settings: one is chosen, or what is set now is saved under a name.
function presets(settings, apply) {
  const kept = store.presets();
  const names = Object.keys(kept).sort();
  const options = ["", ...names].map((name) => h("option", { value: name }, name || (names.length ? "Choose one" : "None yet")));
  const choice = h("select", { id: "preset", onchange: () => choice.value && apply(kept[choice.value]) }, options);
  const name = h("input", { id: "preset-name", type: "text", maxlength: 60, placeholder: "Name", "aria-label": "Name of the preset" });
  const save = () => {
    if (!name.value.trim()) return name.focus();
    store.keepPreset(name.value.trim(), settings);
    apply(settings);
    toast(`Saved “${name.value.trim()}”.`);
  };
  const remove = () => {
    const gone = name.value.trim() || choice.value;
    if (!(gone in kept)) return name.focus();
    store.keepPreset(gone, null);
    apply(settings);
    toast(`Deleted “${gone}”.`);
  };
  const button = (words, act) => h("button", { type: "button", class: "button", onclick: act }, words);
  return h(
    "fieldset",
    null,
    h("legend", null, "Preset"),
    h("div", { class: "field" }, h("label", { for: "preset" }, "Saved settings"), choice),
    h("div", { class: "preset-row" }, name, button("Save", save), button("Delete", remove)),
  );
}

function row(field, settings, models, defaults, changed) {
  const id = `setting-${field.name}`;
  const words = h("p", { class: "fault", id: `${id}-fault` });
  const value = settings[field.name] ?? "";
  const set = (text) => {
    if (text) settings[field.name] = text;
    else delete settings[field.name];
    const wrong = fault(field, text.trim());
    words.textContent = wrong;
    input.setAttribute("aria-invalid", String(Boolean(wrong)));
    changed();
  };
  const own = { id, "aria-describedby": words.id, oninput: (e) => set(e.target.value) };
  const input = makeInput(field, own, value, models, defaults);
  if (fault(field, value.trim())) {
    words.textContent = fault(field, value.trim());
    input.setAttribute("aria-invalid", "true");
  }
  const hint = field.hint && h("p", { class: "hint" }, field.hint);
  return h("div", { class: "field" }, h("label", { for: id }, field.label), input, hint, words);
}

function makeInput(field, own, value, models, defaults) {
  const shown = defaults[field.name] === undefined ? field.placeholder : String(defaults[field.name]);
  if (field.kind === "choice") {
    const named = models.map((name, i) => [i ? name : "", name]);
    const choices = field.name === "model" ? named : field.choices;
    const options = choices.map(([key, words]) => h("option", { value: key, selected: key === value }, words));
    const made = h("select", own, options);
    made.value = choices.some(([key]) => key === value) ? value : "";
    return made;
  }
  if (field.kind === "number") {
    return h("input", { ...own, type: "text", inputmode: "decimal", autocomplete: "off", placeholder: shown, value });
  }
  const code = field.kind === "json" ? "mono" : null;
  return h("textarea", { ...own, rows: field.rows, placeholder: field.placeholder, class: code, spellcheck: code ? "false" : null, value });
}
