"""What a language model asks of whatever computes for it: our own core behind its client, or somebody else's engine.

Token ids in, token ids out. Knows no engine.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from ...core.errors import InvalidArgument
from ...core.metrics import EngineState, LlmMetrics
from ...core.request import GenerateRequest
from ..core.messages import AddRequest, CoreLoading, CoreReady
from .sequence_stats import SequenceStats
from .token_stream import TokenStream

_LOWEST_CLASS = 9
"""Classes below are shown as this one: requests name their class, and every name would be a series forever."""


def count_by_priority(priorities: Iterable[int]) -> Counter[str]:
    """How many there are of each class, as `EngineState.waiting` has them."""
    return Counter(str(min(priority, _LOWEST_CLASS)) for priority in priorities)


class Engine(Protocol):
    """Lives in one event loop, from `start` to `close`."""

    @property
    def ready(self) -> bool:
        """It generated a token, and is well."""

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """Tokens that the cache blocks in use hold, and that all of them would."""

    def state(self) -> EngineState:
        """The engine at this moment, as a scrape sees it."""

    async def start(self) -> CoreReady:
        """Return when it serves.

        Raises:
            CharoniaError: it cannot; the message says why.
        """

    async def close(self) -> None:
        """Streams still open end with `Unavailable`. May be called again."""

    def check_size(self, request: GenerateRequest, tokens: int = 0) -> None:
        """Refuse what no queue is long enough for; `tokens`: of its prompt, once they are counted.

        Raises:
            InvalidArgument: see `AdmissionControl.check_size`.
        """

    def reserve(self, tenant: str = "") -> AbstractContextManager[CoreReady]:
        """A place in line while a request is prepared.

        Raises:
            QueueFull: too many wait already.
            Unavailable: it does not serve.
        """

    def open_stream(self, add: AddRequest, account: SequenceStats | None = None) -> AbstractContextManager[TokenStream]:
        """Where the tokens of one request come out, until the block is left; leaving it before the end aborts.

        Raises:
            QueueFull, Unavailable: see `place`.
            RequestTimeout: its time is over already.
        """


EngineFactory: TypeAlias = Callable[[Callable[[CoreLoading], None], LlmMetrics], Engine]
"""Makes an engine that tells of its start, and counts its steps."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What computes for a model. `backend`: its name in a model's config. `language`: the checkpoint directory or hub
    id that tokenizer and generation defaults are read from. `grants`: fields of `GenerateRequest` that it can satisfy
    and not every engine can. `chat_template`: a file or a template to take in place of the checkpoint's. `tokenizer`:
    another directory or hub id to read the tokenizer from."""

    backend: str
    checkpoint: str
    connect: EngineFactory
    capabilities: frozenset[str] = field(default_factory=frozenset)
    chat_template: str = ""
    tokenizer: str = ""

    def check_request(self, request: GenerateRequest) -> None:
        """Raises `InvalidArgument` for what this engine cannot do; `field` names the parameter."""
        guide = request.guided_decoding.parameter if request.guided_decoding else ""
        wishes = {"adapter": "lora_name", "guided_decoding": guide, "wants_prompt_logprobs": "prompt_logprobs"}
        for wish, parameter in wishes.items():
            if getattr(request, wish) and wish not in self.capabilities:
                raise InvalidArgument(f"parameter '{parameter}' is not supported by this model", field=parameter)
