"""The plan of an ensemble: its steps in an order in which they can run, checked against the models that they name.

What follows a decoupled step runs once for each of its responses, and so opens a new stage; tensors of earlier stages
are the same in all passes. Rules and error texts are Triton's:
https://github.com/triton-inference-server/server/blob/main/docs/user_guide/ensemble_models.md.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from ..core.errors import InvalidArgument
from ..core.model import ModelConfig
from ..core.tensor import TensorSpec

ConfigLookup = Callable[[str, str], ModelConfig]
"""The config of a loaded model by name and version, the latest if that is empty. Raises if there is none."""

DEFAULT_PASSES = 64
"""Passes of one request that run at once where `max_inflight_requests` sets no limit."""

ENSEMBLE = -1
"""The number that stands for the ensemble itself beside those of its steps."""

_ASKING_BACKENDS = ("ensemble", "pipeline")


class EnsembleStep(NamedTuple):
    """One step as the config has it: `inputs` and `outputs` map names of the model's tensors to the ensemble's."""

    number: int
    model: str
    version: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


class Stage(NamedTuple):
    """The steps that run in one pass. `source`: the decoupled step whose responses begin the passes; None for the
    first stage, which has one. `steps`: in an order in which they can run, none of them decoupled. `chained`: each
    needs the one before it, so none can run beside another."""

    source: EnsembleStep | None
    steps: tuple[EnsembleStep, ...]
    chained: bool


@dataclass(frozen=True, slots=True)
class EnsemblePlan:
    """How the requests to one ensemble run. Steps are named by their numbers in the config."""

    name: str
    stages: tuple[Stage, ...]
    """The first, then each within the one before it."""
    optional: Mapping[int, frozenset[str]]
    """By step, the inputs of its model that may be missing."""
    asking: frozenset[int]
    """The steps whose models are made of other models."""
    outputs: tuple[str, ...]
    """The names of the ensemble's outputs."""
    max_passes: int
    """The passes of one stage that run at once."""
    batch_changes: Mapping[int, Mapping[str, int]]
    """By step, and for the ensemble's outputs: the tensors, by the receiver's names, that gain a batch dimension of 1
    there (1), or lose it (-1)."""

    @property
    def decoupled(self) -> bool:
        """Whether any step is decoupled."""
        return len(self.stages) > 1

    @property
    def steps(self) -> Iterator[EnsembleStep]:
        """All steps, in an order in which they can run."""
        for stage in self.stages:
            if stage.source is not None:
                yield stage.source
            yield from stage.steps

    def for_outputs(self, wanted: Collection[str]) -> "EnsemblePlan":
        """The plan without the steps that none of these outputs needs."""
        needed = set(wanted)
        kept = set[int]()
        for step in reversed(tuple(self.steps)):
            if not needed.isdisjoint(step.outputs.values()):
                kept.add(step.number)
                needed.update(step.inputs.values())
        stages = []
        for stage in self.stages:
            if stage.source is None or stage.source.number in kept:
                steps = tuple(step for step in stage.steps if step.number in kept)
                stages.append(Stage(stage.source, steps, _are_chained(steps)))
        return replace(self, stages=tuple(stages))


def read_steps(config: ModelConfig) -> tuple[EnsembleStep, ...]:
    """The steps of an ensemble's config.

    Raises:
        InvalidArgument: a step lacks a field, or a tensor has no or two origins.
    """
    name = config.name
    scheduling = config.raw.get("ensemble_scheduling", {})
    if not scheduling.get("step"):
        raise _error(f"must specify 'step' for ensemble '{name}'")
    steps = []
    producers = {spec.name: -1 for spec in config.inputs}
    for index, raw in enumerate(scheduling["step"]):
        for field in ("model_name", "input_map", "output_map"):
            if not raw.get(field):
                raise _error(f"must specify '{field}' in step {index} of ensemble '{name}'")
        version = int(raw.get("model_version", -1))
        step = EnsembleStep(
            index, raw["model_name"], "" if version <= 0 else str(version), raw["input_map"], raw["output_map"]
        )
        for tensor in step.outputs.values():
            if tensor in producers:
                where = f"ensemble '{name}' step {index}"
                raise _error(f"ensemble tensor '{tensor}' can appear in an output map only once for {where}")
            producers[tensor] = index
        steps.append(step)
    used = {tensor for step in steps for tensor in step.inputs.values()}
    for spec in config.inputs:
        if spec.name not in used:
            raise _error(f"ensemble input '{spec.name}' for ensemble {name} is not used")
    for spec in config.outputs:
        if producers.get(spec.name, -1) < 0:
            raise _error(f"ensemble output '{spec.name}' for ensemble {name} is not used")
    outputs = {spec.name for spec in config.outputs}
    for tensor, index in producers.items():
        if index >= 0 and tensor not in used and tensor not in outputs:
            raise _error(f"ensemble tensor '{tensor}' is unused in ensemble '{name}'")
    for step in steps:
        for tensor in step.inputs.values():
            if tensor not in producers:
                made_by = f"neither an input of ensemble '{name}' nor an output of one of its steps"
                raise _error(f"input of model '{step.model}' in step {step.number}: '{tensor}' is {made_by}")
    return tuple(steps)


