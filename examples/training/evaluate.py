"""Continues the committed prompts greedily and counts the continuations that are Python.

A continuation is cut at its last complete statement. It counts when prompt and continuation parse
together and the continuation brought at least one whole statement of its own.
"""

from __future__ import annotations

import argparse
import ast
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

DOCSTRING = "docstring"


@dataclass(frozen=True)
class Verdict:
    statements: int
    of_them: str
    text: str

    @property
    def counts(self) -> bool:
        return self.statements > 0

    @property
    def does_something(self) -> bool:
        return self.of_them not in ("", DOCSTRING)


def parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def statements_in(tree: ast.Module) -> list[ast.stmt]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]


def ends_of_statements(prompt: str, whole: str, finished: bool) -> list[str]:
    """Every cut after a line of the continuation, the longest first.

    The last line is a candidate only where the model itself ended: a token limit may have cut a
    name in two, and half a name parses.
    """
    lines = whole.splitlines(keepends=True)
    if not finished and lines and not lines[-1].endswith("\n"):
        lines.pop()
    cuts = ("".join(lines[:count]) for count in range(len(lines), 0, -1))
    return [cut for cut in cuts if len(cut) > len(prompt)]


def new_statements(prompt: str, tree: ast.Module) -> list[ast.stmt]:
    """The statements that begin after the prompt, so that a compound one it opened is not one."""
    lines = prompt.split("\n")
    end = (len(lines), len(lines[-1].encode()))
    return [node for node in statements_in(tree) if (node.lineno, node.col_offset) >= end]


def kind_of(node: ast.stmt) -> str:
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return DOCSTRING if text else type(node).__name__


def judge(prompt: str, continuation: str, finished: bool) -> Verdict:
    for cut in ends_of_statements(prompt, prompt + continuation, finished):
        tree = parsed(cut)
        if tree is not None:
            found = new_statements(prompt, tree)
            names = ", ".join(sorted({kind_of(node) for node in found}))
            return Verdict(len(found), names, cut)
    return Verdict(0, "", prompt)


class Writer:
    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()

    @torch.inference_mode()
    def write(self, prompt: str, tokens: int) -> tuple[str, bool]:
        """The continuation, and whether the model ended it itself."""
        inputs = self.tokenizer(prompt, return_tensors="pt")
        ids = self.model.generate(**inputs, max_new_tokens=tokens, do_sample=False)[0]
        new = ids[inputs["input_ids"].shape[1] :]
        return str(self.tokenizer.decode(new, skip_special_tokens=True)), len(new) < tokens


def table(prompts: list[str], verdicts: list[Verdict]) -> str:
    rows = ["| prompt | parses | statements | of them |", "|---|---|---|---|"]
    for prompt, verdict in zip(prompts, verdicts, strict=True):
        shown = prompt.replace("\n", "⏎")
        answer = "yes" if verdict.counts else "no"
        rows.append(f"| `{shown}` | {answer} | {verdict.statements} | {verdict.of_them} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a checkpoint")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--show", action="store_true", help="print the continuations too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    prompts = json.loads(Path(__file__).with_name("prompts.json").read_text())
    writer = Writer(options.folder)
    verdicts = [judge(prompt, *writer.write(prompt, options.tokens)) for prompt in prompts]
    if options.show:
        for prompt, verdict in zip(prompts, verdicts, strict=True):
            print(f"--- {prompt!r}\n{verdict.text}")
    print(table(prompts, verdicts))
    counted = sum(verdict.counts for verdict in verdicts)
    beyond = sum(verdict.does_something for verdict in verdicts)
    print(f"{counted} of {len(prompts)} parse, {beyond} of them with more than a docstring")


if __name__ == "__main__":
    main()
