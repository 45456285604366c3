// The contents of a line of Markdown: emphasis, code, links. Gives nodes; markup stays text.

import { h } from "../dom.js";
import { math } from "./math.js";

const SAFE = /^(?:https?:\/\/|mailto:)/i;
const BARE = /https?:\/\/[^\s<>"'`]+/y;
const ANGLED = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/y;
const DOLLARS = /\$([^\s$](?:[^$\n\\]|\\.){0,400}?)(?<!\s)\$(?![\w$])/y;
const ESCAPED = /[!-/:-@[-`{-~]/;
const SPECIAL = /[\\`*_~[!<hH\n$&]/g;
const ENTITY = /&(?:amp|lt|gt|quot|apos|nbsp|#\d{1,6}|#[xX][\da-fA-F]{1,5});/y;
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };
const DEEPEST = 8;
const LONGEST = 1000; // characters of a link's text

// The nodes of a text. `linked`: it is inside a link, and may contain no other.
export function inline(text, depth = 0, linked = false) {
  if (depth > DEEPEST) return [text];
  return new Reader(text, depth, linked).run();
}

class Reader {
  constructor(text, depth, linked) {
    this.text = text;
    this.depth = depth;
    this.linked = linked;
    this.nodes = [];
    this.plain = "";
    this.missing = new Set(); // marks that nothing closes from here on: looked for once
  }

  run() {
    const { text } = this;
    for (let i = 0; i < text.length; ) {
      SPECIAL.lastIndex = i;
      const found = SPECIAL.exec(text);
      const next = found ? found.index : text.length;
      this.plain += text.slice(i, next);
      i = next;
      if (i >= text.length) break;
      const end = this.special(i);
      if (end > i) i = end;
      else this.plain += text[i++];
    }
    this.flush();
    return this.nodes;
  }

  flush() {
    if (this.plain) this.nodes.push(this.plain);
    this.plain = "";
  }

  put(node) {
    this.flush();
    this.nodes.push(node);
  }

  inner(from, to, linked = this.linked) {
    return inline(this.text.slice(from, to), this.depth + 1, linked);
  }

  // The index after the markup that begins at `i`, or `i` where none does.
  special(i) {
    const { text } = this;
    switch (text[i]) {
      case "\\":
        return this.escape(i);
      case "`":
        return this.code(i);
      case "*":
      case "_":
      case "~":
        return this.emphasis(i);
      case "!":
        return text[i + 1] === "[" ? this.link(i + 1) : i;
      case "[":
        return this.link(i);
      case "<":
        return this.address(ANGLED, i);
      case "h":
      case "H":
        return /\w/.test(text[i - 1] ?? "") ? i : this.address(BARE, i);
      case "$":
        return text[i + 1] === "$" ? this.math(i, "$$", "$$") : this.dollars(i);
      case "&":
        return this.entity(i);
      default: // a newline: models mean a new line by it
        this.plain = this.plain.trimEnd();
        this.put(h("br"));
        return i + 1;
    }
  }

  escape(i) {
    const next = this.text[i + 1] ?? "";
    if (next === "(") return this.math(i, "\\(", "\\)");
    if (next === "[") return this.math(i, "\\[", "\\]");
    if (next === "\n") return i + 1 && (this.put(h("br")), i + 2);
    if (!ESCAPED.test(next)) return i;
    this.plain += next;
    return i + 2;
  }

  entity(i) {
    ENTITY.lastIndex = i;
    const found = ENTITY.exec(this.text);
    if (!found) return i;
    const name = found[0].slice(1, -1);
    if (name[0] !== "#") this.plain += NAMED[name];
    else {
      const code = /^#[xX]/.test(name) ? parseInt(name.slice(2), 16) : parseInt(name.slice(1));
      this.plain += code && code < 0x110000 ? String.fromCodePoint(code) : "\ufffd";
    }
    return i + found[0].length;
  }

  math(i, open, close) {
    if (!this.text.startsWith(open, i)) return i;
    const end = this.find(close, i + open.length);
    if (end < 0) return i;
    this.put(math(this.text.slice(i + open.length, end).trim(), false));
    return end + close.length;
  }

  // $x$, but not prices: no space after the first or before the last one, and no letter or digit after that.
  dollars(i) {
    DOLLARS.lastIndex = i;
    const found = DOLLARS.exec(this.text);
    if (!found || /[\w$]/.test(this.text[i - 1] ?? "")) return i;
    this.put(math(found[1], false));
    return i + found[0].length;
  }

  // indexOf that does not look again for what is not there.
  find(mark, from) {
    if (this.missing.has(mark)) return -1;
    const end = this.text.indexOf(mark, from);
    if (end < 0) this.missing.add(mark);
    return end;
  }

  code(i) {
    const mark = /`+/y;
    mark.lastIndex = i;
    const ticks = mark.exec(this.text)[0];
    const end = this.closingTicks(ticks, i + ticks.length);
    if (end < 0) {
      this.plain += ticks;
      return i + ticks.length;
    }
    let inside = this.text.slice(i + ticks.length, end).replaceAll("\n", " ");
    if (/^ .*\S.* $/.test(inside)) inside = inside.slice(1, -1);
    this.put(h("code", null, inside));
    return end + ticks.length;
  }

  closingTicks(ticks, from) {
    if (this.missing.has(ticks)) return -1;
    const runs = /`+/g;
    runs.lastIndex = from;
    for (let run; (run = runs.exec(this.text)); ) if (run[0].length === ticks.length) return run.index;
    this.missing.add(ticks);
    return -1;
  }

  emphasis(i) {
    const { text } = this;
    const c = text[i];
    let run = i;
    while (text[run] === c) run++;
    const size = run - i;
    const literal = () => ((this.plain += text.slice(i, run)), run);
    if (size > 3 || (c === "~" && size !== 2) || /\s/.test(text[run] ?? " ")) return literal();
    if (c === "_" && /[\p{L}\p{N}]/u.test(text[i - 1] ?? "")) return literal();
    const end = this.closer(c, size, run);
    if (end < 0) return literal();
    let node = this.inner(run, end);
    if (c === "~") node = h("del", null, node);
    else {
      if (size !== 2) node = h("em", null, node);
      if (size !== 1) node = h("strong", null, node);
    }
    this.put(node);
    return end + size;
  }

  // Where a run of exactly `size` of `c` ends what began before `from`; -1: nowhere.
  closer(c, size, from) {
    const mark = c.repeat(size);
    if (this.missing.has(mark)) return -1;
    const { text } = this;
    for (let i = from; i < text.length; ) {
      if (text[i] === "\\") i += 2;
      else if (text[i] === "`") {
        const ticks = /^`+/.exec(text.slice(i, i + 64))[0];
        const end = this.closingTicks(ticks, i + ticks.length);
        i = end < 0 ? i + ticks.length : end + ticks.length;
      } else if (text[i] === c) {
        let end = i;
        while (text[end] === c) end++;
        const word = c === "_" && /[\p{L}\p{N}]/u.test(text[end] ?? "");
        const found = end - i;
        // three close both kinds, the inner one first
        if (!/\s/.test(text[i - 1]) && !word && (found === size || (found === 3 && size < 3))) return end - size;
        i = end;
      } else i++;
    }
    this.missing.add(mark);
    return -1;
  }

  address(pattern, i) {
    if (this.linked) return i;
    pattern.lastIndex = i;
    const found = pattern.exec(this.text);
    if (!found) return i;
    let url = found[1] ?? found[0];
    if (pattern === BARE) {
      url = url.replace(/[.,:;!?*_~]+$/, "");
      while (url.endsWith(")") && url.split(")").length > url.split("(").length) url = url.slice(0, -1);
    }
    this.put(anchor(url, [url]));
    return pattern === BARE ? i + url.length : i + found[0].length;
  }

  // [text](url "title") and, with ! before it, an image, which is shown as a link.
  link(i) {
    if (this.linked) return i;
    const { text } = this;
    let open = 1;
    let close = i + 1;
    for (; close < Math.min(text.length, i + LONGEST) && open; close++) {
      if (text[close] === "\\") close++;
      else if (text[close] === "[") open++;
      else if (text[close] === "]") open--;
    }
    if (open || text[close] !== "(") return i;
    const target = /\(\s*(?:<([^<>\n]*)>|((?:[^\s()\\]|\\.|\([^\s()]*\))*))(?:\s+(?:"[^"]*"|'[^']*'))?\s*\)/y;
    target.lastIndex = close;
    const found = target.exec(text);
    if (!found) return i;
    const url = (found[1] ?? found[2]).replace(/\\([!-/:-@[-`{-~])/g, "$1");
    const inner = this.inner(i + 1, close - 1, true);
    this.put(SAFE.test(url) ? anchor(url, inner.length ? inner : [url]) : h("span", null, inner));
    return target.lastIndex;
  }
}

function anchor(url, inner) {
  return h("a", { href: url, target: "_blank", rel: "noopener noreferrer" }, inner);
}
