"""Figures of the code itself: lines, files, functions, words of docstrings, class names that stand for two classes,
methods that only forward, protocols that a single class fulfils, and what there is to read of the step loop. A checkout
is read as text: nothing of it is imported."""

import ast
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

STEP_LOOP = ("engine/core/step_loop.py", "engine/core/inbox.py", "engine/core.py", "engine/arrivals.py")
"""The step loop and the inbox it reads from, as they are called now and as they were called before; beside them
everything that lies flat in scheduler/ and kvcache/ belongs to what a reader of the step loop reads. What lies in a
folder of theirs stands on them, or hangs on by one object: one that may not be there, or whose answers are all that a
step needs of it, as which tenant was served least."""

MOST_WORDS = 60
"""Of a docstring: a longer one is better told in parts, each where it belongs."""

TRITONS = "classic_backends/python_stub"
"""Its classes have the names that users of Triton's Python models write (Tensor, ModelConfig, MetricFamily): they count
as homonyms of each other only, not of ours."""


@dataclass
class Size:
    """Lines of `files` files; `code` lines are neither blank, nor a comment, nor a docstring."""

    code: int = 0
    total: int = 0
    files: int = 0
    words: int = 0
    """Of strings that stand by themselves: docstrings of modules, classes, functions, fields and constants."""

    def add(self, other: "Size") -> None:
        """Add the lines and files of `other` to these."""
        self.code += other.code
        self.total += other.total
        self.files += other.files
        self.words += other.words


@dataclass
class House:
    """What the shipped code of a checkout consists of."""

    folders: dict[str, Size] = field(default_factory=dict)
    step_loop: Size = field(default_factory=Size)
    functions: list[int] = field(default_factory=list)
    """The lines of each, from `def` to its end without the docstring."""
    classes: dict[str, list[str]] = field(default_factory=dict)
    """By name, the places where a class of that name is defined."""
    forwarders: list[str] = field(default_factory=list)
    asked_forwarders: list[str] = field(default_factory=list)
    """Those that a protocol asks for, which their class fulfils."""
    long_docstrings: list[str] = field(default_factory=list)
    """The place of each docstring of more than `MOST_WORDS`, and its words."""
    lone_protocols: list[str] = field(default_factory=list)
    """Protocols that one shipped class fulfils, or none, and no fake: no other class anywhere in the checkout."""

    @property
    def size(self) -> Size:
        """All folders together."""
        whole = Size()
        for size in self.folders.values():
            whole.add(size)
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
    shapes = _class_shapes(root, folders)
    house.lone_protocols = lone_protocols(shapes)
    house.asked_forwarders = [name for name in house.forwarders if _is_asked_for(name, shapes)]
    return house


def _add_file(house: House, folder: str, name: str, text: str) -> None:
    tree = ast.parse(text)
    docstrings = list(_docstrings(tree))
    size = Size(code_lines(text, tree), text.count("\n"), 1, sum(words for _, words in docstrings))
    house.long_docstrings += (f"{name}:{line} {words}" for line, words in docstrings if words > MOST_WORDS)
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


def _lone_strings(tree: ast.Module) -> Iterator[tuple[ast.Expr, str]]:
    """The strings that stand by themselves, each with its text."""
    for node in statements(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node, node.value.value


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, int]]:
    """(line, words) of each docstring."""
    for node, text in _lone_strings(tree):
        yield node.lineno, len(text.split())


def code_lines(text: str, tree: ast.Module) -> int:
    """Lines of a module that are neither blank, nor a comment alone, nor part of a string that stands by itself."""
    strings = {
        line for node, _ in _lone_strings(tree) for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
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


@dataclass
class _ClassShape:
    """A class as protocols see it: the names of its own members, and of its bases."""

    name: str
    place: str
    shipped: bool
    members: set[str]
    bases: list[str]

    @property
    def is_protocol(self) -> bool:
        return "Protocol" in self.bases

    @property
    def folder(self) -> str:
        return self.place.rpartition("/")[0]


def _class_shapes(root: Path, folders: Sequence[str]) -> dict[str, list[_ClassShape]]:
    """Every class under `root` by its name; those in `folders`, but for bench's, are shipped."""
    shapes: dict[str, list[_ClassShape]] = {}
    for file in sorted(root.rglob("*.py")):
        inner = file.relative_to(root)
        if inner.parts[0].startswith(".") or inner.parts[0] == "build":
            continue
        shipped = inner.parent.as_posix() in folders and inner.parts[0] != "bench"
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                shape = _class_shape(node, f"{inner.as_posix()}:{node.lineno}", shipped)
                shapes.setdefault(node.name, []).append(shape)
    return shapes


def _protocols(shapes: Mapping[str, Sequence[_ClassShape]]) -> Iterator[tuple[_ClassShape, set[str]]]:
    """The shipped protocols in the order of their names, each with the names that a class needs to fulfil it."""
    for name in sorted(shapes):
        for shape in shapes[name]:
            if shape.shipped and shape.is_protocol:
                yield shape, {name for name in _members(shape, shapes) if name[0] != "_" or name.endswith("__")}


def _is_asked_for(forwarder: str, shapes: Mapping[str, Sequence[_ClassShape]]) -> bool:
    """Whether a method, as `House.forwarders` has it, is one of a protocol that its class fulfils."""
    place, _, name = forwarder.partition(" ")
    owner, _, method = name.partition(".")
    file = place.partition(":")[0]
    [shape] = [shape for shape in shapes[owner] if shape.place.startswith(f"{file}:")]
    members = _members(shape, shapes)
    return any(method in wanted <= members for _, wanted in _protocols(shapes))


def lone_protocols(shapes: Mapping[str, Sequence[_ClassShape]]) -> list[str]:
    """The shipped protocols that one shipped class fulfils by its names, or none, and no other class at all; those of
    calls alone are left out, for functions fulfil them."""
    lone = []
    for shape, wanted in _protocols(shapes):
        kin = [
            other
            for named in shapes.values()
            for other in named
            if not other.is_protocol and wanted <= _members(other, shapes)
        ]
        if not wanted <= {"__call__"} and len(kin) < 2 and all(other.shipped for other in kin):
            lone.append(f"{shape.place} {shape.name}: {', '.join(other.name for other in kin) or 'no class'}")
    return lone


def _class_shape(node: ast.ClassDef, place: str, shipped: bool) -> _ClassShape:
    members = {part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            members.add(part.id)
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            members.add(part.attr)
    bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
    # asyncio.Protocol is none of `typing`.
    return _ClassShape(node.name, place, shipped, members, [base.id for base in bases if isinstance(base, ast.Name)])


def _members(shape: _ClassShape, shapes: Mapping[str, Sequence[_ClassShape]]) -> set[str]:
    """The names of a class's members, those of its bases included where they are in the checkout: of several classes of
    a base's name the one in the same folder, or else the first."""
    members = set(shape.members)
    for name in shape.bases:
        named = [base for base in shapes.get(name, ()) if base is not shape and (base.shipped or not shape.shipped)]
        near = [base for base in named if base.folder == shape.folder] or named
        members |= _members(near[0], shapes) if near else set()
    return members
