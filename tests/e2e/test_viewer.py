"""The demo that sees: what examples/README.md promises of it, on the server that `make serve` starts."""

import base64
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import httpx


def questions(root: Path) -> list[dict[str, str]]:
    return list(json.loads((root / "examples/pictures/questions.json").read_text()))


def test_it_is_small(root: Path) -> None:
    files = [file for file in (root / "examples/model_repository/viewer").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 6e6
    pictures = root / "examples/pictures"
    assert sorted(entry["picture"] for entry in questions(root)) == sorted(file.name for file in pictures.glob("*.png"))


def test_it_is_right_about_nine_of_ten_pictures(demo: Any, root: Path) -> None:
    """None of which it was trained on; by `generate`, from their files."""
    wrong = []
    for entry in questions(root):
        image = base64.b64encode((root / "examples/pictures" / entry["picture"]).read_bytes()).decode()
        text = f"<|user|><image>{entry['question']}<|end|><|assistant|>"
        body = {"text_input": text, "image": image, "max_tokens": 40, "temperature": 0}
        said = httpx.post(f"{demo.url}/v2/models/viewer/generate", json=body, timeout=60).json()["text_output"]
        if said != entry["answer"]:
            wrong.append((entry, said))
    assert len(questions(root)) == 10
    assert len(wrong) <= 1, wrong


def test_the_readme_s_lines_are_answered_as_they_say(demo: Any, root: Path) -> None:
    section = (root / "examples/README.md").read_text().partition("\n## See\n")[2].partition("\n## ")[0]
    command, answer = re.findall(r"^```\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[:2]
    command = command.replace("localhost:8000", demo.url.removeprefix("http://"))
    run = subprocess.run(["bash", "-euc", command], capture_output=True, text=True, check=True, timeout=60, cwd=root)
    assert json.loads(run.stdout)["choices"][0]["message"]["content"] == answer.strip()
