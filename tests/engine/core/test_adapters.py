"""Adapters that come and go in a core: loads that are counted, and adapters that stay while sequences have them."""

from concurrent.futures import Future

import pytest

from charonia.core.adapter import Adapter
from charonia.core.errors import InvalidArgument, NotFound, SentError
from charonia.engine.core.adapters import CoreAdapters
from charonia.engine.core.messages import AdapterLoaded, AdapterRefused, AdapterReply, LoadAdapter
from charonia.engine.worker.fake_executor import FakeExecutor


class Loader(FakeExecutor):
    """An executor whose loads end when the test says so."""

    def __init__(self) -> None:
        super().__init__(threaded=False)
        self.loads: list[Future[Adapter]] = []
        self.unloaded: list[str] = []

    def load_adapter(self, path: str) -> Future[Adapter]:
        self.loads.append(Future())
        return self.loads[-1]

    def unload_adapter(self, digest: str) -> None:
        self.unloaded.append(digest)


class Core:
    """`CoreAdapters` as the step loop has them; `used`: digests that sequences have."""

    def __init__(self) -> None:
        self.executor, self.used = Loader(), set[str]()
        self.replies: list[AdapterReply] = []
        self.adapters = CoreAdapters(self.executor, self._reply, self.used.__contains__)

    def _reply(self, outcome: AdapterReply) -> None:
        self.adapters.finish_load(outcome)
        self.replies.append(outcome)

    def load(self, digest: str = "d") -> None:
        self.begin()
        self.end(digest)

    def begin(self) -> None:
        self.adapters.load(LoadAdapter(len(self.executor.loads), "somewhere"))

    def end(self, digest: str = "d") -> None:
        self.executor.loads[-1].set_result(Adapter("", "somewhere", digest, 8, 100))


@pytest.fixture
def core() -> Core:
    return Core()


def test_an_adapter_is_there_when_it_is_loaded(core: Core) -> None:
    core.begin()
    assert "d" not in core.adapters
    core.end()
    assert "d" in core.adapters
    assert core.replies == [AdapterLoaded(0, Adapter("", "somewhere", "d", 8, 100))]


def test_an_adapter_that_sequences_have_stays_until_they_end(core: Core) -> None:
    core.load()
    core.used.add("d")
    core.adapters.unload("d")
    core.adapters.forget_unused()
    assert "d" not in core.adapters, "no new sequence gets it"
    assert core.executor.unloaded == []
    core.used.clear()
    core.adapters.forget_unused()
    assert core.executor.unloaded == ["d"]


def test_an_adapter_is_unloaded_as_often_as_it_was_loaded(core: Core) -> None:
    core.load()
    core.load()
    core.adapters.unload("d")
    core.adapters.forget_unused()
    assert "d" in core.adapters
    core.adapters.unload("d")
    core.adapters.unload("d")
    core.adapters.forget_unused()
    assert core.executor.unloaded == ["d"]


def test_an_adapter_that_comes_back_while_it_leaves_stays(core: Core) -> None:
    core.load()
    core.begin()
    core.adapters.unload("d")
    core.adapters.forget_unused()
    assert core.executor.unloaded == [], "the load may have found it"
    core.end()
    core.adapters.forget_unused()
    assert core.executor.unloaded == []
    assert "d" in core.adapters


@pytest.mark.parametrize(
    ("error", "sent"),
    [
        (InvalidArgument("no", field="lora_path"), SentError("InvalidArgument", "no", "lora_path")),
        (NotFound("where"), SentError("NotFound", "where")),
        (OSError("disk"), SentError("Internal", "OSError: disk")),
    ],
)
def test_what_is_wrong_with_an_adapter_is_told(core: Core, error: Exception, sent: SentError) -> None:
    core.begin()
    core.executor.loads[0].set_exception(error)
    assert core.replies == [AdapterRefused(0, sent)]
