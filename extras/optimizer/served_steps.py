"""What a client sees of a server's steps: sequences that decode together, and prompts that are alone.

The client runs in this process, which has nothing else to do.
"""

import asyncio
from collections.abc import Iterator
from time import perf_counter

from ...bench.load.driver import OK, LoadDriver, LoadRecord, LoopMode, RequestOptions
from ...bench.load.figures import inter_token_times, ttft
from ...bench.load.plan import Prompts
from ...bench.load.planned_requests import uniform_jobs
from ...bench.load.worker import LoadTarget, make_sender
from ...bench.server_process import ServerAddress, fetch_metrics
from ...core.errors import Unavailable
from ...telemetry.scrape import parse_scrape
from .engine_measurement import Tell
from .served_fit import ServedDecode, ServedLoad, ServedPrompt, ServedTimes

_SHORT, _NEW = 16, 48
"""Tokens of the prompts of sequences that decode together, and new ones."""

_CONTEXT, _CONTEXT_ROWS = 512, (4, 16)
_MOST_ROWS = 32
_PROMPTS = (16, 128, 512, 1500)
_REPEATS = 3
_REQUEST_SECONDS = 600.0
_STEPS = "charonia_step_seconds"


class ServedSteps:
    """Requests to one model of a server, whose sequences have at most `longest` tokens and run at most `most` at a
    time."""

    def __init__(self, address: ServerAddress, manner: RequestOptions, most: int, longest: int) -> None:
        self._address = address
        self._target = LoadTarget(host=address.host, port=address.http_port, door="completions", manner=manner)
        self._most = most
        self._longest = longest
        self._seed = 0

    def measure_waits(self, seconds: float, tell: Tell) -> list[ServedLoad]:
        """Of a server that was started here and tells how long its steps take: measure every load once, and again while
        there is time.

        Raises:
            Unavailable: a request failed.
        """
        began = perf_counter()
        loads = list[ServedLoad]()
        while not loads or perf_counter() - began < seconds:
            for rows, prompt in self._decode_cases():
                tell((perf_counter() - began) / seconds, f"over HTTP, {rows} at a time")
                loads.append(self._wait(rows, rows, prompt, min(_NEW, self._longest - prompt - 1)))
            for tokens in self._prompts():
                tell((perf_counter() - began) / seconds, f"over HTTP, a prompt of {tokens} tokens")
                loads.append(self._wait(1, _REPEATS, tokens, 2))
        return loads

    def _wait(self, concurrency: int, requests: int, prompt: int, new: int) -> ServedLoad:
        """Requests all at once, or one after the other."""
        before = self._step_totals()
        records = self._put(concurrency, requests, prompt, new)
        steps, computing = (after - earlier for after, earlier in zip(self._step_totals(), before, strict=True))
        if concurrency == 1:
            busy = sum(record.times[-1] - record.sent for record in records)
            begun = requests
        else:
            busy = max(record.times[-1] for record in records) - min(record.sent for record in records)
            begun = 1
        tokens = sum(record.tokens for record in records) - requests
        return ServedLoad(begun, begun * prompt, round(steps), tokens, busy - computing)

    def _step_totals(self) -> tuple[float, float]:
        """How many steps there were, and their seconds."""
        scrape = parse_scrape(fetch_metrics(self._address), "/metrics")
        model = self._target.manner.model
        count, seconds = (sum(scrape[f"{_STEPS}_{part}"][model].values()) for part in ("count", "sum"))
        return count, seconds

    def measure_times(self, seconds: float, tell: Tell) -> ServedTimes:
        """Of any server, what its client sees: measure everything once, and again while there is time.

        Raises:
            Unavailable: a request failed, or no two tokens came apart.
        """
        began = perf_counter()
        decodes = dict[tuple[int, int], list[float]]()
        prompts = dict[int, list[float]]()
        while not decodes or perf_counter() - began < seconds:
            for rows, context in (*self._decode_cases(), *self._context_cases()):
                tell((perf_counter() - began) / seconds, f"over HTTP, {rows} at a time")
                decodes.setdefault((rows, context), []).extend(self._decode(rows, context))
            for tokens in self._prompts():
                tell((perf_counter() - began) / seconds, f"over HTTP, a prompt of {tokens} tokens")
                records = self._put(1, _REPEATS, tokens, 2)
                prompts.setdefault(tokens, []).extend(map(ttft, records))
        if not any(decodes.values()):
            raise Unavailable("the tokens of each answer came together: the server's steps cannot be told apart")
        return ServedTimes(
            [ServedDecode(rows, context + _NEW // 2, gaps) for (rows, context), gaps in decodes.items() if gaps],
            [ServedPrompt(tokens, times) for tokens, times in prompts.items()],
        )

    def _prompts(self) -> Iterator[int]:
        yield from (tokens for tokens in _PROMPTS if tokens + 2 <= self._longest)

    def _decode_cases(self) -> Iterator[tuple[int, int]]:
        """Rows, and tokens of their prompts."""
        rows = 1
        while rows <= min(self._most, _MOST_ROWS):
            yield rows, min(_SHORT, self._longest // 4)
            rows *= 4 if rows == 1 else 2

    def _context_cases(self) -> Iterator[tuple[int, int]]:
        """The same, with prompts long enough to tell what attention takes."""
        if self._longest >= _CONTEXT + 2 * _NEW:
            yield from ((rows, _CONTEXT) for rows in sorted({min(self._most, rows) for rows in _CONTEXT_ROWS}))

    def _decode(self, rows: int, prompt: int) -> list[float]:
        """Gaps while all of them decode."""
        records = self._put(rows, rows, prompt, min(_NEW, self._longest - prompt - 1))
        begin = max(record.times[0] for record in records)
        end = min(record.times[-1] for record in records)
        return [
            gap
            for record in records
            for at, gap in zip(record.times[1:], inter_token_times(record), strict=True)
            if begin < at - gap and at <= end
        ]

    def _put(self, concurrency: int, requests: int, prompt: int, new: int) -> list[LoadRecord]:
        records = asyncio.run(self._put_at_once(concurrency, requests, prompt, new))
        if failed := next((record for record in records if record.status != OK), None):
            reason = f"{failed.status}{failed.detail and f': {failed.detail}'}"
            raise Unavailable(f"a request to {self._target.manner.model} for {prompt} + {new} tokens failed: {reason}")
        return records

    async def _put_at_once(self, concurrency: int, requests: int, prompt: int, new: int) -> list[LoadRecord]:
        self._seed += 1
        sender = make_sender(self._target)
        prompts = Prompts(form="ids", seed=self._seed)
        pace = LoopMode(concurrency=concurrency, timeout=_REQUEST_SECONDS)
        try:
            driver = LoadDriver(sender, prompts, pace, perf_counter())
            await driver.run(uniform_jobs([0.0] * requests, prompt, new))
        finally:
            await sender.close()
        return driver.records
