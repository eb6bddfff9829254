"""No request is lost while routes are switched: `python -m tests.proofs.route_switches`.

Clients ask two routes of a server without a pause, one for tensors and one for streams of text, while requests switch
each from one arm to the other and back, a hundred times. The tensors' arms are versions of which the model's policy
serves one alone: the other is loaded for every second switch, and unloaded after it. Each request must be answered,
whole, by an arm, and both arms must have answered.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx
from cyclopts import App
from rich.console import Console

from charonia.bench.load.fake_model import write_config, write_repository, write_words
from charonia.bench.server_process import ServerAddress, own_server

_MODEL = """
backend: "identity"
input { name: "A" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "B" data_type: TYPE_FP32 dims: [ 4 ] }
"""
_BODY = {"inputs": [{"name": "A", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}]}
_TOKENS = 8
_BETWEEN = 20
"""Requests that are answered between two switches, at least."""

_PATIENCE = 60.0

app = App(name="python -m tests.proofs.route_switches", help=__doc__)


class SwitchedRoute(NamedTuple):
    """A route by its name, and the two targets that it is switched between."""

    name: str
    targets: tuple[dict[str, Any], dict[str, Any]]


TENSORS = SwitchedRoute("tensors", ({"model": "m", "version": 1}, {"model": "m", "version": 2}))
TEXTS = SwitchedRoute("texts", ({"model": "fake"}, {"model": "other"}))


class SwitchResult(NamedTuple):
    """`answered`: requests by route and arm; `lost`: what became of others."""

    answered: Counter[tuple[str, str]]
    lost: list[str]

    @property
    def holds(self) -> bool:
        return not self.lost and len(self.answered) == 4


class RouteLoad:
    """Clients of two routes, `clients` of each, from the first switch to the last."""

    def __init__(self, client: httpx.AsyncClient, tensors: SwitchedRoute, texts: SwitchedRoute, clients: int) -> None:
        self._client, self._tensors, self._texts, self._clients = client, tensors, texts, clients
        self._wanted, self._enough = 0, asyncio.Event()
        self._ended = False
        self.result = SwitchResult(Counter(), [])

    async def switch(self, times: int) -> SwitchResult:
        """Raises `TimeoutError` if nothing is answered for long."""
        await self._put(0)
        async with asyncio.TaskGroup() as group:
            for ask in (self._ask_tensors, self._ask_texts):
                for _ in range(self._clients):
                    group.create_task(self._ask(ask))
            try:
                for number in range(1, times + 1):
                    await self._until_answered()
                    await self._put(number % 2)
                await self._until_answered()
            finally:
                self._ended = True
        return self.result

    async def _put(self, chosen: int) -> None:
        for route in (self._tensors, self._texts):
            arm = {**route.targets[chosen], "weight": 1}
            (await self._client.put(f"/v2/routes/{route.name}", json={"arms": [arm]})).raise_for_status()

    async def _until_answered(self) -> None:
        self._wanted = self.result.answered.total() + _BETWEEN
        self._enough.clear()
        async with asyncio.timeout(_PATIENCE):
            await self._enough.wait()

    async def _ask(self, ask: Callable[[], Awaitable[tuple[str, str]]]) -> None:
        while not self._ended:
            try:
                self.result.answered[await ask()] += 1
            except (httpx.HTTPError, ValueError, LookupError) as error:
                self.result.lost.append(f"{type(error).__name__}: {error}")
            if self.result.answered.total() >= self._wanted or self.result.lost:
                self._enough.set()

    async def _ask_tensors(self) -> tuple[str, str]:
        route = self._tensors.name
        answer = await self._client.post(f"/v2/models/{route}/infer", json=_BODY)
        return route, _arm(answer, '"data":[1.0,2.0,3.0,4.0]' in answer.text)

    async def _ask_texts(self) -> tuple[str, str]:
        asked = {"model": self._texts.name, "prompt": "a", "max_tokens": _TOKENS, "ignore_eos": True}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        answer = await self._client.post("/v1/completions", json=asked | streamed)
        whole = f'"completion_tokens":{_TOKENS}' in answer.text and "[DONE]" in answer.text
        return self._texts.name, _arm(answer, whole)


def _arm(answer: httpx.Response, whole: bool) -> str:
    """Raises `ValueError` for what is no whole answer."""
    if answer.status_code != 200 or not whole:
        raise ValueError(f"{answer.status_code} {answer.text[:500]}")
    return answer.headers["x-charonia-arm"]


def write_models(directory: Path) -> None:
    """What the routes' arms are."""
    for version in "12":
        (directory / "m" / version).mkdir(parents=True)
    (directory / "m" / "config.pbtxt").write_text(_MODEL)
    write_repository(directory, {})
    write_words(directory / "other" / "1")
    write_config(directory / "other", {"executor": "fake", "fake_vocab_size": 1024})


async def run_switches(
    place: ServerAddress,
    switches: int,
    clients: int,
    tensors: SwitchedRoute = TENSORS,
    texts: SwitchedRoute = TEXTS,
) -> SwitchResult:
    """At a server that has the models, and runs with `--state-dir`."""
    url = f"http://{place.host}:{place.http_port}"
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_PATIENCE, limits=limits, trust_env=False) as client:
        return await RouteLoad(client, tensors, texts, clients).switch(switches)


def switch_own_server(switches: int, clients: int) -> SwitchResult:
    with TemporaryDirectory(prefix="charonia-proof-") as directory:
        models, state = Path(directory) / "models", Path(directory) / "state"
        write_models(models)
        with own_server("--model-repository", str(models), "--state-dir", str(state)) as place:
            return asyncio.run(run_switches(place, switches, clients))


@app.default
def main(*, switches: int = 100, clients: int = 8) -> int:
    """Switch again and again; the exit code is 0 if nothing was lost.

    Parameters
    ----------
    switches
        Of both routes.
    clients
        Of each route, which ask one request after the other.
    """
    result = switch_own_server(switches, clients)
    console = Console()
    for (route, arm), count in sorted(result.answered.items()):
        console.print(f"{route}: {count} answered by {arm}", highlight=False)
    console.print(f"{len(result.lost)} lost of {result.answered.total() + len(result.lost)}", highlight=False)
    for lost in result.lost[:10]:
        console.print(lost, highlight=False, markup=False)
    return 0 if result.holds else 1


if __name__ == "__main__":
    sys.exit(app())
