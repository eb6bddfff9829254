"""Shadows of routes: copies of a share of the requests, for a model whose answers nobody gets.

A copy is asked when its request has been answered, behind all that clients wait for, and counts for no client. What
there may be of copies is bounded, for all routes together: what is beyond is not copied.
"""

import asyncio
import functools
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Container, Coroutine, Iterator, Mapping
from contextlib import aclosing
from hashlib import blake2b
from typing import Any, NamedTuple, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...core.errors import NotFound, QueueFull
from ...core.extension_contracts import ResidentHandle, ResidentModels
from ...core.gateway import ResponseStream
from ...core.metrics import Histogram, Measurement, Reading
from ...core.request import (
    Conversation,
    GenerateChunk,
    GenerateRequest,
    InferRequest,
    InferResponse,
    ParameterValue,
    Prompt,
    TextWithMedia,
    prompt_media,
)
from ...core.request_context import RequestContext
from ...core.tensor import Tensor
from ...processes.client_shared_memory import is_lent
from ...routing.route import RouteShadow
from .arm_samples import is_answer, is_failure

log = logging.getLogger(__name__)

SHADOW_TENANT = "(shadow)"
"""The tenant of shadows' tokens, which are no client's."""

_MOST = 32
_MOST_BYTES = 64 << 20
_LONGEST = 120.0
"""Seconds that a copy may take."""

_MOST_IN_LOOP = 1 << 16
"""Bytes that are compared in the event loop; more in a thread."""

_SAY_AGAIN = 60.0
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_PYTHON = "python"
_TEXT = "text_output"
_SEEDS = "seed", "random_seed"

Call: TypeAlias = InferRequest | GenerateRequest
Item = TypeVar("Item", InferResponse, GenerateChunk)


class ShadowKey(NamedTuple):
    """Whose copies are counted together; `model` and `version`: of the shadow, as the route has it."""

    route: str
    model: str
    version: str


class ShadowTraffic:
    """The copies that are waiting or being answered, of all routes, and what was counted of those that were. Lives in
    one event loop: a `RequestObserver`."""

    def __init__(self, models: ResidentModels, most: int = _MOST, most_bytes: int = _MOST_BYTES) -> None:
        self.models = models
        self.most = most
        self.most_bytes = most_bytes
        self.copies = self.bytes = 0
        self.outcomes: Counter[tuple[ShadowKey, str]] = Counter()
        self._seconds: dict[ShadowKey, tuple[Histogram, Histogram]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._said: dict[ShadowKey, float] = {}

    def observe_route(self, name: str, route: Mapping[str, Any]) -> "Shadow | None":
        shadow = route.get("shadow")
        return None if shadow is None else Shadow(name, msgspec.convert(shadow, RouteShadow), self)

    def reserve(self, size: int) -> bool:
        """Take room for a copy of so many bytes, if there is some; `release` gives it back."""
        if self.copies >= self.most or self.bytes + size > self.most_bytes:
            return False
        self.copies += 1
        self.bytes += size
        return True

    def grow(self, size: int) -> bool:
        """Take more bytes for a copy, if there are some."""
        grows = self.bytes + size <= self.most_bytes
        self.bytes += size if grows else 0
        return grows

    def release(self, size: int) -> None:
        self.copies -= 1
        self.bytes -= size

    def start(self, copy: "MirroredRequest", work: Coroutine[Any, Any, None]) -> None:
        """Ask for a copy, and let go of it at the end, also if the work never begins."""
        task = asyncio.get_running_loop().create_task(work, name="shadow")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self.release(copy.size))

    def count(self, key: ShadowKey, outcome: str, reason: str = "") -> None:
        """Count a copy. A `reason` is said, now and then."""
        self.outcomes[key, outcome] += 1
        now = time.monotonic()
        if reason and now > self._said.get(key, -math.inf) + _SAY_AGAIN:
            self._said[key] = now
            log.warning("the shadow of route '%s', %s:%s: %s", *key, reason)

    def observe(self, key: ShadowKey, arm: float, shadow: float) -> None:
        """Measure a request that both answered, in seconds."""
        ours, theirs = self._seconds.setdefault(key, (Histogram(_SECONDS), Histogram(_SECONDS)))
        ours.observe(shadow)
        theirs.observe(arm)

    def forget_others(self, routes: Container[str]) -> None:
        """Drop what was counted of routes that are none of these."""
        self.outcomes = Counter({key: count for key, count in self.outcomes.items() if key[0].route in routes})
        self._seconds = {key: histograms for key, histograms in self._seconds.items() if key.route in routes}
        self._said = {key: at for key, at in self._said.items() if key.route in routes}

    def close(self) -> None:
        """End all copies: the server exits, and waits for none."""
        for task in self._tasks:
            task.cancel()

    def measure(self) -> Iterator[Measurement]:
        """The readings of a scrape."""
        for (key, outcome), count in self.outcomes.items():
            labels = {**key._asdict(), "outcome": outcome}
            yield Measurement(labels, (Reading("charonia_shadow_requests_total", count),))
        for key, (shadow, arm) in self._seconds.items():
            by = Reading("charonia_shadow_seconds", shadow, {"of": "shadow"})
            yield Measurement(key._asdict(), (by, Reading("charonia_shadow_seconds", arm, {"of": "arm"})))
        if self.outcomes:
            yield Measurement({}, (Reading("charonia_shadow_running", self.copies),))


