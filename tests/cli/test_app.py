"""Commands of installed packages stand beside ours, and none is imported before it is called."""

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import MappingProxyType

import pytest

from charonia.cli import app as command_line
from charonia.cli.app import add_installed_commands, app
from charonia.cli.serve_command import serve_command

MODULE = '''"""A module of commands."""

from charonia.core.errors import NotFound


def greet(name: str = "you", /, *, loud: bool = False) -> int:
    """Greet somebody.

    Parameters
    ----------
    loud
        In capitals.
    """
    if name == "nobody":
        raise NotFound("there is nobody to greet")
    print(name.upper() if loud else name)
    return 3
'''


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    (tmp_path / "greetings.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    entries = {name: EntryPoint(name, "greetings:greet", "charonia.commands") for name in ("greet", "serve")}
    monkeypatch.setattr(command_line, "installed_extensions", lambda group: MappingProxyType(entries))
    add_installed_commands()
    yield
    del app["greet"]
    sys.modules.pop("greetings", None)


@pytest.mark.usefixtures("installed")
def test_an_installed_command_is_imported_when_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    app(["--help"])
    [line] = (line for line in capsys.readouterr().out.splitlines() if "greet" in line)
    assert "Greet somebody." in line
    assert "greetings" not in sys.modules
    assert app(["greet", "them", "--loud"]) == 3
    assert capsys.readouterr().out == "THEM\n"
    app(["greet", "--help"])
    assert "In capitals." in capsys.readouterr().out


@pytest.mark.usefixtures("installed")
def test_errors_of_an_installed_command_are_told_as_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert app(["greet", "nobody"]) == 1
    assert capsys.readouterr().err == "charonia: there is nobody to greet\n"


@pytest.mark.usefixtures("installed")
def test_an_installed_command_does_not_replace_ours() -> None:
    assert app["serve"] is serve_command


def test_the_server_imports_no_command_of_a_package() -> None:
    code = """
import sys
from charonia.cli.app import app
from charonia.core.extensions import installed_extensions

modules = {entry.module for entry in installed_extensions("charonia.commands").values()}
assert app(["serve"]) == 1
sys.exit(" ".join(modules & set(sys.modules)) or 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (
        0,
        "charonia: nothing to serve: name a checkpoint, or give --model-repository\n",
    )
