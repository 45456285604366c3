// /metrics in the browser: the text read, and what was seen over time turned into rates, shares and
// quantiles. Knows the names; draws nothing.

// The names that the page reads. A histogram is named without its ending.
export const NAMES = {
  generated: "spark:generation_tokens_total",
  prompt: "spark:prompt_tokens_total",
  running: "spark:num_requests_running",
  waiting: "spark:num_requests_waiting",
  kv: "spark:kv_cache_usage_perc",
  first: "spark:time_to_first_token_seconds",
  between: "spark:inter_token_latency_seconds",
  queries: "spark:prefix_cache_queries_total",
  hits: "spark:prefix_cache_hits_total",
  cacheBytes: "spark:prefix_cache_bytes",
  cacheBudget: "spark:prefix_cache_budget_bytes",
  drafts: "spark:spec_decode_num_draft_tokens_total",
  kept: "spark:spec_decode_num_accepted_tokens_total",
  perRound: "spark:tokens_per_round",
  ended: "spark:request_success_total",
  refused: "spark:admission_rejections_total",
  preempted: "spark:num_preemptions_total",
};

const HISTOGRAMS = new Set([NAMES.first, NAMES.between]);
const WANTED = new Set(Object.values(NAMES).flatMap((name) => (HISTOGRAMS.has(name) ? [`${name}_bucket`] : [name])));
const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/g;

// {name: value} summed over labels; a histogram's buckets as [[bound, count], ...], cumulative.
export function parse(text) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = LINE.exec(line);
    if (!match || !WANTED.has(match[1])) continue;
    const [, name, labels, written] = match;
    const value = Number(written.replace("+Inf", "Infinity"));
    if (!name.endsWith("_bucket")) {
      found[name] = (found[name] ?? 0) + value;
      continue;
    }
    const bounds = (found[name.slice(0, -7)] ??= new Map());
    for (const [, label, text] of (labels ?? "").matchAll(LABEL)) {
      if (label !== "le") continue;
      const bound = Number(text.replace("+Inf", "Infinity"));
      bounds.set(bound, (bounds.get(bound) ?? 0) + value);
    }
  }
  for (const name of HISTOGRAMS) {
    if (found[name]) found[name] = [...found[name]].sort(([a], [b]) => a - b);
  }
  return found;
}

// The q-quantile of what was counted between two readings of a histogram; null: nothing was.
// Within a bucket it is a straight line; in the last, which is open, the bound below.
export function quantile(q, now, before) {
  if (!now) return null;
  const counts = now.map(([bound, n], i) => [bound, n - (before?.[i]?.[1] ?? 0)]);
  const total = counts.at(-1)?.[1] ?? 0;
  if (!(total > 0)) return null;
  const wanted = q * total;
  let low = 0;
  let below = 0;
  for (const [bound, n] of counts) {
    if (n >= wanted) {
      if (bound === Infinity) return low;
      return low + ((bound - low) * (wanted - below)) / Math.max(n - below, 1e-9);
    }
    [low, below] = [bound, n];
  }
  return low;
}

const RATE_S = 4; // over which a rate is taken
const LATENCY_S = 15; // and a quantile
const KEPT_S = 15 * 60 + 30;

// What /metrics said over time. `at` is in seconds.
export class History {
  constructor() {
    this.rows = []; // {at, values, points}
  }

  // Takes a reading; its figures become a point of every series.
  push(at, values, series) {
    const last = this.rows.at(-1);
    // counters that went back belong to another run of the server
    if (last && (values[NAMES.generated] ?? 0) < (last.values[NAMES.generated] ?? 0)) this.rows = [];
    const row = { at, values, points: {} };
    this.rows.push(row);
    while (this.rows[0].at < at - KEPT_S) this.rows.shift();
    for (const [name, figure] of Object.entries(series)) row.points[name] = figure(this);
    return row;
  }

  get now() {
    return this.rows.at(-1);
  }

  // The reading that is `seconds` old, or the nearest older one; the first where there is none.
  before(seconds) {
    const limit = this.now.at - seconds + 0.2;
    let found = this.rows[0];
    for (let i = this.rows.length - 2; i >= 0; i--) {
      found = this.rows[i];
      if (found.at <= limit) break;
    }
    return found;
  }

  value(name) {
    return this.now.values[NAMES[name]] ?? null;
  }

  rate(name) {
    const old = this.before(RATE_S);
    const spent = this.now.at - old.at;
    if (!spent || this.value(name) === null) return null;
    return (this.value(name) - (old.values[NAMES[name]] ?? 0)) / spent;
  }

  // The share of `part` in `whole` among what was counted of late; null: nothing was.
  share(part, whole) {
    const old = this.before(LATENCY_S);
    const grown = (name) => (this.value(name) ?? 0) - (old.values[NAMES[name]] ?? 0);
    return grown(whole) > 0 ? (100 * grown(part)) / grown(whole) : null;
  }

  quantile(name, q) {
    const old = this.before(LATENCY_S);
    if (old === this.now) return null;
    return quantile(q, this.now.values[NAMES[name]], old.values[NAMES[name]]);
  }
}
