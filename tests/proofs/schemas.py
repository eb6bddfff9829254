"""Answers under a schema are valid, and those that are cut could become so: `python -m tests.proofs.schemas`.

The demo model, which knows nothing of JSON, answers under each schema of a committed corpus, on several endpoints,
streamed and not. Every answer that ends by itself is held against its schema by jsonschema. One that `max_tokens` cut
is completed, byte by byte and without the model's tokens, and the whole is held against the schema.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from cyclopts import App
from jsonschema import Draft202012Validator, validators
from jsonschema.protocols import Validator
from rich.progress import Progress

from charonia.bench.server_process import ServerAddress, own_server
from charonia.core.request import GuidedDecoding
from charonia.engine.grammars.backend import GrammarMatcher
from charonia.engine.grammars.constraint_check import check_constraint, checking_backend

CORPUS = Path(__file__).with_name("schemas.jsonl")
MODEL = "demo"
_MODELS = Path(__file__).parents[2] / "examples" / "model_repository"
_AT_ONCE = 16
_CLOSING = b'"}]'
"""Bytes that lead to the end of JSON."""
_LONGEST_END = 20_000
_LEAST_ENDED = 0.95

app = App(help_format="rst")
_BYTES = checking_backend({})


class CorpusSchema(NamedTuple):
    """A schema of the corpus. `text`: what is enforced of it, which is all. `judge`: tells what fits it."""

    name: str
    schema: Any
    text: str
    judge: Validator

    def error(self, text: str) -> str:
        """Why some JSON is not what the schema asks for; empty if it is."""
        found = next(self.judge.iter_errors(json.loads(text, parse_float=Decimal)), None)
        return "" if found is None else f"{found.json_path}: {found.message[:200]}"


class SchemaAnswer(NamedTuple):
    """An answer of the server. `ended`: by itself, and not by `max_tokens`."""

    asked: CorpusSchema
    text: str
    ended: bool


class SchemaResult(NamedTuple):
    """What became of all answers."""

    ends: Counter[str]
    faults: list[str]

    @property
    def ended(self) -> float:
        """The share of answers that ended by themselves."""
        return self.ends["ended"] / max(1, sum(self.ends.values()))


def read_corpus(path: Path = CORPUS) -> list[CorpusSchema]:
    """The schemas, each of which must be enforced to the last keyword; formats of their own are only named.

    Raises:
        ValueError: one is not.
    """
    return [_enforced(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _enforced(line: str) -> CorpusSchema:
    name, schema = json.loads(line).values()
    checked = check_constraint(GuidedDecoding("json_schema", json.dumps(schema), strict=True), _BYTES)
    left_out = [each for each in checked.left_out if not each.startswith("format ")]
    if checked.error or left_out:
        raise ValueError(f"{name}: {checked.error or left_out}")
    exact = json.loads(line, parse_float=Decimal)["schema"]  # 1.18 is a multiple of 0.01, and no float knows it
    kind = validators.validator_for(schema, default=Draft202012Validator)
    return CorpusSchema(name, schema, checked.text, kind(exact, format_checker=kind.FORMAT_CHECKER))


def fault(answer: SchemaAnswer, rng: random.Random) -> str:
    """What is wrong with an answer, if anything."""
    asked, text = answer.asked, answer.text
    try:
        whole = text if answer.ended else complete(asked.text, text.removesuffix("\ufffd"), rng)
        error = asked.error(whole)
    except ValueError as wrong:
        error = str(wrong)
    kind = "ended" if answer.ended else "cut"
    return f"{asked.name}, {kind}: {error}: {text[:200]!r}" if error else ""


def complete(schema: str, prefix: str, rng: random.Random) -> str:
    """Some text that a schema allows and that begins with `prefix`.

    Raises:
        ValueError: there is none, or none was found.
    """
    matcher = _BYTES.compile(GuidedDecoding("json_schema", schema)).matcher()
    written = bytearray(prefix.encode())
    if not matcher.accept(list(written)):
        raise ValueError(f"no valid text begins so: {matcher.error}")
    for _ in range(_LONGEST_END):
        if matcher.complete:
            return written.decode()
        byte = _choose(matcher, rng)
        matcher.accept([byte])
        written.append(byte)
    raise ValueError(f"no end was found within {_LONGEST_END} bytes")


def _choose(matcher: GrammarMatcher, rng: random.Random) -> int:
    """A byte that may come next: every other time one that closes something, if there is such."""
    mask = np.zeros(257 // 32 + 1, np.int32)
    matcher.fill_mask(mask)
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:256]).tolist()
    closing = [byte for byte in allowed if byte in _CLOSING]
    return rng.choice(closing if closing and rng.random() < 0.5 else allowed)


def ask(place: ServerAddress, asked: CorpusSchema, seed: int, max_tokens: int) -> SchemaAnswer:
    """One answer; endpoint, field and streaming go by the seed."""
    chat, field, stream = seed % 2 == 0, seed // 2 % 2, seed // 4 % 2 == 0
    constraint: dict[str, Any] = {"structured_outputs": {"json": asked.schema}}
    if field:
        named = {"name": "answer", "schema": asked.schema, "strict": True}
        constraint = {"response_format": {"type": "json_schema", "json_schema": named}}
    prompt = f"def example_{seed}():\n    return "
    question = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    body = {"model": MODEL, "max_tokens": max_tokens, "seed": seed, "temperature": 1.0, "stream": stream}
    connection = HTTPConnection(place.host, place.http_port, timeout=120)
    try:
        path = "/v1/chat/completions" if chat else "/v1/completions"
        connection.request("POST", path, json.dumps(body | question | constraint), {"Content-Type": "application/json"})
        response = connection.getresponse()
        content = response.read().decode()
    finally:
        connection.close()
    if response.status != 200:
        raise ValueError(f"{asked.name}: {response.status} {content[:300]}")
    choices = (
        [event["choices"][0] for event in _events(content) if event["choices"]]
        if stream
        else json.loads(content)["choices"]
    )
    text = "".join(_text(choice) for choice in choices)
    return SchemaAnswer(asked, text, choices[-1]["finish_reason"] == "stop")


def _events(content: str) -> Iterator[Any]:
    for line in content.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _text(choice: Any) -> str:
    part = choice.get("message") or choice.get("delta") or choice
    return part.get("content") or part.get("text") or ""


def prove(
    place: ServerAddress,
    corpus: Iterable[CorpusSchema],
    answers: int,
    max_tokens: int,
    tell: Callable[[], None] = lambda: None,
) -> SchemaResult:
    """Ask for so many answers, schema by schema in turn, and judge each."""
    schemas, result, rng = list(corpus), SchemaResult(Counter(), []), random.Random(1)

    def attempt(number: int) -> SchemaAnswer | ValueError:
        try:
            return ask(place, schemas[number % len(schemas)], number + number // len(schemas), max_tokens)
        except ValueError as error:
            return error

    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for answer in threads.map(attempt, range(answers)):
            if isinstance(answer, ValueError):
                result.faults.append(str(answer))
                continue
            result.ends["ended" if answer.ended else "cut"] += 1
            if found := fault(answer, rng):
                result.faults.append(found)
            tell()
    return result


@app.default
def main(answers: int = 2000, max_tokens: int = 600) -> None:
    """Ask for so many answers; the exit code is 0 if every check held."""
    corpus = read_corpus()
    flags = ("--model-repository", str(_MODELS), "--model-control-mode", "explicit", "--load-model", MODEL)
    with own_server(*flags) as place, Progress() as progress:
        task = progress.add_task("answers", total=answers)
        result = prove(place, corpus, answers, max_tokens, lambda: progress.advance(task))
    for fault in result.faults[:20]:
        print(fault)
    ends = ", ".join(f"{count:,} {end}" for end, count in result.ends.most_common())
    print(f"{len(corpus)} schemas, {answers:,} answers: {ends} ({result.ended:.1%} ended); {len(result.faults)} faults")
    sys.exit(bool(result.faults) or result.ended < _LEAST_ENDED)


if __name__ == "__main__":
    app()
