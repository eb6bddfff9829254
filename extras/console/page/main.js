/** The sections, the address that names one, and what all of them show of the server. */

import { Catalog } from "./catalog.js";
import { ChatView } from "./chat.js";
import { clearNews, prepareCredentials } from "./dialogs.js";
import { byId, element } from "./dom.js";
import { GraphView } from "./graph.js";
import { MetricsView } from "./metrics.js";
import { ModelsView } from "./models.js";
import { poll } from "./polling.js";
import { RoutesView } from "./routes.js";
import { Scrapes } from "./scrapes.js";
import { credentials, hasCredentials, keyText } from "./server.js";

/** The server's id where nobody gave it one, for clients that know Triton. */
const USUAL_ID = "triton";
const MODELS_SECONDS = 5;
const BUSY_SECONDS = 1;
const METRICS_SECONDS = 2;
const ROUTES_SECONDS = 3;
/** After an error: a key that lacks does not come by asking often. */
const REFUSED_SECONDS = 10;

const catalog = new Catalog();
const scrapes = new Scrapes();
const views = {
  models: new ModelsView(byId("models"), catalog, scrapes, () => refreshModels()),
  chat: new ChatView(byId("chat"), catalog),
  metrics: new MetricsView(byId("metrics"), scrapes),
  graph: new GraphView(byId("graph"), catalog),
  routes: new RoutesView(byId("routes"), {
    catalog,
    scrapes,
    link: document.querySelector('nav a[href="#routes"]'),
    refresh: () => refreshRoutes(),
  }),
};

/** Shows the section that the address names, `#section` or `#section/model`. */
function route() {
  const [, name, model = ""] = /^#(\w+)(?:\/(.*))?$/.exec(location.hash) ?? [];
  const shown = views[name] ? name : "models";
  for (const [each, view] of Object.entries(views)) {
    byId(each).hidden = each !== shown;
    const link = document.querySelector(`nav a[href="#${each}"]`);
    if (each === shown) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
    if (each !== shown) view.hide?.();
  }
  document.body.dataset.section = shown;
  document.title = `${document.querySelector('nav a[aria-current="page"]').textContent} · Charonia`;
  views[shown].show?.(decoded(model));
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function showServer() {
  const { server, ready, reachable } = catalog;
  const [kind, word] = !reachable ? ["bad", "no answer"] : ready ? ["good", "ready"] : ["warn", "not ready"];
  const id = server && server.name !== USUAL_ID ? ` · ${server.name}` : "";
  const name = server && element("span", { class: "name" }, `Charonia ${server.version}${id}`);
  byId("server").replaceChildren(...[name, element("span", { class: `state ${kind}` }, word)].filter(Boolean));
}

/** The dialog opens by itself once for each key that is refused. */
let asked = false;
const openCredentials = prepareCredentials();
byId("key").addEventListener("click", () => openCredentials());
credentials.addEventListener("refused", () => {
  if (!asked) openCredentials(keyText());
  asked = true;
});
credentials.addEventListener("changed", () => {
  asked = false;
  byId("key").textContent = hasCredentials() ? "Key in use" : "Key";
  catalog.forget();
  scrapes.forget();
  views.routes.forget();
  refreshModels();
  refreshRoutes();
  refreshMetrics();
});

byId("skip").addEventListener("click", (event) => {
  event.preventDefault();
  byId("main").focus();
});
catalog.addEventListener("change", showServer);
addEventListener("hashchange", () => {
  clearNews();
  route();
});
const refreshModels = poll(
  () => catalog.refresh(),
  () => (catalog.busy ? BUSY_SECONDS : catalog.entriesError?.status ? REFUSED_SECONDS : MODELS_SECONDS),
);
const refreshMetrics = poll(
  () => scrapes.refresh(),
  () => (scrapes.error?.status ? REFUSED_SECONDS : METRICS_SECONDS),
);
const refreshRoutes = poll(
  () => views.routes.refresh(),
  () => (views.routes.error?.status ? REFUSED_SECONDS : ROUTES_SECONDS),
  () => views.routes.there !== false,
);
route();
