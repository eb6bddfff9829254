"""The house rules: which floor may lean on which, and that the package ships what the tree holds."""

import ast
import gc
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from .house_figures import code_lines, statements

MAY_IMPORT = {
    "core": set(),
    "processes": {"core"},
    "telemetry": {"core", "processes"},
    "kvcache": {"core"},
    "tokenization": {"core", "processes"},
    "media": {"core", "telemetry", "processes"},
    "scheduler": {"core", "kvcache"},
    "engine": {"core", "telemetry", "processes", "kvcache", "scheduler", "tokenization"},
    "classic_backends": {"core", "telemetry", "processes", "tokenization"},
    "ensembles": {"core", "telemetry"},
    "routing": {"core"},
    "repository": {"core", "telemetry", "processes", "routing"},
    "api": {"core", "telemetry", "processes"},
    "http_workers": {"core", "telemetry", "processes", "engine", "repository", "api"},
    "extras/trtllm": {"core", "telemetry", "scheduler", "tokenization", "engine", "ensembles"},
    "extras/batches": {"core", "processes", "api"},
    "extras/console": {"core", "telemetry", "api", "repository"},
    "extras/dynamo": {"core", "engine", "inprocess"},
    "extras/rollouts": {"core", "processes", "routing", "api"},
    "bench": {
        "core",
        "telemetry",
        "processes",
        "tokenization",
        "kvcache",
        "scheduler",
        "engine",
        "classic_backends",
    },
    "cli": {
        "api",
        "core",
        "http_workers",
        "telemetry",
        "processes",
        "engine",
        "repository",
        "routing",
    },
    "inprocess": {"core", "telemetry", "processes", "engine", "repository", "api", "cli"},
    # It simulates the scheduler and the cache, has the engine's options, reads repositories, and puts load to servers.
    "extras/optimizer": {"core", "telemetry", "processes", "kvcache", "scheduler", "engine", "repository", "bench"},
}
FOREIGN_BANS = {
    "core": {"torch", "transformers", "fastapi", "starlette", "uvicorn", "grpc", "zmq"},
    "kvcache": {"torch", "transformers"},
    "tokenization": {"torch", "transformers"},
    "media": {"torch"},
    "scheduler": {"torch", "transformers"},
    "api": {"torch", "transformers", "zmq"},
    "routing": {"torch", "transformers"},
    "repository": {"torch", "transformers"},
    "http_workers": {"torch", "transformers", "zmq"},
    "extras/trtllm": {"transformers"},
    "extras/dynamo": {"torch", "transformers", "zmq"},
    "cli": {"torch", "transformers"},
    "inprocess": {"transformers", "zmq", "fastapi", "uvicorn", "grpc"},
    "extras/optimizer": {"torch", "transformers"},
}
INNER_FLOORS = {
    "engine": (
        ".options",
        "cpu grammars drafters transfer",
        "gpu",
        "checkpoint",
        "layers",
        "attention",
        "models",
        "worker",
        "parallel",
        "core",
        "client",
        ".build",
        "vllm",
    ),
    "api": ("http", "triton openai grpc", "anthropic", ".openapi", ".app"),
    "classic_backends": (
        "python_stub",
        "batching",
        "sequences",
        ".model .builtin onnx torch isolated python",
        "encoder tower",
    ),
}
"""The parts of a floor from low to high: folders and, with a dot, modules. A module that is not named lies lowest."""
NAMES_OF_OTHERS = {
    *(f"classic_backends/python_stub/{name}.py" for name in ("backend_utils", "tensor")),
    *(f"inprocess/{name}.py" for name in ("requests", "server", "tensor", "sampling_params", "outputs")),
}
"""Files whose classes a user's `model.py`, or a program, knows by Triton's or vLLM's names."""
MOST_LINES = 400
"""Of a file: more do not fit in a head."""
NAMES_AN_EXTRA = re.compile(r"\bextras[./]\w|\bimport extras\b|from \.+extras\b")
# Raising one is a line in a commit that says why.
BUDGETS = {
    "core": 2_521,
    "processes": 1_245,
    "telemetry": 3_025,
    "kvcache": 1_620,
    "tokenization": 4_189,
    "media": 1_763,
    "scheduler": 2_565,
    "engine": 32_952,
    "classic_backends": 8_987,
    "ensembles": 1_262,
    "routing": 250,
    "repository": 5_187,
    "api": 10_956,
    "http_workers": 2_588,
    "extras/trtllm": 1_965,
    "extras/batches": 1_410,
    "extras/console": 600,
    "extras/dynamo": 370,
    "extras/rollouts": 1_160,
    "bench": 7_573,
    "cli": 2_979,
    "extras/optimizer": 4_050,
    "inprocess": 1_935,
}
"""Lines of code that a room has at most, as `tests/house_figures.py` counts them."""
NOT_PACKAGES = {"tests", "examples", "docs", "deploy", "build"}


@pytest.fixture(scope="module", autouse=True)
def no_collections() -> Iterator[None]:
    """A tree of syntax is no cycle: the collector would go through all of them in vain, two fifths of the time."""
    gc.disable()
    yield
    gc.enable()


