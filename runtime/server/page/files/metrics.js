// What page/live says in the browser, seen over time: rates, shares and quantiles. Draws nothing.

const HISTOGRAMS = ["first", "between"];

// The server's numbers by name; a histogram is [[bound, count], ...] with an infinite last bound.
export function read(values) {
  const found = { ...values };
  for (const name of HISTOGRAMS) {
    if (found[name]) found[name] = found[name].map(([bound, count]) => [bound ?? Infinity, count]);
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

// What the server reported over time. `at` is in seconds.
export class History {
  constructor() {
    this.rows = []; // {at, values, points}
  }

  // Takes a reading; its figures become a point of every series.
  push(at, values, series) {
    const last = this.rows.at(-1);
    // counters that went back belong to another run of the server
    if (last && (values.generated ?? 0) < (last.values.generated ?? 0)) this.rows = [];
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
    return this.now.values[name] ?? null;
  }

  rate(name) {
    const old = this.before(RATE_S);
    const spent = this.now.at - old.at;
    if (!spent || this.value(name) === null) return null;
    return (this.value(name) - (old.values[name] ?? 0)) / spent;
  }

  // The share of `part` in `whole` among what was counted of late; null: nothing was.
  share(part, whole) {
    const old = this.before(LATENCY_S);
    const grown = (name) => (this.value(name) ?? 0) - (old.values[name] ?? 0);
    return grown(whole) > 0 ? (100 * grown(part)) / grown(whole) : null;
  }

  quantile(name, q) {
    const old = this.before(LATENCY_S);
    if (old === this.now) return null;
    return quantile(q, this.now.values[name], old.values[name]);
  }
}
