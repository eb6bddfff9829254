"""Holds the contract against the installed package: every signature we call, then a real generation.

What it finds is for people; the adapter itself never looks.
"""

import asyncio
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ...core.errors import CharoniaError
from ...scheduler.plan import SamplerParams
from ..core.messages import AddRequest
from .api_versions import ApiArgument, ApiCall, ApiVersion
from .options import TrtllmOptions
from .package import TrtllmPackage, resolve
from .results import ResultReader
from .runtime import TrtllmRuntime, TrtllmRuntimeLoader

_TOKENS = 8
_SECONDS = 120.0
"""Given to one generation, once the model is loaded."""

_UNKNOWN = msgspec.UNSET
"""A default that is made anew for each call."""


def report(model: str | None, find: Callable[[], TrtllmPackage] = TrtllmPackage.find) -> int:
    """Compare signatures and, with a `model` (checkpoint directory, hub id or prebuilt engine), generate. Print what
    differs; the exit status."""
    try:
        package = find()
    except CharoniaError as error:
        print(f"charonia: {error.message}", file=sys.stderr)
        return 1
    print(f"tensorrt_llm {package.version}, held against what the adapter expects of {package.world}")
    found = list(differences(package.world))
    if model is None:
        print("signatures only: name a checkpoint to generate with it")
    else:
        found += asyncio.run(trial(package, model))
    for line in found:
        print(f"DIFFERS: {line}")
    print(f"{len(found)} differences" if found else "good: nothing differs")
    return int(bool(found))


# Signatures


def differences(world: ApiVersion) -> Iterator[str]:
    """What the installed package lacks of the contract, or has otherwise."""
    for name, call in world.calls.items():
        try:
            there = arguments(call)
        except (ImportError, AttributeError) as error:
            yield f"{name}: {call.path} is not there ({error})"
            continue
        yield from (f"{name}: {said}" for said in _compare(call, there))
    try:
        resolve(world.request_error)
    except (ImportError, AttributeError):
        yield f"{world.request_error} is not there"


def arguments(call: ApiCall) -> Mapping[str, ApiArgument]:
    """What the real one takes, by name; where it does not say, what we expect."""
    found = resolve(call.path)
    if _is_open(found) and not call.fields:
        return call.arguments
    there = dict(_fields(found)) if hasattr(found, "model_fields") else dict(_parameters(found))
    return there | (dict(_fields(resolve(call.fields))) if call.fields else {})


_OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _is_open(function: Any) -> bool:
    """It takes any keyword, as what wraps another function may."""
    return any(each.kind is each.VAR_KEYWORD for each in inspect.signature(function).parameters.values())


def _parameters(function: Any) -> Iterator[tuple[str, ApiArgument]]:
    for name, parameter in inspect.signature(function).parameters.items():
        if name != "self" and parameter.kind not in _OPEN:
            required = parameter.default is inspect.Parameter.empty
            yield name, ApiArgument(required=required, default=_UNKNOWN if required else parameter.default)


def _fields(model: Any) -> Iterator[tuple[str, ApiArgument]]:
    """Of a pydantic model."""
    for name, info in model.model_fields.items():
        made = info.is_required() or info.default_factory is not None
        yield name, ApiArgument(required=info.is_required(), default=_UNKNOWN if made else info.default)


def _compare(call: ApiCall, there: Mapping[str, ApiArgument]) -> Iterator[str]:
    for name, expected in call.arguments.items():
        real = there.get(name)
        if real is None:
            yield f"has no argument {name}"
        elif msgspec.UNSET not in (expected.default, real.default) and real.default != expected.default:
            yield f"{name} is {real.default!r} by default, expected {expected.default!r}"
    for name, real in there.items():
        if real.required and name not in call.arguments:
            yield f"needs {name}, which the adapter does not know"


# A generation


@dataclass(slots=True)
class CompatReport:
    """Looks at results as they come. `found`: what is not as expected."""

    world: ApiVersion
    found: list[str] = field(default_factory=list)

    def see(self, result: Any) -> None:
        self.has("RequestOutput", result)
        if getattr(result, "outputs", None):
            output = result.outputs[0]
            self.has("CompletionOutput", output)
            for likely in output.logprobs or ():
                if isinstance(likely, Mapping):
                    self.has("Logprob", next(iter(likely.values())))

    def expect(self, holds: bool, said: str) -> None:
        if not holds and said not in self.found:
            self.found.append(said)

    def has(self, owner: str, thing: Any) -> None:
        for name in self.world.attributes[owner]:
            self.expect(hasattr(thing, name), f"{owner} has no attribute {name}")


async def trial(package: TrtllmPackage, model: str) -> list[str]:
    """Load it, generate, abort, ask for statistics, shut down; what was not as expected."""
    maker, witness = (
        TrtllmRuntimeLoader(model, TrtllmOptions(max_num_seqs=4), lambda: package),
        CompatReport(package.world),
    )
    try:
        runtime = await maker.load()
        witness.has("LLM", runtime.llm)
        async with asyncio.timeout(_SECONDS):
            await _generate(runtime, witness)
            await _abort(runtime, witness)
            await _ask(runtime, witness)
    except CharoniaError as error:
        witness.expect(False, error.message)
    except TimeoutError:
        witness.expect(False, f"no end within {_SECONDS:g} s")
    except Exception as error:
        witness.expect(False, f"{type(error).__name__}: {error}")
    finally:
        await maker.close()
    return witness.found


async def _generate(runtime: TrtllmRuntime, witness: CompatReport) -> None:
    add = AddRequest(client=0, key=1, prompt=[1, 2, 3], max_tokens=_TOKENS, sampling=SamplerParams(logprobs=1))
    submitted, reader, tokens, items = runtime.submit(runtime.translate(add)), ResultReader(add), 0, 0
    async for result in submitted:
        items += 1
        witness.see(result)
        witness.expect(result is submitted, "results are not one object, changed in place")
        news = reader.read_delta(result)
        tokens += len(news.tokens)
        witness.expect(len(news.tokens) == len(news.logprobs), "there is not one log-probability for each token")
    said = submitted.outputs[0].finish_reason
    witness.expect(said in witness.world.finish_reasons, f"a generation ended with '{said}'")
    witness.expect(tokens == _TOKENS, f"{tokens} tokens came, {_TOKENS} were asked for")
    print(f"generated {tokens} tokens in {items} items: {list(submitted.outputs[0].token_ids)}")


async def _abort(runtime: TrtllmRuntime, witness: CompatReport) -> None:
    """An aborted one must end by itself."""
    longest = runtime.ready.max_model_len - 3
    add = AddRequest(client=0, key=2, prompt=[1, 2, 3], max_tokens=longest)
    submitted = runtime.submit(runtime.translate(add))
    async for result in submitted:
        runtime.package.tell(result, "RequestOutput.abort")
    came = len(submitted.outputs[0].token_ids)
    witness.expect(came < longest, "an abort changes nothing")
    print(f"aborted after the first item, ended after {came} tokens")


async def _ask(runtime: TrtllmRuntime, witness: CompatReport) -> None:
    records = [record async for record in runtime.package.tell(runtime.llm, "LLM.get_stats_async", timeout=2.0)]
    witness.expect(bool(records), "there are no statistics")
    for record in records[-1:]:
        plain = msgspec.json.decode(record) if isinstance(record, str | bytes) else record
        for path in witness.world.statistics:
            witness.expect(_leads(plain, path), f"statistics have no {path}")


def _leads(record: Any, path: str) -> bool:
    for name in path.split("."):
        if not isinstance(record, Mapping) or name not in record:
            return False
        record = record[name]
    return True
