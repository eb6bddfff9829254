"""A package that extends the server, as the page about it has one and pip would install it."""

import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from .models import write_labelled


@pytest.fixture
def installed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example of docs/extending.md on the path, with the metadata that installing it writes."""
    fences = {
        language: text
        for language, _, text in (
            fence.partition("\n") for fence in (root / "docs" / "extending.md").read_text().split("```")[1::2]
        )
    }
    project = tomllib.loads(fences["toml"])["project"]
    metadata = tmp_path / "site" / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    metadata.mkdir(parents=True)
    (metadata.parent / "greetings.py").write_text(fences["python"])
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1\n")
    points = project["entry-points"]["charonia.routes"]
    lines = ["[charonia.routes]", *(f"{name} = {value}" for name, value in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join([*lines, "broken = greetings:plan", "gone = nowhere:X"]))
    monkeypatch.setenv("PYTHONPATH", str(metadata.parent), prepend=":")
    return metadata.parent


@pytest.mark.parametrize("flags", [pytest.param((), marks=pytest.mark.proof), ("--frontends", "2")])
def test_a_package_brings_endpoints(
    serve: Callable[..., Any], installed: Path, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    write_labelled(tmp_path / "models", "echo")
    with serve("--model-repository", str(tmp_path / "models"), "--greeting", "moin", *flags) as server:
        for ask in (httpx.get, httpx.post):
            assert ask(f"{server.url}/greet").json() == {"greeting": "moin", "models": ["echo"]}
        assert httpx.delete(f"{server.url}/greet").status_code == 405
        assert httpx.get(server.url).json()["endpoints"]["greetings"] == "/greet"
        scrape = httpx.get(server.metrics_url).text
        assert "# HELP greetings_total Greetings\n# TYPE greetings_total counter\ngreetings_total 2\n" in scrape
        assert "the extension 'broken' of charonia.routes is left out: greetings:plan is no" in server.said
        assert server.stop() == 0, server.said


def test_its_flags_are_the_servers(installed: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "charonia", "serve"]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
    assert "Greetings" in shown
    assert "What /greet says. [default: hello]" in shown
    command += ["--model-repository", str(tmp_path), "--greeting", ""]
    wrong = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stderr.splitlines()[-1]) == (1, "charonia: --greeting must say something")
