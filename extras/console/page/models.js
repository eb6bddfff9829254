/** Models and versions: state, memory, requests; what loads and unloads them. */

import { askedBy } from "./catalog.js";
import { confirmed, showDocument, tell } from "./dialogs.js";
import { bytes, element, nothing, number, problem, refill } from "./dom.js";
import { showLimits } from "./limits.js";
import { askJson, encoded, post } from "./server.js";

const MANY = 10;

export class ModelsView {
  #catalog;
  #scrapes;
  #refresh;
  #search;
  #summary;
  #holder;
  #filter = "";
  /** Models that a request of this page loads or unloads now, and the word for it. */
  #working = new Map();

  constructor(section, catalog, scrapes, refresh) {
    this.#catalog = catalog;
    this.#scrapes = scrapes;
    this.#refresh = refresh;
    const input = (event) => {
      this.#filter = event.target.value.toLowerCase();
      this.#draw();
    };
    this.#search = element("label", { class: "search" }, "Find ", element("input", { type: "search", oninput: input }));
    this.#summary = element("p", { class: "muted" });
    this.#holder = element("div");
    section.append(
      element("div", { class: "bar" }, element("h1", {}, "Models"), this.#summary, this.#search),
      this.#holder,
    );
    catalog.addEventListener("change", () => this.#draw());
    scrapes.addEventListener("change", () => this.#draw());
    this.#draw();
  }

  #draw() {
    const { entries, entriesError, known } = this.#catalog;
    const groups = Map.groupBy(entries, (entry) => entry.name);
    this.#search.hidden = groups.size < MANY;
    this.#summary.textContent = known && !entriesError ? summary(entries, groups, this.#scrapes.latest) : "";
    if (!known) return refill(this.#holder, element("p", { class: "muted" }, "Asking the server …"));
    if (entriesError) return refill(this.#holder, problem(entriesError));
    if (!groups.size) {
      return refill(
        this.#holder,
        nothing("No models", "The server's repositories are empty, or it was started with none."),
      );
    }
    const seen = [...groups].filter(([name]) => name.toLowerCase().includes(this.#filter));
    if (!seen.length)
      return refill(this.#holder, nothing("None of that name", `No model's name has “${this.#filter}” in it.`));
    const heads = ["Model", "Version", "State", "Backend", "Memory", "Requests", ""];
    const table = element(
      "table",
      { class: "models" },
      element(
        "thead",
        {},
        element(
          "tr",
          {},
          heads.map((head) => element("th", { scope: "col" }, head)),
        ),
      ),
      element(
        "tbody",
        {},
        seen.map(([name, versions]) => versions.map((entry, place) => this.#row(name, entry, place === 0))),
      ),
    );
    refill(
      this.#holder,
      !this.#catalog.changeable &&
        element(
          "p",
          { class: "notice" },
          "This server loads and unloads nothing on request: start it with --model-control-mode explicit.",
        ),
      table,
    );
  }

  #row(name, entry, first) {
    const config = this.#catalog.config(name);
    const cells = [
      ["Version", entry.version ?? "–"],
      ["State", this.#state(entry, first)],
      ["Backend", config?.backend || config?.platform || "–"],
      ["Memory", memory(this.#scrapes.latest, name, entry.version)],
      ["Requests", requests(this.#scrapes.latest, name, entry.version)],
    ];
    return element(
      "tr",
      { class: first ? "first" : "" },
      element("th", { scope: "row" }, first ? name : element("span", { class: "unseen" }, name)),
      cells.map(([label, value]) => element("td", { "data-label": label }, value)),
      element("td", { class: "actions" }, first && this.#actions(name, config)),
    );
  }

  #state(entry, first) {
    const state = (first && this.#working.get(entry.name)) || entry.state || "NOT LOADED";
    const kind =
      { READY: "good", LOADING: "warn", UNLOADING: "warn" }[state] ??
      (entry.reason && !/^(unloaded|on demand)$/.test(entry.reason) ? "bad" : "off");
    return [
      element("span", { class: `state ${kind}` }, state.toLowerCase()),
      entry.reason && element("span", { class: "reason" }, entry.reason),
    ];
  }

  #actions(name, config) {
    const { changeable } = this.#catalog;
    const served = this.#catalog.served.some((card) => card.id === name);
    const talks = this.#catalog.talking.some((card) => card.id === name);
    const busy =
      this.#working.has(name) || this.#catalog.entries.some((each) => each.name === name && each.state === "LOADING");
    const button = (label, act, disabled) =>
      element(
        "button",
        { type: "button", "data-key": `${label} ${name}`, "aria-label": `${label} ${name}`, disabled, onclick: act },
        label,
      );
    return [
      talks && element("a", { href: `#chat/${encoded(name)}`, "data-key": `chat ${name}` }, "Chat"),
      served &&
        config &&
        askedBy(config).length > 0 &&
        element("a", { href: `#graph/${encoded(name)}`, "data-key": `graph ${name}` }, "Graph"),
      served && button("Explain", () => showLimits(name), false),
      served && button("Config", () => showConfig(name), false),
      changeable && served && button("Unload", () => this.#unload(name, config), busy),
      changeable && button(served ? "Reload" : "Load", () => this.#load(name, served), busy),
    ];
  }

  async #load(name, again) {
    const what = again
      ? "The server reads its files again. What has not changed stays; what has is served when it is ready."
      : "The server reads it from its repository and serves it. Loading a model runs what its files say.";
    if (!(await confirmed(`${again ? "Reload" : "Load"} ${name}?`, again ? "Reload" : "Load", what))) return;
    await this.#work(name, "LOADING", "load", {}, `${name} is loaded.`);
  }

  async #unload(name, config) {
    const asking = this.#catalog.served
      .map((card) => card.id)
      .filter((each) => askedBy(this.#catalog.config(each)).includes(name));
    const asked = askedBy(config);
    const box = element("input", { type: "checkbox" });
    const agreed = await confirmed(
      `Unload ${name}?`,
      "Unload",
      "New requests for it are refused; those that run are finished, then its memory is free.",
      asking.length > 0 && `${asking.join(", ")} ${asking.length > 1 ? "ask" : "asks"} it, and will not be ready.`,
      asked.length > 0 && element("label", { class: "choice" }, box, ` Unload what it asks too: ${asked.join(", ")}`),
    );
    if (!agreed) return;
    const parameters = box.checked ? { unload_dependents: true } : {};
    await this.#work(name, "UNLOADING", "unload", { parameters }, `${name} is unloaded.`);
  }

  async #work(name, word, verb, body, done) {
    this.#working.set(name, word);
    this.#draw();
    try {
      await post(`v2/repository/models/${encoded(name)}/${verb}`, body);
      tell(done);
    } catch (error) {
      tell(`${name}: ${error.message}`, true);
    }
    this.#working.delete(name);
    this.#draw();
    this.#refresh();
  }
}

function summary(entries, groups, scrape) {
  const ready = new Set(entries.filter((entry) => entry.state === "READY").map((entry) => entry.name)).size;
  const held = scrape ? scrape.memory.reduce((sum, each) => sum + each.value, 0) : 0;
  const models = `${groups.size} ${groups.size === 1 ? "model" : "models"}, ${ready} ready`;
  return held ? `${models}, ${bytes(held)} of memory held` : models;
}

function memory(scrape, name, version) {
  const held = scrape?.memory.filter((each) => each.model === name && each.version === version && each.value > 0) ?? [];
  if (!held.length) return "–";
  return held.map((each) =>
    element("span", { class: "line" }, bytes(each.value), each.memory !== "host" && ` ${each.memory}`),
  );
}

function requests(scrape, name, version) {
  const counts = scrape?.requests.find((each) => each.model === name && each.version === version);
  if (!counts) return "–";
  const failed = counts.failure > 0 && element("span", { class: "reason" }, `${number(counts.failure)} failed`);
  return [element("span", { class: "line" }, number(counts.success)), failed];
}

async function showConfig(name) {
  try {
    const config = JSON.stringify(await askJson(`v2/models/${encoded(name)}/config`), null, 2);
    showDocument(name, element("pre", { tabindex: 0 }, config));
  } catch (error) {
    tell(`${name}: ${error.message}`, true);
  }
}
