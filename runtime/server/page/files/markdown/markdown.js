// Markdown as models write it, made into elements. Raw HTML stays text; links are http(s) and mail
// alone; images become links, since nothing is fetched for a model. Text may end anywhere: what is
// open is shown as if it ended there.

import { copyButton, h } from "../dom.js";
import { pieces } from "./highlight.js";
import { inline } from "./inline.js";
import { math } from "./math.js";

const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: |$)/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:( +)(?=\S)|[ \t]*$)/;
const CELLS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const MATH = /^ {0,3}(?:\$\$|\\\[)/;
const DEEPEST = 12; // quotes and lists within one another; deeper ones stay text

// Renders into `box` again and again as a text grows: only what changed is made again.
export class Markdown {
  #box;
  #text = "";
  #starts = []; // where each block begins, in lines' characters

  constructor(box) {
    this.#box = box;
    box.classList.add("markdown");
  }

  set(text) {
    if (text === this.#text) return;
    let from = 0;
    if (text.startsWith(this.#text) && this.#starts.length > 1) {
      this.#starts.pop();
      from = this.#starts.pop(); // what follows a list may turn out to be its next item
    } else this.#starts = [];
    while (this.#box.childNodes.length > this.#starts.length) this.#box.lastChild.remove();
    this.#text = text;
    for (const block of blocks(text.slice(from))) {
      this.#starts.push(from + block.start);
      this.#box.append(make(block, 0));
    }
  }
}

// The top blocks of a text: {kind, start, ...}, `start` being its first character.
export function blocks(text) {
  const lines = text.split("\n").map((line) => line.replace(/\r$/, "").replaceAll("\t", "    "));
  const starts = [];
  let at = 0;
  for (const line of text.split("\n")) {
    starts.push(at);
    at += line.length + 1;
  }
  const found = [];
  for (let i = 0; i < lines.length; ) {
    if (!lines[i].trim()) {
      i++;
      continue;
    }
    const [block, next] = read(lines, i);
    found.push({ ...block, start: starts[i] });
    i = next;
  }
  return found;
}

function read(lines, i) {
  const line = lines[i];
  let match;
  if ((match = FENCE.exec(line))) return readFence(lines, i, match);
  if ((match = HEADING.exec(line))) return [readHeading(line, match), i + 1];
  if (RULE.test(line)) return [{ kind: "rule" }, i + 1];
  if (QUOTE.test(line)) return readQuote(lines, i);
  if ((match = ITEM.exec(line))) return readList(lines, i, match);
  if (isTable(lines, i)) return readTable(lines, i);
  if (MATH.test(line)) return readMath(lines, i);
  let end = i + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end)) end++;
  const text = lines.slice(i, end).map((l) => l.trimStart()).join("\n");
  return [{ kind: "paragraph", text }, end];
}

function interrupts(lines, i) {
  const line = lines[i];
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const item = ITEM.exec(line);
  if (item?.[3] && (!/\d/.test(item[2]) || parseInt(item[2]) === 1)) return true;
  return isTable(lines, i) || MATH.test(line);
}

function readHeading(line, [head, marks]) {
  const text = line.slice(head.length).trim();
  const last = text.lastIndexOf(" ");
  const closed = /^#+$/.test(text.slice(last + 1)); // "## So ##"
  return { kind: "heading", level: marks.length, text: closed ? text.slice(0, Math.max(0, last)) : text };
}

function readFence(lines, i, [, indent, mark, words]) {
  const language = words.trim().split(/\s/)[0];
  const close = new RegExp(`^ {0,3}\\${mark[0]}{${mark.length},}[ \\t]*$`);
  let end = i + 1;
  while (end < lines.length && !close.test(lines[end])) end++;
  const strip = new RegExp(`^ {0,${indent.length}}`);
  const text = lines.slice(i + 1, end).map((l) => l.replace(strip, "")).join("\n");
  return [{ kind: "code", language, text }, end + 1];
}

function readQuote(lines, i) {
  let end = i;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  const inner = lines.slice(i, end).map((l) => l.replace(QUOTE, ""));
  return [{ kind: "quote", text: inner.join("\n") }, end];
}

function readList(lines, i, first) {
  const ordered = /\d/.test(first[2]);
  const mark = first[2].at(-1);
  const items = [];
  let loose = false;
  while (i < lines.length) {
    const match = ITEM.exec(lines[i]);
    if (!match || match[2].at(-1) !== mark || /\d/.test(match[2]) !== ordered || RULE.test(lines[i])) break;
    if (match[1].length < first[1].length || match[1].length > first[1].length + 3) break;
    const width = match[1].length + match[2].length + Math.min(match[3]?.length ?? 1, 4);
    const own = [lines[i].slice(width)];
    let blank = false;
    for (i++; i < lines.length; i++) {
      const line = lines[i];
      const indent = line.length - line.trimStart().length;
      if (!line.trim()) blank = true;
      else if (indent >= width || (indent > first[1].length + 1 && ITEM.test(line))) {
        if (blank) loose = loose || !ITEM.test(line);
        blank = false;
      } else if (blank || ITEM.test(line) || interrupts(lines, i)) break;
      own.push(line.slice(Math.min(indent, width)));
    }
    items.push(own.join("\n").trimEnd());
  }
  return [{ kind: "list", ordered, from: parseInt(first[2]), items, loose }, i];
}

function isTable(lines, i) {
  const next = lines[i + 1];
  if (next === undefined || !lines[i].includes("|") || !CELLS.test(next)) return false;
  return cells(lines[i]).length === cells(next).length;
}

// The cells of a row: at bars that are neither escaped nor within code.
function cells(line) {
  const found = [""];
  let code = false;
  for (let i = 0; i < line.length; i++) {
    const c = line[i];
    if (c === "\\" && line[i + 1] === "|") found[found.length - 1] += line[++i];
    else if (c === "|" && !code) found.push("");
    else {
      if (c === "`") code = !code;
      found[found.length - 1] += c;
    }
  }
  const trimmed = found.map((cell) => cell.trim());
  if (trimmed[0] === "") trimmed.shift();
  if (trimmed.length > 1 && trimmed.at(-1) === "") trimmed.pop();
  return trimmed;
}

function readTable(lines, i) {
  const head = cells(lines[i]);
  const sides = cells(lines[i + 1]).map((c) => (c.endsWith(":") ? (c.startsWith(":") ? "center" : "right") : "left"));
  const rows = [];
  let end = i + 2;
  while (end < lines.length && lines[end].trim() && lines[end].includes("|")) rows.push(cells(lines[end++]));
  return [{ kind: "table", head, sides, rows }, end];
}

function readMath(lines, i) {
  const close = lines[i].trimStart().startsWith("$$") ? "$$" : "\\]";
  let end = i;
  let from = lines[i].indexOf(close === "$$" ? "$$" : "\\[") + 2;
  while (end < lines.length && !lines[end].includes(close, from)) [end, from] = [end + 1, 0];
  const text = lines.slice(i, end + 1).join("\n").trim();
  return [{ kind: "math", text: text.replace(/^(\$\$|\\\[)\s*/, "").replace(/\s*(\$\$|\\\])$/, "") }, end + 1];
}

function make(block, depth) {
  switch (block.kind) {
    case "heading":
      return h(`h${Math.min(6, block.level + 2)}`, null, inline(block.text)); // below the page's own
    case "rule":
      return h("hr");
    case "code":
      return makeCode(block);
    case "math":
      return math(block.text, true);
    case "quote":
      return h("blockquote", null, within(block.text, depth));
    case "list":
      return makeList(block, depth);
    case "table":
      return makeTable(block);
    default:
      return h("p", null, inline(block.text));
  }
}

function within(text, depth) {
  if (depth >= DEEPEST) return h("p", null, text);
  return blocks(text).map((block) => make(block, depth + 1));
}

function makeCode({ language, text }) {
  const parts = pieces(text, language).map(([name, part]) => (name ? h("span", { class: `t-${name}` }, part) : part));
  const head = h("div", { class: "code-head" }, h("span", null, language || "text"), copyButton("Copy code", () => text));
  return h("div", { class: "code" }, head, h("pre", { tabindex: "0" }, h("code", null, parts)));
}

function makeList({ ordered, from, items, loose }, depth) {
  const rows = items.map((text) => {
    const task = /^\[([ xX])\] /.exec(text);
    const made = within(task ? text.slice(4) : text, depth);
    // a tight item's text has no paragraph
    if (!loose && made[0]?.tagName === "P") made.splice(0, 1, ...made[0].childNodes);
    const box = task && h("input", { type: "checkbox", disabled: true, checked: task[1] !== " " });
    return h("li", { class: task && "task" }, box, made);
  });
  return h(ordered ? "ol" : "ul", { start: ordered && from !== 1 ? from : null }, rows);
}

function makeTable({ head, sides, rows }) {
  const row = (tag, texts) =>
    h("tr", null, sides.map((side, i) => h(tag, { class: `to-${side}` }, inline(texts[i] ?? ""))));
  const body = rows.map((texts) => row("td", texts));
  return h("div", { class: "table", tabindex: "0" }, h("table", null, h("thead", null, row("th", head)), h("tbody", null, body)));
}
