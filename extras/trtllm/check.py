"""`charonia check --tensorrt-llm`: the installed package compared with the stubs, then a real generation.

The report is for people; serving does not depend on it.
"""

import asyncio
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from ...core.errors import CharoniaError
from ...core.resolved_sampling import ResolvedSampling
from ...engine.core.messages import AddRequest
from ...scheduler.sequence import SequenceSpec
from .options import TrtllmOptions
from .package import SUPPORTED, differences, import_tensorrt_llm, read_stubs
from .request import ResultReader
from .runtime import TrtllmRuntime, TrtllmRuntimeLoader

_PROMPT = np.array([1, 2, 3], np.int32)
_TOKENS = 8
_SECONDS = 120.0
"""Seconds for all generations, once the model is loaded."""

_FINISH_REASONS = ("stop", "length", "timeout", "cancelled")

_STATISTICS = (
    "iterLatencyMS",
    "kvCacheStats.usedNumBlocks",
    "kvCacheStats.maxNumBlocks",
    "kvCacheStats.tokensPerBlock",
    "inflightBatchingStats.numScheduledRequests",
    "inflightBatchingStats.numGenRequests",
    "inflightBatchingStats.numCtxTokens",
    "inflightBatchingStats.numPausedRequests",
)
"""Paths of the numbers that we read in the record of an iteration."""


def report(model: str | None) -> int:
    """Compare signatures and, with a `model` (checkpoint directory, hub id or prebuilt engine), generate. Print what
    differs; the exit status."""
    try:
        version = import_tensorrt_llm()
    except CharoniaError as error:
        print(f"charonia: {error.message}", file=sys.stderr)
        return 1
    print(f"tensorrt_llm {version}, held against what the adapter expects of {SUPPORTED}")
    differing = list(differences())
    if model is None:
        print("signatures only: name a checkpoint to generate with it")
    else:
        differing += asyncio.run(try_out(model))
    for line in differing:
        print(f"DIFFERS: {line}")
    print(f"{len(differing)} differences" if differing else "good: nothing differs")
    return int(bool(differing))


class CompatReport:
    """Collects the differences from what the adapter expects, each once."""

    def __init__(self) -> None:
        self.differences: list[str] = []

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds and otherwise not in self.differences:
            self.differences.append(otherwise)

    def check_attributes(self, path: str, instance: object) -> None:
        """Expect the attributes of the stub at `path`."""
        stub = read_stubs()[path]
        for name in sorted(stub.attributes):
            self.expect(hasattr(instance, name), f"{stub.name.removeprefix('_')} has no attribute {name}")

    def check_result(self, result: Any) -> None:
        self.check_attributes("tensorrt_llm.llmapi.RequestOutput", result)
        for output in getattr(result, "outputs", ())[:1]:
            self.check_attributes("tensorrt_llm.llmapi.CompletionOutput", output)
            for likely in output.logprobs or ():
                if isinstance(likely, Mapping):
                    self.check_attributes("tensorrt_llm.llmapi._Logprob", next(iter(likely.values())))


async def try_out(model: str) -> list[str]:
    """Load the model, generate, abort, ask for statistics, shut down; the differences that were found."""
    loader = TrtllmRuntimeLoader(model, TrtllmOptions(max_num_seqs=4))
    compat = CompatReport()
    try:
        runtime = await loader.load()
        compat.check_attributes("tensorrt_llm.LLM", runtime.llm)
        async with asyncio.timeout(_SECONDS):
            await _generate(runtime, compat)
            await _abort(runtime, compat)
            await _read_statistics(runtime, compat)
    except CharoniaError as error:
        compat.expect(False, error.message)
    except TimeoutError:
        compat.expect(False, f"no end within {_SECONDS:g} s")
    except Exception as error:
        compat.expect(False, f"{type(error).__name__}: {error}")
    finally:
        await loader.close()
    return compat.differences


async def _generate(runtime: TrtllmRuntime, compat: CompatReport) -> None:
    spec = SequenceSpec(key=1, prompt=_PROMPT, max_tokens=_TOKENS, sampling=ResolvedSampling(logprobs=1))
    submitted = runtime.submit(runtime.translate(AddRequest(spec)))
    reader = ResultReader(spec)
    tokens = 0
    items = 0
    async for result in submitted:
        items += 1
        compat.check_result(result)
        compat.expect(result is submitted, "results are not one object, changed in place")
        delta = reader.read_delta(result)
        tokens += len(delta.tokens)
        compat.expect(len(delta.tokens) == len(delta.logprobs), "there is not one log-probability for each token")
    reason = submitted.outputs[0].finish_reason
    compat.expect(reason in _FINISH_REASONS, f"a generation ended with '{reason}'")
    compat.expect(tokens == _TOKENS, f"{tokens} tokens came, {_TOKENS} were asked for")
    print(f"generated {tokens} tokens in {items} items: {list(submitted.outputs[0].token_ids)}")


async def _abort(runtime: TrtllmRuntime, compat: CompatReport) -> None:
    """An aborted generation must end by itself."""
    longest = runtime.ready.max_model_len - 3
    add = AddRequest(SequenceSpec(key=2, prompt=_PROMPT, max_tokens=longest))
    submitted = runtime.submit(runtime.translate(add))
    async for result in submitted:
        result.abort()
    generated = len(submitted.outputs[0].token_ids)
    compat.expect(generated < longest, "an abort changes nothing")
    print(f"aborted after the first item, ended after {generated} tokens")


async def _read_statistics(runtime: TrtllmRuntime, compat: CompatReport) -> None:
    records = [record async for record in runtime.llm.get_stats_async(timeout=2.0)]
    compat.expect(bool(records), "there are no statistics")
    for record in records[-1:]:
        plain = msgspec.json.decode(record) if isinstance(record, str | bytes) else record
        for path in _STATISTICS:
            value: Any = plain
            for name in path.split("."):
                value = value.get(name) if isinstance(value, Mapping) else None
            compat.expect(value is not None, f"statistics have no {path}")
