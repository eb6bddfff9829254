"""Agents' traffic: conversations that grow turn by turn, with pauses while tools run.

    python -m charonia.bench.agents trace agents.csv --sessions 8
    python -m charonia.bench.agents live http://localhost:8000 --scale 100 --pauses 0.1 --retain 60

`trace` writes a trace that `charonia simulate` plays: each session asks again some time after its last answer, with all
of the conversation so far and what a tool said. Turns, lengths and pauses are as published of coding agents: 43 turns,
a prompt of 142,000 tokens in the end, 444 new ones each; 86 of 100 pauses are within a second, 95 within ten, none is
longer than a minute. `--scale` divides lengths, for models and machines that are small.

`live` asks a server, or a router before several, with texts, and tells which part of the prompts was cached, as answers
say, and how long first tokens took. With `--retain` sessions ask to retain their cache, and release it in the end.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, zip_longest
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Annotated, NamedTuple

import numpy as np
from cyclopts import App, Parameter
from cyclopts.validators import Number

from ..core.errors import Unavailable
from .command import Count, Positive, exit_on_error, report_console, run_command, table_of
from .load.figures import Spread
from .load.http_client import HttpClient
from .load.planned_requests import PlannedRequest, draw_arrivals, write_trace
from .server_process import first_model, parse_server_url

_TURNS, _LAST_PROMPT, _NEW = 43, 142_000, 444
_FIRST_PROMPT = 20_000
"""Instructions and tools, and the task."""
_LONE_PROMPT = 32_000
_SPREAD = 0.8
"""Of what turns add: the sigma of a lognormal distribution."""
_PAUSES = ((0.0, 0.05), (0.86, 1.0), (0.95, 10.0), (1.0, 60.0))
"""Quantiles of pauses in seconds, between which their logarithm is on a straight line."""

_LETTERS = 4
"""Of a token, about."""
_WORDS = ("cache", "def", "file", "import", "line", "list", "return", "self", "test", "value", "while", "with")

app = App(name="python -m charonia.bench.agents", help=__doc__)


def agent_sessions(
    sessions: int, conversations: int, scale: float = 1.0, turns: int = _TURNS, seed: int = 0
) -> Iterator[PlannedRequest]:
    """The requests of so many sessions at a time, each of which has several conversations, one after the other."""
    random = np.random.default_rng(seed)
    levels, seconds = zip(*_PAUSES, strict=True)
    index = 0
    for session in range(sessions):
        start = float(random.uniform(0, _PAUSES[-1][1]))
        for conversation in range(conversations):
            steps = random.lognormal(0.0, _SPREAD, turns - 1)
            added = np.maximum(steps / steps.sum() * (_LAST_PROMPT - _FIRST_PROMPT), _NEW)
            prompts = np.maximum((_FIRST_PROMPT + np.cumsum([0.0, *added])) / scale, 2)
            pauses = np.exp(np.interp(random.random(turns), levels, np.log(seconds)))
            for turn in range(turns):
                prompt = int(prompts[turn])
                new = max(int(_NEW / scale), 1)
                pause = float(pauses[turn]) if turn or conversation else 0.0
                yield PlannedRequest(index, start, prompt, new, str(session), pause)
                index += 1


@app.command
def trace(
    file: Path,
    /,
    *,
    sessions: Count = 8,
    conversations: Count = 2,
    turns: Count = _TURNS,
    others: Annotated[float, Parameter(validator=Number(gte=0))] = 0.0,
    seconds: Annotated[float, Positive] = 600.0,
    scale: Annotated[float, Positive] = 1.0,
    seed: int = 0,
) -> None:
    """Write a trace for `charonia simulate --trace`.

    Parameters
    ----------
    sessions
        Agents at a time.
    conversations
        Of each, one after the other.
    others
        Prompts a second that come once beside them, of 32,000 tokens.
    seconds
        How long those come.
    scale
        Divides lengths.
    """
    with exit_on_error():
        lone = lone_requests(others, seconds, scale, seed) if others else ()
        write_trace(file, chain(agent_sessions(sessions, conversations, scale, turns, seed), lone))


def lone_requests(rate: float, seconds: float, scale: float, seed: int) -> Iterator[PlannedRequest]:
    """Long prompts that come once, beside sessions: so many a second on average."""
    for index, at in enumerate(draw_arrivals(rate, seed, duration=seconds)):
        yield PlannedRequest(index, at, max(int(_LONE_PROMPT / scale), 1), max(int(_NEW / scale), 1))


class AgentTurn(NamedTuple):
    """What a turn got."""

    prompt: int
    cached: int
    ttft: float


class LiveAgents:
    """Sessions that ask one server, each about texts of its own behind instructions that all have."""

    def __init__(self, client: HttpClient, model: str, common: int, pauses: float, retain: float, seed: int) -> None:
        self._client = client
        self._model = model
        self._instructions = _text(Random(seed), common)
        self._pauses, self._retain, self._seed = pauses, retain, seed

    async def run(self, jobs: Sequence[PlannedRequest]) -> list[AgentTurn]:
        """Have all sessions at once, each turn after the answer to the one before."""
        sessions = [[*turns] for _, turns in groupby(jobs, key=lambda job: job.session)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._session(number, turns)) for number, turns in enumerate(sessions)]
        except* Unavailable as error:
            raise error.exceptions[0] from None
        finally:
            self._client.close()
        return [turn for task in tasks for turn in task.result()]

    async def _session(self, number: int, jobs: Sequence[PlannedRequest]) -> list[AgentTurn]:
        random = Random((self._seed + 1) * 1_000_003 + number)
        turns, said, conversation = list[AgentTurn](), "", 0
        for job, following in zip_longest(jobs, jobs[1:]):
            await asyncio.sleep(self._pauses * job.pause)
            scope = f"agent-{self._seed}-{number}-{conversation}"
            prompt = self._instructions + said
            prompt += _text(random, job.prompt - len(prompt) // _LETTERS)
            turn, answer = await self._ask(prompt, job.new, scope)
            turns.append(turn)
            said = prompt[len(self._instructions) :] + answer
            if following is None or following.prompt < job.prompt:
                said = ""
                conversation += 1
                if self._retain:
                    await self._post("/v1/release_retention", {"model": self._model, "retention_scope": scope})
        return turns

    async def _ask(self, prompt: str, new: int, scope: str) -> tuple[AgentTurn, str]:
        body: dict[str, object] = {"model": self._model, "prompt": prompt, "max_tokens": new, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
        if self._retain:
            wish = {"start": 0, "end": None, "priority": 50, "duration": self._retain}
            body |= {"retention_scope": scope, "retention_directives": [wish]}
        began = perf_counter()
        answer = await self._post("/v1/completions", body)
        events = [event for event in answer if event[1] != b"data: [DONE]"]
        chunks = [json.loads(data.removeprefix(b"data: ")) for _, data in events]
        usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
        return AgentTurn(usage["prompt_tokens"], cached, events[0][0] - began), text

    async def _post(self, path: str, body: object) -> list[tuple[float, bytes]]:
        try:
            answer = await self._client.post(path, json.dumps(body).encode())
        except OSError as error:
            raise Unavailable(f"the server is not there, or hung up: {error}") from None
        if answer.status != 200:
            content = answer.body[:300].decode(errors="replace")
            raise Unavailable(f"{path} answered {answer.status}: {content}")
        return [(event.at, event.data) for event in answer.events]


def _text(random: Random, tokens: int) -> str:
    """Words of about so many tokens."""
    words: list[str] = []
    letters = 0
    while letters < tokens * _LETTERS:
        words.append(f"{random.choice(_WORDS)}{random.randrange(100)} ")
        letters += len(words[-1])
    return "".join(words)


@app.command
def live(
    url: str,
    /,
    *,
    model: str = "",
    sessions: Count = 8,
    conversations: Count = 1,
    turns: Count = _TURNS,
    scale: Annotated[float, Positive] = 100.0,
    pauses: Annotated[float, Parameter(validator=Number(gte=0))] = 1.0,
    retain: Annotated[float, Parameter(validator=Number(gte=0))] = 0.0,
    seed: int = 0,
    json_output: Annotated[bool, Parameter("--json", negative=())] = False,
    allow_remote: Annotated[bool, Parameter(negative=())] = False,
) -> None:
    """Put the traffic to a server, or a router.

    Parameters
    ----------
    model
        By default the first that it lists.
    pauses
        Times the pauses are as long as published.
    retain
        Seconds for which sessions ask to retain their cache.
    seed
        Texts differ by it: with another one nothing is cached of an earlier run.
    """
    with exit_on_error():
        place = parse_server_url(url, 0, allow_remote)
        name = model or first_model(place)
        jobs = [*agent_sessions(sessions, conversations, scale, turns, seed)]
        common = int(_FIRST_PROMPT / scale / 2)
        agents = LiveAgents(HttpClient(place.host, place.http_port), name, common, pauses, retain, seed)
        began = perf_counter()
        got = asyncio.run(agents.run(jobs))
        seconds = perf_counter() - began
    prompts, cached = sum(turn.prompt for turn in got), sum(turn.cached for turn in got)
    ttft = Spread.of([turn.ttft for turn in got])
    assert ttft is not None
    if json_output:
        figures = {"hit_rate": cached / prompts, "ttft_mean": ttft.mean, "ttft_p90": ttft.p90, "seconds": seconds}
        print(json.dumps(figures | {"turns": len(got), "prompt_tokens": prompts}))
        return
    table = table_of(("",), ("turns", "prompt tokens", "cached", "TTFT mean s", "p50", "p90", "p99", "seconds"))
    times = (f"{seconds:.3f}" for seconds in (ttft.mean, ttft.p50, ttft.p90, ttft.p99))
    table.add_row(name, str(len(got)), f"{prompts:,}", f"{cached / prompts:.1%}", *times, f"{seconds:.1f}")
    report_console().print(table)


if __name__ == "__main__":
    run_command(app)
