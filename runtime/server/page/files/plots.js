// A small line plot: one measure over time, up to three lines, one axis from zero.

import { h, svg } from "./dom.js";

const HEIGHT = 150;
const LEFT = 46; // of the axis' words
const RIGHT = 8;
const TOP = 8;
const BOTTOM = 20;

// The highest tick, and the step: 0, step, 2 step, … reach above `most`.
export function niceScale(most, whole = false, ticks = 3) {
  if (!(most > 0)) return { top: 1, step: 1 };
  if (whole && most <= ticks) return { top: Math.ceil(most), step: 1 };
  const rough = most / ticks;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((s) => s * power >= rough * 0.999) * power;
  return { top: step * Math.ceil((most / step) * 0.999), step };
}

export function ago(seconds) {
  if (seconds < 1.5) return "now";
  return seconds < 90 ? `${Math.round(seconds)} s ago` : `${Math.round(seconds / 60)} min ago`;
}

// `format` turns a value into words; `top` fixes the axis; `pick(at)` is called with the time that
// is pointed at, or null.
export class Plot {
  constructor({ title, series, format, top, whole, about }, pick) {
    this.whole = whole;
    this.series = series; // [[key, words], ...]
    this.format = format;
    this.top = top;
    this.pick = pick;
    this.title = title;
    this.width = 320;
    this.rows = [];
    this.values = series.map(([, words], i) => {
      const value = h("b", null, "–");
      return { value, element: h("span", { class: `key s${i}` }, h("i"), words && `${words} `, value) };
    });
    this.svg = svg("svg", { height: HEIGHT, role: "img", tabindex: "0" });
    this.note = h("span", { class: "note" });
    const keys = h("div", { class: "keys" }, this.values.map((v) => v.element), this.note);
    const caption = h("figcaption", null, h("div", { class: "title", title: about }, title), keys);
    this.element = h("figure", { class: "plot" }, caption, this.svg);
    this.#listen();
  }

  // The rows {at, points}, from the oldest on; the plot ends at `now` and is `span` seconds wide.
  update(rows, now, span) {
    this.rows = rows.filter((row) => row.at >= now - span);
    [this.now, this.span] = [now, span];
    this.draw();
  }

  #listen() {
    new ResizeObserver(([entry]) => {
      this.width = Math.max(160, entry.contentRect.width);
      this.draw();
    }).observe(this.element);
    this.svg.addEventListener("pointermove", (event) => {
      const x = event.clientX - this.svg.getBoundingClientRect().left;
      this.pick(this.now - this.span + ((x - LEFT) / (this.width - LEFT - RIGHT)) * this.span);
    });
    this.svg.addEventListener("pointerleave", () => this.pick(null));
    this.svg.addEventListener("blur", () => this.pick(null));
    this.svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step || !this.rows.length) return;
      event.preventDefault();
      const at = this.picked ? this.rows.indexOf(this.picked) : this.rows.length;
      const next = Math.min(Math.max(at + step, 0), this.rows.length - 1);
      this.pick(this.rows[next].at);
    });
  }

  // Shows the values at a time, or with null the last ones.
  mark(at) {
    const near = (best, row) => (Math.abs(row.at - at) < Math.abs(best.at - at) ? row : best);
    this.picked = at === null || !this.rows.length ? null : this.rows.reduce(near);
    this.draw();
  }

  draw() {
    if (this.now === undefined) return;
    if (this.picked && !this.rows.includes(this.picked)) this.picked = null;
    const shown = this.picked ?? this.rows.at(-1);
    this.series.forEach(([key], i) => {
      this.values[i].value.textContent = shown && has(shown, key) ? this.format(shown.points[key]) : "–";
    });
    this.note.textContent = this.picked ? ago(this.now - this.picked.at) : "";
    this.#drawLines();
  }

  #drawLines() {
    const seen = this.rows.flatMap((row) => this.series.map(([key]) => row.points[key] ?? 0));
    const { top, step } = this.top ? { top: this.top, step: this.top / 2 } : niceScale(Math.max(0, ...seen), this.whole);
    const x = (at) => LEFT + ((at - this.now + this.span) / this.span) * (this.width - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - (Math.min(value, top) / top) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    for (let tick = 0; tick <= top * 1.001; tick += step) {
      const line = { x1: LEFT, x2: this.width - RIGHT, y1: y(tick), y2: y(tick), class: tick ? "grid" : "axis" };
      const words = svg("text", { x: LEFT - 6, y: y(tick) + 3.5, class: "tick end" }, this.format(tick));
      parts.push(svg("line", line), words);
    }
    const empty = !this.rows.some((row) => this.series.some(([key]) => has(row, key)));
    if (empty) parts.push(svg("text", { x: (LEFT + this.width - RIGHT) / 2, y: HEIGHT / 2, class: "tick middle" }, "no data"));
    const left = svg("text", { x: LEFT, y: HEIGHT - 5, class: "tick" }, ago(this.span));
    const right = svg("text", { x: this.width - RIGHT, y: HEIGHT - 5, class: "tick end" }, "now");
    parts.push(left, right);
    this.series.forEach(([key], i) => {
      for (const piece of pieces(this.rows, key)) parts.push(...this.#line(piece, key, i, x, y));
    });
    if (this.picked) {
      const at = x(this.picked.at);
      parts.push(svg("line", { x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM, class: "cross" }));
      this.series.forEach(([key], i) => {
        if (has(this.picked, key)) parts.push(svg("circle", { cx: at, cy: y(this.picked.points[key]), r: 3.5, class: `dot s${i}` }));
      });
    }
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.setAttribute("width", this.width);
    this.svg.setAttribute("aria-label", this.#words(seen));
    this.svg.replaceChildren(...parts);
  }

  #line(rows, key, i, x, y) {
    const points = rows.map((row) => `${x(row.at).toFixed(1)},${y(row.points[key]).toFixed(1)}`);
    if (points.length === 1) {
      const [cx, cy] = points[0].split(",");
      return [svg("circle", { cx, cy, r: 1.5, class: `dot s${i}` })];
    }
    const line = svg("path", { d: `M${points.join("L")}`, class: `line s${i}` });
    if (this.series.length > 1) return [line];
    const [first, last] = [x(rows[0].at), x(rows.at(-1).at)].map((v) => v.toFixed(1));
    const area = svg("path", { d: `M${first},${y(0)}L${points.join("L")}L${last},${y(0)}Z`, class: `area s${i}` });
    return [area, line];
  }

  #words(seen) {
    const now = this.series.map(([, words], i) => `${words} ${this.values[i].value.textContent}`.trim());
    const most = seen.length ? `, at most ${this.format(Math.max(...seen))}` : "";
    return `${this.title}: ${now.join(", ")}${most}`;
  }
}

const GAP_S = 12; // between two readings, from where on no line joins them

function has(row, key) {
  return row.points[key] !== null && row.points[key] !== undefined;
}

// The runs of rows that have a value, one after the other.
function pieces(rows, key) {
  const found = [];
  let last = null;
  for (const row of rows) {
    const there = has(row, key);
    if (there && last && row.at - last.at < GAP_S) found.at(-1).push(row);
    else if (there) found.push([row]);
    last = there ? row : null;
  }
  return found;
}
