"""A `tensorrt_llm` made of the stubs: exactly their classes, signatures and defaults.

Its next token is the last one plus one, as the fake executor's. Results behave as theirs: one object per request,
changed in place, its text and tokens cumulative; an abort is heard one step late.
"""

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from charonia.extras.trtllm.package import Stub, read_stubs

VOCABULARY = 100
BROKEN = 13
"""A prompt that ends with this token breaks its request; with the next one, the engine."""


class Fields:
    """Holds what it was called with, defaults filled in; whatever the stubs lack is a TypeError. `given`: without the
    defaults."""

    __signature__: ClassVar[inspect.Signature]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = self.__signature__.bind(*args, **kwargs)
        self.given = dict(bound.arguments)
        bound.apply_defaults()
        self.__dict__.update(bound.arguments)


class RequestError(RuntimeError):
    pass


class Result:
    """Their `RequestOutput`."""

    def __init__(self, llm: "Llm", prompt: list[int], params: Any) -> None:
        self.request_id = len(llm.results)
        self.prompt_token_ids = prompt
        self.outputs = [
            SimpleNamespace(index=0, text="", token_ids=[], logprobs=[], finish_reason=None, stop_reason=None)
        ]
        self.finished = False
        self.cached_tokens = 0
        self.aborts = 0
        self._llm = llm
        self._params = params
        self._queue: asyncio.Queue[Exception | None] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._generate())

    def abort(self) -> None:
        self.aborts += 1

    def __aiter__(self) -> AsyncIterator["Result"]:
        return self

    async def __anext__(self) -> "Result":
        if self.finished and self._queue.empty():
            raise StopAsyncIteration
        if (error := await self._queue.get()) is not None:
            raise error
        return self

    async def _generate(self) -> None:
        llm, output, token = self._llm, self.outputs[0], self.prompt_token_ids[-1]
        llm.enter(self)
        try:
            if token in (BROKEN, BROKEN + 1):
                self._queue.put_nowait(RequestError("no") if token == BROKEN else RuntimeError("a rank died"))
                return
            while not self.finished:
                aborted = self.aborts > 0
                await asyncio.sleep(llm.package.step_seconds)
                token = (token + 1) % VOCABULARY
                self._append(output, token)
                if aborted:
                    output.finish_reason, self.finished = "cancelled", True
                llm.note_step()
                self._queue.put_nowait(None)
        finally:
            llm.leave(self)

    def _append(self, output: Any, token: int) -> None:
        params = self._params
        made = len(output.token_ids)
        output.token_ids.append(token)
        output.text += f" w{token}" if params.detokenize else ""
        if params.logprobs:
            places = enumerate(range(token, token + params.logprobs), start=1)
            likely = {other % VOCABULARY: SimpleNamespace(logprob=-float(rank), rank=rank) for rank, other in places}
            output.logprobs.append(likely)
        if params.end_id == token and not params.ignore_eos and made >= (params.min_tokens or 0):
            output.token_ids = output.token_ids[: -1 if self._llm.package.hides_end else None]
            output.finish_reason, self.finished = "stop", True
        elif token in (params.stop_token_ids or ()):
            output.token_ids = output.token_ids if params.include_stop_str_in_output else output.token_ids[:-1]
            output.finish_reason, output.stop_reason, self.finished = "stop", token, True
        elif made + 1 == params.max_tokens:
            output.finish_reason, self.finished = "length", True


