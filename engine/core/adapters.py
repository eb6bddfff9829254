"""The adapters of an engine core: loaded, being loaded, or to be forgotten. For the step loop's thread.

Knows nothing of files and matrices: the executor reads them.
"""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial

from ...core.adapter import Adapter
from ...core.errors import SentError
from ...core.native_calls import CONTROL_FLOW
from ..worker.executor import Executor
from .messages import AdapterLoaded, AdapterRefused, AdapterReply, LoadAdapter


class CoreAdapters:
    """The adapters of one core. `reply` is called from any thread with the outcome of every load, which `finish_load`
    must get. `in_use`: whether a sequence, or a plan without a result, has the adapter with this digest."""

    def __init__(
        self, executor: Executor, reply: Callable[[AdapterReply], None], in_use: Callable[[str], bool]
    ) -> None:
        self._executor = executor
        self._reply = reply
        self._in_use = in_use
        self._loaded: Counter[str] = Counter()  # by digest, loads that were not unloaded
        self.leaving = set[str]()
        """Digests of those that are to be unloaded when nothing has them any more."""
        self._loads = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._loaded

    def load(self, message: LoadAdapter) -> None:
        self._loads += 1
        self._executor.load_adapter(message.path).add_done_callback(partial(self._on_loaded, message.number))

    def finish_load(self, outcome: AdapterReply) -> None:
        self._loads -= 1
        if isinstance(outcome, AdapterLoaded):
            self._loaded[outcome.adapter.digest] += 1
            self.leaving.discard(outcome.adapter.digest)

    def unload(self, digest: str) -> None:
        """Take back one load. An adapter without loads is forgotten when nothing has it any more; unknown ones are
        ignored."""
        if digest not in self._loaded:
            return
        self._loaded[digest] -= 1
        if not self._loaded[digest]:
            del self._loaded[digest]
            self.leaving.add(digest)

    def forget_unused(self) -> None:
        """Unload the adapters that are leaving and not in use. While any load goes on none is: it may be a leaving
        one's, which then stays in memory."""
        if self._loads:
            return
        for digest in [digest for digest in self.leaving if not self._in_use(digest)]:
            self.leaving.remove(digest)
            self._executor.unload_adapter(digest)

    def _on_loaded(self, number: int, loaded: Future[Adapter]) -> None:
        """Called by the thread that loaded, or at once."""
        try:
            self._reply(AdapterLoaded(number, loaded.result()))
        except CancelledError:
            return  # the core is being stopped
        except CONTROL_FLOW:
            raise
        except BaseException as error:
            self._reply(AdapterRefused(number, SentError.of(error)))
