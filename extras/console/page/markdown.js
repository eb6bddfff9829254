/** Markdown as elements: what a model writes becomes text nodes in elements that are made here, and never markup. */

import { element } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`\s]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const INDENTED = /^(?: {4}|\t)/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/;
const COLUMNS = /^ {0,3}\|?( *:?-+:? *\|)+( *:?-+:? *)?$/;
/** Quotes in quotes and lists in lists: deeper ones stay as they are written. */
const DEEPEST = 8;
/** Letters of a paragraph in which marks are looked for. */
const LONGEST = 5_000;
const SAFE = /^(https?:\/\/|mailto:)/i;
const INLINE = new RegExp(
  [
    /\\([!-/:-@[-`{-~])/, // 1: an escaped sign
    /(`+)(?!`)([^]*?[^`])\2(?!`)/, // 2, 3: code
    /\*\*(?=\S)([^\n]*?\S)\*\*/, // 4: strong; not __, which names in code begin with
    /(?<!\w)([*_])(?=[^\s*_])([^\n*_]*?[^\s*_])\5(?!\w)/, // 5, 6: emphasised
    /~~(?=\S)([^\n]*?\S)~~/, // 7: struck out
    /!?\[([^\]\n]{1,500})\]\(\s*<?([^\s()<>]{1,2000}(?:\([^\s()<>]*\))?)>?(?:\s+"[^"\n]*")?\s*\)/, // 8, 9: a link
    /(https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]}])/, // 10: an address
  ]
    .map((part) => part.source)
    .join("|"),
  "g",
);

/** Shows a text that grows in `holder`: blocks that have not changed since the last time stay as they are. */
export class Rendering {
  #holder;
  /** Of each block, what it was made of. */
  #sources = [];

  constructor(holder) {
    this.#holder = holder;
  }

  show(text) {
    const found = blocks(text.split("\n"));
    let same = 0;
    while (same < found.length && this.#sources[same] === found[same].source) same += 1;
    while (this.#holder.childNodes.length > same) this.#holder.lastChild.remove();
    this.#holder.append(...found.slice(same).map((block) => block.make(0)));
    this.#sources = found.map((block) => block.source);
  }
}

/** The blocks of these lines: what each is made of, and the function that makes its element. */
function blocks(lines) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [kind, end] = extent(lines, at);
    const own = lines.slice(at, end);
    found.push({ source: `${kind} ${own.join("\n")}`, make: (depth) => MAKERS[kind](own, depth) });
    at = end;
  }
  return found;
}

/** What begins at a line, and where the next block does. */
function extent(lines, at) {
  const until = (ends) => {
    let end = at + 1;
    while (end < lines.length && !ends(lines[end], end)) end += 1;
    return end;
  };
  const fence = FENCE.exec(lines[at]);
  if (fence) {
    const close = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
    return ["code", until((_, end) => close.test(lines[end - 1]) && end > at + 1)];
  }
  if (INDENTED.test(lines[at])) {
    let end = until((line) => line.trim() && !INDENTED.test(line));
    while (!lines[end - 1].trim()) end -= 1;
    return ["indented", end];
  }
  if (HEADING.test(lines[at])) return ["heading", at + 1];
  if (RULE.test(lines[at])) return ["rule", at + 1];
  if (QUOTE.test(lines[at])) return ["quote", until((line) => !line.trim() || begins(line, ITEM, HEADING, FENCE))];
  const item = ITEM.exec(lines[at]);
  if (item) return ["list", until((line, end) => endsList(lines, end, item))];
  if (lines[at].includes("|") && COLUMNS.test(lines[at + 1] ?? ""))
    return ["table", until((line) => !line.includes("|"))];
  const ends = (line, end) =>
    !line.trim() ||
    begins(line, FENCE, HEADING, RULE, QUOTE, ITEM) ||
    (line.includes("|") && COLUMNS.test(lines[end + 1] ?? ""));
  return ["paragraph", until(ends)];
}

const begins = (line, ...patterns) => patterns.some((pattern) => pattern.test(line));

/** An item's own lines are indented; an empty line ends a list unless an item, or what is indented, follows. */
function endsList(lines, at, first) {
  const line = lines[at];
  if (!line.trim()) {
    let following = at + 1;
    while (following < lines.length && !lines[following].trim()) following += 1;
    const next = lines[following] ?? "";
    return !(/^ {2,}/.test(next) || sameList(next, first));
  }
  if (/^ {2,}/.test(line) || sameList(line, first)) return false;
  return !lines[at - 1].trim() || begins(line, FENCE, HEADING, QUOTE, ITEM, RULE);
}

function sameList(line, first) {
  const item = ITEM.exec(line);
  return item !== null && !RULE.test(line) && /\d/.test(item[2]) === /\d/.test(first[2]);
}