def shipped(root: Path) -> Iterator[Path]:
    for floor in MAY_IMPORT:
        yield from sorted((root / floor).rglob("*.py"))


def packages(root: Path) -> set[str]:
    found = (
        path.parent.relative_to(root) for deep in ("*", "*/*", "*/*/*") for path in root.glob(deep + "/__init__.py")
    )
    return {
        folder.as_posix() for folder in found if folder.parts[0].isidentifier() and folder.parts[0] not in NOT_PACKAGES
    }


@cache
def parsed(path: Path) -> tuple[list[ast.AST], int]:
    """The imports and classes of a module, at any depth, and its lines of code; its tree is not kept."""
    wanted = (ast.Import, ast.ImportFrom, ast.ClassDef)
    text = path.read_text()
    tree = ast.parse(text)
    return [node for node in statements(tree) if isinstance(node, wanted)], code_lines(text, tree)


def nodes(path: Path) -> list[ast.AST]:
    return parsed(path)[0]


def imports(path: Path, root: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted target) of every import; one of ours starts with `charonia.`."""
    here = ("charonia", *path.relative_to(root).with_suffix("").parts)
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = here[: len(here) - node.level]
            targets = [node.module] if node.module else [alias.name for alias in node.names]
            yield from ((node.lineno, ".".join((*base, target))) for target in targets)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""


def floor_of(names: Sequence[str]) -> str:
    """The floor of a module: a folder at the root, or one of `extras`, which lean on each other as little as floors."""
    return "/".join(names[:2]) if names[0] == "extras" else names[0]


def complaint(floor: str, target: str, relative_root: str) -> str | None:
    head, *rest = target.split(".")
    if head != relative_root:
        return f"{floor} imports {head}" if head in FOREIGN_BANS.get(floor, set()) else None
    other = floor_of(rest) if rest else ""
    if other and other not in MAY_IMPORT and not other.startswith("extras"):
        return None
    return None if other in MAY_IMPORT.get(floor, set()) | {floor, ""} else f"{floor} leans on {other}"


def test_no_floor_leans_on_one_above(root: Path) -> None:
    wrong = [
        f"{path.relative_to(root)}:{line}: {said}"
        for path in shipped(root)
        for line, target in imports(path, root)
        if (said := complaint(floor_of(path.relative_to(root).parts), target, "charonia"))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_optimizer_takes_of_bench_what_puts_load_to_a_server(root: Path) -> None:
    taken = {
        target.removeprefix("charonia.bench.")
        for path in (root / "extras" / "optimizer").glob("*.py")
        for _, target in imports(path, root)
        if target.startswith("charonia.bench")
    }
    assert {name for name in taken if not name.startswith("load.")} == {"roofline", "server_process"}
    for path in (root / "bench" / "load").glob("*.py"):
        assert not [target for _, target in imports(path, root) if target.startswith("charonia.extras")], path.name


def circles_in(folder: Path, root: Path) -> set[frozenset[str]]:
    """The modules of a folder, by file, that import each other through whatever else in it; also where the import waits
    in a function, or is for types alone."""
    dotted = ".".join(("charonia", *folder.relative_to(root).parts))
    names = {f"{dotted}.{path.stem}": path for path in folder.glob("*.py") if path.stem != "__init__"}
    leads_to = {name: {target for _, target in imports(path, root)} & names.keys() for name, path in names.items()}
    for through in names:
        for name in names:
            if through in leads_to[name]:
                leads_to[name] |= leads_to[through]
    together = ({name, *(other for other in leads_to[name] if name in leads_to[other])} for name in names)
    return {
        frozenset(names[name].relative_to(root).as_posix() for name in circle) for circle in together if len(circle) > 1
    }


def test_no_modules_of_a_folder_import_each_other(root: Path) -> None:
    folders = sorted({path.parent for path in shipped(root)})
    circles = {circle for folder in folders for circle in circles_in(folder, root)}
    assert not circles, "\n".join(" <> ".join(sorted(circle)) for circle in circles)


def test_no_file_is_longer_than_fits_in_a_head(root: Path) -> None:
    longer = {path.relative_to(root).as_posix() for path in shipped(root) if path.read_text().count("\n") > MOST_LINES}
    assert longer == set(), f"more than {MOST_LINES} lines"


def test_rooms_keep_their_budgets_of_code(root: Path) -> None:
    sizes = dict.fromkeys(MAY_IMPORT, 0)
    for path in shipped(root):
        sizes[floor_of(path.relative_to(root).parts)] += parsed(path)[1]
    assert sizes.keys() == BUDGETS.keys()
    over = {room: f"{size} of {BUDGETS[room]}" for room, size in sizes.items() if size > BUDGETS[room]}
    assert over == {}, "make room, or raise its budget in a commit that says why"


def part_of(floor: str, names: Sequence[str], root: Path) -> str:
    """The inner folder that the module `names` lies in; a module that lies flat in its floor is its own part."""
    return names[0] if (root / floor / names[0]).is_dir() else "." + names[0]


def inner_complaint(floor: str, here: str, there: str) -> str | None:
    """Why the part `here` of `floor` may not import `there`; parts of one level may not either, but for the lowest."""
    levels = {part: number for number, level in enumerate(INNER_FLOORS[floor], 1) for part in level.split()}
    low, high = levels.get(there, 0), levels.get(here, 0)
    stands = here == there or low < high or low == high == 0
    return None if stands else f"{floor}: {here} leans on {there}"


@pytest.mark.parametrize("floor", ["engine", "api", "classic_backends"])
def test_no_room_leans_on_one_above(floor: str, root: Path) -> None:
    wrong = []
    for path in sorted((root / floor).rglob("*.py")):
        names = path.relative_to(root / floor).with_suffix("").parts
        for line, target in imports(path, root):
            inner = target.removeprefix(f"charonia.{floor}.").split(".")
            if names[-1] == "__init__" or not target.startswith(f"charonia.{floor}.") or not inner[0]:
                continue
            if said := inner_complaint(floor, part_of(floor, names, root), part_of(floor, inner, root)):
                wrong.append(f"{path.relative_to(root)}:{line}: {said}")
    assert not wrong, "\n".join(wrong)


def test_the_inner_rule_bites() -> None:
    assert inner_complaint("engine", "layers", "worker") == "engine: layers leans on worker"
    assert inner_complaint("api", "grpc", "openai") == "api: grpc leans on openai"
    assert inner_complaint("engine", "worker", "cpu") is None
    assert inner_complaint("api", "http", ".json_values") is None


def test_nothing_that_ships_imports_tests(root: Path) -> None:
    wrong = [
        f"{path.relative_to(root)}:{line}: imports {target}"
        for path in shipped(root)
        for line, target in imports(path, root)
        if target.split(".")[0] == "tests" or target.startswith("charonia.tests")
    ]
    assert not wrong, "\n".join(wrong)


def test_no_two_shipped_classes_share_a_name(root: Path) -> None:
    places: dict[str, list[str]] = {}
    for path in shipped(root):
        file = path.relative_to(root)
        if file.as_posix() not in NAMES_OF_OTHERS:
            for node in nodes(path):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(f"{path.relative_to(root)}:{node.lineno}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_no_file_of_the_server_names_an_extra(root: Path) -> None:
    """They are found by their entry points alone: to take one away is to delete its folder."""
    wrong = [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for floor in (*MAY_IMPORT, "__init__.py", "__main__.py")
        if not floor.startswith(("extras", "bench"))
        for path in (sorted((root / floor).rglob("*.py")) if (root / floor).is_dir() else [root / floor])
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if NAMES_AN_EXTRA.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_rule_bites() -> None:
    assert complaint("core", "charonia.engine.core.step_loop", "charonia") == "core leans on engine"
    assert complaint("scheduler", "torch.nn", "charonia") == "scheduler imports torch"
    assert complaint("scheduler", "charonia.kvcache.manager", "charonia") is None
    assert NAMES_AN_EXTRA.search("from ..extras.trtllm.build import TENSORRT_LLM")
    assert complaint("cli", "charonia.extras.trtllm.build", "charonia") == "cli leans on extras/trtllm"
    assert complaint("extras/trtllm", "charonia.extras.batches", "charonia") == "extras/trtllm leans on extras/batches"


def test_the_rule_of_circles_bites(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    for name, text in {
        "a": "from .b import B",
        "b": "def f():\n    from ..core.c import C",
        "c": "import typing\nif typing.TYPE_CHECKING:\n    from . import a",
        "d": "from .a import A",
    }.items():
        (tmp_path / "core" / f"{name}.py").write_text(text)
    assert circles_in(tmp_path / "core", tmp_path) == {frozenset({"core/a.py", "core/b.py", "core/c.py"})}


def test_the_package_list_is_the_tree(root: Path) -> None:
    listed = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(["charonia", *("charonia." + p.replace("/", ".") for p in packages(root))])


def test_the_extension_lists_all_that_it_is_made_of(root: Path) -> None:
    """What is not listed is missing from a source distribution, whose extension then is not built: it is optional."""
    [extension] = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    there = [path for path in (root / "engine" / "cpu").iterdir() if path.suffix in {".c", ".h", ".inc"}]
    listed = extension["sources"] + extension["depends"]
    assert sorted(listed) == sorted(path.relative_to(root).as_posix() for path in there)


def test_folders_are_at_most_two_deep(root: Path) -> None:
    assert not [package for package in packages(root) if package.count("/") > 1]


def test_only_the_two_faces_stand_at_the_root(root: Path) -> None:
    assert {path.name for path in root.glob("*.py")} == {"__init__.py", "__main__.py"}


def test_the_frontend_is_free_of_torch() -> None:
    modules = ["api", "api.app", "repository.gateway", "engine.client.llm", "extras.trtllm.build"]
    code = """if True:
    import importlib, sys
    for module in sys.argv[1:]:
        importlib.import_module("charonia." + module)
        if heavy := {"torch", "transformers"} & {*sys.modules}:
            sys.exit(f"{module} imports {heavy}")
    """
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
