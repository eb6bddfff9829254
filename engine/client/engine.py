"""The protocol of an engine, which computes for a language model: token ids in, token ids out. Knows no engine."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from ...core.drafts import DraftReport
from ...core.errors import InvalidArgument
from ...core.kv_transfer import FIELD as KV_TRANSFER
from ...core.model import MemoryHolder, RetainingModel
from ...core.request import GenerateRequest, GuidedDecoding
from ...core.request_context import RequestContext
from ...scheduler.drafts.speculation import PREDICTED_DRAFTS
from ...telemetry.llm_metrics import EngineState, LlmMetrics
from ...tokenization.answers.answer_formats import AnswerParsers
from ..config import LoraConfig
from ..core.messages import AddRequest, CoreLoading, CoreReady
from .adapters import AdapterEngine
from .admission import AdmissionControl, QueueTicket
from .sequence_stats import SequenceStats
from .token_stream import TokenStream

_PARAMETERS = {
    "adapter": "lora_name",
    "lora_task": "lora_task_id",
    "prediction": "prediction",
    "wants_prompt_logprobs": "prompt_logprobs",
}
"""Fields of a request that not every engine can satisfy -> what clients call them."""

ANY_TENANT = "*"
"""In place of tenants' names: all of them."""

_LOWEST_CLASS = 9
"""Classes of less urgency count as this one: requests choose their class, and each would be a series for ever."""


def count_by_priority(priorities: Iterable[int]) -> Counter[str]:
    """The number of requests of each class, as `EngineState.waiting` has them."""
    return Counter(str(min(priority, _LOWEST_CLASS)) for priority in priorities)


class SharedEngine(Protocol):
    """An engine that computes for the same model in several processes."""

    def cancel_elsewhere(self, request_id: str) -> None:
        """Have the other processes end their generations of all requests with this id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What an engine can do beside computing: for each ability the object that has it, or None."""

    adapters: AdapterEngine | None = None
    memory: MemoryHolder | None = None
    shared: SharedEngine | None = None
    retention: RetainingModel | None = None


class Engine(Protocol):
    """An engine. It lives in one event loop, from `start` to `close`."""

    @property
    def ready(self) -> bool:
        """True once the engine has generated a token, and while it goes on stepping."""

    @property
    def kv_tokens(self) -> tuple[int, int]:
        """Tokens that the cache blocks in use hold, and that all of them would."""

    @property
    def admission(self) -> AdmissionControl:
        """The count of those that wait, for requests that wait until they are admitted."""

    @property
    def capabilities(self) -> EngineCapabilities:
        """What the engine can do beside computing."""

    def state(self) -> EngineState:
        """The engine's gauges, for a scrape."""

    async def start(self) -> CoreReady:
        """Return when the engine serves. Raises a `CharoniaError` that says why it cannot."""

    async def close(self) -> None:
        """Streams still open end with `Unavailable`. May be called again."""

    def admit(self, request: GenerateRequest, tenant: str = "") -> QueueTicket:
        """Count one sequence of a request among those that wait, before any work is done for it.

        Raises:
            InvalidArgument: no queue is long enough for all the request's sequences.
            QueueFull: too many wait already.
            Unavailable: the engine does not serve.
        """

    def open_stream(
        self, add: AddRequest, stats: SequenceStats | None = None, ticket: QueueTicket | None = None
    ) -> AbstractContextManager[TokenStream]:
        """The stream of one sequence, for the block, whose early end aborts it. The engine sets the key of `add`,
        records in `stats`, and releases `ticket` at the start.

        Raises, here or in `TokenStream.read`:
            InvalidArgument: the engine can never satisfy the request.
            QueueFull: too many prompt tokens wait.
            Unavailable: the engine breaks.
            RequestTimeout: before its first token.
        """


