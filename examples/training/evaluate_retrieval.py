"""Asks a server that serves `ask` the held-out questions, and tells how often the right passage came first.

Beside it, how often it does by words alone: in the passages, and in them and their questions.
"""

from __future__ import annotations

import argparse
import json
import urllib.request

from pairs import HERE, passages
from search import WordIndex


def sources(url: str, question: str) -> list[str]:
    body = json.dumps({"text_input": question, "max_tokens": 1}).encode()
    with urllib.request.urlopen(f"{url}/v2/models/ask/generate", body, timeout=60) as response:
        return [source.rpartition(" (")[0] for source in json.load(response)["sources"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--show", action="store_true", help="print the questions that find something else first")
    options = parser.parse_args()
    found = passages()
    words, more = WordIndex([each.text for each in found]), WordIndex([each.long_text for each in found])
    for name, asked in json.loads((HERE / "held_out_questions.json").read_text()).items():
        ways = {
            "by words": lambda question: [found[place].title for place in words.rank(question)[:3]],
            "by words and questions": lambda question: [found[place].title for place in more.rank(question)[:3]],
            "ask": lambda question: sources(options.url, question),
        }
        for way, rank in ways.items():
            ranked = {question: rank(question) for question in asked}
            first = sum(ranked[question][0] == title for question, title in asked.items())
            among = sum(title in ranked[question] for question, title in asked.items())
            print(f"{name}, {way}: of {len(asked)} {first} first, {among} among three")
            for question, title in asked.items() if options.show else ():
                if ranked[question][0] != title:
                    print(f"    {question} ({title}): {ranked[question][0]}")


if __name__ == "__main__":
    main()