class Llm(Fields):
    """Their `LLM`."""

    package: ClassVar["FakePackage"]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tokenizer = SimpleNamespace(decode=lambda ids: " ".join(f"w{token}" for token in ids))
        self.calls: list[dict[str, Any]] = []
        self.results: list[Result] = []
        self.running: list[Result] = []
        self.most = 0
        self.down = False
        self.records: list[dict[str, Any]] = []
        self.package.made.append(self)

    def generate_async(self, **asked: Any) -> Result:
        if self.down:
            raise RuntimeError("LLM is shutting down")
        assert asked["streaming"]
        result = Result(self, list(asked["inputs"]), asked["sampling_params"])
        result.cached_tokens = max((_shared(call, asked) for call in self.calls), default=0)
        self.calls.append(asked)
        self.results.append(result)
        return result

    async def get_stats_async(self, **asked: Any) -> AsyncIterator[dict[str, Any]]:
        while self.records:
            yield self.records.pop(0)

    def shutdown(self) -> None:
        self.down = True

    def enter(self, result: Result) -> None:
        self.running.append(result)
        self.most = max(self.most, len(self.running))

    def leave(self, result: Result) -> None:
        self.running.remove(result)

    def note_step(self) -> None:
        running = len(self.running)
        cache = {"usedNumBlocks": running, "maxNumBlocks": 8, "tokensPerBlock": 32}
        batching = {"numScheduledRequests": running, "numGenRequests": running, "numCtxTokens": 0}
        batching["numPausedRequests"] = 0
        self.records.append({"iterLatencyMS": 1.5, "kvCacheStats": cache, "inflightBatchingStats": batching})


def _shared(before: dict[str, Any], asked: dict[str, Any]) -> int:
    alike = (before["cache_salt"], before["inputs"]) == (asked["cache_salt"], asked["inputs"])
    return len(asked["inputs"]) - 1 if alike else 0


class FakePackage:
    """The modules of one version, to be put into `sys.modules`. `made`: every `LLM` that was. `hides_end`: an end
    token is not among the tokens of its text."""

    step_seconds = 0.0
    hides_end = False

    def __init__(self, version: str) -> None:
        self.modules: dict[str, ModuleType] = {}
        self.made: list[Llm] = []
        self._module("tensorrt_llm").__version__ = version
        for path, stub in read_stubs().items():
            if "__init__" in stub.methods:
                self.place(path, self._class(stub))
        self.place("tensorrt_llm.llmapi.TorchLlmArgs", _args(read_stubs()["tensorrt_llm.LLM"]))
        self.place("tensorrt_llm.llmapi.TrtLlmArgs", _args(read_stubs()["tensorrt_llm._tensorrt_engine.LLM"]))
        self.place("tensorrt_llm.llmapi.RequestOutput", Result)
        self.place("tensorrt_llm.llmapi.CompletionOutput", SimpleNamespace)
        self.place("tensorrt_llm.llmapi.RequestError", RequestError)

    def _class(self, stub: Stub) -> type[Fields]:
        base = Llm if stub.name == "LLM" else Fields
        own: dict[str, Any] = {"__signature__": stub.methods["__init__"], "package": self, "__module__": stub.module}
        for name, its in stub.methods.items():
            if name != "__init__":
                own[name] = _checked(getattr(Llm, name), its)
        return type(stub.name, (base,), own)

    def place(self, path: str, thing: Any) -> None:
        module, _, name = path.rpartition(".")
        setattr(self._module(module), name, thing)

    def _module(self, name: str) -> ModuleType:
        if name not in self.modules:
            module = self.modules[name] = ModuleType(name)
            module.__path__, module.__spec__ = [], ModuleSpec(name, None)
            parent, _, own = name.rpartition(".")
            if parent:
                setattr(self._module(parent), own, module)
        return self.modules[name]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "FakePackage":
        for name, module in self.modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return self


def _checked(function: Any, its: inspect.Signature) -> Any:
    """Takes what the stub has, and hands all of it on by name."""
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    its = its.replace(parameters=[own, *its.parameters.values()])

    def method(*args: Any, **kwargs: Any) -> Any:
        bound = its.bind(*args, **kwargs)
        bound.apply_defaults()
        return function(**bound.arguments)

    method.__signature__ = its  # type: ignore[attr-defined]
    return method


def _args(stub: Stub) -> type:
    """The pydantic model of a class's further keywords."""
    parameters = stub.methods["__init__"].parameters.values()
    return type("Args", (), {"model_fields": {parameter.name: _field(parameter.default) for parameter in parameters}})


def _field(default: Any) -> SimpleNamespace:
    required = default is inspect.Parameter.empty
    return SimpleNamespace(default=default, default_factory=None, is_required=lambda: required)