EngineFactory: TypeAlias = Callable[[Callable[[CoreLoading], None], LlmMetrics], Engine]
"""Makes an engine from a callback for its progress while it starts, and the metrics that count its steps."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """How to make the engine of a model, and what it can do."""

    backend: str
    """The engine's name in a model's config."""
    checkpoint: str
    """The directory or hub id that tokenizer and generation defaults are read from."""
    connect: EngineFactory
    capabilities: frozenset[str] = field(default_factory=frozenset)
    """The fields of `GenerateRequest` that this engine can satisfy and not every engine can."""
    chat_template: str = ""
    """A file, or a template, that replaces the checkpoint's."""
    tokenizer: str = ""
    """Another directory or hub id to read the tokenizer from."""
    parsers: AnswerParsers = field(default_factory=AnswerParsers)
    """How the model writes calls of tools and reasoning."""
    checks_constraints: bool = False
    """Whether constraints are to be checked before the engine gets them."""
    default_timeout: float = 0.0
    """Seconds that a request may take that says nothing of them; 0 is any time."""
    most_in_background: int = 32
    """Background sequences at a time."""
    target_tenants: frozenset[str] = frozenset()
    """Tenants whose requests may have targets of their own, `*` for all."""
    lora: LoraConfig | None = None
    """The limits of adapters that are loaded while it serves; None: there are no such adapters."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Directories of the adapters that the engine reads itself, by name."""
    most_drafts: int = 0
    """Tokens that a step may draft for a sequence."""
    draft_report: DraftReport = "none"
    """What answers report about their drafts."""

    def check_request(self, request: GenerateRequest, tenant: str = "") -> None:
        """Raises `InvalidArgument` for a parameter that this engine cannot satisfy for `tenant`; `field` names it."""
        for name, parameter in _PARAMETERS.items():
            if getattr(request, name):
                self._check(name, parameter)
        if request.needs_thinking_limit:
            self._check("thinking_budget", "thinking_token_budget")
        for name in ("target_ttft_ms", "target_itl_ms"):
            if getattr(request, name):
                self._check("targets", name)
                if not self.target_tenants & {tenant, ANY_TENANT}:
                    message = f"parameter '{name}' is not for this client; --target-tenants says for which it is"
                    raise InvalidArgument(message, field=name)
        if (transfer := request.kv_transfer) is not None:
            ability = "hands_prompts_over" if transfer.do_remote_decode else "takes_prompts_over"
            if ability not in self.capabilities:
                wanted = "do_remote_decode" if transfer.do_remote_decode else "do_remote_prefill"
                message = f"{KV_TRANSFER}: {wanted} is not for this server: kv_transfer_config gives it no such role"
                raise InvalidArgument(message, field=KV_TRANSFER)
        self._check_drafts(request)
        self.check_constraint(request.guided_decoding)

    def check_constraint(self, constraint: GuidedDecoding | None) -> None:
        """As `check_request`, for the constraint of an answer."""
        if constraint is not None:
            self._check("guided_decoding", constraint.parameter)

    def timeout_of(self, request: GenerateRequest, context: RequestContext) -> float:
        """Seconds that a request may take; 0 is any time."""
        return request.timeout or (0.0 if context.background else self.default_timeout)

    def most_drafts_of(self, request: GenerateRequest) -> int:
        """Tokens that a step may draft for a request without a limit of its own."""
        return max(self.most_drafts, PREDICTED_DRAFTS) if request.prediction else self.most_drafts

    def _check_drafts(self, request: GenerateRequest) -> None:
        if (limit := request.drafts) is None:
            return
        self._check("drafts", limit.parameter)
        most = self.most_drafts_of(request)
        if limit.most > most:
            why = "" if most else ": without a prediction nothing drafts for this model"
            message = f"parameter '{limit.parameter}' must be at most {most}, got {limit.most}{why}"
            raise InvalidArgument(message, field=limit.parameter)

    def _check(self, name: str, parameter: str) -> None:
        if name not in self.capabilities:
            raise InvalidArgument(f"parameter '{parameter}' is not supported by this model", field=parameter)
