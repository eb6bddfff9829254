/** The pictures that go along with the next message: chosen as files, pasted or dropped. */

import { bytes, element } from "./dom.js";

const TYPES = ["image/png", "image/jpeg", "image/gif", "image/webp", "image/bmp", "image/tiff"];
const MOST_BYTES = 25 * 1024 * 1024;
/** Pixels of the longer side of a thumbnail. */
const SIDE = 112;

export class Pictures {
  /** Each has a `name` and its file as a data: `url`. */
  chosen = [];
  #refusal = () => "";
  #input = element("input", {
    type: "file",
    accept: TYPES.join(","),
    multiple: true,
    hidden: true,
    onchange: () => this.add([...this.#input.files]),
  });
  #button = element("button", { type: "button", onclick: () => this.#input.click() }, "Add picture");
  #list = element("ul", { class: "pictures", "aria-label": "Pictures to send", hidden: true });
  #error = element("p", { class: "notice bad", role: "alert", hidden: true });
  element = element("div", { class: "attach" }, this.#button, this.#input, this.#list, this.#error);

  /** `refusal`: why the model takes no pictures; "" if it does. */
  constructor(refusal) {
    this.#refusal = refusal;
  }

  /** Files that are pasted into `box` or dropped on it are added. */
  watch(box) {
    const take = (event, transfer) => {
      const files = [...(transfer?.files ?? [])];
      if (!files.length) return;
      event.preventDefault();
      this.add(files);
    };
    box.addEventListener("paste", (event) => take(event, event.clipboardData));
    box.addEventListener("drop", (event) => take(event, event.dataTransfer));
    box.addEventListener("dragover", (event) => {
      if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
    });
  }

  /** Called when there may be another model: what was said of the last one is forgotten. */
  update() {
    const refusal = this.#refusal();
    if (refusal === this.#button.title) return;
    this.#button.disabled = Boolean(refusal);
    this.#button.title = refusal;
    this.#say(this.chosen.length ? refusal : "");
  }

  async add(files) {
    this.#input.value = "";
    const refusal = this.#refusal();
    if (refusal) return this.#say(refusal);
    this.#say("");
    for (const file of files) {
      const name = file.name || "picture";
      if (!TYPES.includes(file.type)) this.#say(`${name} is no PNG, JPEG, GIF, WebP, BMP or TIFF file.`);
      else if (file.size > MOST_BYTES) this.#say(`${name} has ${bytes(file.size)}, and may have ${bytes(MOST_BYTES)}.`);
      else this.put([...this.chosen, { name, url: await dataUrl(file) }]);
    }
  }

  /** The pictures, which are those of a message that is sent. */
  take() {
    const { chosen } = this;
    this.put([]);
    this.#say("");
    return chosen;
  }

  put(pictures) {
    this.chosen = pictures;
    this.#list.hidden = !pictures.length;
    this.#list.replaceChildren(...pictures.map((picture) => element("li", {}, thumbnail(picture), this.#remover(picture))));
  }

  #remover(picture) {
    const remove = () => {
      this.put(this.chosen.filter((other) => other !== picture));
      if (!this.chosen.length) this.#say("");
      this.#button.focus();
    };
    return element("button", { type: "button", "aria-label": `Remove ${picture.name}`, onclick: remove }, "×");
  }

  #say(text) {
    this.#error.textContent = text;
    this.#error.hidden = !text;
  }
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

/** A small drawing of a picture; its name, where the browser does not read its format. */
export function thumbnail({ name, url }) {
  const canvas = element("canvas", { class: "thumbnail", role: "img", "aria-label": name, width: 1, height: 1 });
  draw(canvas, url).catch(() => canvas.replaceWith(element("span", { class: "thumbnail" }, name)));
  return canvas;
}

async function draw(canvas, url) {
  const [head, base64] = url.split(",", 2);
  const content = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const bitmap = await createImageBitmap(new Blob([content], { type: head.slice(5).split(";")[0] }));
  const scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
}

/** A turn of the user's as the endpoint for chats takes it. */
export function userTurn(text, pictures) {
  if (!pictures.length) return { role: "user", content: text };
  const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: text ? [...parts, { type: "text", text }] : parts };
}