def plan_ensemble(config: ModelConfig, lookup: ConfigLookup) -> EnsemblePlan:
    """The plan of an ensemble whose models are loaded.

    Raises:
        InvalidArgument: the steps do not fit together, or not to their models.
    """
    steps = _in_order(config, read_steps(config))
    models = {step.number: lookup(step.model, step.version) for step in steps}
    batch_changes = _check_tensors(config, steps, models)
    stages = _divide_into_stages(config, steps, models)
    optional = {
        index: frozenset(spec.name for spec in model.inputs if spec.optional) for index, model in models.items()
    }
    limit = int(config.raw["ensemble_scheduling"].get("max_inflight_requests", 0))
    outputs = tuple(spec.name for spec in config.outputs)
    asking = frozenset(number for number, model in models.items() if model.backend in _ASKING_BACKENDS)
    return EnsemblePlan(config.name, stages, optional, asking, outputs, limit or DEFAULT_PASSES, batch_changes)


def _in_order(config: ModelConfig, steps: Sequence[EnsembleStep]) -> list[EnsembleStep]:
    """The steps so that each comes after those that make its inputs."""
    known = {spec.name for spec in config.inputs}
    left = list(steps)
    ordered = list[EnsembleStep]()
    while left:
        ready = [step for step in left if known.issuperset(step.inputs.values())]
        if not ready:
            names = ", ".join(f"'{step.model}' (step {step.number})" for step in left)
            raise _error(f"steps of ensemble '{config.name}' wait for each other's outputs: {names}")
        known.update(*(step.outputs.values() for step in ready))
        ordered += ready
        left = [step for step in left if step not in ready]
    return ordered


def _divide_into_stages(
    config: ModelConfig, steps: Sequence[EnsembleStep], models: Mapping[int, ModelConfig]
) -> tuple[Stage, ...]:
    stages: list[tuple[EnsembleStep | None, list[EnsembleStep]]] = [(None, [])]
    stage_of = dict.fromkeys((spec.name for spec in config.inputs), 0)

    def only_stage(tensors: Sequence[str], receiver: str) -> int:
        """The stage whose passes a receiver of these tensors belongs to."""
        by_stage = {stage_of[tensor]: tensor for tensor in tensors if stage_of[tensor]}
        if len(by_stage) > 1:
            origins = [(tensor, source) for stage, tensor in by_stage.items() if (source := stages[stage][0])]
            named = " and ".join(
                f"'{tensor}' from '{source.model}' (step {source.number})" for tensor, source in origins
            )
            text = "receives inputs originated from different decoupled models"
            raise _error(f"in ensemble {config.name}, {receiver} {text}: {named}")
        return next(iter(by_stage), 0)

    for step in steps:
        stage = only_stage(list(step.inputs.values()), f"step of model '{step.model}'")
        if models[step.number].decoupled:
            stage = len(stages)
            stages.append((step, []))
        else:
            stages[stage][1].append(step)
        stage_of.update(dict.fromkeys(step.outputs.values(), stage))
    only_stage([spec.name for spec in config.outputs], "the response")
    return tuple(Stage(source, tuple(members), _are_chained(members)) for source, members in stages)


