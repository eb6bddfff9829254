/** The graph of a model as the server draws it: of its picture known shapes are copied, in the page's own colours. */

import { askedBy } from "./catalog.js";
import { drawing, element, nothing, offer, problem, refill } from "./dom.js";
import { ask, encoded } from "./server.js";

/** What a picture shrinks to before it scrolls. */
const SMALLEST = 0.6;
/** What is copied; all else stays away. */
const SHAPES = {
  rect: ["class", "x", "y", "width", "height", "rx", "fill-opacity"],
  path: ["class", "d", "stroke-dasharray"],
  text: ["class", "x", "y"],
};

export class GraphView {
  #catalog;
  #choice = element("select", {
    onchange: () => {
      location.hash = `#graph/${encoded(this.#choice.value)}`;
    },
  });
  #again = element("button", { type: "button", onclick: () => this.#ask() }, "Refresh");
  #holder = element("div", { class: "graph" });
  #model = "";
  #shown = false;

  constructor(section, catalog) {
    this.#catalog = catalog;
    section.append(
      element(
        "div",
        { class: "bar" },
        element("h1", {}, "Graph"),
        element("label", {}, "Model ", this.#choice),
        this.#again,
      ),
      this.#holder,
      element(
        "p",
        { class: "muted" },
        "The models that answer a request, and the tensors between them. " +
          "The stronger a step is coloured, the more of the time is its own.",
      ),
    );
    catalog.addEventListener("change", () => this.#offer());
  }

  /** Called when the section is shown; `model`: the one that the address names, or none. */
  show(model) {
    this.#shown = true;
    this.#model = model;
    this.#offer();
    this.#ask();
  }

  hide() {
    this.#shown = false;
  }

  #offer() {
    const names = this.#catalog.served.filter((card) => !card.parent).map((card) => card.id);
    const asking = names.filter((name) => askedBy(this.#catalog.config(name)).length > 0);
    const ordered = [...asking, ...names.filter((name) => !asking.includes(name))];
    offer(
      this.#choice,
      ordered.map((name) => [name, asking.includes(name) ? name : `${name} (alone)`]),
    );
    if (ordered.includes(this.#model)) this.#choice.value = this.#model;
    this.#choice.disabled = this.#again.disabled = !ordered.length;
    const drawn = this.#holder.dataset.model;
    if (
      this.#shown &&
      (ordered.length ? drawn !== this.#choice.value : drawn !== undefined || !this.#holder.firstChild)
    )
      this.#ask();
  }

  async #ask() {
    const model = this.#choice.value;
    if (!model) {
      delete this.#holder.dataset.model;
      const { servedError, known } = this.#catalog;
      if (known) refill(this.#holder, servedError ? problem(servedError) : nothing("No graph", "No model is loaded."));
      return;
    }
    this.#holder.dataset.model = model;
    try {
      const answer = await ask(`v2/models/${encoded(model)}/graph?format=svg&statistics=1`);
      const picture = copied(await answer.text(), model);
      picture.style.minWidth = `${SMALLEST * Number(picture.getAttribute("width"))}px`;
      if (this.#choice.value === model) refill(this.#holder, element("div", { class: "scroll", tabindex: 0 }, picture));
    } catch (error) {
      if (this.#choice.value === model) refill(this.#holder, problem(error));
    }
  }
}

function copied(text, model) {
  const unstyled = text.replace(/<style>[^<]*<\/style>/, "");
  const source = new DOMParser().parseFromString(unstyled, "image/svg+xml").documentElement;
  const shapes = [...source.querySelectorAll("rect, path, text")].filter((each) => !each.closest("marker"));
  const words = shapes.filter((each) => each.localName === "text").map((each) => each.textContent);
  const arrow = drawing(
    "marker",
    { id: "arrow", viewBox: "0 0 8 8", refX: 8, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" },
    drawing("path", { class: "tip", d: "M0 0L8 4L0 8z" }),
  );
  const size = Object.fromEntries(["width", "height", "viewBox"].map((name) => [name, source.getAttribute(name)]));
  return drawing(
    "svg",
    { ...size, role: "img", "aria-label": `${model}: ${words.join("; ")}` },
    drawing("defs", {}, arrow),
    shapes.map((each) => {
      const kept = SHAPES[each.localName]
        .filter((name) => each.hasAttribute(name))
        .map((name) => [name, each.getAttribute(name)]);
      const copy = drawing(each.localName, Object.fromEntries(kept));
      if (each.localName === "text") copy.textContent = each.textContent;
      if (each.getAttribute("class") === "edge") copy.setAttribute("marker-end", "url(#arrow)");
      return copy;
    }),
  );
}
