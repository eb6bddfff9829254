"""What a drafter gains: tokens a second with it, over those without, and whether the answers are the same.

    python -m charonia.bench.drafters ./my-checkpoint
    python -m charonia.bench.drafters ./my-checkpoint --drafters ngram '{"method": "eagle3", "model": "HEAD"}'
    python -m charonia.bench.drafters ./my-checkpoint --prompts prompts.jsonl -- --quantization int8

A server for each drafter and one without take turns over the same prompts. Which texts are asked for decides what can
be guessed of them: bring prompts like your own, one {"prompt": "..."} a line. Without any the beginnings of modules of
Python's standard library are to be continued. Ends with status 1 where a drafter changed an answer.
"""

import bisect
import heapq
import json
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from inspect import getsource
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter
from rich.console import Console

from ..core.errors import InvalidArgument, Unavailable
from ..engine.options import read_speculation_config
from .command import Count, exit_on_error, log_to, report_console, run_command, table_of
from .server_process import ServerAddress, fetch, first_model, own_server
from .trial import median_of, ratio_of, take_turns

NONE = "none"
"""The contender without drafts."""

_PROMPT_CHARACTERS = 1500

app = App(name="python -m charonia.bench.drafters", help=__doc__)


class DrafterRun(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of one contender: the answers to all prompts."""

    answers: list[str]
    tokens: int
    seconds: float
    verified: int
    """Steps that verified drafts."""
    accepted: int
    """Drafts that were right."""

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def length(self) -> float:
        """Mean tokens of a step that verified drafts; 1 where none did."""
        return 1 + self.accepted / max(self.verified, 1)


def read_prompts(path: Path | None) -> list[str]:
    """The prompts of a file in JSON Lines, or those that are there without one.

    Raises:
        InvalidArgument: it cannot be read, or a line has no prompt.
    """
    if path is None:
        return [getsource(module)[:_PROMPT_CHARACTERS] for module in (textwrap, shlex, heapq, bisect)]
    try:
        return [str(json.loads(line)["prompt"]) for line in path.read_text().splitlines()]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InvalidArgument(f"prompts {path}: {error}", field="prompts") from None


def read_drafters(drafters: Sequence[str]) -> dict[str, str]:
    """The value of --speculative-config by the contender's name: a method's, or the whole value.

    Raises:
        InvalidArgument: there is no such drafter, or a key means nothing.
    """
    configs = {name: name if name.startswith("{") else json.dumps({"method": name}) for name in drafters}
    for config in configs.values():
        read_speculation_config(config)
    return configs


def ask(place: ServerAddress, prompts: Sequence[str], streams: int, new: int) -> DrafterRun:
    """All prompts, so many at a time.

    Raises:
        Unavailable: a request failed.
    """
    body = {"model": first_model(place), "max_tokens": new, "temperature": 0, "ignore_eos": True}

    def complete(prompt: str) -> Any:
        return json.loads(fetch(place, "/v1/completions", body | {"prompt": prompt}, timeout=600.0))

    began = perf_counter()
    try:
        with ThreadPoolExecutor(streams) as threads:
            answers = list(threads.map(complete, prompts))
    except OSError as error:
        raise Unavailable(f"a completion failed: {error}") from None
    seconds = perf_counter() - began
    drafts = [answer["metrics"]["speculative_decoding"] for answer in answers if "metrics" in answer]
    histograms = [summary["acceptance_histogram"] for summary in drafts]
    return DrafterRun(
        answers=[answer["choices"][0]["text"] for answer in answers],
        tokens=sum(answer["usage"]["completion_tokens"] for answer in answers),
        seconds=seconds,
        verified=sum(map(sum, histograms)),
        accepted=sum(right * steps for histogram in histograms for right, steps in enumerate(histogram)),
    )


def changed_answers(runs: Sequence[DrafterRun], plain: DrafterRun) -> int:
    """How many answers are others than those without drafts."""
    return sum(one != other for run in runs for one, other in zip(run.answers, plain.answers, strict=True))


def show(console: Console, turns: dict[str, list[DrafterRun]]) -> None:
    """Print the medians beside those without drafts."""
    columns = ("tokens/s", "of none", "tokens a verifying step", "other answers")
    table = table_of(("drafter",), columns)
    plain = turns[NONE]
    for name, runs in turns.items():
        speed = median_of(runs, lambda run: run.speed)
        ratio = ratio_of(runs, plain, lambda run: run.speed)
        length = f"{median_of(runs, lambda run: run.length):.2f}" if runs[0].verified else "-"
        table.add_row(name, f"{speed:.1f}", f"{ratio:.2f}", length, str(changed_answers(runs, plain[0])))
    console.print(table)


def _contenders(
    stack: ExitStack, checkpoint: Path, flags: Sequence[str], configs: dict[str, str]
) -> Iterator[tuple[str, ServerAddress]]:
    tells = "--per-request-spec-decode-metrics", "summary"
    yield NONE, stack.enter_context(own_server(str(checkpoint), *flags, *tells))
    for name, config in configs.items():
        yield name, stack.enter_context(own_server(str(checkpoint), *flags, *tells, "--speculative-config", config))


@app.default
def main(
    checkpoint: Path,
    *flags: Annotated[str, Parameter(allow_leading_hyphen=True)],
    drafters: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ("ngram", "suffix"),
    prompts: Path | None = None,
    streams: Count = 1,
    new: Count = 256,
    repeats: Count = 3,
    json: Path | None = None,
) -> int:
    """Compare drafters with none.

    Parameters
    ----------
    checkpoint
        What to serve.
    flags
        Further flags of `charonia serve`, behind --.
    drafters
        Methods, or whole values of --speculative-config.
    prompts
        A file of prompts, one {"prompt": "..."} a line.
    streams
        Requests at a time.
    new
        Tokens of each answer.
    repeats
        Turns of each contender.
    json
        Write the turns to this file.
    """
    console = report_console()
    with exit_on_error(), ExitStack() as stack:
        texts, configs = read_prompts(prompts), read_drafters(drafters)
        contenders = {}
        for name, place in _contenders(stack, checkpoint, flags, configs):
            ask(place, texts[:1], 1, new)
            contenders[name] = lambda _, place=place: ask(place, texts, streams, new)
        turns = take_turns(contenders, repeats, log_to(console), lambda run: f"{run.speed:.1f} tokens/s")
    show(console, turns)
    if json:
        json.write_bytes(msgspec.json.encode(turns))
    return 1 if any(changed_answers(runs, turns[NONE][0]) for runs in turns.values()) else 0


if __name__ == "__main__":
    run_command(app)