class MirroredRequest:
    """A copied request, with the arm's answer that its own is held to, as far as there was room for that.

    `size`: bytes of `traffic` that it takes; `compared`: whether the whole answer is here; `as_text`: answers are
    texts, cut into responses by chance.
    """

    def __init__(self, traffic: ShadowTraffic, request: Call, size: int, compared: bool, as_text: bool) -> None:
        self.request = request
        self.size = size
        self.compared = compared
        self.as_text = as_text
        self._traffic = traffic
        self._same = True
        self._checked = 0
        self._tokens: list[int] = []
        self._text = bytearray()
        self._tensors: list[dict[str, Tensor]] = []

    def add(self, item: InferResponse | GenerateChunk) -> None:
        """An item of the arm's answer."""
        if not self.compared:
            return
        size = _answer_bytes(item)
        self.compared = self._traffic.grow(size)
        if not self.compared:
            return
        self.size += size
        if isinstance(item, GenerateChunk):
            self._tokens += item.token_ids
        elif self.as_text:
            self._text += _text_of(item)
        elif item.outputs:
            # What a model gives out may be its own memory, for as long as the item is.
            self._tensors.append({tensor.name: _copied(tensor) for tensor in item.outputs})

    async def check(self, item: InferResponse | GenerateChunk, tolerance: float) -> None:
        """Hold an item of the shadow's answer to the arm's."""
        if not self.compared:
            return
        if isinstance(item, GenerateChunk):
            end = self._checked + len(item.token_ids)
            self._same = self._same and self._tokens[self._checked : end] == [*item.token_ids]
            self._checked = end
        elif self.as_text:
            end = self._checked + len(piece := _text_of(item))
            self._same = self._same and self._text[self._checked : end] == piece
            self._checked = end
        elif item.outputs:
            expected = self._tensors[self._checked] if self._checked < len(self._tensors) else {}
            compare = functools.partial(_same_tensors, expected, item.outputs, tolerance)
            large = _answer_bytes(item) > _MOST_IN_LOOP
            self._same = self._same and (await asyncio.to_thread(compare) if large else compare())
            self._checked += 1

    @property
    def same(self) -> bool:
        """Whether the shadow's whole answer was the arm's."""
        return self._same and self._checked == len(self._tokens or self._text or self._tensors)


