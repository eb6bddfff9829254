"""Selects the training documents and writes them, split by file, as JSON lines.

Knows nothing of tokens. Reads the running interpreter's standard library and the reStructuredText
sources of the Python documentation; `selection.json` says what of them and how often.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sysconfig
import tempfile
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

Selection = dict[str, Any]
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

SCRATCH = Path(tempfile.gettempdir()) / "charonia-demo-model"
DEBIAN_DOCS = Path("/usr/share/doc/python3.11/html/_sources")
ROLE = re.compile(r":[a-z:]+:`[~!]?([^`<]+?)(?:\s*<[^`]*>)?`")
CODE_BLOCK = re.compile(
    r"(?:^\.\. code-block:: python3?\s*$|::[ \t]*$)\n(?:[ \t]*\n)+((?:[ \t]+\S.*\n|[ \t]*\n)+)",
    re.MULTILINE,
)
GLOSSARY_ENTRY = re.compile(r"^ {3}(\S.*)\n((?: {6}.*\n|\s*\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Document:
    kind: str  # module, function, snippet, docs or chat: held-out loss is reported for each
    origin: str
    split: str
    text: str
    repeats: int = 1


def tidy(text: str) -> str:
    lines = (line.rstrip() for line in text.expandtabs(8).splitlines())
    return "\n".join(lines).strip("\n") + "\n"


def stdlib_files(root: Path, selection: Selection) -> Iterator[Path]:
    folders = set(selection["stdlib_skipped_folders"])
    files = set(selection["stdlib_skipped_files"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        wanted = folders.isdisjoint(relative.parts[:-1]) and relative.as_posix() not in files
        if wanted and path.stat().st_size <= selection["stdlib_largest_file"]:
            yield path


def docs_files(root: Path, selection: Selection) -> Iterator[tuple[Path, int]]:
    for path in sorted(root.rglob("*.rst.txt")):
        repeats = selection["docs_repeats"].get(path.relative_to(root).parts[0].split(".")[0], 0)
        # Half a repeat: half the pages, drawn by the seed.
        extra = random.Random(f"{selection['seed']} page {path.name}").random() < repeats % 1
        if int(repeats) + extra:
            yield path, int(repeats) + extra


def split_of(origin: str, selection: Selection) -> str:
    draw = random.Random(f"{selection['seed']} {origin}").random()
    return "held_out" if draw < selection["held_out_share"] else "train"


def source_of(text: str, node: FunctionNode) -> str:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = text.splitlines()[first - 1 : node.end_lineno]
    return tidy(textwrap.dedent("\n".join(lines)))


def functions_of(tree: ast.Module) -> Iterator[FunctionNode]:
    for node in ast.walk(tree):
        if isinstance(node, FunctionNode):
            yield node


def parses(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    return True


def summary_of(node: FunctionNode) -> str:
    paragraphs = (ast.get_docstring(node) or "").strip().split("\n\n")
    summary = " ".join(paragraphs[0].split())
    return summary if summary.endswith((".", "?", "!")) or not summary else summary + "."


def without_docstring(text: str, node: FunctionNode) -> str:
    """The function's source, less its docstring where something else remains."""
    source = source_of(text, node)
    if len(node.body) < 2 or ast.get_docstring(node) is None:
        return source
    docstring, following = node.body[0], node.body[1]
    if docstring.lineno <= node.lineno or following.lineno <= (docstring.end_lineno or 0):
        return source
    lines = text.splitlines()
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    kept = lines[first - 1 : docstring.lineno - 1] + lines[docstring.end_lineno : node.end_lineno]
    while not kept[docstring.lineno - first].strip():
        del kept[docstring.lineno - first]
    return tidy(textwrap.dedent("\n".join(kept)))


def turns(request: str, answer: str) -> str:
    return f"<|user|>{request}<|end|><|assistant|>{answer.strip()}<|end|>"


def chat_text(node: FunctionNode, text: str, selection: Selection, rng: random.Random) -> str:
    summary = summary_of(node)
    forms = selection["chat_requests"]
    form = rng.choice(forms if 0 < len(summary) < 200 else forms[-2:])
    signature = f"{node.name}({ast.unparse(node.args)})"
    request = form.format(signature=signature, name=node.name, summary=summary)
    bare = rng.random() < selection["chat_share_without_docstring"]
    answer = without_docstring(text, node) if bare else source_of(text, node)
    system = ""
    if rng.random() < 0.15:
        system = f"<|system|>{rng.choice(selection['chat_systems'])}<|end|>"
    return system + turns(request, answer)


