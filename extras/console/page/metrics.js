/** Live charts of what matters, from the server's own metrics. */

import { Chart } from "./chart.js";
import { element, nothing, number, offer, percent, problem, refill, seconds } from "./dom.js";
import { SECONDS, WINDOW_SECONDS, gauge, quantile, quotient, rate } from "./scrapes.js";

const FIRST = "charonia_time_to_first_token_seconds_bucket";
const BETWEEN = "charonia_inter_token_latency_seconds_bucket";
const SUCCESS = "nv_inference_request_success";

const CHARTS = [
  ["Time to first token", seconds, { median: quantile(FIRST, 0.5), "95 %": quantile(FIRST, 0.95) }],
  ["Inter-token latency", seconds, { median: quantile(BETWEEN, 0.5), "95 %": quantile(BETWEEN, 0.95) }],
  [
    "Tokens per second",
    number,
    { generated: rate("charonia_generation_tokens_total"), prompt: rate("charonia_prompt_tokens_total") },
  ],
  ["Requests per second", number, { answered: rate(SUCCESS), failed: rate("nv_inference_request_failure") }],
  [
    "Queue",
    number,
    { running: gauge("charonia_requests_running"), waiting: gauge("nv_inference_pending_request_count") },
  ],
  [
    "Batch size",
    number,
    {
      "a step": quotient("charonia_step_sequences_sum", "charonia_step_sequences_count"),
      "an execution": quotient("nv_inference_count", "nv_inference_exec_count"),
    },
  ],
  [
    "KV cache",
    percent,
    {
      "in use": gauge("charonia_kv_cache_usage_ratio"),
      "prefix hits": quotient("charonia_prefix_cache_hits_total", "charonia_prefix_cache_queries_total"),
    },
    1,
  ],
  [
    "Request time, mean",
    seconds,
    {
      whole: quotient("nv_inference_request_duration_us", SUCCESS, 1e-6),
      queued: quotient("nv_inference_queue_duration_us", SUCCESS, 1e-6),
    },
  ],
];

/** The families without which a model has no such chart; the others have one always. */
const NEEDED = {
  "Time to first token": [FIRST],
  "Inter-token latency": [BETWEEN],
  "Tokens per second": ["charonia_generation_tokens_total"],
  "KV cache": ["charonia_kv_cache_usage_ratio"],
  "Request time, mean": ["nv_inference_request_duration_us"],
};

export class MetricsView {
  #scrapes;
  #choice = element("select", { onchange: () => this.#draw() });
  #label = element("label", {}, "Model ", this.#choice);
  #words = element(
    "p",
    { class: "muted" },
    `The last ${SECONDS / 60} minutes while this page was seen. Rates, means and quantiles are of the last ` +
      `${WINDOW_SECONDS} seconds; quantiles are as fine as the buckets of the server's histograms. ` +
      "Of all models together the fullest cache is shown.",
  );
  #problem = element("div");
  #grid = element("div", { class: "charts" });
  #charts;

  constructor(section, scrapes) {
    this.#scrapes = scrapes;
    this.#charts = CHARTS.map(([title, format, lines, greatest]) => ({
      readings: Object.values(lines),
      chart: new Chart({ title, format, greatest, names: Object.keys(lines) }),
    }));
    section.append(
      element("div", { class: "bar" }, element("h1", {}, "Metrics"), this.#label),
      this.#problem,
      this.#grid,
      this.#words,
    );
    scrapes.addEventListener("change", () => this.#draw());
  }

  /** Called when the section is shown. */
  show() {
    this.#draw();
  }

  #draw() {
    const { latest, error, history } = this.#scrapes;
    refill(
      this.#problem,
      error && problem(error),
      !error && !latest && element("p", { class: "muted" }, "Asking the server …"),
      !error &&
        latest &&
        !latest.models.length &&
        nothing("Nothing is measured yet", "No model is loaded. A model's charts begin with its load."),
    );
    this.#label.hidden = this.#words.hidden = !latest;
    if (!latest) return refill(this.#grid);
    offer(this.#choice, [["", "All models"], ...latest.models.map((name) => [name, name])]);
    const model = this.#choice.value;
    const there = this.#charts.filter(({ chart }) =>
      (NEEDED[chart.title] ?? []).every((name) => latest.value(model, name) !== undefined),
    );
    const figures = there.map(({ chart }) => chart.element);
    if (
      figures.length !== this.#grid.children.length ||
      figures.some((each, place) => each !== this.#grid.children[place])
    ) {
      this.#grid.replaceChildren(...figures);
    }
    for (const { chart, readings } of there) {
      chart.draw(
        history.map((scrape, place) => {
          const before = this.#scrapes.before(place);
          return { at: scrape.at, values: readings.map((reading) => reading(model, scrape, before)) };
        }),
      );
    }
  }
}
