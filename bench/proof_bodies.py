"""Ten thousand requests that are wrong, and none of them hurts: `python -m charonia.bench.proof_bodies`.

Mutants of valid requests go to every door that takes one, a third of them over gRPC. Each must be answered or hung up
on within a bound, none with a fault of the server's (5xx; over gRPC INTERNAL, UNKNOWN and the like), none with a
traceback in its log; and afterwards it still serves, and its memory has not grown. The core computes: its weights are
random.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import orjson
from cyclopts import App
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from .load_http import Answer
from .mutant_http import LIMIT, Mutant, mutant, valid_requests
from .mutant_rpc import RpcMutant, rpc_mutant
from .serve_census import Census, census, until_idle
from .serve_server import Place
from .serve_tiny import ECHO, NAME, tiny_server
from .trend import Trend, trend

AT_ONCE = 24
LOOKS = 60
"""How often memory is looked at."""
_BOUND_SECONDS = 30.0
"""No answer may take longer."""
_PATIENCE = 0.3
"""Seconds in which a request whose end nobody knows may be answered before we hang up."""
_RPC_SHARE = 3
"""Every third mutant goes over gRPC."""
_SERVICE = "/inference.GRPCInferenceService/"
_REFUSALS = ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNIMPLEMENTED")
"""Statuses that say it is the request: UNIMPLEMENTED is Triton's for a stream asked of ModelInfer."""
QUEUE_FULL = "429"
_EXPIRED = "Request timeout expired"
"""Triton's 503 for a request whose own `timeout`, mutated to almost nothing, was over: asked for, and given."""
_TRITONS = (
    _EXPIRED,
    "hape does not match true shape",
    "HTTP end point doesn't support models with decoupled transaction policy",
    "Unsupported compression type",
    "can not be updated through network protocol",
    "trace level 'TENSORS' is not served",
)
"""What Triton's protocol answers with 5xx although it is the request's fault."""

app = App(name="python -m charonia.bench.proof_bodies", help=__doc__)


class Targets(NamedTuple):
    """A language model, and one of the backend `identity` if there is one."""

    model: str
    identity: str = ""


class Verdict(NamedTuple):
    """How one mutant was answered, in a word; `fault`: what is wrong with that."""

    kind: str
    answer: str
    fault: str = ""


class Look(NamedTuple):
    done: int
    seen: Census


class Findings(NamedTuple):
    verdicts: list[Verdict]
    looks: list[Look]

    @property
    def faults(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.fault]


# HTTP


async def ask_http(place: Place, asked: Mutant) -> Verdict:
    """Send it on a connection of its own, and hear what comes."""
    try:
        async with asyncio.timeout(_BOUND_SECONDS):
            answer = await _exchange(place, asked)
    except TimeoutError:
        return Verdict(asked.kind, "hung", f"no answer within {_BOUND_SECONDS:g} s: {asked.wire[:300]!r}")
    except (ValueError, LookupError) as error:
        return Verdict(asked.kind, "strange", f"not HTTP ({error}): {asked.wire[:300]!r}")
    fault = _fault_of(asked, answer)
    word = f"{answer.status // 100}xx" if answer.status else "hung up"
    word = QUEUE_FULL if answer.status == 429 else word
    return Verdict(asked.kind, word, f"{fault}: {asked.wire[:300]!r}" if fault else "")


async def _exchange(place: Place, asked: Mutant) -> Answer:
    answer = Answer()
    reader, writer = await asyncio.open_connection(place.host, place.http_port)
    try:
        writer.write(asked.wire)
        try:
            async with asyncio.timeout(_PATIENCE if asked.unframed else None):
                await _hear(reader, answer)
        except TimeoutError:
            # Whoever hangs up is heard no more: what the server waits for will not come.
            writer.write_eof()
            await _hear(reader, answer)
    except OSError:  # gone in the middle of anything
        pass
    finally:
        writer.transport.abort()
    return answer


async def _hear(reader: asyncio.StreamReader, answer: Answer) -> None:
    while not answer.complete and (data := await reader.read(1 << 16)):
        answer.feed(data, 0.0)


def _fault_of(asked: Mutant, answer: Answer) -> str:
    if answer.status >= 500:
        listed = any(text.encode() in answer.body for text in _TRITONS)
        return "" if listed else f"{answer.status} {answer.body[:200]!r}"
    if not (asked.unframed or answer.complete):
        return f"hung up on, {answer.status or 'without an answer'}"
    for event in answer.events:
        if error := _error_in(event.data):
            return f"error in a stream: {error}"
    return ""


def _error_in(event: bytes) -> str:
    content = event.removeprefix(b"data:").strip()
    if content == b"[DONE]":
        return ""
    error = orjson.loads(content).get("error", "")
    return "" if _EXPIRED in str(error) else str(error)


# gRPC