def within(source: str, bounds: list[int]) -> bool:
    return bounds[0] <= source.count("\n") <= bounds[1]


def function_documents(text: str, origin: str, split: str, selection: Selection) -> Iterator[Document]:
    rng = random.Random(f"{selection['seed']} functions {origin}")
    for node in functions_of(ast.parse(text)):
        # Whole modules bring the docstrings: on its own a function begins with what it does.
        source = without_docstring(text, node)
        if not parses(source):
            continue
        if within(source, selection["function_lines"]):
            short = source.count("\n") <= selection["function_short_lines"]
            repeats = selection[f"function_repeats_{'short' if short else 'longer'}"]
            yield Document("function", origin, split, source, repeats)
        asked_for = within(source_of(text, node), selection["chat_lines"]) and not node.name.startswith("__")
        # A function without a docstring gives a request that only names it: half is enough.
        if asked_for and (summary_of(node) or rng.random() < 0.5):
            yield Document("chat", origin, split, chat_text(node, text, selection, rng))


def module_documents(root: Path, selection: Selection) -> Iterator[Document]:
    for path in stdlib_files(root, selection):
        text = tidy(path.read_text(encoding="utf-8", errors="replace"))
        origin = "stdlib/" + path.relative_to(root).as_posix()
        if not parses(text) or text.count("\n") < 3:
            continue
        split = split_of(origin, selection)
        yield Document("module", origin, split, text)
        yield from function_documents(text, origin, split, selection)


def is_program(source: str) -> bool:
    return ">>>" not in source and ".rst\n" not in source and parses(source)


def snippets(text: str, fewest_lines: int) -> Iterator[str]:
    for match in CODE_BLOCK.finditer(text):
        source = tidy(textwrap.dedent(match[1]))
        if source.count("\n") >= fewest_lines and is_program(source):
            yield source


def glossary_chats(text: str) -> Iterator[str]:
    for match in GLOSSARY_ENTRY.finditer(text):
        term = ROLE.sub(r"\1", match[1]).strip("`")
        answer = ROLE.sub(r"\1", textwrap.dedent(match[2])).replace("``", "`").strip()
        if len(answer) > 30:
            yield turns(f"What is {term} in Python?", answer)
            yield turns(f"Explain {term}.", answer)


def docs_documents(root: Path, selection: Selection) -> Iterator[Document]:
    for path, repeats in docs_files(root, selection):
        text = tidy(path.read_text(encoding="utf-8"))
        origin = "docs/" + path.relative_to(root).as_posix()
        split = split_of(origin, selection)
        yield Document("docs", origin, split, text, repeats)
        for source in snippets(text, selection["snippet_fewest_lines"]):
            yield Document("snippet", origin, split, source, selection["snippet_repeats"])
        if path.name.startswith("glossary"):
            for chat in glossary_chats(text):
                yield Document("chat", origin, split, chat)


def report(documents: list[Document]) -> None:
    for split in ("train", "held_out"):
        for kind in ("module", "function", "snippet", "docs", "chat"):
            chosen = [d for d in documents if (d.split, d.kind) == (split, kind)]
            size = sum(len(d.text) for d in chosen) / 1e6
            weighed = sum(len(d.text) * d.repeats for d in chosen) / 1e6
            print(f"{split:9} {kind:9} {len(chosen):6} documents {size:7.2f} M characters, {weighed:7.2f} M repeated")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path, default=DEBIAN_DOCS, help="folder of *.rst.txt files")
    parser.add_argument("--scratch", type=Path, default=SCRATCH)
    options = parser.parse_args()
    if not options.docs.is_dir():
        parser.error(f"--docs: no folder {options.docs} (see examples/README.md)")
    selection = json.loads(Path(__file__).with_name("selection.json").read_text())
    documents = [
        *module_documents(Path(sysconfig.get_path("stdlib")), selection),
        *docs_documents(options.docs, selection),
    ]
    options.scratch.mkdir(parents=True, exist_ok=True)
    with open(options.scratch / "documents.jsonl", "w", encoding="utf-8") as out:
        out.writelines(json.dumps(asdict(document)) + "\n" for document in documents)
    report(documents)


if __name__ == "__main__":
    main()
