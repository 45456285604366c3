// The live view: what the server does now, from page/live. Reads once a second while it is shown, and
// more slowly while an answer is being written elsewhere on the page.

import { getJson } from "./api.js";
import { bytes, count, h, seconds } from "./dom.js";
import { History, read } from "./metrics.js";
import { Plot } from "./plots.js";

const SHOWN_MS = 1000;
const HIDDEN_MS = 3000;
const SPANS = [[60, "1 min"], [300, "5 min"], [900, "15 min"]];
const percent = (value) => `${Math.round(value)} %`;
const rate = (value) => `${value >= 10_000 ? `${count(value / 1000)}k` : count(value)}/s`;

const SERIES = {
  generated: (seen) => seen.rate("generated"),
  prompt: (seen) => seen.rate("prompt"),
  running: (seen) => seen.value("running"),
  waiting: (seen) => seen.value("waiting"),
  first50: (seen) => seen.quantile("first", 0.5),
  first95: (seen) => seen.quantile("first", 0.95),
  between50: (seen) => seen.quantile("between", 0.5),
  between95: (seen) => seen.quantile("between", 0.95),
  kv: (seen) => (seen.value("kv") === null ? null : 100 * seen.value("kv")),
  cache: (seen) => (seen.value("cacheBudget") ? (100 * seen.value("cacheBytes")) / seen.value("cacheBudget") : null),
  hits: (seen) => seen.share("hits", "queries"),
  kept: (seen) => seen.share("kept", "drafts"),
};

const PLOTS = [
  { title: "Generated tokens", series: [["generated", ""]], format: rate, about: "Over the last 4 s" },
  { title: "Prompt tokens", series: [["prompt", ""]], format: rate, about: "Read, cached ones included; over the last 4 s" },
  { title: "Requests", series: [["running", "running"], ["waiting", "waiting"]], format: count, whole: true, about: "Running is the batch" },
  { title: "Time to first token (TTFT)", series: [["first50", "p50"], ["first95", "p95"]], format: seconds, about: "Percentiles of the last 15 s, from a histogram's buckets" },
  { title: "Time between tokens (ITL)", series: [["between50", "p50"], ["between95", "p95"]], format: seconds, about: "Percentiles of the last 15 s, from a histogram's buckets" },
  { title: "Memory", series: [["kv", "KV pages"], ["cache", "prefix cache"]], format: percent, top: 100, about: "Pages in use of all, and the prefix cache of its budget" },
  { title: "Prefix cache hits", series: [["hits", ""]], format: percent, top: 100, about: "Share of prompt tokens of the last 15 s that were cached" },
  { title: "Drafts accepted", series: [["kept", ""]], format: percent, top: 100, about: "Share of draft tokens of the last 15 s", only: "drafts" },
];

export class Live {
  constructor(box, isBusy) {
    this.box = box;
    this.isBusy = isBusy; // whether this page has an answer in the making
    this.history = new History();
    this.span = 60;
    this.shown = false;
    this.#build();
    this.#loop();
  }

  setShown(shown) {
    if (shown === this.shown) return;
    this.shown = shown;
    clearTimeout(this.timer);
    this.#loop();
  }

  #build() {
    const pick = (at) => this.plots.forEach(({ plot }) => plot.mark(at));
    this.plots = PLOTS.map((made) => ({ made, plot: new Plot(made, pick) }));
    const spans = SPANS.map(([span, words]) => {
      const choose = () => {
        this.span = span;
        this.#draw();
      };
      const input = h("input", { type: "radio", name: "span", onchange: choose, checked: span === this.span });
      return h("label", null, input, h("span", null, words));
    });
    this.state = h("p", { class: "hint", role: "status" }, "Reading…");
    this.totals = h("dl", { class: "totals" });
    const choice = h("fieldset", { class: "segments" }, h("legend", { class: "off-screen" }, "Time shown"), spans);
    this.box.replaceChildren(
      h("div", { class: "page-head" }, h("h1", null, "Live"), choice),
      this.state,
      h("div", { class: "plots" }, this.plots.map(({ plot }) => plot.element)),
      h("h2", null, "Since the server started"),
      this.totals,
    );
  }

  async #loop() {
    if (!document.hidden && (this.shown || this.isBusy())) await this.#read();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.#loop(), this.shown ? SHOWN_MS : HIDDEN_MS);
  }

  async #read() {
    if (this.reading) return;
    this.reading = true;
    try {
      const values = read(await getJson("page/live"));
      this.history.push(performance.now() / 1000, values, SERIES);
      this.state.textContent = "";
      this.state.hidden = true;
    } catch (problem) {
      this.state.textContent = problem.message;
      this.state.hidden = false;
    } finally {
      this.reading = false;
    }
    if (this.shown) this.#draw();
  }

  #draw() {
    const { rows, now } = this.history;
    if (!now) return;
    for (const { made, plot } of this.plots) {
      plot.element.hidden = made.only !== undefined && now.values[made.only] === undefined;
      plot.update(rows, now.at, this.span);
    }
    this.#drawTotals(now.values);
  }

  #drawTotals(values) {
    const rows = [
      ["Completed requests", count(values.ended ?? 0)],
      ["Rejected: queue full", count(values.refused ?? 0)],
      ["Prompt tokens", count(values.prompt ?? 0)],
      ["Generated tokens", count(values.generated ?? 0)],
      ["Preempted", count(values.preempted ?? 0)],
    ];
    if (values.queries) rows.push(["Prefix cache hits", percent((100 * values.hits) / values.queries)]);
    if (values.cacheBudget) rows.push(["Prefix cache", `${bytes(values.cacheBytes)} of ${bytes(values.cacheBudget)}`]);
    if (values.drafts) {
      rows.push(["Drafts accepted", percent((100 * values.kept) / values.drafts)]);
      rows.push(["Tokens per round", count(values.perRound)]);
      for (const [source, { verified, kept }] of Object.entries(values.bySource)) {
        const shares = kept.map((n) => (n / verified[0]).toFixed(2));
        if (verified[0]) rows.push([`Kept per round, by position (${source})`, shares.join(" + ")]);
      }
    }
    this.totals.replaceChildren(...rows.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))));
  }
}
