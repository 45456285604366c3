// The engine view: what was built, how it is stored, and what it takes, from /report.

import { getJson } from "./api.js";
import { bytes, count, h } from "./dom.js";

const MEMORY = [
  ["weights", "Weights"],
  ["kv", "Keys and values"],
  ["states", "States"],
  ["snapshots", "Prefix cache states"],
  ["arena", "Scratch"],
  ["buffers", "Inputs and outputs"],
  ["tables", "Tables"],
];

// Fills the box with the report, or with an error message. Throws the error that asks for a key.
export async function showReport(box) {
  let report;
  try {
    report = await getJson("report");
  } catch (problem) {
    box.replaceChildren(h("div", { class: "page-head" }, h("h1", null, "Engine")), h("p", { class: "problem" }, problem.message));
    if (problem.status === 401) throw problem;
    return;
  }
  box.replaceChildren(...sections(report));
}

function sections(report) {
  const parts = [h("div", { class: "page-head" }, h("h1", null, report.name)), summary(report)];
  if (report.memory) parts.push(h("h2", null, "Memory"), memory(report));
  if (report.buckets) parts.push(h("h2", null, "Buckets"), buckets(report));
  if (report.quantisation) parts.push(h("h2", null, "Quantisation"), stored(report));
  if (report.fusions) parts.push(h("h2", null, "Fusions"), fusions(report));
  if (report.refusals?.length) parts.push(folded(`Fusions refused (${report.refusals.length})`, refusals(report)));
  if (report.tactics?.length) parts.push(folded(`Tactics (${report.tactics.length})`, tactics(report)));
  if (report.producer) parts.push(h("h2", null, "Build"), made(report));
  return parts;
}

function pairs(rows) {
  const kept = rows.filter(([, value]) => value !== undefined && value !== null && value !== "");
  return h("dl", { class: "totals" }, kept.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))));
}

function summary({ model, target, card, executor, invariant, dtypes, limits, cache, generation, version }) {
  return pairs([
    ["Model", model && `${model.model_type}, ${model.layers} layers of ${count(model.hidden)}`],
    ["Parameters", model && count(model.parameters)],
    ["Vocabulary", count(limits.vocab)],
    ["Target", target && `${target} (${executor})${card ? `, ${card}` : ""}`],
    ["Activations", dtypes?.activation],
    ["Keys and values", dtypes?.kv],
    ["States", dtypes?.state],
    ["Sequences", `${limits.max_seqs} of up to ${count(limits.max_context)} tokens`],
    ["KV pages", `${count(limits.pages)} of ${limits.page_size} tokens`],
    ["Prefix cache", cache.budget_bytes ? `${bytes(cache.budget_bytes)}, ${count(cache.snapshots)} states` : "none"],
    ["Prefix cache on disk", cache.disk_bytes ? bytes(cache.disk_bytes) : "none"],
    ["Drafts", limits.drafts ? `up to ${limits.drafts} a round` : "none"],
    ["Batch-invariant", invariant === undefined ? null : invariant ? "yes" : "no"],
    ["Default sampling", sampling(generation)],
    ["Spark", version],
  ]);
}

function sampling(generation) {
  const names = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"];
  if (generation.do_sample === false) return "greedy";
  return names.filter((name) => generation[name] !== undefined).map((name) => `${name} ${generation[name]}`).join(", ");
}

function memory({ memory }) {
  const parts = MEMORY.filter(([key]) => memory[key] > 0);
  const bar = h("div", { class: "bar", role: "img", "aria-label": "Shares of the memory; the table has the figures" });
  parts.forEach(([key], i) => {
    const piece = h("i", { class: `m${i}` });
    piece.style.flexGrow = String(memory[key] / memory.total);
    bar.append(piece);
  });
  const rows = parts.map(([key, words], i) => [
    h("span", { class: "swatch" }, h("i", { class: `m${i}` }), words),
    bytes(memory[key]),
    `${((100 * memory[key]) / memory.total).toFixed(1)} %`,
  ]);
  return h("div", null, bar, table(["", "Size", "Share"], [...rows, ["Total", bytes(memory.total), ""]]));
}

function buckets({ buckets }) {
  const rows = buckets.map((b) => [b.file.replace(/\.engine$/, ""), count(b.rows), count(b.tokens), micro(b.cost_us), bytes(b.arena_bytes), bytes(b.file_bytes)]);
  return table(["Bucket", "Rows", "Tokens", "Planned time", "Scratch", "File"], rows);
}

function stored({ quantisation }) {
  const rows = quantisation.map((q) => [q.module, q.format, count(q.modules), count(q.tensors)]);
  return table(["Module", "Format", "Modules", "Tensors"], rows, 2);
}

function fusions({ fusions }) {
  const families = Object.keys(fusions);
  const rules = [...new Set(families.flatMap((family) => Object.keys(fusions[family])))];
  const rows = rules.map((rule) => [rule, ...families.map((family) => count(fusions[family][rule] ?? 0))]);
  return table(["Rule", ...families], rows);
}

function refusals({ refusals }) {
  return table(["Rule", "At", "Because"], refusals.map((r) => [r.rule, r.node, r.reason]), 3);
}

function tactics({ tactics }) {
  const rows = tactics.map((t) => [t.bucket.replace(/\.engine$/, ""), t.op, t.node, count(t.nodes), t.chosen ?? "the only one", micro(t.microseconds), t.timed ? "timed" : "predicted"]);
  return table(["Bucket", "Op", "First node", "Nodes", "Tactic", "Time", ""], rows, 3);
}

function made({ producer, fingerprint }) {
  const rows = Object.entries(producer).sort(([a], [b]) => a.localeCompare(b));
  return pairs([...rows, ["Fingerprint", fingerprint?.all?.slice(0, 16)]]);
}

function micro(value) {
  if (value === undefined || value === null) return "–";
  return value >= 1000 ? `${(value / 1000).toFixed(2)} ms` : `${value.toFixed(1)} µs`;
}

function folded(title, inner) {
  return h("details", { class: "folded" }, h("summary", null, title), inner);
}

// The first `words` columns are text, the others figures.
function table(head, rows, words = 1) {
  const side = (i) => (i < words ? "to-left" : "to-right");
  const line = (tag, cells) => h("tr", null, cells.map((cell, i) => (tag === "th" && cell ? h("th", { class: side(i), scope: "col" }, cell) : h("td", { class: side(i) }, cell))));
  const body = rows.map((cells) => line("td", cells));
  return h("div", { class: "table", tabindex: "0" }, h("table", null, h("thead", null, line("th", head)), h("tbody", null, body)));
}
