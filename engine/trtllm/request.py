"""One sequence on its way through TensorRT-LLM, from our queue to its last token.

Knows nothing of other sequences.
"""

import asyncio
import logging
import time
from typing import Any, NamedTuple

from ...core.errors import CharoniaError
from ...scheduler.sequence import Sequence
from ..core.messages import AddRequest
from ..frontend.token_stream import TokenStream
from .package import TrtllmPackage
from .results import ResultReader, to_client_error

log = logging.getLogger(__name__)


class GenerateArguments(NamedTuple):
    """A sequence in TensorRT-LLM's words: what `generate_async` is called with."""

    arguments: dict[str, Any]


class TrtllmRequest:
    """Waits while `task` is None. `result`: TensorRT-LLM's, while it works on this. `timer`: ends it in time."""

    def __init__(
        self,
        add: AddRequest,
        submission: GenerateArguments,
        channel: TokenStream,
        sequence: Sequence,
        package: TrtllmPackage,
    ) -> None:
        self.add = add
        self.submission = submission
        self.channel = channel
        self.sequence = sequence
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.result: Any = None
        self._package = package
        self._reader = ResultReader(add)
        self._began = 0.0

    def begin(self, result: Any) -> None:
        """TensorRT-LLM has it."""
        self.result = result
        self._began = time.monotonic()

    def forward_results(self) -> int:
        """Pass on what is new; how many tokens that are. Raises as `ResultReader.read` does."""
        news = self._reader.read_delta(self.result)
        if not self.channel.started:
            self.channel.start(self.result.cached_tokens or 0, self._began)
        if news.tokens:
            self.channel.push(news.tokens, time.monotonic(), news.logprobs)
        if news.finish_reason is not None:
            self._forget(self.result.finished)
            self.channel.finish(news.finish_reason)
        return len(news.tokens)

    def fail(self, error: Exception) -> None:
        """It broke; if the trouble is ours, TensorRT-LLM does not know yet."""
        self._forget(not isinstance(error, CharoniaError))
        self.channel.fail(to_client_error(error))

    def stop(self) -> None:
        """Nobody reads what still comes."""
        if self.timer is not None:
            self.timer.cancel()
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()
        self._forget(False)

    def _forget(self, ended: bool) -> None:
        result, self.result = self.result, None
        if result is None or ended:
            return
        try:
            self._package.tell(result, "RequestOutput.abort")
        except Exception as error:  # it may be gone by now, and no client is to suffer for that
            log.warning("TensorRT-LLM could not be told to abort: %s", error)
