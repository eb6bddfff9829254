"""The image files: what they build is run by tests/test_packaging.py; here is how they run it."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from charonia.cli import health
from charonia.cli.app import app

IMAGES = ("cpu", "cuda")
USER = "10001:10001"
OF_OTHERS = ("PIP_", "PATH", "VENV", "CHARONIA_")
"""Environment variables that pip, the shell and the server read."""


@pytest.fixture(scope="module")
def images(sibling: Callable[[str], ModuleType]) -> ModuleType:
    return sibling("deploy/image_files.py")


@pytest.fixture
def image(root: Path, images: ModuleType) -> Callable[[str], Any]:
    return lambda name: images.read_image_file(root / "deploy" / "images" / f"{name}.Dockerfile")


def test_both_images_are_built_alike(image: Callable[[str], Any]) -> None:
    """So a test that builds one has tried the other."""
    cpu, cuda = map(image, IMAGES)
    kinds = ("RUN", "ENV", "COPY", "WORKDIR")
    assert [each for each in cpu.stages[0] if each.word in kinds] == [
        each for each in cuda.stages[0] if each.word in kinds
    ]


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_asks_for_its_base_and_index(name: str, image: Callable[[str], Any], images: ModuleType) -> None:
    file = image(name)
    assert [argument.word for argument in file.arguments] == ["ARG"]
    assert all(stage[0].rest.startswith("${PYTHON_IMAGE}") for stage in file.stages)
    named = {each.rest.partition("=")[0] for each in file.of(0, "ARG")}
    assert named == {"PIP_INDEX_URL", "TORCH_INDEX_URL", "TORCH", "EXTRAS", "PACKAGES", "CONSTRAINTS"}
    used = set(re.findall(r"\$\{?(\w+)", " ".join(each.rest for each in file.of(0, "RUN"))))
    assert used == (named | {"VENV"}) - {"PIP_INDEX_URL"}, "pip itself reads the index's variable"
    assert all(
        setting.startswith(OF_OTHERS)
        for stage in (0, 1)
        for setting in images.settings(file, stage)
        if setting not in named
    )


def test_a_build_is_given_every_package(images: ModuleType, root: Path) -> None:
    packages = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    names = [name.partition(".")[2].replace(".", "/") + "/__init__.py" for name in packages if "." in name]
    assert set(names) - set(images.build_context(root, names)) == set(), "let their folders through in .dockerignore"


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_has_known_extras(name: str, image: Callable[[str], Any], images: ModuleType, root: Path) -> None:
    known = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(images.settings(image(name), 0)["EXTRAS"].split(",")) <= known.keys()


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_runs_as_nobody_and_hears_signals(name: str, image: Callable[[str], Any]) -> None:
    file = image(name)
    words = [each.word for each in file.stages[1]]
    [user], [entry], [command] = (file.of(1, word) for word in ("USER", "ENTRYPOINT", "CMD"))
    assert user.rest == USER
    assert "RUN" not in words[words.index("USER") :]
    assert entry.vector == ["tini", "-s", "--", "charonia"]
    app.parse_args(command.vector, exit_on_error=False, print_error=False)
    [copied] = file.of(1, "COPY")
    assert copied.rest == "--from=build /opt/charonia /opt/charonia"
    assert [each.rest for each in file.of(1, "EXPOSE")] == ["8000 8001 8002"]


def test_its_health_is_the_servers(
    image: Callable[[str], Any], images: ModuleType, served: Any, tmp_path: Path
) -> None:
    """Wherever it serves: the server writes where that is, and the check reads it."""
    for name in IMAGES:
        [check] = image(name).of(1, "HEALTHCHECK")
        assert check.vector == ["python", "-m", health.__name__]
        assert health.VARIABLE in images.settings(image(name), 1)
    file, variables = tmp_path / "url", os.environ | {health.VARIABLE: str(tmp_path / "url")}

    def ends() -> int:
        command = [sys.executable, *check.vector[1:]]
        return subprocess.run(command, stderr=subprocess.DEVNULL, env=variables).returncode

    assert ends() == 1
    file.write_text(served.url + "\n")
    assert ends() == 0


def test_versions_of_images_are_held(root: Path) -> None:
    """Every package that the package needs itself is held to a version that it may have."""
    lines = (root / "deploy" / "images" / "constraints.txt").read_text().splitlines()
    held = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        *project["dependencies"],
        *(each for name in ("llm", "media", "onnx", "s3", "otel", "gpu", "ray") for each in extras[name]),
    ]
    for text in wanted:
        if text == "charonia[llm]":
            continue
        requirement = Requirement(text)
        version = held[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), text


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_says_what_it_is_and_has_a_layer_for_what_it_needs(name: str, image: Callable[[str], Any]) -> None:
    build, final = image(name).stages
    labels = " ".join(each.rest for each in final if each.word == "LABEL")
    for label in ("title", "description", "licenses", "revision"):
        assert f"org.opencontainers.image.{label}=" in labels
    words = [f"{each.word} {each.rest}" for each in build]
    [needs] = [at for at, text in enumerate(words) if "--requirement" in text]
    [source] = [at for at, text in enumerate(words) if text == "COPY . /source"]
    assert needs < source
    assert [text for text in words[source:] if text.startswith("RUN ")] == [
        'RUN pip --python "$VENV/bin/python" install --no-deps .'
    ]


@pytest.mark.proof
@pytest.mark.timeout(1500)
def test_an_image_is_built_from_nothing(
    image: Callable[[str], Any], images: ModuleType, sibling: Callable[[str], ModuleType], root: Path, tmp_path: Path
) -> None:
    """All that a build installs comes from an index; what it makes serves, and is found healthy."""
    packaging = sibling("test_packaging.py")
    names = images.build_context(root, packaging.files_that_ship(root))
    source = packaging.copied(root, names, tmp_path / "source")
    held = root / "deploy" / "images" / "constraints.txt"
    given = {"TORCH_INDEX_URL": "", "TORCH": "torch==2.13.0", "CONSTRAINTS": str(held)}
    file = image("cpu")
    images.run_build(file, source, tmp_path / "venv", given, linked=False)
    environment = {**os.environ, "PATH": f"{tmp_path}/venv/bin:{os.environ['PATH']}"}
    version = subprocess.run(["charonia", "--version"], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert version.returncode == 0, version.stderr
    serving = sibling("e2e/serving.py")
    with serving.serving(
        tmp_path / "t", str(root / "examples" / "model_repository"), python=f"{tmp_path}/venv/bin/python"
    ) as server:
        assert server.status("/v2/health/ready") == 200
        assert server.stop() == 0, server.said
