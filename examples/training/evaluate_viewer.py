"""Asks a server that serves the viewer about pictures that it was not trained on, and tells how often it is right.

With --write, ten such pictures with a question each go to a folder, and nobody is asked.
"""

from __future__ import annotations

import argparse
import base64
import io
import itertools
import json
import random
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from scenes import Exchange, chosen_exchanges, draw_scene

SEED = 20261129
FEW = 2
"""Shapes that a picture of the ten has at most."""


def held_out(count: int, most: int) -> Iterator[tuple[bytes, Exchange]]:
    """Files of pictures of at most that many shapes, each with a question; the digits are those that nothing was learnt
    from."""
    rng = random.Random(SEED)
    drawn = (draw_scene(rng, held_out=True) for _ in itertools.count())
    for scene in itertools.islice((scene for scene in drawn if len(scene.shapes) <= most), count):
        [exchange] = chosen_exchanges(rng, scene, 1)
        file = io.BytesIO()
        scene.image.save(file, "PNG", optimize=True)
        yield file.getvalue(), exchange


def answer(url: str, picture: bytes, question: str) -> str:
    image = {"url": f"data:image/png;base64,{base64.b64encode(picture).decode()}"}
    content = [{"type": "image_url", "image_url": image}, {"type": "text", "text": question}]
    body = {"model": "viewer", "temperature": 0, "messages": [{"role": "user", "content": content}]}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def write(folder: Path) -> None:
    """Ten pictures, and questions.json with their questions and answers."""
    folder.mkdir(parents=True, exist_ok=True)
    questions = []
    for number, (picture, exchange) in enumerate(held_out(10, FEW)):
        name = f"{number}.png"
        (folder / name).write_bytes(picture)
        questions.append({"picture": name, "question": exchange.question, "answer": exchange.answer})
    (folder / "questions.json").write_text(json.dumps(questions, indent=1) + "\n")


def evaluate(url: str, count: int, most: int, show: bool) -> None:
    right, asked = Counter[str](), Counter[str]()
    for picture, exchange in held_out(count, most):
        said = answer(url, picture, exchange.question)
        asked[exchange.sort] += 1
        right[exchange.sort] += said == exchange.answer
        if show and said != exchange.answer:
            print(f"{exchange.question} {exchange.answer} Said: {said}")
    for sort, pictures in sorted(asked.items()):
        print(f"{sort}: {right[sort]} of {pictures}")
    print(f"all: {right.total()} of {asked.total()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--pictures", type=int, default=500)
    parser.add_argument("--shapes", type=int, default=4, help="of a picture, at most")
    parser.add_argument("--show", action="store_true", help="print what is answered wrongly")
    parser.add_argument("--write", type=Path, help="a folder for ten pictures")
    options = parser.parse_args()
    if options.write:
        write(options.write)
    else:
        evaluate(options.url, options.pictures, options.shapes, options.show)


if __name__ == "__main__":
    main()
