/** Routes: names that stand for several versions or models, the share of each arm, and rollouts that change it. */

import { confirmed, tell } from "./dialogs.js";
import { drawing, element, nothing, number, percent, problem, refill } from "./dom.js";
import { ask, askJson, encoded } from "./server.js";

const STATES = { running: "warn", forward: "good", back: "bad" };
const BAR = 96;

export class RoutesView {
  #catalog;
  #scrapes;
  #link;
  #refresh;
  #routes = [];
  /** The last rollout of each by the route's name, null for none, and the route's version when that was asked. */
  #rollouts = new Map();
  #holder = element("div");
  error = null;
  /** Whether the server has such an endpoint; null until that is known. */
  there = null;

  /** `link`: to the section, shown where there is one; `refresh`: asks again, at once. */
  constructor(section, { catalog, scrapes, link, refresh }) {
    this.#catalog = catalog;
    this.#scrapes = scrapes;
    this.#link = link;
    this.#refresh = refresh;
    section.append(element("div", { class: "bar" }, element("h1", {}, "Routes")), this.#holder);
    catalog.addEventListener("change", () => this.#draw());
  }

  async refresh() {
    try {
      this.#routes = (await askJson("v2/routes")).routes;
      await Promise.all(this.#routes.map((each) => this.#askRollout(each)));
      this.error = null;
    } catch (error) {
      this.#routes = [];
      this.error = error;
    }
    if (this.error?.status !== 0) this.there = this.error?.status !== 404;
    this.#link.hidden = !this.there;
    this.#draw();
  }

  /** A rollout that begins, or ends, gives its route another version. */
  async #askRollout({ name, version }) {
    const known = this.#rollouts.get(name);
    if (known?.version === version && known.rollout?.state !== "running") return;
    const rollout = await askJson(`${path(name)}/rollout`).catch(() => null);
    this.#rollouts.set(name, { version, rollout });
  }

  /** Nothing of what one key could see is shown under another. */
  forget() {
    this.#routes = [];
    this.#rollouts.clear();
  }

  #draw() {
    if (this.error) return refill(this.#holder, problem(this.error));
    const words =
      "A route is a name that stands for several versions or models. They are in routes.yaml of a repository, " +
      "or requests make them: PUT /v2/routes/NAME, with --state-dir.";
    refill(
      this.#holder,
      this.#routes.length ? this.#routes.map((each) => this.#card(each)) : nothing("No routes", words),
    );
  }

  #card({ name, version, changed_by: who, route }) {
    const rollout = this.#rollouts.get(name)?.rollout;
    const running = rollout?.state === "running";
    const talks = this.#catalog.talking.some((card) => card.id === name);
    const button = (label, act) =>
      element(
        "button",
        { type: "button", "data-key": `${label} ${name}`, "aria-label": `${label}: ${name}`, onclick: act },
        label,
      );
    return element(
      "article",
      { class: "route" },
      element(
        "header",
        { class: "bar" },
        element("h2", {}, name),
        element("p", { class: "muted" }, `version ${version}, by ${who}`),
        element(
          "p",
          { class: "actions" },
          talks && element("a", { href: `#chat/${encoded(name)}`, "data-key": `chat ${name}` }, "Chat"),
          !running && button("Change weights", () => this.#changeWeights(name, version, route)),
          !running && button("Start a rollout", () => this.#startRollout(name, route)),
          running && button("Abort the rollout", () => this.#abort(name, rollout)),
        ),
      ),
      this.#arms(name, [...route.arms, ...this.#formerArms(name, route.arms)]),
      element("p", { class: "muted" }, manners(route)),
      rollout && shownRollout(rollout),
    );
  }

  #arms(name, arms) {
    const all = sum(arms.map((arm) => arm.weight ?? 0));
    const served = arms.map((arm) => this.#served(name, arm));
    const requests = sum(served.map((each) => each.requests));
    const heads = ["Arm", "State", "Weight", "Share", "Requests", "Failed"];
    return element(
      "table",
      { class: "arms" },
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
        arms.map((arm, place) => {
          const share = (arm.weight ?? 0) / all;
          const { requests: count, failed } = served[place];
          const cells = [
            ["State", this.#state(arm)],
            ["Weight", number(arm.weight ?? 0)],
            ["Share", [bar(share), ` ${percent(share)}`]],
            ["Requests", count ? `${number(count)} (${percent(count / requests)})` : "–"],
            ["Failed", count ? `${number(failed)} (${percent(failed / count)})` : "–"],
          ];
          return element(
            "tr",
            { class: "first" },
            element("th", { scope: "row" }, labelOf(arm), arm.former && element("span", { class: "muted" }, ", formerly")),
            cells.map(([label, value]) => element("td", { "data-label": label }, value)),
          );
        }),
      ),
    );
  }

  #state({ model, version }) {
    const entries = this.#catalog.entries.filter(
      (each) => each.name === model && (!version || each.version === String(version)),
    );
    const state = entries.find((each) => each.state === "READY")?.state ?? entries[0]?.state ?? "not known";
    return element("span", { class: `state ${state === "READY" ? "good" : "off"}` }, state.toLowerCase());
  }

  /** What an arm answered of the route's requests, since the server began. */
  #served(name, { model, version }) {
    const counted = (this.#scrapes.latest?.routed ?? []).filter(
      (each) => each.route === name && each.model === model && (!version || each.version === String(version)),
    );
    const failed = counted.filter((each) => ["error", "timeout", "rejected"].includes(each.outcome));
    return { requests: sum(counted.map((each) => each.value)), failed: sum(failed.map((each) => each.value)) };
  }

  /** Those that answered requests of the route and are no longer in it, after a rollout, say. */
  #formerArms(name, arms) {
    const gone = (this.#scrapes.latest?.routed ?? []).filter((each) => {
      const serves = ({ model, version }) => each.model === model && (!version || each.version === String(version));
      return each.route === name && !arms.some(serves);
    });
    const labels = new Map(gone.map((each) => [labelOf(each), each]));
    return [...labels.values()].map(({ model, version }) => ({ model, version, former: true }));
  }

  async #changeWeights(name, version, route) {
    const inputs = route.arms.map((arm) =>
      element("input", {
        type: "number",
        min: 0,
        step: "any",
        required: true,
        value: arm.weight ?? 0,
        oninput: () => show(),
      }),
    );
    const shares = inputs.map(() => element("output", { class: "muted" }));
    const weights = () => inputs.map((input) => Number(input.value));
    const show = () =>
      shares.forEach((share, place) => {
        share.textContent = percent(weights()[place] / sum(weights()));
      });
    show();
    const fields = route.arms.map((arm, place) =>
      element("label", { class: "field" }, labelOf(arm), inputs[place], shares[place]),
    );
    if (
      !(await confirmed(`Change the weights of ${name}?`, "Change", "From now on requests are divided so:", ...fields))
    )
      return;
    const arms = route.arms.map((arm, place) => ({ ...arm, weight: weights()[place] }));
    const change = ask(`${path(name)}?version=${version}`, { method: "PUT", body: { ...route, arms } });
    await this.#tell(name, change, `The weights of ${name} are changed.`);
  }

  async #startRollout(name, route) {
    const models = new Set(route.arms.map((arm) => arm.model));
    const versions = this.#catalog.entries.filter((each) => each.version);
    if (!versions.length) return tell(`${name}: there is no version that a rollout could go to.`, true);
    versions.sort((one, other) => models.has(other.name) - models.has(one.name));
    const labels = versions.map((each) => `${each.name}:${each.version}`);
    const to = element(
      "select",
      {},
      labels.map((label, place) =>
        element("option", { value: label }, versions[place].state === "READY" ? label : `${label} (not loaded)`),
      ),
    );
    const input = (attributes) => element("input", { required: true, ...attributes });
    const steps = input({ value: "1, 5, 25, 100" });
    const every = input({ type: "number", min: 1, value: 300 });
    const least = input({ type: "number", min: 1, value: 300 });
    const guard = input({ value: "error_rate < 1 %" });
    const fields = [
      ["To", to],
      ["Steps, % of the requests", steps],
      ["Seconds of a step", every],
      ["Requests of a step", least],
      ["Guard", guard],
    ];
    const agreed = await confirmed(
      `Start a rollout of ${name}?`,
      "Start",
      "The route's weights go step by step to the version, and back by themselves when the guard does not hold.",
      ...fields.map(([label, field]) => element("label", { class: "field" }, label, field)),
    );
    if (!agreed) return;
    const plan = {
      to: to.value,
      steps: steps.value.split(",").map(Number),
      every: Number(every.value),
      min_requests: Number(least.value),
      guard: guard.value,
    };
    await this.#tell(
      name,
      ask(`${path(name)}/rollout`, { method: "POST", body: plan }),
      `The rollout of ${name} has begun.`,
    );
  }

  async #abort(name, rollout) {
    const text = `${rollout.to} gets no more requests: the route is again what it was before.`;
    if (!(await confirmed(`Abort the rollout of ${name}?`, "Abort", text))) return;
    await this.#tell(name, ask(`${path(name)}/rollout`, { method: "DELETE" }), `The rollout of ${name} is aborted.`);
  }

  async #tell(name, change, done) {
    try {
      await (await change).text();
      tell(done);
    } catch (error) {
      tell(`${name}: ${error.message}`, true);
    }
    this.#refresh();
  }
}

