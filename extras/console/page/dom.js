/** Elements and texts. All text of the server's becomes text nodes: nothing here parses markup. */

const SVG = "http://www.w3.org/2000/svg";

/** An element; attributes that begin with `on` are listeners, true is an empty attribute, false and null are none. */
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function drawing(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== false && value != null) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
  return made;
}

export const byId = (id) => document.getElementById(id);

/** Replaces what is in `holder`; what had the focus keeps it and what was open stays open, if something with its
 * `data-key` is there again. */
export function refill(holder, ...children) {
  const held = document.activeElement;
  const key = holder.contains(held) ? held.dataset.key : undefined;
  const open = [...holder.querySelectorAll("details[open]")].map((each) => each.dataset.key);
  const find = (wanted) => holder.querySelector(`[data-key="${CSS.escape(wanted)}"]`);
  holder.replaceChildren(...children.flat(Infinity).filter((child) => child != null && child !== false));
  for (const each of open) find(each)?.setAttribute("open", "");
  if (key !== undefined) find(key)?.focus();
}

/** Makes the options of a select these, `[value, text]` each, and keeps its choice where that is still there. */
export function offer(select, options) {
  const old = [...select.options].map((option) => [option.value, option.text]);
  if (JSON.stringify(old) === JSON.stringify(options)) return;
  const chosen = select.value;
  select.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  if (options.some(([value]) => value === chosen)) select.value = chosen;
}

/** What is not as it should be, in words; with a way to the key where one may be what lacks. */
export function problem(error) {
  const lacks = error.status === 401 || error.status === 403;
  const button = lacks && element("button", { type: "button", onclick: () => byId("key").click() }, "Key and headers");
  return element("div", { class: "notice bad", role: "alert" }, element("p", {}, error.message), button);
}

/** What there is when there is nothing. */
export function nothing(title, text) {
  return element("div", { class: "empty" }, element("h2", {}, title), element("p", {}, text));
}

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

/** A number in three digits or so; a dash for none. */
export function number(value) {
  if (value == null || Number.isNaN(value)) return "–";
  return plain.format(Math.abs(value) >= 100 ? Math.round(value) : value);
}

export function seconds(value) {
  if (value == null || Number.isNaN(value)) return "–";
  if (value < 0.0995) return `${(1000 * value).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  return value < 0.9995 ? `${Math.round(1000 * value)} ms` : `${value.toFixed(value < 9.995 ? 2 : 1)} s`;
}

export function percent(value) {
  if (value == null || Number.isNaN(value)) return "–";
  return `${(100 * value).toFixed(value > 0 && value < 0.0995 ? 1 : 0)} %`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit += 1) value /= 1024;
  return `${value.toFixed(unit > 0 && value < 9.995 ? 1 : 0)} ${units[unit]}`;
}
