/** Requests to the server that the page is from, with the key and the headers that its user typed. */

const ROOT = new URL("..", import.meta.url);

/** In memory alone. */
let shown = new Headers();
/** Ends the requests that carry what is no longer used. */
let session = new AbortController();

/** "changed": another key is used from now on; "refused": the server wants one. */
export const credentials = new EventTarget();

/** An answer that is an error; `status` is 0 where there was none. The message is for the user. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Sends these along from now on. `lines`: `name: value` each. Throws an error that says which line is wrong. */
export function useCredentials(key, lines) {
  const given = new Headers();
  for (const line of lines
    .split("\n")
    .map((each) => each.trim())
    .filter(Boolean)) {
    const [, name, value] = /^([^:]+):(.*)$/.exec(line) ?? [];
    if (name === undefined) throw new Error(`“${line}” is no header: one is “name: value”.`);
    append(given, name.trim(), value.trim());
  }
  if (key && given.has("authorization"))
    throw new Error("A key and the header “authorization” are two keys: give one.");
  if (key) append(given, "authorization", `Bearer ${key}`);
  shown = given;
  session.abort();
  session = new AbortController();
  credentials.dispatchEvent(new Event("changed"));
}

/** Whether anything is sent along. */
export const hasCredentials = () => !shown.entries().next().done;

/** What there is to say where the server wants a key. */
export const keyText = () =>
  shown.has("authorization") ? "The server does not know this API key." : "This server asks for an API key.";

function append(headers, name, value) {
  try {
    headers.append(name, value);
  } catch {
    const what = name === "authorization" ? "The key" : `The header “${name}”`;
    throw new Error(`${what} has characters that a header cannot have.`);
  }
  const sent = new Request(ROOT, { headers }).headers;
  if (!sent.has(name)) throw new Error(`Browsers let no page send the header “${name}”.`);
}

/** The answer to a request, if it is no error. Throws a `Refusal`; an AbortError where `signal` says so. */
export async function ask(path, { method = "GET", body, signal } = {}) {
  const headers = new Headers(shown);
  if (body !== undefined) headers.set("content-type", "application/json");
  const ending = signal ? AbortSignal.any([signal, session.signal]) : session.signal;
  let response;
  try {
    response = await fetch(new URL(path, ROOT), {
      method,
      headers,
      signal: ending,
      cache: "no-store",
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Refusal(0, ending.aborted ? "Another key is used from now on." : "The server does not answer.");
  }
  if (response.ok) return response;
  if (response.status !== 401) throw new Refusal(response.status, await errorText(response));
  credentials.dispatchEvent(new Event("refused"));
  throw new Refusal(401, keyText());
}

export async function askJson(path, options) {
  const response = await ask(path, options);
  try {
    return await response.json();
  } catch {
    throw new Refusal(response.status, `The answer to ${path} is no JSON.`);
  }
}

export async function post(path, body = {}) {
  await (await ask(path, { method: "POST", body })).text();
}

/** The data of each server-sent event of an answer. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(lost);
      if (done) return;
      const parts = (held + value).split(/\r?\n\r?\n/);
      held = parts.pop();
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function lost(error) {
  throw error.name === "AbortError" ? error : new Refusal(0, "The connection to the server was lost.");
}

/** What an error says, in v2's form or OpenAI's. */
export function errorOf(body) {
  const error = body?.error;
  return typeof error === "string" ? error : error?.message;
}

async function errorText(response) {
  const text = await response.text().catch(() => "");
  let said;
  try {
    said = errorOf(JSON.parse(text));
  } catch {
    said = text.slice(0, 300);
  }
  return said || `The server answered with status ${response.status}.`;
}

export const encoded = encodeURIComponent;