const path = (name) => `v2/routes/${encoded(name)}`;
const labelOf = ({ model, version }) => (version ? `${model}:${version}` : `${model}, the latest`);
const sum = (values) => values.reduce((all, each) => all + each, 0);

function bar(share) {
  const width = Math.round(BAR * (share || 0));
  return drawing(
    "svg",
    { class: "share", width: BAR, height: 8, "aria-hidden": "true" },
    drawing("rect", { class: "whole", width: BAR, height: 8, rx: 2 }),
    drawing("rect", { class: "part", width, height: 8, rx: 2 }),
  );
}

/** What keeps clients on an arm, and what names one, in words. */
function manners({ sticky, rules = [], shadow }) {
  const kept =
    sticky && (sticky.tenant ? "tenant" : sticky.header ? `header ${sticky.header}` : `field ${sticky.field}`);
  const told = rules.map((rule) => {
    const what = rule.tenant ? `tenant ${rule.tenant}` : rule.header ? `header ${rule.header}` : `field ${rule.field}`;
    return `Requests with ${what}${rule.equals == null ? "" : ` of “${rule.equals}”`} go to ${labelOf(rule.to)}.`;
  });
  const copied =
    shadow && `A copy of ${percent(shadow.share ?? 1)} goes to ${labelOf(shadow)} too, whose answers nobody gets.`;
  return [kept && `Requests of one ${kept} stay with one arm.`, ...told, copied].filter(Boolean).join(" ");
}

function shownRollout(rollout) {
  const { to, state, step, steps, progress, reason, events, started_by: who } = rollout;
  const at = (seconds) => new Date(1000 * seconds).toLocaleString();
  return element(
    "div",
    { class: "rollout" },
    element("p", {}, element("span", { class: `state ${STATES[state] ?? "off"}` }, `rollout to ${to}: ${state}`)),
    element(
      "ol",
      { class: "steps", "aria-label": "Steps" },
      steps.map((each, place) =>
        element(
          "li",
          { class: place < step ? "done" : "", "aria-current": place === step ? "step" : null },
          `${number(each)} %`,
        ),
      ),
    ),
    element("p", {}, state === "running" ? progress : reason),
    element(
      "details",
      { "data-key": `since ${rollout.name}` },
      element("summary", { "data-key": `summary ${rollout.name}` }, `Since ${at(rollout.began_at)}, started by ${who}`),
      element(
        "ol",
        { class: "events" },
        events.map((event) => element("li", {}, element("time", { class: "muted" }, at(event.at)), ` ${event.text}`)),
      ),
    ),
  );
}
