"""A loaded `LLM` of TensorRT-LLM: made in a thread of its own, asked in the event loop, shut down.

Knows nothing of queues and channels.
"""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ...core.errors import CharoniaError, Internal, InvalidArgument, Unavailable
from ..core.messages import AddRequest, CoreReady
from .arguments import llm_arguments
from .model_info import TrtllmModelInfo, read_model_info
from .options import TrtllmOptions
from .package import TrtllmPackage, resolve
from .request import GenerateArguments
from .results import ResultReader
from .sampling import SamplingTranslator

log = logging.getLogger(__name__)

_PATIENCE = 60.0
"""Seconds that a shutdown may take; then the process goes on without it."""

_BLOCK = 32
"""Tokens in a block where nobody says; theirs is the same."""


@dataclass(eq=False, slots=True)
class TrtllmRuntime:
    """`llm` is theirs. `places`: sequences it runs at once. `adapters`: paths of LoRA adapters by name."""

    package: TrtllmPackage
    llm: Any
    ready: CoreReady
    max_sequences: int
    sampler: SamplingTranslator
    adapters: dict[str, str] = field(default_factory=dict)

    def translate(self, add: AddRequest) -> GenerateArguments:
        """What is asked of it for a sequence.

        Raises:
            InvalidArgument: it can never be satisfied; `field` names the culprit where that is known.
        """
        _check_length(add, self.ready.max_model_len)
        try:
            return GenerateArguments(self._arguments(add))
        except (ValueError, TypeError, NotImplementedError) as error:
            raise _refused(error) from error

    def submit(self, submission: GenerateArguments) -> Any:
        """Their `RequestOutput`; in the event loop that is going to iterate it.

        Raises:
            InvalidArgument: they refuse it. What else they raise means that the engine is lost.
        """
        try:
            return self.package.tell(self.llm, "LLM.generate_async", **submission.arguments)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise _refused(error) from error

    def _arguments(self, add: AddRequest) -> dict[str, Any]:
        arguments = {"inputs": add.prompt, "sampling_params": self.sampler.params(add), "streaming": True}
        if add.adapter:
            arguments["lora_request"] = self._adapter(add.adapter)
        if salt := _salt(add):
            arguments["cache_salt"] = salt
        return arguments

    def _adapter(self, name: str) -> Any:
        if name not in self.adapters:
            known = ", ".join(self.adapters)
            raise InvalidArgument(f"lora_name: no adapter '{name}'; known are {known}", field="lora_name")
        number = 1 + list(self.adapters).index(name)
        path = self.adapters[name]
        return self.package.make("LoRARequest", lora_name=name, lora_int_id=number, lora_path=path)

    def is_of_the_request(self, error: Exception) -> bool:
        """The engine goes on after this error."""
        return isinstance(error, CharoniaError | resolve(self.package.world.request_error))

    async def warm_up(self) -> None:
        """Return when it generated a token."""
        add = AddRequest(client=0, key=0, prompt=[0], max_tokens=1)
        reader = ResultReader(add)
        async for result in self.submit(self.translate(add)):
            if reader.read_delta(result).finish_reason is not None:
                return
        raise Internal("TensorRT-LLM generated nothing")

    def shut_down(self) -> None:
        """Takes a while."""
        self.package.tell(self.llm, "LLM.shutdown")


def _refused(error: Exception) -> InvalidArgument:
    return InvalidArgument(f"TensorRT-LLM refuses the request: {error}")


def _check_length(add: AddRequest, longest: int) -> None:
    prompt, new = len(add.prompt), add.max_tokens
    if prompt < 1:
        raise InvalidArgument("the prompt is empty", field="prompt")
    if prompt + new > longest:
        field = "max_tokens" if prompt < longest else "prompt"
        message = f"{field}: {prompt} prompt tokens and {new} new ones exceed the model's {longest}"
        raise InvalidArgument(message, field=field)


def _salt(add: AddRequest) -> str:
    """Tenants share no cached prefix, nor do salts of one: their names' lengths keep the two apart."""
    return f"{len(add.tenant)}:{add.tenant}{add.salt}" if add.tenant or add.salt else ""


class TrtllmRuntimeLoader:
    """Makes a `TrtllmRuntime`. `TrtllmPackage.find`, reading and loading take their time in one thread of its own."""

    def __init__(
        self, model: str, options: TrtllmOptions, find: Callable[[], TrtllmPackage] = TrtllmPackage.find
    ) -> None:
        self._model = model
        self._options = options
        self._find = find
        self._thread = ThreadPoolExecutor(1, "tensorrt-llm")
        self._made: Future[TrtllmRuntime] | None = None

    async def load(self) -> TrtllmRuntime:
        """Load it and generate a token.

        Raises:
            CharoniaError: it cannot; the message says why, and nothing is left running.
        """
        self._made = self._thread.submit(self._load)
        runtime = await asyncio.wrap_future(self._made)
        try:
            await runtime.warm_up()
        except CharoniaError:
            raise
        except Exception as error:
            raise Unavailable(f"TensorRT-LLM loaded the model and generates nothing: {error}") from error
        return runtime

    async def close(self) -> None:
        """Shut it down, if it was made; if it is still being made, as soon as it is. May be called again."""
        made, self._made = self._made, None
        if made is None:
            return
        made.cancel()
        ended = asyncio.wrap_future(self._thread.submit(_shut_down, made))
        self._thread.shutdown(wait=False)
        if made.done():
            _, late = await asyncio.wait([ended], timeout=_PATIENCE)
            if late:
                log.warning("TensorRT-LLM did not shut down within %g s", _PATIENCE)

    def _load(self) -> TrtllmRuntime:
        package, options = self._find(), self._options
        checkpoint = read_model_info(self._model, options.max_model_len)
        try:
            call, arguments = llm_arguments(package, checkpoint, options)
            llm = package.make(call, **arguments)
        except CharoniaError:
            raise
        except ValueError as error:
            raise InvalidArgument(f"TensorRT-LLM refuses the model: {error}") from error
        except Exception as error:  # drivers, memory, MPI
            raise Unavailable(f"TensorRT-LLM cannot load the model: {error}") from error
        return _runtime(package, llm, checkpoint, options)


def _shut_down(made: "Future[TrtllmRuntime]") -> None:
    if made.cancelled() or made.exception() is not None:
        return
    try:
        made.result().shut_down()
    except Exception:
        log.warning("TensorRT-LLM did not shut down", exc_info=True)


def _runtime(package: TrtllmPackage, llm: Any, checkpoint: TrtllmModelInfo, options: TrtllmOptions) -> TrtllmRuntime:
    applies = checkpoint.engine or options.sampler_type == "TRTLLMSampler"
    unapplied = frozenset() if applies else frozenset(package.world.unapplied)
    sampler = SamplingTranslator(
        package, checkpoint.vocab_size, unapplied, lambda ids: str(llm.tokenizer.decode(list(ids)))
    )
    ready = CoreReady(checkpoint.vocab_size, checkpoint.max_model_len, options.block_size or _BLOCK, 0)
    places = min(options.max_num_seqs, checkpoint.max_num_seqs or options.max_num_seqs)
    return TrtllmRuntime(package, llm, ready, places, sampler, options.adapters)
