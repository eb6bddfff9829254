"""A server of ours that takes one configuration after the other, and is put under load.

It begins without models, in mode explicit, and is asked to load each configuration as a client would ask it. One that
ends is started again for the next.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from ...bench.load.worker import LoadRun, Watch, WorkerOutcome, run_here
from ...bench.server_process import ServerAddress, own_server
from ...core.errors import Unavailable
from ...core.model import RawConfig
from ...processes.host import resident_memory_of
from ...repository.config_io import config_to_text
from ...repository.model_source import ModelSource

_LOAD_SECONDS = 600.0
_POLL_SECONDS = 0.02
_SAMPLE_SECONDS = 0.1


class MeasuredServer:
    """Serves `models` of a repository, in their order; `flags`: more arguments of `charonia serve`. Close it."""

    def __init__(self, repository: Path, models: Sequence[ModelSource], flags: Sequence[str] = ()) -> None:
        fixed = ("--model-repository", str(repository), "--model-control-mode", "explicit", "--allow-pipelines")
        self._arguments = (*fixed, *flags)
        self._models = models
        self._stack = ExitStack()
        self._address: ServerAddress | None = None
        self._loaded: dict[str, str] = {}
        self._puts = 0

    @property
    def address(self) -> ServerAddress:
        """Its addresses; started if it does not run."""
        if self._address is None:
            self._address = self._stack.enter_context(own_server(*self._arguments))
        return self._address

    def close(self) -> None:
        """Stop it; what it had loaded is gone."""
        self._address = None
        self._loaded = {}
        self._stack.close()

    def load(self, configs: Mapping[str, RawConfig]) -> Any:
        """Load the models with these configs, by name, and unload before what had others; the config of the last, as
        the server completed it, in JSON.

        Raises:
            Unavailable: a model does not load, the message says why; or the server ended.
        """
        texts = {name: config_to_text(config) for name, config in configs.items()}
        changed: set[str] = set()
        for source in self._models:
            if self._loaded.get(source.name) != texts[source.name] or source.steps & changed:
                changed.add(source.name)
        ordered = [source.name for source in self._models if source.name in changed]
        if len(ordered) == len(self._models):
            self._puts = 0
        try:
            for name in [name for name in reversed(ordered) if name in self._loaded]:
                self._unload(name)
            for name in ordered:
                override = {"parameters": {"config": json.dumps(configs[name])}}
                self._ask(f"/v2/repository/models/{quote(name, safe='')}/load", override)
                self._loaded[name] = texts[name]
            return self._ask(f"/v2/models/{quote(self._models[-1].name, safe='')}/config")
        except (OSError, HTTPException) as error:
            self.close()
            raise Unavailable(f"the server ended while it loaded: {error}") from None

    def _unload(self, name: str) -> None:
        del self._loaded[name]
        self._ask(f"/v2/repository/models/{quote(name, safe='')}/unload", {})
        deadline = time.monotonic() + _LOAD_SECONDS
        while any(
            model["name"] == name and model.get("state") not in (None, "UNAVAILABLE")
            for model in self._ask("/v2/repository/index", {})
        ):
            if time.monotonic() > deadline:
                raise Unavailable(f"model '{name}' is not unloaded after {_LOAD_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)

    def _ask(self, path: str, body: Any = None) -> Any:
        return ask_server(self.address, path, body)

    def put(self, load: LoadRun, watch: Watch) -> tuple[WorkerOutcome, float]:
        """Put a load to it; what came of it, and the most memory of its processes meanwhile. Of loads that the same
        models take one after the other each has prompts of its own: those before are in their prefix caches.

        Raises:
            Unavailable: the first requests failed, or the server ended.
        """
        prompts = msgspec.structs.replace(load.prompts, seed=load.prompts.seed + self._puts)
        load = msgspec.structs.replace(load, prompts=prompts)
        self._puts += 1
        pid = self.address.pid
        assert pid is not None
        try:
            with peak_memory(pid) as peak:
                return run_here(load, watch), float(peak())
        except Unavailable:
            if not self._answers():
                self.close()
            raise

    def _answers(self) -> bool:
        try:
            self._ask("/v2/repository/index", {})
        except (OSError, HTTPException, Unavailable):
            return False
        return True


def ask_server(
    address: ServerAddress, path: str, body: Any = None, *, api_key: str = "", timeout: float = _LOAD_SECONDS
) -> Any:
    """The content of a JSON answer: to a POST of `body`, without one to a GET.

    Raises:
        Unavailable: an error's status; with its message.
        OSError, HTTPException: there is no such server, or it broke off.
    """
    connection = HTTPConnection(address.host, address.http_port, timeout=timeout)
    try:
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        connection.request("GET" if body is None else "POST", path, data, headers)
        answer = connection.getresponse()
        content = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise Unavailable(_error_text(content) or f"{path}: status {answer.status}")
    try:
        return json.loads(content) if content else None
    except ValueError:
        raise Unavailable(f"{path}: the answer is no JSON") from None


def _error_text(content: bytes) -> str:
    with suppress(ValueError, LookupError, TypeError):
        return str(json.loads(content)["error"]).strip()
    return " ".join(content.decode(errors="replace").split())[:300]


@contextmanager
def peak_memory(pid: int) -> Iterator[Callable[[], int]]:
    """A function that tells the most bytes of a process and all that it started, sampled during the block."""
    enough = threading.Event()
    most = [resident_memory_of([pid])]

    def sample() -> None:
        while not enough.wait(_SAMPLE_SECONDS):
            most[0] = max(most[0], resident_memory_of([pid]))

    thread = threading.Thread(target=sample, name="peak memory", daemon=True)
    thread.start()
    try:
        yield lambda: max(most[0], resident_memory_of([pid]))
    finally:
        enough.set()
        thread.join()
