/** A chart of lines over the last minutes, in SVG; the pointer and the arrow keys read values off it. Its left end is a
 * whole minute ago, as many as there are points for. */

import { drawing, element } from "./dom.js";

const HEIGHT = 140;
const LEFT = 44;
const RIGHT = 6;
const TOP = 8;
const BOTTOM = 18;
const MINUTE = 60;
/** Between points that are further apart the page was not seen. */
const GAP_SECONDS = 10;

export class Chart {
  #format;
  #greatest;
  #names;
  #points = [];
  /** Of the point that is read, or null: the last one. */
  #at = null;
  #time = element("span", { class: "muted" });
  #legend = element("div", { class: "legend" });
  #picture = drawing("svg", { height: HEIGHT, role: "img", tabindex: 0 });

  /** `names`: of the lines, at most three. `greatest`: where the scale ends, if that is fixed. */
  constructor({ title, format, greatest, names }) {
    this.title = title;
    this.#format = format;
    this.#greatest = greatest;
    this.#names = names;
    this.element = element(
      "figure",
      { class: "chart" },
      element("figcaption", {}, element("h2", {}, title), this.#time),
      this.#legend,
      this.#picture,
    );
    new ResizeObserver(() => this.#draw()).observe(this.element);
    this.#picture.addEventListener("pointermove", (event) => this.#readAt(event.offsetX));
    this.#picture.addEventListener("pointerleave", () => this.#read(null));
    this.#picture.addEventListener("blur", () => this.#read(null));
    this.#picture.addEventListener("keydown", (event) => this.#move(event));
  }

  /** `points`: `at` in seconds and `values`, one for each line, null where there is none; oldest first. */
  draw(points) {
    this.#points = points;
    this.#draw();
  }

  #move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") this.#read(null);
    if (!step || !this.#points.length) return;
    event.preventDefault();
    const place = this.#place();
    const next = this.#points[Math.min(Math.max(place + step, 0), this.#points.length - 1)];
    this.#read(next === this.#points.at(-1) ? null : next.at);
  }

  #read(at) {
    this.#at = at;
    this.#draw();
  }

  #readAt(x) {
    const near = (point) => Math.abs(this.#x(point.at) - x);
    const nearest = this.#points.reduce((best, point) => (near(point) < near(best) ? point : best), this.#points[0]);
    this.#read(nearest && nearest !== this.#points.at(-1) ? nearest.at : null);
  }

  /** The place of the point that is read. */
  #place() {
    const found = this.#at === null ? -1 : this.#points.findIndex((point) => point.at >= this.#at);
    return found < 0 ? this.#points.length - 1 : found;
  }

  get #minutes() {
    return Math.max(1, Math.ceil((this.#points.at(-1).at - this.#points[0].at) / MINUTE - 0.5));
  }

  #x(at) {
    const width = this.#picture.clientWidth - LEFT - RIGHT;
    return LEFT + width * (1 + (at - this.#points.at(-1).at) / (this.#minutes * MINUTE));
  }

  #draw() {
    if (!this.element.isConnected || !this.#points.length) return;
    const point = this.#points[this.#place()];
    const read = point.values.map((value) => this.#format(value));
    const ago = this.#points.at(-1).at - point.at;
    this.#time.textContent = ago > 0.5 ? `${Math.round(ago)} s ago` : "now";
    this.#legend.replaceChildren(
      ...this.#names.map((name, line) =>
        element(
          "span",
          {},
          drawing(
            "svg",
            { class: `key line${line}`, width: 14, height: 8, "aria-hidden": "true" },
            drawing("path", { d: "M0 4H14" }),
          ),
          `${name} `,
          element("b", {}, read[line]),
        ),
      ),
    );
    const words = this.#names.map((name, line) => `${name} ${read[line]}`).join(", ");
    this.#picture.setAttribute("aria-label", `${this.title}, ${this.#time.textContent}: ${words}`);
    const top =
      this.#greatest ?? niceAbove(Math.max(...this.#points.flatMap((each) => each.values.map((value) => value ?? 0))));
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - Math.min(value / top, 1));
    const end = this.#picture.clientWidth - RIGHT;
    const grid = [0, top / 2, top].flatMap((value) => [
      drawing("path", { class: "grid", d: `M${LEFT} ${y(value)}H${end}` }),
      drawing(
        "text",
        { x: LEFT - 6, y: y(value) + 3.5, "text-anchor": "end" },
        this.#format(value).replace(/\.0+(?=\D|$)/, ""),
      ),
    ]);
    this.#picture.replaceChildren(
      ...grid,
      drawing("text", { x: LEFT, y: HEIGHT - 4 }, `${this.#minutes} min ago`),
      drawing("text", { x: end, y: HEIGHT - 4, "text-anchor": "end" }, "now"),
      ...this.#names.map((_, line) => drawing("path", { class: `line line${line}`, d: this.#path(line, y) })),
      ...(this.#at === null
        ? []
        : [drawing("path", { class: "cursor", d: `M${this.#x(point.at)} ${TOP}V${HEIGHT - BOTTOM}` })]),
    );
  }

  #path(line, y) {
    let path = "";
    let before = null;
    for (const { at, values } of this.#points) {
      const value = values[line];
      const x = this.#x(at);
      if (value !== null && x >= LEFT) {
        const joined = before !== null && at - before < GAP_SECONDS;
        path += `${joined ? "L" : "M"}${x.toFixed(1)} ${y(value).toFixed(1)}${joined ? "" : "h0"}`;
        before = at;
      } else {
        before = null;
      }
    }
    return path;
  }
}

/** The next 1, 2 or 5 with zeros that is not below; 1 where all is 0. */
function niceAbove(value) {
  if (!(value > 0)) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((each) => each * unit).find((each) => each >= value * 0.9999);
}
