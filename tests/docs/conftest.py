"""The pages of docs/, taken apart."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)


class Fence(NamedTuple):
    """A fenced block."""

    language: str
    text: str


class Page:
    """One Markdown file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text()
        self.prose = FENCE.sub("", COMMENT.sub("", self.text))

    def fences(self) -> list[Fence]:
        return [Fence(found[1], found[2]) for found in FENCE.finditer(self.text)]

    def rows(self, first_column: str) -> list[list[str]]:
        """The cells of all tables whose first column has this heading."""
        found: list[list[str]] = []
        wanted = False
        for line in self.prose.splitlines():
            cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
            if not cells:
                wanted = False
            elif cells[0] == first_column:
                wanted = True
            elif wanted and set(cells[0]) != {"-"}:
                found.append(cells)
        return found

    def headings(self) -> set[str]:
        """As they can be linked to."""
        return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in HEADING.findall(self.prose)}

    def section(self, heading: str) -> str:
        """What stands under it, up to the next one."""
        _, _, rest = self.text.partition(f"# {heading}\n")
        assert rest, f"{self.path.name} has no section '{heading}'"
        return HEADING.split(rest, maxsplit=1)[0]


def codes(text: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`\n]+)`", text)


@pytest.fixture(scope="session", name="codes")
def _codes() -> Callable[[str], list[str]]:
    return codes


@pytest.fixture(scope="session")
def page(root: Path) -> Callable[[str], Page]:
    """`page("clients.md")`"""
    return lambda name: Page(root / "docs" / name)
