/** What limits a model now, as the server explains it: in a dialog, which asks again on demand. */

import { showDocument } from "./dialogs.js";
import { element, percent, problem, refill, seconds } from "./dom.js";
import { askJson, encoded } from "./server.js";

export function showLimits(name) {
  const holder = element("div", { class: "limits", "aria-live": "polite" });
  const again = element("button", { type: "button", onclick: () => look() }, "Look again");

  async function look() {
    again.disabled = true;
    refill(holder, element("p", { class: "muted" }, "Looking at the server's metrics …"));
    try {
      const { reports } = await askJson(`v2/models/${encoded(name)}/explain`);
      refill(holder, reports.map(report));
    } catch (error) {
      refill(holder, problem(error));
    }
    again.disabled = false;
  }
  showDocument(`What limits ${name}`, holder, again);
  look();
}

function report({ version, seconds: time, since_start: whole, bottlenecks }) {
  const over = whole ? "since the server's start" : `in the last ${seconds(time)}`;
  return [
    element("p", { class: "muted" }, `Version ${version}, ${over}; the worst first`),
    element("ol", {}, bottlenecks.map(bottleneck)),
  ];
}

function bottleneck({ cause, share, text, turn, evidence }) {
  const named = Object.entries(evidence).flatMap(([key, value]) => [
    element("dt", {}, key.replaceAll("_", " ")),
    element("dd", {}, String(Number(value.toPrecision(3)))),
  ]);
  return element(
    "li",
    {},
    element("b", {}, `${cause.replaceAll("_", " ")}, ${percent(share)}`),
    element("p", {}, text),
    turn && element("p", {}, element("span", { class: "muted" }, "Turn: "), turn),
    named.length > 0 && element("dl", {}, named),
  );
}
