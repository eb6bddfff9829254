"""The pages that `ask` answers from: Markdown, each section a passage, and in questions.json questions that it answers.

Edit them, and the answers change.
"""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Passage:
    page: str
    title: str
    body: str
    questions: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        return f"{self.title}. {self.body}"

    @property
    def long_text(self) -> str:
        return " ".join((self.text, *self.questions))


def read_passages(folder: Path) -> list[Passage]:
    questions, found = json.loads((folder / "questions.json").read_text(encoding="utf-8")), []
    for path in sorted((folder / "pages").glob("*.md")):
        head, *sections = path.read_text(encoding="utf-8").split("\n## ")
        for section in sections:
            title, _, body = (part.strip() for part in section.partition("\n"))
            found.append(Passage(head.strip("# \n"), title, " ".join(body.split()), tuple(questions.get(title, ()))))
    return found
