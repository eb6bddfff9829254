/** The models that the server has, and the names that requests may ask for. */

import { askJson, ask, encoded } from "./server.js";

const SIDE_BY_SIDE = 4;
const ENGINES = new Set(["charonia", "tensorrtllm", "vllm"]);

export class Catalog extends EventTarget {
  /** Of /v2/repository/index, a version each: name, version, state, reason. */
  entries = [];
  /** Why there are none, if asking failed. */
  entriesError = null;
  /** Of /v1/models: id, created, and parent of an adapter. */
  served = [];
  servedError = null;
  server = null;
  ready = false;
  known = false;
  /** Whether the server loads and unloads models on request. */
  changeable = true;
  #configs = new Map();

  async refresh() {
    const asked = [
      ask("v2/repository/index", { method: "POST", body: {} }).then(async (answer) => {
        this.changeable = answer.headers.get("x-charonia-model-control") !== "none";
        return answer.json();
      }),
      askJson("v1/models"),
      this.server ?? askJson("v2"),
      ask("v2/health/ready").then((answer) => answer.text()),
    ];
    const [entries, served, server, ready] = await Promise.allSettled(asked);
    const cards = served.value?.data ?? [];
    this.#configs = await readConfigs(cards, this.#configs);
    this.entries = entries.value ?? [];
    this.entriesError = entries.reason ?? null;
    this.served = cards;
    this.servedError = served.reason ?? null;
    this.ready = ready.status === "fulfilled";
    this.reachable = [entries, served, ready].some((each) => each.reason?.status !== 0);
    this.server = (this.reachable && server.value) || null;
    this.known = true;
    this.dispatchEvent(new Event("change"));
  }

  get busy() {
    return this.entries.some((entry) => entry.state === "LOADING" || entry.state === "UNLOADING");
  }

  /** The config of a model that is served, null where it may not be read, undefined where there is none now. */
  config(name) {
    const card = this.served.find((each) => each.id === name);
    return card && this.#configs.get(key(card));
  }

  /** The names that a chat can ask for: where a config may not be read, whatever there is. */
  get talking() {
    return this.served.filter((card) => {
      const config = this.config(card.parent ?? card.id);
      return config === null || (config !== undefined && talks(config));
    });
  }

  /** Nothing of what one key could see is shown under another. */
  forget() {
    this.#configs.clear();
    this.server = null;
  }
}

/** The configs of models, and not of adapters; those that are `known` are not asked for again. */
async function readConfigs(cards, known) {
  const models = cards.filter((card) => !card.parent);
  const configs = new Map(
    models.filter((card) => known.get(key(card)) !== undefined).map((card) => [key(card), known.get(key(card))]),
  );
  const missing = models.filter((card) => !configs.has(key(card)));
  const work = async () => {
    for (let card = missing.pop(); card; card = missing.pop()) {
      configs.set(key(card), await askJson(`v2/models/${encoded(card.id)}/config`).catch(noConfig));
    }
  };
  await Promise.all(Array.from({ length: SIDE_BY_SIDE }, work));
  return configs;
}

/** One that may not be read is not asked for again; one that is not there now may be the next time. */
const noConfig = (error) => (error.status === 401 || error.status === 403 ? null : undefined);

/** A model that is loaded again is another one. */
const key = (card) => `${card.created} ${card.id}`;

const openaiOf = (config) => config.parameters?.openai?.string_value;

/** Whether a model answers a text with a text. */
function talks(config) {
  if (openaiOf(config)) return true;
  const others = (config.input ?? []).filter((each) => each.name !== "text_input");
  return (
    (config.input ?? []).length > others.length &&
    others.every((each) => each.optional) &&
    (config.output ?? []).some((each) => each.name === "text_output")
  );
}

/** Whether a model's prompts may have pictures. */
export function sees(config) {
  return (config.input ?? []).some((tensor) => tensor.name === "image_pixels");
}

/** How a model is asked at first: by `chat`, or by `generate`. */
export function mannerOf(config) {
  if (!config) return "chat";
  return openaiOf(config) === "chat" || (!openaiOf(config) && ENGINES.has(config.backend)) ? "chat" : "generate";
}

/** The models that a model asks: an ensemble's steps, and those that code says it asks. */
export function askedBy(config) {
  const steps = (config?.ensemble_scheduling?.step ?? []).map((step) => step.model_name);
  const named = (config?.parameters?.models?.string_value ?? "").split(",");
  const declared = named.map((name) => name.trim().replace(/\?$/, "")).filter((name) => name && name !== "*");
  return [...new Set([...steps, ...declared])];
}