class Shadow:
    """The shadow of one route: which of its requests are copied, and to whom."""

    def __init__(self, route: str, shadow: RouteShadow, traffic: ShadowTraffic) -> None:
        self._shadow = shadow
        self._traffic = traffic
        self._key = ShadowKey(route, shadow.model, str(shadow.version or ""))
        self._due = 0.0

    def follow(self, request: Call, context: RequestContext, responses: ResponseStream[Item]) -> ResponseStream[Item]:
        """The arm's responses as they are. If it is the request's turn, it is copied, and the copy asked when `context`
        ends."""
        if not self._is_turn(request):
            return responses
        size = _request_bytes(request)
        if not self._traffic.reserve(size):
            self._traffic.count(self._key, "dropped")
            return responses
        if isinstance(request, InferRequest):  # a client may write anew what it lends
            lent = {name: _copied(tensor) for name, tensor in request.inputs.items() if is_lent(tensor.data)}
            request = msgspec.structs.replace(request, inputs={**request.inputs, **lent}) if lent else request
        as_text = self._shadow.compare == "tokens" and isinstance(request, InferRequest)
        copy = MirroredRequest(self._traffic, request, size, self._compares(request), as_text)
        context.on_end(lambda ended: self._begin(copy, ended))
        return cast("ResponseStream[Item]", _recorded(responses, copy)) if copy.compared else responses

    def _is_turn(self, request: Call) -> bool:
        if isinstance(request, GenerateRequest):  # of several answers the first
            return not request.choice and request.lora_task is None and self._takes_turn()
        if sequence := request.parameters.get("sequence_id"):
            return "sequences" in self._shadow.also and self._has_sequence(sequence)
        return self._takes_turn(request)

    def _takes_turn(self, request: InferRequest | None = None) -> bool:
        """Counted, as the weights of arms. A turn that does not suit is the next request's."""
        self._due += self._shadow.share
        if self._due < 1 - 1e-9:
            return False
        inputs = {} if request is None or "shared_memory" in self._shadow.also else request.inputs
        if any(is_lent(tensor.data) for tensor in inputs.values()):
            self._due = 1.0
            return False
        self._due -= 1
        return True

    def _has_sequence(self, id_: ParameterValue) -> bool:
        hashed = int.from_bytes(blake2b(str(id_).encode(errors="surrogatepass"), digest_size=8).digest())
        return hashed < self._shadow.share * 2.0**64

    def _compares(self, request: Call) -> bool:
        """Whether the answers can be the same: where tokens are drawn, they are of one seed."""
        if self._shadow.compare != "tokens":
            return self._shadow.compare == "tensors" and isinstance(request, InferRequest)
        if isinstance(request, InferRequest):
            parameters = {name: tensor.data.flat[0] for name, tensor in request.inputs.items() if tensor.data.size == 1}
            parameters.update(request.parameters)
            return parameters.get("temperature") == 0 or any(parameters.get(name, -1) != -1 for name in _SEEDS)
        return request.sampling.temperature == 0 or request.sampling.chosen_seed is not None

    def _begin(self, copy: MirroredRequest, ended: RequestContext) -> None:
        """Ask the shadow what the arm was asked, unless that was the client's fault, or the client did not wait."""
        end = ended.end
        assert end is not None
        if is_answer(end) or is_failure(end):
            self._traffic.start(copy, self._ask(copy, is_answer(end), ended.ended_at - ended.arrived_at))
        else:
            self._traffic.release(copy.size)

    async def _ask(self, copy: MirroredRequest, answered: bool, seconds: float) -> None:
        context = RequestContext("shadow", tenant=SHADOW_TENANT, background=True, counted=True, route=self._key.route)
        reason = outcome = ""
        try:
            with context:
                async with asyncio.timeout(_LONGEST), aclosing(self._answer(copy, context)) as responses:
                    async for item in responses:
                        await copy.check(item, self._shadow.tolerance)
        except QueueFull:
            outcome = "dropped"
        except _Excluded as excluded:
            outcome = "excluded"
            reason = excluded.message
        except Exception as error:
            reason = f"a copy failed: {str(error) or type(error).__name__}"
        if not outcome:
            outcome = _outcome(copy, answered, not reason)
            if answered and not reason:
                self._traffic.observe(self._key, seconds, context.ended_at - context.arrived_at)
        self._traffic.count(self._key, outcome, reason)

    async def _answer(
        self, copy: MirroredRequest, context: RequestContext
    ) -> AsyncGenerator[InferResponse | GenerateChunk, None]:
        """The shadow's answer. Raises `_Excluded` if it may not be asked."""
        model = self._acquire(context)
        request = copy.request
        responses: ResponseStream[InferResponse] | ResponseStream[GenerateChunk]
        if isinstance(request, GenerateRequest):
            targets = {"target_ttft_ms": 0.0, "target_itl_ms": 0.0}
            request = msgspec.structs.replace(request, id=f"shadow-{id(context):x}-{request.id}", **targets)
            responses = model.generate(request)
        else:
            copy.compared = copy.compared and copy.as_text is model.generates_text
            responses = model.infer(request)
        async with aclosing(cast("ResponseStream[InferResponse | GenerateChunk]", responses)) as stream:
            async for item in stream:
                yield item
        if not context.sequences:
            context.finish()

    def _acquire(self, context: RequestContext) -> ResidentHandle:
        model = self._traffic.models.acquire_resident(context, self._key.model, self._key.version)
        if model is None:
            raise _Excluded("it is not in memory, and copies load no model")
        also = self._shadow.also
        if model.config.backend == _PYTHON and "python" not in also:
            raise _Excluded("it is a Python model, which gets no copies unless the route says so: also: [python]")
        if model.asks_models and "pipelines" not in also:
            raise _Excluded("it asks other models, and gets no copies unless the route says so: also: [pipelines]")
        return model


