/** The metrics of /metrics, as they were over the last minutes. */

import { Refusal, ask } from "./server.js";

/** How far back the charts look. */
export const SECONDS = 300;
/** What a rate, a mean and a quantile are of. */
export const WINDOW_SECONDS = 15;

/** Of several models the greatest is shown, not the sum. */
const GREATEST = new Set(["charonia_kv_cache_usage_ratio"]);
const OF_BATCHES = new Set(["nv_inference_count", "nv_inference_exec_count"]);
const WANTED = new Set([
  "charonia_time_to_first_token_seconds_bucket",
  "charonia_inter_token_latency_seconds_bucket",
  "charonia_generation_tokens_total",
  "charonia_prompt_tokens_total",
  "charonia_requests_running",
  "nv_inference_pending_request_count",
  "charonia_kv_cache_usage_ratio",
  "charonia_prefix_cache_queries_total",
  "charonia_prefix_cache_hits_total",
  "charonia_step_sequences_sum",
  "charonia_step_sequences_count",
  "nv_inference_request_success",
  "nv_inference_request_failure",
  "nv_inference_request_duration_us",
  "nv_inference_queue_duration_us",
  "charonia_memory_held_bytes",
  "charonia_route_requests_total",
  ...OF_BATCHES,
]);

/** The series of the families in `wanted`, of a text in Prometheus's format: name, labels, value. */
export function parseMetrics(text, wanted = WANTED) {
  const found = [];
  for (const line of text.split("\n")) {
    const [, name, labels, value] = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line) ?? [];
    if (!wanted.has(name)) continue;
    const pairs = [...(labels ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)];
    found.push({
      name,
      labels: Object.fromEntries(
        pairs.map(([, key, quoted]) => [key, quoted.replace(/\\(.)/g, (_, each) => (each === "n" ? "\n" : each))]),
      ),
      value: value === "+Inf" ? Infinity : Number(value),
    });
  }
  return found;
}

/** What a scrape says of each model, and under "" of all: a number of each family, of histograms a count by bucket. */
export class Scrape {
  constructor(series, at) {
    this.at = at;
    this.totals = new Map([["", new Map()]]);
    this.memory = [];
    this.requests = [];
    this.routed = [];
    const engines = new Set(
      series.filter(({ name }) => name === "charonia_step_sequences_count").map(({ labels }) => labels.model),
    );
    for (const { name, labels, value } of series) {
      const { model = "", version } = labels;
      if (name === "charonia_memory_held_bytes") {
        this.memory.push({ model, version, memory: labels.memory, value });
        continue;
      }
      if (name === "charonia_route_requests_total") {
        this.routed.push({ ...labels, value });
        continue;
      }
      const outcome = /^nv_inference_request_(success|failure)$/.exec(name)?.[1];
      if (outcome) this.#count(model, version, outcome, value);
      // A sequence of a language model is one inference and one execution: of its batches these tell nothing.
      if (OF_BATCHES.has(name) && engines.has(model)) continue;
      for (const of of new Set([model, ""])) this.#add(of, name, labels.le, value);
    }
  }

  get models() {
    return [...this.totals.keys()].filter(Boolean).sort();
  }

  value(model, name) {
    return this.totals.get(model)?.get(name);
  }

  #count(model, version, outcome, value) {
    let counts = this.requests.find((each) => each.model === model && each.version === version);
    if (!counts) this.requests.push((counts = { model, version, success: 0, failure: 0 }));
    counts[outcome] += value;
  }

  #add(model, name, bound, value) {
    if (!this.totals.has(model)) this.totals.set(model, new Map());
    const totals = this.totals.get(model);
    if (bound === undefined) {
      const before = totals.get(name) ?? 0;
      totals.set(name, GREATEST.has(name) ? Math.max(before, value) : before + value);
      return;
    }
    if (!totals.has(name)) totals.set(name, new Map());
    const buckets = totals.get(name);
    const at = bound === "+Inf" ? Infinity : Number(bound);
    buckets.set(at, (buckets.get(at) ?? 0) + value);
  }
}

export class Scrapes extends EventTarget {
  history = [];
  error = null;

  get latest() {
    return this.history.at(-1) ?? null;
  }

  async refresh() {
    try {
      const text = await (await ask("metrics")).text();
      const at = performance.now() / 1000;
      this.history = [
        ...this.history.filter((each) => each.at > at - SECONDS - WINDOW_SECONDS),
        new Scrape(parseMetrics(text), at),
      ];
      this.error = null;
    } catch (error) {
      this.error =
        error.status === 404
          ? new Refusal(404, "This server shows no metrics: it was started with --allow-metrics false.")
          : error;
    }
    this.dispatchEvent(new Event("change"));
  }

  /** Nothing of what one key could see is shown under another. */
  forget() {
    this.history = [];
  }

  /** The last scrape that is a window older than that at `place`, or the oldest that there is. */
  before(place) {
    const { at } = this.history[place];
    let found = null;
    for (let each = place - 1; each >= 0 && !(found && found.at <= at - WINDOW_SECONDS); each -= 1)
      found = this.history[each];
    return found;
  }
}

/** Readings: functions of a model, a scrape and the one a window before; null where there is nothing to tell. */

export const gauge = (name) => (model, now) => now.value(model, name) ?? null;

export const rate = (name) => (model, now, before) => {
  const grown = growth(name, model, now, before);
  return grown === null ? null : grown / (now.at - before.at);
};

/** What one counter grew by for each that another grew by. */
export const quotient =
  (name, by, scale = 1) =>
  (model, now, before) => {
    const grown = growth(name, model, now, before);
    const others = growth(by, model, now, before);
    return others ? (scale * grown) / others : null;
  };

/** A quantile of what a histogram observed, evenly spread within a bucket, as Prometheus has it. */
export const quantile = (name, part) => (model, now, before) => {
  const [buckets, old] = [now, before].map((each) => each?.value(model, name));
  if (!buckets || !old) return null;
  let [below, lower] = [0, 0];
  const counts = [...buckets].sort(([a], [b]) => a - b).map(([bound, count]) => [bound, count - (old.get(bound) ?? 0)]);
  const all = counts.at(-1)[1];
  if (!(all > 0)) return null;
  for (const [bound, count] of counts) {
    if (count >= part * all)
      return bound === Infinity ? lower : lower + ((bound - lower) * (part * all - below)) / (count - below);
    [below, lower] = [count, bound];
  }
  return null;
};

/** What a counter grew by; null where it is not there, or began anew. */
function growth(name, model, now, before) {
  const [value, old] = [now, before].map((each) => each?.value(model, name));
  return value === undefined || old === undefined || value < old ? null : value - old;
}
