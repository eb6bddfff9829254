"""What stands in an image file, and its build run without Docker: the RUN lines of the build stage, by the shell, in a
fresh environment. Lines that ask apt-get are left out: they are the base image's business."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

DEVELOPMENT = "development.pth"
"""Lets the fresh environment see the packages of this one."""


class Instruction(NamedTuple):
    word: str
    rest: str

    @property
    def vector(self) -> list[str]:
        """The exec form: a list of words, which no shell reads."""
        words: list[str] = json.loads(self.rest[self.rest.index("[") :])
        return words


class ImageFile(NamedTuple):
    """`arguments`: those before the first stage; then the instructions of each stage."""

    arguments: Sequence[Instruction]
    stages: Sequence[Sequence[Instruction]]

    def of(self, stage: int, word: str) -> list[Instruction]:
        return [each for each in self.stages[stage] if each.word == word]


def read_image_file(path: Path) -> ImageFile:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    stages: list[list[Instruction]] = [[]]
    for line in filter(None, whole.splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stages.append([])
        stages[-1].append(Instruction(word, rest.strip()))
    return ImageFile(stages[0], stages[1:])


def build_context(root: Path, names: Sequence[str]) -> list[str]:
    """Those files that .dockerignore, which names what it lets through, leaves to a build."""
    lines = (root / ".dockerignore").read_text().splitlines()
    let_through = {line.removeprefix("!/") for line in lines if line.startswith("!/")}
    return [name for name in names if name.split("/")[0] in let_through]


def settings(file: ImageFile, stage: int) -> dict[str, str]:
    """What ARG and ENV of a stage set, those without a value left out."""
    found: dict[str, str] = {}
    for each in (*file.of(stage, "ARG"), *file.of(stage, "ENV")):
        found |= {name: value.strip('"') for name, value in re.findall(r'(\w+)=("[^"]*"|\S+)', each.rest)}
    return found


def run_build(file: ImageFile, source: Path, environment: Path, given: Mapping[str, str], *, linked: bool) -> None:
    """Run the build stage in `source`, its environment at `environment`. With `linked` that sees our dependencies,
    which pip then neither looks up nor installs; `given` are build arguments, and variables of the shell."""
    # By 0 pip understands that there is no isolation. Modules are compiled when they are imported, which few are.
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_COMPILE": "0"}
    offline["CONSTRAINTS"] = os.devnull
    offline = offline if linked else {}
    variables = {**os.environ, **settings(file, 0), **offline, **given, "VENV": str(environment)}
    variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for each in file.of(0, "RUN"):
        if not each.rest.startswith("apt-get "):
            subprocess.run(["sh", "-ec", each.rest], check=True, cwd=source, env=variables, stdout=subprocess.DEVNULL)
            if linked and environment.is_dir():
                [site] = (environment / "lib").glob("python*/site-packages")
                (site / DEVELOPMENT).write_text(sysconfig.get_path("purelib") + "\n")
