/** The dialogs: what is to be confirmed, the key, a text to read; and the news of what was done. Escape closes each. */

import { byId, element } from "./dom.js";
import { useCredentials } from "./server.js";

const NEWS_SECONDS = 8;

/** Asks before the server is changed; whether the user agrees. `text`: elements or strings, a paragraph each. */
export function confirmed(title, action, ...text) {
  const dialog = byId("confirmation");
  byId("confirmation-title").textContent = title;
  byId("confirmation-text").replaceChildren(
    ...text.filter(Boolean).map((each) => (typeof each === "string" ? element("p", {}, each) : each)),
  );
  dialog.querySelector("button.primary").textContent = action;
  dialog.querySelector("button:not(.primary)").onclick = () => dialog.close("");
  return new Promise((resolve) => {
    dialog.returnValue = "";
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
    dialog.showModal();
  });
}

/** Shows what is to be read. */
export function showDocument(title, ...shown) {
  byId("document-title").textContent = title;
  byId("document-text").replaceChildren(...shown);
  byId("document").showModal();
}

/** Tells what was done, for a while; what went wrong stays until it is closed. */
export function tell(text, bad = false) {
  const close = element("button", { type: "button", "aria-label": "Close", onclick: () => item.remove() }, "×");
  const item = element(
    "div",
    { class: bad ? "notice bad" : "notice", role: bad ? "alert" : null },
    element("p", {}, text),
    close,
  );
  byId("news").append(item);
  if (!bad) setTimeout(() => item.remove(), 1000 * NEWS_SECONDS);
}

/** Takes away what was told: another section is shown. */
export const clearNews = () => byId("news").replaceChildren();

/** Makes the dialog for the key work. Returns a function that opens it, with a text that says why. */
export function prepareCredentials() {
  const dialog = byId("credentials");
  const error = byId("credentials-error");
  const form = dialog.querySelector("form");
  const { key, headers } = form.elements;

  function say(text) {
    error.textContent = text;
    error.hidden = !text;
  }

  function use() {
    try {
      useCredentials(key.value.trim(), headers.value);
    } catch (wrong) {
      return say(wrong.message);
    }
    dialog.close();
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    use();
  });
  form.querySelector("[value=forget]").addEventListener("click", () => {
    form.reset();
    use();
  });
  form.querySelector("[value=cancel]").addEventListener("click", () => dialog.close());
  return (why = "") => {
    if (dialog.open) return;
    say(why);
    dialog.showModal();
  };
}