const within = (lines, depth) =>
  depth < DEEPEST
    ? blocks(lines).map((block) => block.make(depth + 1))
    : [element("p", {}, lines.join("\n"))];

const MAKERS = {
  code(lines) {
    const [opening, ...rest] = lines;
    const [, fence, language] = FENCE.exec(opening);
    const closed = rest.length && rest.at(-1).trim().startsWith(fence);
    return codeBlock((closed ? rest.slice(0, -1) : rest).join("\n"), language);
  },
  indented: (lines) => codeBlock(lines.map((line) => line.replace(INDENTED, "")).join("\n"), ""),
  heading([line]) {
    const [, signs, text] = HEADING.exec(line);
    return element(`h${Math.min(signs.length + 2, 6)}`, {}, inline(text));
  },
  rule: () => element("hr"),
  quote: (lines, depth) =>
    element(
      "blockquote",
      {},
      within(
        lines.map((line) => line.replace(QUOTE, "")),
        depth,
      ),
    ),
  list(lines, depth) {
    const [, indent, mark] = ITEM.exec(lines[0]);
    const items = [];
    for (const line of lines) {
      const item = ITEM.exec(line);
      if (item && item[1].length < indent.length + 2) items.push([line.slice(item[0].length)]);
      else items.at(-1).push(line);
    }
    const ordered = /\d/.test(mark);
    return element(
      ordered ? "ol" : "ul",
      ordered ? { start: parseInt(mark, 10) } : {},
      items.map((own) => element("li", {}, tight(within(dedented(own), depth)))),
    );
  },
  table(lines) {
    const cells = (line) =>
      line
        .trim()
        .replace(/^\||\|$/g, "")
        .split("|")
        .map((cell) => inline(cell.trim()));
    const row = (kind, line) => element("tr", {}, cells(line).map((cell) => element(kind, {}, cell)));
    const body = lines.slice(2).map((line) => row("td", line));
    const head = element("thead", {}, row("th", lines[0]));
    return element("div", { class: "scroll" }, element("table", {}, head, element("tbody", {}, body)));
  },
  paragraph: (lines) => element("p", {}, inline(lines.join("\n"))),
};

/** Lines without what all but the first are indented by. */
function dedented([first, ...rest]) {
  const widths = rest.filter((line) => line.trim()).map((line) => /^ */.exec(line)[0].length);
  const width = Math.min(...widths, 8);
  return [first, ...rest.map((line) => line.slice(Math.min(width, /^ */.exec(line)[0].length)))];
}

/** A lone paragraph of an item is its text. */
const tight = ([first, ...rest]) => [first?.localName === "p" ? [...first.childNodes] : (first ?? ""), ...rest];

/** The nodes of a text with marks in it. */
function inline(text, depth = 0) {
  if (text.length > LONGEST || depth > DEEPEST) return [text];
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, escaped, , code, strong, , emphasised, struck, label, target, address] = match;
    if (match.index > at) nodes.push(text.slice(at, match.index));
    at = match.index + whole.length;
    if (escaped) nodes.push(escaped);
    else if (code) nodes.push(element("code", {}, code.length > 2 ? code.replace(/^ (.*) $/s, "$1") : code));
    else if (strong) nodes.push(element("strong", {}, inline(strong, depth + 1)));
    else if (emphasised) nodes.push(element("em", {}, inline(emphasised, depth + 1)));
    else if (struck) nodes.push(element("del", {}, inline(struck, depth + 1)));
    else if (address) nodes.push(link(address, [address]));
    else nodes.push(SAFE.test(target) ? link(target, inline(label, depth + 1)) : whole);
  }
  return at < text.length ? [...nodes, text.slice(at)] : nodes;
}

const link = (href, content) => element("a", { href, target: "_blank", rel: "noopener noreferrer" }, content);

function codeBlock(text, language) {
  const button = element("button", { type: "button", "aria-label": "Copy code", onclick: () => copy(text, button) }, "Copy");
  return element(
    "figure",
    { class: "code" },
    element("figcaption", {}, element("span", {}, language || "code"), button),
    element("pre", { tabindex: 0 }, element("code", {}, text)),
  );
}

async function copy(text, button) {
  const done = (await clipboard(text)) ? "Copied" : "Not allowed";
  button.textContent = done;
  setTimeout(() => (button.textContent = "Copy"), 2000);
}

/** Whether a text is in the clipboard now; pages over HTTP may use it in the older way alone. */
async function clipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const held = element("textarea", { class: "unseen" });
    held.value = text;
    document.body.append(held);
    held.select();
    const done = document.execCommand("copy");
    held.remove();
    return done;
  }
}