class _Excluded(NotFound):
    """The shadow gets no copies."""


def _outcome(copy: MirroredRequest, arm: bool, shadow: bool) -> str:
    """What became of a copy, by who answered."""
    if arm and shadow:
        return ("same" if copy.same else "different") if copy.compared else "answered"
    return "failed" if arm else "arm_failed" if shadow else "both_failed"


async def _recorded(responses: ResponseStream[Any], copy: MirroredRequest) -> AsyncGenerator[Any, None]:
    async with aclosing(responses):
        async for item in responses:
            copy.add(item)
            yield item


def _copied(tensor: Tensor) -> Tensor:
    return msgspec.structs.replace(tensor, data=tensor.data.copy())


def _text_of(response: InferResponse) -> bytes:
    return b"".join(text for tensor in response.outputs if tensor.name == _TEXT for text in tensor.data.flat)


def _array_bytes(data: NDArray[Any]) -> int:
    return sum(map(len, data.flat)) if data.dtype.hasobject else data.nbytes


def _answer_bytes(item: InferResponse | GenerateChunk) -> int:
    if isinstance(item, GenerateChunk):
        return 8 * len(item.token_ids)
    return sum(_array_bytes(tensor.data) for tensor in item.outputs)


def _request_bytes(request: Call) -> int:
    if isinstance(request, InferRequest):
        return sum(_array_bytes(tensor.data) for tensor in request.inputs.values())
    media = prompt_media(request.prompt)
    if request.speech is not None:
        media = (*media, request.speech.sound)
    return _prompt_bytes(request.prompt) + sum(len(medium.data) + len(medium.url) for medium in media)


def _prompt_bytes(prompt: Prompt) -> int:
    if isinstance(prompt, Conversation):
        return sum(len(message.content) for message in prompt.messages)
    if isinstance(prompt, TextWithMedia):
        return len(prompt.text)
    return len(prompt) * (1 if isinstance(prompt, str) else 8)


def _same_tensors(expected: dict[str, Tensor], outputs: tuple[Tensor, ...], tolerance: float) -> bool:
    if [*expected] != [tensor.name for tensor in outputs]:
        return False
    return all(_same_tensor(expected[tensor.name], tensor, tolerance) for tensor in outputs)


def _same_tensor(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if (one.datatype, one.shape) != (other.datatype, other.shape):
        return False
    if tolerance and one.data.dtype.kind == "f":
        return np.allclose(other.data.ravel(), one.data.ravel(), tolerance, tolerance, equal_nan=True)
    return np.array_equal(one.data.ravel(), other.data.ravel(), equal_nan=one.data.dtype.kind == "f")