def _are_chained(steps: Sequence[EnsembleStep]) -> bool:
    return all(set(before.outputs.values()) & set(after.inputs.values()) for before, after in pairwise(steps))


class _End(NamedTuple):
    """One end of a tensor: the model that it belongs to there, that of a step or the ensemble, its datatype and whole
    shape in it, and the model's max_batch_size."""

    model: str
    datatype: str
    shape: tuple[int, ...]
    max_batch_size: int

    def batch_change(self, taken: "_End") -> int | None:
        """What becomes of the batch dimension of a tensor on its way to the end that takes it: see `EnsemblePlan`. None
        if the shapes disagree."""
        if _shapes_agree(self.shape, taken.shape):
            return 0
        # A batch of one is the tensor itself: Triton lets models that batch no more meet those that do not batch.
        match self.max_batch_size, taken.max_batch_size:
            case 0, 1 if _shapes_agree(self.shape, taken.shape[1:]):
                return 1
            case 1, 0 if _shapes_agree(self.shape[1:], taken.shape):
                return -1
        return None


def _shapes_agree(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return len(one) == len(other) and all(-1 in pair or pair[0] == pair[1] for pair in zip(one, other, strict=True))


def _check_tensors(
    config: ModelConfig, steps: Sequence[EnsembleStep], models: Mapping[int, ModelConfig]
) -> dict[int, dict[str, int]]:
    """Compare both ends of every tensor, and the tensors of every step with those of its model. Returns the plan's
    `batch_changes`."""
    origins = {spec.name: _end(config, spec) for spec in config.inputs}
    changes = dict[int, dict[str, int]]()
    for step in steps:
        model = models[step.number]
        where = f"step {step.number} of ensemble '{config.name}'"
        if config.max_batch_size > model.max_batch_size:
            sizes = f"{config.max_batch_size}, but its model '{step.model}' has {model.max_batch_size}"
            raise _error(f"{where}: the ensemble's max_batch_size is {sizes}")
        inputs, outputs = ({spec.name: spec for spec in specs} for specs in (model.inputs, model.outputs))
        for kind, known, mapped in (("input", inputs, step.inputs), ("output", outputs, step.outputs)):
            for name in mapped:
                if name not in known:
                    raise _error(f"{where}: model '{step.model}' has no {kind} '{name}'")
        for name, spec in inputs.items():
            if name not in step.inputs and not spec.optional:
                raise _error(f"{where}: input '{name}' of model '{step.model}' is not mapped, and not optional")
        changes[step.number] = {
            name: _check_ends(config, tensor, origins[tensor], _end(model, inputs[name], step))
            for name, tensor in step.inputs.items()
        }
        origins.update({tensor: _end(model, outputs[name], step) for name, tensor in step.outputs.items()})
    changes[ENSEMBLE] = {
        spec.name: _check_ends(config, spec.name, origins[spec.name], _end(config, spec)) for spec in config.outputs
    }
    return changes


def _end(model: ModelConfig, spec: TensorSpec, step: EnsembleStep | None = None) -> _End:
    name = f"'{model.name}'" if step is None else f"'{model.name}' (step {step.number})"
    shape = (-1, *spec.dims) if model.max_batch_size else spec.dims
    return _End(name, spec.datatype, shape, model.max_batch_size)


def _type_name(datatype: str) -> str:
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"


def _check_ends(config: ModelConfig, tensor: str, made: _End, taken: _End) -> int:
    """The change of the tensor's batch dimension. Raises `InvalidArgument` if the ends do not fit together."""
    where = f"in ensemble '{config.name}', ensemble tensor '{tensor}'"
    if made.datatype != taken.datatype:
        kind = "data type"
        ours = _type_name(taken.datatype)
        theirs = _type_name(made.datatype)
    elif (change := made.batch_change(taken)) is None:
        kind = "shape"
        ours = str(list(taken.shape))
        theirs = str(list(made.shape))
    else:
        return change
    both = f"{ours} is inferred from model {taken.model} while {theirs} is inferred from model {made.model}"
    raise _error(f"{where}: inconsistent {kind}: {both}")


def _error(message: str) -> InvalidArgument:
    return InvalidArgument(message, field="ensemble_scheduling")
