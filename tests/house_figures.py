"""Figures of the code itself: lines, files, functions, class names that stand for two classes, methods that only
forward, and what there is to read of the step loop. A checkout is read as text: nothing of it is imported."""

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

STEP_LOOP = ("engine/core/step_loop.py", "engine/core/inbox.py", "engine/core.py", "engine/arrivals.py")
"""The step loop and the inbox it reads from, as they are called now and as they were called before; beside them
everything in scheduler/ and kvcache/ belongs to what a reader of the step loop reads."""

TRITONS = "classic_backends/python_stub"
"""Its classes have the names that users of Triton's Python models write (Tensor, ModelConfig, MetricFamily): they count
as homonyms of each other only, not of ours."""


@dataclass
class Size:
    """Lines of `files` files; `code` lines are neither blank, nor a comment, nor a docstring."""

    code: int = 0
    total: int = 0
    files: int = 0

    def add(self, other: "Size") -> None:
        """Add the lines and files of `other` to these."""
        self.code, self.total, self.files = self.code + other.code, self.total + other.total, self.files + other.files


@dataclass
class House:
    """What the shipped code of a checkout consists of. `functions`: the lines of each, from `def` to its end without
    the docstring. `classes`: by name, the places where a class of that name is defined."""

    folders: dict[str, Size] = field(default_factory=dict)
    step_loop: Size = field(default_factory=Size)
    functions: list[int] = field(default_factory=list)
    classes: dict[str, list[str]] = field(default_factory=dict)
    forwarders: list[str] = field(default_factory=list)

    @property
    def size(self) -> Size:
        """All folders together."""
        whole = Size()
        for each in self.folders.values():
            whole.add(each)
        return whole

    @property
    def homonyms(self) -> dict[str, list[str]]:
        """Class names that two or more shipped classes have, with the places of those."""
        return {name: places for name, places in sorted(self.classes.items()) if len(places) > 1}


def read_house(root: Path) -> House:
    """Measure the checkout at `root`: all packages that its pyproject.toml ships, but bench."""
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = [name.removeprefix("charonia.").replace(".", "/") for name in sorted(listed) if name != "charonia"]
    house = House()
    for folder in folders:
        if folder.partition("/")[0] != "bench":
            for file in sorted((root / folder).glob("*.py")):
                _add_file(house, folder, file.relative_to(root).as_posix(), file.read_text())
    return house


def _add_file(house: House, folder: str, name: str, text: str) -> None:
    tree = ast.parse(text)
    size = Size(code_lines(text, tree), text.count("\n"), 1)
    house.folders.setdefault(folder, Size()).add(size)
    in_step_loop = folder in ("scheduler", "kvcache") and not name.endswith("__init__.py")
    if in_step_loop or name in STEP_LOOP:
        house.step_loop.add(size)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            house.functions.append(_function_lines(node))
        elif isinstance(node, ast.ClassDef):
            scope = "Triton's " if folder == TRITONS else ""
            house.classes.setdefault(f"{scope}{node.name}", []).append(f"{name}:{node.lineno}")
            house.forwarders += (f"{name}:{line} {node.name}.{method}" for line, method in forwarders(node))


def statements(block: ast.AST) -> Iterator[ast.stmt]:
    """The statements in a module, a definition or another block, at any depth; what they consist of, nine of ten nodes
    of a tree, is not gone through."""
    for part in ("body", "handlers", "orelse", "finalbody", "cases"):
        for node in getattr(block, part, ()):
            if isinstance(node, ast.stmt):
                yield node
            yield from statements(node)


def code_lines(text: str, tree: ast.Module) -> int:
    """Lines of a module that are neither blank, nor a comment alone, nor part of a string that stands by itself."""
    strings = {
        line
        for node in statements(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    numbered = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(bool(line) and not line.startswith("#") and number not in strings for number, line in numbered)


def _function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    docstring = 0
    if ast.get_docstring(node, clean=False) is not None:
        docstring = (first.end_lineno or first.lineno) - first.lineno + 1
    return (node.end_lineno or node.lineno) - node.lineno + 1 - docstring


def forwarders(node: ast.ClassDef) -> Iterator[tuple[int, str]]:
    """(line, name) of each method whose whole body is a call, or the value, of the same name on an object that it has,
    or gets: `os.close` is a module's."""
    for method in node.body:
        if not isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = method.body[1:] if ast.get_docstring(method) is not None else method.body
        if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
            continue
        value = body[0].value
        value = value.value if isinstance(value, ast.Await) else value
        value = value.func if isinstance(value, ast.Call) else value
        if not isinstance(value, ast.Attribute) or value.attr != method.name:
            continue
        owner = value.value
        while isinstance(owner, ast.Attribute):
            owner = owner.value
        if isinstance(owner, ast.Name) and owner.id in {argument.arg for argument in method.args.args}:
            yield method.lineno, method.name
