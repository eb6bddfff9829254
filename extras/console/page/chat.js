/** A conversation with a model, streamed, and how long each answer took. */

import { mannerOf, sees } from "./catalog.js";
import { element, nothing, number, offer, problem, refill, seconds } from "./dom.js";
import { Rendering } from "./markdown.js";
import { Pictures, thumbnail, userTurn } from "./pictures.js";
import { Refusal, ask, encoded, errorOf, events } from "./server.js";

/** Pixels from the end from which on the text that comes is followed. */
const NEAR = 60;

export class ChatView {
  #catalog;
  /** Role and content of each, as the endpoint for chats takes them. */
  #turns = [];
  /** Ends the answer that is being made, if one is. */
  #stopping = null;
  /** The model whose manner was chosen for it. */
  #chosen = "";
  #wanted = "";
  #model = element("select", { onchange: () => this.#pick() });
  #manner = element(
    "select",
    {},
    element("option", { value: "chat" }, "chat"),
    element("option", { value: "generate" }, "generate"),
  );
  #system = element("textarea", { rows: 2, placeholder: "What the model is told before the first turn of a chat" });
  #tokens = element("input", { type: "number", min: 1, step: 1, value: 256, inputmode: "numeric" });
  #temperature = element("input", {
    type: "number",
    min: 0,
    max: 2,
    step: 0.1,
    placeholder: "model's",
    inputmode: "decimal",
  });
  #log = element("div", { class: "log", role: "log", "aria-label": "Conversation", tabindex: 0 });
  #message = element("textarea", {
    rows: 2,
    placeholder: "Message",
    "aria-label": "Message",
    onkeydown: (event) => this.#typed(event),
  });
  #pictures = new Pictures(() => this.#blindness());
  #send = element("button", { type: "submit", class: "primary" }, "Send");

  constructor(section, catalog) {
    this.#catalog = catalog;
    const submit = (event) => {
      event.preventDefault();
      if (this.#stopping) this.#stopping.abort();
      else this.#ask();
    };
    const settings = element(
      "details",
      { class: "settings" },
      element("summary", {}, "Settings"),
      element(
        "div",
        {},
        element("label", {}, "Endpoint ", this.#manner),
        element("label", {}, "Most tokens ", this.#tokens),
        element("label", {}, "Temperature ", this.#temperature),
        element("label", {}, "System ", this.#system),
      ),
    );
    section.append(
      element(
        "div",
        { class: "bar" },
        element("h1", {}, "Chat"),
        element("label", {}, "Model ", this.#model),
        element("button", { type: "button", onclick: () => this.#clear() }, "New chat"),
        settings,
      ),
      this.#log,
      element(
        "form",
        { class: "compose", onsubmit: submit },
        this.#message,
        this.#send,
        this.#pictures.element,
        element("p", { class: "muted" }, "Enter sends, Shift+Enter begins a line, Escape stops an answer."),
      ),
    );
    this.#pictures.watch(section);
    section.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#stopping?.abort();
    });
    catalog.addEventListener("change", () => this.#offer());
    this.#offer();
  }

  /** Called when the section is shown; `model`: the one that the address names, or none. */
  show(model) {
    this.#wanted = model;
    this.#offer();
    this.#message.focus();
  }

  #offer() {
    const { talking } = this.#catalog;
    offer(
      this.#model,
      talking.map((card) => [card.id, card.parent ? `${card.id} (adapter of ${card.parent})` : card.id]),
    );
    if (talking.some((card) => card.id === this.#wanted)) {
      this.#model.value = this.#wanted;
      this.#wanted = "";
    }
    this.#pick();
    this.#message.disabled = this.#send.disabled = !talking.length;
    this.#greet();
  }

  /** What stands where no turn does. */
  #greet() {
    const { talking, servedError, known } = this.#catalog;
    if (this.#log.querySelector(".turn") || !known) return;
    refill(
      this.#log,
      servedError
        ? problem(servedError)
        : talking.length
          ? nothing(
              `A chat with ${this.#model.value}`,
              "Answers come as they are made, with the time to the first token and the tokens per second.",
            )
          : nothing("Nobody to talk to", "No language model or pipeline is loaded: load one under Models."),
    );
  }

  /** Why the model takes no pictures; "" if it does, or if its config may not be read. */
  #blindness() {
    const { value } = this.#model;
    if (!value) return "There is no model to see it.";
    const config = this.#config(this.#catalog.served.find((card) => card.id === value));
    return !config || sees(config) ? "" : `${value} reads text alone.`;
  }

  /** The manner that fits the model is chosen once; the user may choose another. */
  #pick() {
    const { value } = this.#model;
    this.#pictures.update();
    if (value === this.#chosen) return;
    this.#chosen = value;
    const card = this.#catalog.served.find((each) => each.id === value);
    this.#manner.value = mannerOf(this.#config(card));
    this.#greet();
  }

  #config(card) {
    return card && this.#catalog.config(card.parent ?? card.id);
  }

  #typed(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!this.#stopping) this.#ask();
  }

  #clear() {
    this.#stopping?.abort();
    this.#stopped();
    this.#turns = [];
    this.#pictures.take();
    this.#log.replaceChildren();
    this.#offer();
    this.#message.focus();
  }

  async #ask() {
    const content = this.#message.value;
    const model = this.#model.value;
    if (!(content.trim() || this.#pictures.chosen.length) || !model) return;
    this.#message.value = "";
    const pictures = this.#pictures.take();
    if (!this.#log.querySelector(".turn")) this.#log.replaceChildren();
    const shown = pictures.length ? element("div", { class: "pictures" }, pictures.map(thumbnail)) : [];
    this.#log.append(turn("user", "You", shown, ...(content.trim() ? [content] : [])));
    const answer = new Answer(model);
    this.#log.append(answer.element);
    this.#follow(true);
    let near = true;
    answer.onrender = () => this.#follow(near);
    const turns = (this.#turns = [...this.#turns, userTurn(content, pictures)]);
    const stopping = (this.#stopping = new AbortController());
    this.#send.textContent = "Stop";
    try {
      for await (const piece of this.#pieces(model, content, pictures, stopping.signal)) {
        near = this.#isNearEnd();
        answer.add(piece);
      }
      answer.end();
    } catch (error) {
      if (error.name === "AbortError") answer.end("stopped");
      else answer.fail(error);
    }
    // A turn that failed is no part of the conversation; a chat that was cleared meanwhile has none of this.
    if (this.#turns !== turns) return;
    this.#turns = answer.text ? [...turns, { role: "assistant", content: answer.text }] : turns.slice(0, -1);
    if (!answer.text && !this.#message.value && !this.#pictures.chosen.length) {
      this.#message.value = content;
      this.#pictures.put(pictures);
    }
    this.#stopped();
    this.#follow(this.#isNearEnd());
  }

  #stopped() {
    this.#stopping = null;
    this.#send.textContent = "Send";
  }

  #isNearEnd() {
    return this.#log.scrollHeight - this.#log.scrollTop - this.#log.clientHeight < NEAR;
  }

  #follow(wanted) {
    if (wanted) this.#log.scrollTop = this.#log.scrollHeight;
  }

  /** The parts of an answer: `text`, `reasoning`, `tokens` in all, `reason` of the end, `arm` of a route, `warning`. */
  #pieces(model, content, pictures, signal) {
    const sampling = { max_tokens: Number(this.#tokens.value) || 256 };
    if (this.#temperature.value !== "") sampling.temperature = Number(this.#temperature.value);
    if (this.#manner.value === "generate")
      return generated(
        model,
        content,
        pictures.length ? { ...sampling, image: pictures.map(({ url }) => url) } : sampling,
        this.#config(this.#catalog.served.find((card) => card.id === model)),
        signal,
      );
    const system = this.#system.value.trim();
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...this.#turns];
    return chatted({ model, messages, ...sampling }, signal);
  }
}

async function* chatted(asked, signal) {
  const body = { ...asked, stream: true, stream_options: { include_usage: true } };
  const response = await ask("v1/chat/completions", { method: "POST", body, signal });
  yield told(response);
  for await (const data of events(response)) {
    if (data === "[DONE]") continue;
    const chunk = parsed(data);
    const choice = chunk.choices?.[0];
    yield {
      text: choice?.delta?.content,
      reasoning: choice?.delta?.reasoning ?? choice?.delta?.reasoning_content,
      tokens: chunk.usage?.completion_tokens,
      reason: choice?.finish_reason,
    };
  }
}

async function* generated(model, text, sampling, config, signal) {
  const counts = (config?.output ?? []).some((each) => each.name === "num_output_tokens");
  const wanted = counts ? { return_num_output_tokens: true, return_finish_reason: true } : {};
  const body = { text_input: text, ...sampling, ...wanted };
  const response = await ask(`v2/models/${encoded(model)}/generate_stream`, { method: "POST", body, signal });
  yield told(response);
  let tokens = 0;
  for await (const data of events(response)) {
    const chunk = parsed(data);
    if (counts) tokens += Number(chunk.num_output_tokens ?? 0);
    yield {
      text: [chunk.text_output ?? []].flat().join(""),
      tokens: counts ? tokens : undefined,
      reason: chunk.finish_reason,
    };
  }
}

function told(response) {
  return { arm: response.headers.get("x-charonia-arm"), warning: response.headers.get("x-charonia-warning") };
}

function parsed(data) {
  const chunk = JSON.parse(data);
  if (chunk.error) throw new Refusal(200, errorOf(chunk));
  return chunk;
}

function turn(kind, name, ...content) {
  return element(
    "article",
    { class: `turn ${kind}` },
    element("h2", {}, name),
    content.map((each) => (typeof each === "string" ? element("p", { class: "text" }, each) : each)),
  );
}

/** An answer as it comes, and its times as this page sees them. */
class Answer {
  text = "";
  #begun = performance.now();
  #first = null;
  #last = null;
  #known = {};
  #ended = false;
  #thought = element("p", { class: "text" });
  #thinking = element(
    "details",
    { class: "thinking", hidden: true },
    element("summary", {}, "Thinking"),
    this.#thought,
  );
  #body = element("div", { class: "text" });
  #rendering = new Rendering(this.#body);
  /** Of a frame that will show what has come, if one is due. */
  #due = 0;
  #times = element("p", { class: "times muted" });

  constructor(model) {
    this.element = turn("answer", model, this.#thinking, this.#body, this.#times);
    this.element.setAttribute("aria-busy", "true");
    this.#show([]);
  }

  add({ text, reasoning, ...known }) {
    for (const [name, value] of Object.entries(known)) if (value != null) this.#known[name] = value;
    if (reasoning) {
      this.#thinking.hidden = false;
      this.#thought.append(reasoning);
    }
    if (text) {
      this.text += text;
      this.#due ||= requestAnimationFrame(() => this.#render());
    }
    if (text || reasoning) {
      this.#last = performance.now();
      this.#first ??= this.#last;
    }
    this.#show([]);
  }

  #render() {
    cancelAnimationFrame(this.#due);
    this.#due = 0;
    this.#rendering.show(this.text);
    this.onrender?.();
  }

  end(...more) {
    this.#render();
    this.element.removeAttribute("aria-busy");
    this.#ended = true;
    const { reason, arm, warning } = this.#known;
    const why = { length: "ended at the most tokens", tool_calls: "calls a tool", timeout: "its time was over" }[
      reason
    ];
    this.#show([...more, why, arm && `by ${arm}`, warning]);
    if (!this.text && !this.#first) this.#body.replaceChildren(element("span", { class: "muted" }, "(no text)"));
  }

  fail(error) {
    this.end();
    if (!this.text) this.#body.remove();
    this.#times.before(problem(error));
  }

  #show(more) {
    const { tokens } = this.#known;
    const streamed = (this.#last - this.#first) / 1000;
    const first = this.#first && `first token after ${seconds((this.#first - this.#begun) / 1000)}`;
    const count = tokens > 0 && `${number(tokens)} ${tokens === 1 ? "token" : "tokens"}`;
    const pace = tokens > 1 && streamed > 0 && `${number((tokens - 1) / streamed)} tokens/s`;
    const whole = this.#ended && this.#last && `${seconds((this.#last - this.#begun) / 1000)} in all`;
    this.#times.textContent =
      [first, count, pace, whole, ...more].filter(Boolean).join(" · ") || (this.#ended ? "" : "waiting …");
  }
}
