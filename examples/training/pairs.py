"""Makes the pairs that the encoders of `ask` learn from: a short text, and a longer one that belongs to it.

Pairs come from the passages that ship, the training questions about them, and the running interpreter's standard
library. The held-out questions are never read here.
"""

from __future__ import annotations

import ast
import json
import random
import re
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prepare import functions_of, stdlib_files

HERE = Path(__file__).parent
ASK = HERE.parent / "model_repository" / "ask" / "1"
sys.path.insert(0, str(ASK))

from passages import Passage, read_passages  # noqa: E402

SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`'_:(])")
WORD = re.compile(r"[A-Za-z][a-z]+|[A-Z]+(?![a-z])")


@dataclass(frozen=True)
class Pair:
    """`group`: pairs of one group are no negatives of each other."""

    short: str
    long: str
    group: str


def passages() -> list[Passage]:
    return read_passages(ASK)


def questions() -> dict[str, list[str]]:
    """The training questions of each passage, by its title."""
    return dict(json.loads((ASK / "questions.json").read_text()))


def sentences(text: str) -> list[str]:
    return SENTENCE_END.split(text)


def docstrings() -> Iterator[tuple[str, str]]:
    """Each documented function, class and module of the standard library: its name in words, and its docstring."""
    selection = json.loads((HERE / "selection.json").read_text())
    for path in stdlib_files(Path(sysconfig.get_path("stdlib")), selection):
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        for node in (tree, *classes, *functions_of(tree)):
            name = path.stem if isinstance(node, ast.Module) else node.name
            text = ast.get_docstring(node)
            if text and len(text) > 30:
                yield " ".join(WORD.findall(name)).lower(), text


def topics() -> list[str]:
    """The paragraphs of the language reference, as `help()` shows them."""
    from pydoc_data.topics import topics as texts

    paragraphs = (" ".join(part.split()) for text in texts.values() for part in text.split("\n\n"))
    return [each for each in dict.fromkeys(paragraphs) if len(each) > 60]


def library_texts() -> list[str]:
    return [*(f"{name}. {' '.join(text.split())}" for name, text in docstrings()), *topics()]


def library_pairs() -> list[Pair]:
    """A docstring's name or first sentence, and the rest; a paragraph's sentence, and the rest."""
    found = []
    for name, text in docstrings():
        first, *rest = sentences(" ".join(text.split()))
        if rest:
            found.append(Pair(f"{name} {first}"[:100], " ".join(rest)[:180], text))
        elif len(name.split()) > 1:
            found.append(Pair(name, first[:180], text))
    for paragraph in topics():
        parts = sentences(paragraph)
        if len(parts) > 2:
            found.append(Pair(parts[0][:100], " ".join(parts[1:])[:180], paragraph))
    return found


FORMS = {
    "How do I ": ["how to ", "how can I ", "what is the way to ", "I want to ", "how would one ", ""],
    "What is ": ["explain ", "what's ", "tell me about ", ""],
    "What does ": ["explain what ", ""],
    "Why ": ["what is the reason that ", "explain why "],
}
SYNONYMS = [
    ["remove", "delete", "drop", "discard", "get rid of", "eliminate", "take out"],
    ["make", "create", "build", "construct", "produce", "set up", "generate"],
    ["get", "obtain", "fetch", "retrieve", "find"],
    ["find", "look for", "search for", "locate"],
    ["check", "test", "determine", "find out", "see", "verify"],
    ["convert", "turn", "change", "transform"],
    ["start", "launch", "run", "execute", "begin"],
    ["stop", "end", "quit", "abort", "leave"],
    ["show", "print", "display", "output"],
    ["join", "combine", "merge", "concatenate", "put together"],
    ["split", "cut", "divide", "separate", "break"],
    ["write", "define", "declare"],
    ["fast", "quick", "quickly", "efficient"],
    ["slow", "sluggish", "taking long"],
    ["big", "huge", "large", "long"],
    ["element", "item", "entry", "member", "value"],
    ["elements", "items", "entries", "members", "values"],
    ["folder", "directory"],
    ["dict", "dictionary", "mapping"],
    ["string", "text", "str"],
    ["function", "method", "routine"],
    ["error", "exception", "failure", "problem"],
    ["program", "script", "code", "application"],
    ["duplicates", "repeated values", "double entries"],
    ["unique", "distinct", "without duplicates"],
    ["parallel", "concurrently", "at the same time", "simultaneously"],
    ["variable", "name"],
    ["class", "type"],
    ["parent", "base", "super"],
    ["number", "integer", "figure"],
    ["use", "apply", "employ"],
    ["happens", "occurs", "goes on"],
    ["several", "multiple", "many", "two"],
    ["order", "sequence"],
    ["index", "position"],
    ["compare", "check for equality"],
    ["repeat", "do again", "loop"],
    ["count", "tally"],
    ["library", "package", "module"],
    ["object", "instance"],
]
SAME = {word: group for group in SYNONYMS for word in group}


def reworded(question: str, rng: random.Random) -> str:
    """The question in another form, some words exchanged or left out."""
    for start, forms in FORMS.items():
        if question.startswith(start) and rng.random() < 0.6:
            question = rng.choice(forms) + question.removeprefix(start)
    words = []
    for word in question.rstrip("?").split():
        draw = rng.random()
        if draw < 0.3 and word.lower() in SAME:
            words.append(rng.choice(SAME[word.lower()]))
        elif draw < 0.92:
            words.append(word)
    return " ".join(words) + rng.choice(["?", ""])


STARTS = ["How do I ", "How can I ", "What is ", "What does ", "Why ", "When ", "Can I ", "", ""]


def passage_pairs(asked: dict[str, list[str]], rng: random.Random) -> Iterator[Pair]:
    """Without end: a reworded question, the title, or a few words of a passage, and the passage."""
    found = {each.title: each for each in passages()}
    while True:
        for title in rng.sample(sorted(found), len(found)):
            passage, draw = found[title], rng.random()
            if draw < 0.6:
                short = reworded(rng.choice(asked[title]), rng)
            elif draw < 0.67:
                short = reworded(title, rng)
            else:
                words = passage.text.split()
                chosen = rng.sample(words, min(len(words), rng.randint(2, 7)))
                short = rng.choice(STARTS) + reworded(" ".join(chosen), rng)
            yield Pair(short, passage.text, title)
