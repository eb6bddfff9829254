"""A loaded `LLM` of TensorRT-LLM: made and shut down in a thread of its own, used in the event loop.

Knows nothing of queues and streams.
"""

import asyncio
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from ...core.errors import CharoniaError, Internal, InvalidArgument, Unavailable
from ...core.sampling import TokenLimit
from ...engine.core.messages import AddRequest, CoreReady
from ...scheduler.sequence import SequenceSpec
from .llm_factory import make_llm, read_model_info
from .options import TrtllmOptions
from .package import differences, import_tensorrt_llm
from .request import GenerateArguments, ResultReader, SamplingTranslator

if TYPE_CHECKING:
    from tensorrt_llm import LLM
    from tensorrt_llm.llmapi import LoRARequest, RequestOutput

log = logging.getLogger(__name__)

_SHUTDOWN_SECONDS = 60.0
"""Given to a shutdown; then the process goes on without it."""

_REFUSALS = (ValueError, TypeError, NotImplementedError)
_BLOCK_SIZE = 32
"""Tokens in a block where nothing else is set; TensorRT-LLM's default is the same."""


@dataclass(eq=False, slots=True)
class TrtllmRuntime:
    """A loaded model. `max_sequences`: run at once. `adapters`: paths of LoRA adapters by name."""

    version: str
    llm: "LLM"
    ready: CoreReady
    max_sequences: int
    sampling: SamplingTranslator
    adapters: dict[str, str] = field(default_factory=dict)

    def translate(self, add: AddRequest) -> GenerateArguments:
        """The arguments of `submit` for a sequence.

        Raises:
            InvalidArgument: it can never be satisfied; `field` names the culprit where that is known.
        """
        spec = add.spec
        if not len(spec.prompt):
            raise InvalidArgument("the prompt is empty", field="prompt")
        TokenLimit(self.ready.max_model_len).check_sequence(len(spec.prompt), spec.max_tokens)
        # Tenants share no cached prefix, nor do salts of one: their names' lengths keep the two apart.
        salt = f"{len(spec.tenant)}:{spec.tenant}{spec.salt}" if spec.tenant or spec.salt else None
        try:
            adapter = self._lora_request(spec.adapter) if spec.adapter else None
            return GenerateArguments(spec.prompt.tolist(), self.sampling.translate(add), adapter, salt)
        except _REFUSALS as error:
            raise InvalidArgument(f"TensorRT-LLM refuses the request: {error}") from error

    def submit(self, arguments: GenerateArguments) -> "RequestOutput":
        """Begin a generation; called in the event loop that iterates the result.

        Raises:
            InvalidArgument: it is refused. Any other error means that the engine is lost.
        """
        try:
            return self.llm.generate_async(
                inputs=arguments.inputs,
                sampling_params=arguments.sampling_params,
                lora_request=arguments.lora_request,
                streaming=True,
                cache_salt=arguments.cache_salt,
            )
        except _REFUSALS as error:
            raise InvalidArgument(f"TensorRT-LLM refuses the request: {error}") from error

    def _lora_request(self, name: str) -> "LoRARequest":
        from tensorrt_llm.llmapi import LoRARequest

        if name not in self.adapters:
            known = ", ".join(self.adapters)
            raise InvalidArgument(f"lora_name: no adapter '{name}'; known are {known}", field="lora_name")
        number = 1 + list(self.adapters).index(name)
        return LoRARequest(lora_name=name, lora_int_id=number, lora_path=self.adapters[name])

    def is_request_error(self, error: Exception) -> bool:
        """Whether the engine goes on after this error."""
        from tensorrt_llm.llmapi import RequestError

        return isinstance(error, CharoniaError | RequestError)

    async def warm_up(self) -> None:
        """Return when the model generated a token."""
        spec = SequenceSpec(key=0, prompt=np.zeros(1, np.int32), max_tokens=1)
        reader = ResultReader(spec)
        async for result in self.submit(self.translate(AddRequest(spec))):
            if reader.read_delta(result).finish_reason is not None:
                return
        raise Internal("TensorRT-LLM generated nothing")


class TrtllmRuntimeLoader:
    """Loads a `TrtllmRuntime` in a thread of its own: importing the package and loading the model take long."""

    def __init__(self, model: str, options: TrtllmOptions) -> None:
        self._model = model
        self._options = options
        self._thread = ThreadPoolExecutor(1, "tensorrt-llm")
        self._loading: Future[TrtllmRuntime] | None = None

    async def load(self) -> TrtllmRuntime:
        """Load the model and generate a token.

        Raises:
            CharoniaError: it cannot be loaded; the message says why, and nothing is left running.
        """
        self._loading = self._thread.submit(self._load)
        runtime = await asyncio.wrap_future(self._loading)
        try:
            await runtime.warm_up()
        except CharoniaError:
            raise
        except Exception as error:
            raise Unavailable(f"TensorRT-LLM loaded the model and generates nothing: {error}") from error
        return runtime

    async def close(self) -> None:
        """Shut the model down, if it was loaded; if it is still loading, as soon as it is. May be called again."""
        loading = self._loading
        self._loading = None
        if loading is None:
            return
        loading.cancel()
        ended = asyncio.wrap_future(self._thread.submit(_shut_down, loading))
        self._thread.shutdown(wait=False)
        if loading.done():
            _, late = await asyncio.wait([ended], timeout=_SHUTDOWN_SECONDS)
            if late:
                log.warning("TensorRT-LLM did not shut down within %g s", _SHUTDOWN_SECONDS)

    def _load(self) -> TrtllmRuntime:
        version = import_tensorrt_llm()
        options = self._options
        for difference in differences():
            log.warning("tensorrt_llm %s is not as its adapter expects: %s", version, difference)
        model = read_model_info(self._model, options.max_model_len)
        try:
            llm = make_llm(model, options)
        except CharoniaError:
            raise
        except ValueError as error:
            raise InvalidArgument(f"TensorRT-LLM refuses the model: {error}") from error
        except Exception as error:  # drivers, memory, MPI
            raise Unavailable(f"TensorRT-LLM cannot load the model: {error}") from error
        applies_all = model.engine or options.sampler_type == "TRTLLMSampler"
        sampling = SamplingTranslator(
            version, model.vocab_size, applies_all, lambda ids: llm.tokenizer.decode(list(ids))
        )
        ready = CoreReady(model.vocab_size, model.max_model_len, options.block_size or _BLOCK_SIZE, 0)
        max_sequences = min(options.max_num_seqs, model.max_num_seqs or options.max_num_seqs)
        return TrtllmRuntime(version, llm, ready, max_sequences, sampling, options.adapters)


def _shut_down(loading: "Future[TrtllmRuntime]") -> None:
    if loading.cancelled() or loading.exception() is not None:
        return
    try:
        loading.result().llm.shutdown()
    except Exception:
        log.warning("TensorRT-LLM did not shut down", exc_info=True)