class Rpc:
    """Sends bytes where messages belong, over one channel."""

    def __init__(self, place: Place) -> None:
        import grpc

        self._rpc_error = grpc.RpcError
        self._channel = grpc.aio.insecure_channel(f"{place.host}:{place.grpc_port}")
        self._infer = self._channel.unary_unary(f"{_SERVICE}ModelInfer")
        self._stream = self._channel.stream_stream(f"{_SERVICE}ModelStreamInfer")

    async def ask(self, asked: RpcMutant) -> Verdict:
        """Send it as the one message of a call, and hear what comes."""
        status = await self._status(asked)
        code, _, detail = status.partition(": ")
        expired = code == "UNAVAILABLE" and detail == _EXPIRED
        right = code in _REFUSALS or expired
        return Verdict(asked.kind, code, "" if right else f"{status[:300]}: {asked.data[:300]!r}")

    async def _status(self, asked: RpcMutant) -> str:
        try:
            if not asked.streaming:
                await self._infer(asked.data, timeout=_BOUND_SECONDS)
                return "OK"
            call = self._stream(iter([asked.data]), timeout=_BOUND_SECONDS)
            return _said([response async for response in call])
        except self._rpc_error as error:
            return f"{error.code().name}: {error.details()}"

    async def close(self) -> None:
        await self._channel.close()


def _said(responses: list[bytes]) -> str:
    from tritonclient.grpc import service_pb2 as pb

    errors = [pb.ModelStreamInferResponse.FromString(each).error_message for each in responses]
    if any("Internal Server Error" in error for error in errors):
        return f"INTERNAL: {errors}"
    return "INVALID_ARGUMENT" if any(errors) else "OK"


# All of them


async def assail(
    place: Place, targets: Targets, numbers: range, seed: int, tell: Callable[[], None] = lambda: None
) -> Findings:
    """Send the mutants of these numbers, some at a time, and look at the server's processes in between."""
    model = targets.model
    valid, remaining, rpc = valid_requests(model, targets.identity), iter(numbers), Rpc(place)
    found, every = Findings([], []), max(1, len(numbers) // LOOKS)

    async def one_after_another() -> None:
        for number in remaining:
            if number % _RPC_SHARE:
                verdict = await ask_http(place, mutant(valid, seed, number))
            else:
                verdict = await rpc.ask(rpc_mutant(model, seed, number))
            if verdict.fault:
                verdict = verdict._replace(fault=f"number {number}: {verdict.fault}")
            found.verdicts.append(verdict)
            if len(found.verdicts) % every == 0:
                found.looks.append(Look(len(found.verdicts), census(place)))
            tell()

    try:
        async with asyncio.TaskGroup() as senders:
            for _ in range(AT_ONCE):
                senders.create_task(one_after_another())
    finally:
        await rpc.close()
    await until_idle(place)
    return found


def tracebacks(place: Place) -> list[str]:
    """The last line of every traceback in the server's log."""
    text = "" if place.log is None else place.log.read_text(errors="replace")
    said = text.split("Traceback (most recent call last):")[1:]
    return [next((line for line in each.splitlines() if line[:1].strip()), "") for each in said]


def memory(looks: list[Look]) -> dict[str, Trend]:
    """How the memory of the frontend and of the core went, in bytes."""
    done = [look.done for look in looks]
    return {
        "frontend": trend(done, [look.seen.frontend.rss for look in looks]),
        "core": trend(done, [look.seen.cores[0].rss for look in looks]),
    }


def show(console: Console, found: Findings, trends: dict[str, Trend]) -> None:
    """The table of what was answered to what, and the figures."""
    answers = sorted({verdict.answer for verdict in found.verdicts})
    table = Table("mutation", "sent", *answers)
    counts = Counter((verdict.kind, verdict.answer) for verdict in found.verdicts)
    for kind in sorted({verdict.kind for verdict in found.verdicts}):
        row = [counts[kind, answer] for answer in answers]
        table.add_row(kind, str(sum(row)), *(str(count or "") for count in row))
    console.print(table)
    for verdict in found.faults[:20]:
        console.print(f"{verdict.kind}: {verdict.fault}", markup=False, highlight=False)
    for who, each in trends.items():
        print(f"{who}: {told(each)}")


def told(each: Trend) -> str:
    """Memory and its growth, for people."""
    mib = 1 << 20
    word = "flat" if each.flat else "GROWS"
    return f"{each.mean / mib:.1f} MiB, grew {each.growth / mib:+.2f} MiB, noise {each.noise / mib:.2f} MiB: {word}"


@app.default
def main(count: int = 10_000, seed: int = 0, first: int = 0) -> None:
    """Send `count` mutants from number `first` on; the exit code tells whether all was well."""
    console = Console()
    with tiny_server("--http-max-input-size", str(LIMIT)) as place, Progress(console=console) as progress:
        task = progress.add_task("mutants", total=count)
        found = asyncio.run(
            assail(place, Targets(NAME, ECHO), range(first, first + count), seed, lambda: progress.advance(task))
        )
        cores, broken = census(place).cores, tracebacks(place)
    same = cores[0].pid == found.looks[0].seen.cores[0].pid
    trends = memory(found.looks)
    show(console, found, trends)
    for line in broken[:20]:
        print(f"in the log: {line}")
    print(
        f"{len(found.verdicts):,} mutants, {len(found.faults)} answered wrongly, {len(broken)} tracebacks, "
        f"core {'alive throughout' if same else 'LOST'}"
    )
    sys.exit(bool(found.faults or broken) or not same or not all(each.flat for each in trends.values()))


if __name__ == "__main__":
    app()
