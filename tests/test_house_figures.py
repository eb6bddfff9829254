"""Figures of a small house that is written here, and of a process that is recorded."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .house_figures import Size, read_house
from .proofs import call_recorder

PYPROJECT = """
[tool.setuptools]
packages = ["charonia", "charonia.bench", "charonia.core", "charonia.engine.core", "charonia.scheduler"]
"""
ORDERS = '''"""Orders.

Two of them.
"""

class Order:
    """One."""

    def total(self) -> int:
        """In cents."""
        # a comment

        return self.lines.total()

    async def close(self) -> None:
        await self.file.close()

    def __init__(self) -> None:
        super().__init__()

    def sync(self) -> None:
        os.sync()

    def price(self) -> int:
        return self.total() * 2
'''
STEP_LOOP = """class Order:
    text = "not a docstring"

def run(
    steps: int,
) -> int:
    return steps
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {
        "pyproject.toml": PYPROJECT,
        "bench/figures.py": "class Order: ...\n",
        "core/__init__.py": "",
        "core/orders.py": ORDERS,
        "engine/core/step_loop.py": STEP_LOOP,
        "engine/core/sockets.py": "x = 1\n",
        "scheduler/__init__.py": "\n",
        "scheduler/plan.py": "x = 1\n\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_lines_are_counted_by_folder_and_bench_is_left_out(root: Path) -> None:
    house = read_house(root)
    assert house.folders == {
        "core": Size(code=11, total=25, files=2, words=7),
        "engine/core": Size(code=7, total=8, files=2),
        "scheduler": Size(code=1, total=3, files=2),
    }
    assert house.size == Size(code=19, total=36, files=6, words=7)


def test_the_step_loop_is_read_with_the_scheduler(root: Path) -> None:
    assert read_house(root).step_loop == Size(code=7, total=9, files=2)


def test_a_function_is_as_long_as_it_is_without_its_docstring(root: Path) -> None:
    assert sorted(read_house(root).functions) == [2, 2, 2, 2, 4, 4]


def test_homonyms_and_forwarders_are_named(root: Path) -> None:
    house = read_house(root)
    assert house.homonyms == {"Order": ["core/orders.py:6", "engine/core/step_loop.py:1"]}
    assert house.forwarders == ["core/orders.py:9 Order.total", "core/orders.py:15 Order.close"]
    assert house.asked_forwarders == []
    (root / "scheduler" / "plan.py").write_text("class Closable(Protocol):\n    async def close(self) -> None: ...\n")
    assert read_house(root).asked_forwarders == ["core/orders.py:15 Order.close"]


def test_long_docstrings_are_named_with_their_words(root: Path) -> None:
    (root / "scheduler" / "plan.py").write_text(f'x = 1\n"""{"word " * 61}"""\ny = 2\n"""{"word " * 60}"""\n')
    assert read_house(root).long_docstrings == ["scheduler/plan.py:2 61"]


def test_protocols_of_a_single_class_are_named_unless_there_is_a_fake(root: Path) -> None:
    (root / "core" / "shops.py").write_text(
        """
class Priced(Protocol):
    price: int

class Shop(Priced, Protocol):
    def sell(self) -> None: ...

class Open(Protocol):
    def hours(self) -> int: ...

class Callback(Protocol):
    def __call__(self, at: int) -> None: ...

class Kiosk:
    def __init__(self) -> None:
        self.price = 1

    def sell(self) -> None: ...

class Cafe(Kiosk):
    def hours(self) -> int: ...
"""
    )
    (root / "tests").mkdir()
    fake = root / "tests" / "test_shops.py"
    fake.write_text("class FakeCafe:\n    def hours(self) -> int: ...\n")
    assert read_house(root).lone_protocols == []
    (root / "core" / "shops.py").write_text((root / "core" / "shops.py").read_text().replace("(Kiosk)", ""))
    assert read_house(root).lone_protocols == ["core/shops.py:5 Shop: Kiosk"]
    fake.unlink()
    assert read_house(root).lone_protocols == ["core/shops.py:8 Open: Cafe", "core/shops.py:5 Shop: Kiosk"]


def test_only_what_is_called_while_recording_is_written(tmp_path: Path) -> None:
    for name in ("before", "within"):
        (tmp_path / f"{name}.py").write_text("def call(): ...\n")
    (tmp_path / "sitecustomize.py").write_text(Path(call_recorder.__file__).read_text())
    code = "import before, within; before.call(); print(flush=True); input(); within.call(); print(flush=True); input()"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdout.readline()
        (tmp_path / call_recorder.FLAG).touch()
        time.sleep(0.2)
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        (tmp_path / call_recorder.FLAG).unlink()
        while not (written := list(tmp_path.glob("*.json"))):
            time.sleep(0.01)
        child.stdin.write("\n")
    files = [Path(name).name for name in json.loads(written[0].read_text())]
    assert "within.py" in files
    assert "before.py" not in files


def test_classes_named_as_tritons_are_no_homonyms_of_ours(root: Path) -> None:
    listed = (
        (root / "pyproject.toml")
        .read_text()
        .replace('"charonia.core"', '"charonia.core", "charonia.classic_backends.python_stub"')
    )
    (root / "pyproject.toml").write_text(listed)
    stub = root / "classic_backends" / "python_stub"
    stub.mkdir(parents=True)
    (stub / "tensor.py").write_text("class Order: ...\n")
    house = read_house(root)
    assert "classic_backends/python_stub" in house.folders
    assert house.homonyms == {"Order": ["core/orders.py:6", "engine/core/step_loop.py:1"]}
