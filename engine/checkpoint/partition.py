"""How a model is shared out over ranks: the stages of a pipeline, and whether a split is possible at all.

Numbers alone, checked before any weight is read. Imports no torch.
"""

from dataclasses import dataclass

from ...core.errors import InvalidArgument
from .model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """The stage `index` of a pipeline of `count`: a rank's consecutive part of the model's layers. `layer_counts`: the
    layers of each stage; empty for as even as can be, the last stages the shorter, since they have the head. The
    default is a pipeline of one stage."""

    index: int = 0
    count: int = 1
    layer_counts: tuple[int, ...] = ()

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.count - 1

    def layers(self, total: int) -> range:
        """The indices of this stage's layers, of a model that has `total`."""
        if self.layer_counts:
            start = sum(self.layer_counts[: self.index])
            return range(start, start + self.layer_counts[self.index])
        return range(-(-total * self.index // self.count), -(-total * (self.index + 1) // self.count))


def check_partition(
    spec: ModelSpec, model: str, tensor: int, stage: PipelineStage, whole_experts: bool = False
) -> None:
    """Whether `tensor` ranks in each stage can share the `model`'s layers, and `stage.count` stages its depth.

    Slices need not be equal, but heads are whole: every rank has as many as the others, with key/value heads to them.

    Raises:
        InvalidArgument: they can't; the message names the model and the numbers.
    """
    if whole_experts and spec.experts is None:
        raise InvalidArgument(f"model {model}: it has no experts to share", field="enable_expert_parallel")
    _check_heads(spec, model, tensor)
    _check_sizes(spec, model, tensor, whole_experts)
    _check_layers(spec.layers, model, stage)


def _check_heads(spec: ModelSpec, model: str, tensor: int) -> None:
    if spec.heads % tensor:
        raise _refusal(model, f"{spec.heads} attention heads can't be shared evenly by {tensor} ranks")
    if spec.kv_heads % tensor and tensor % spec.kv_heads:
        raise _refusal(
            model,
            f"{spec.kv_heads} key/value heads can be neither shared evenly by {tensor} ranks"
            " nor held by equally many of them each",
        )


def _check_sizes(spec: ModelSpec, model: str, tensor: int, whole_experts: bool) -> None:
    sizes = {"intermediate_size": spec.intermediate_size, "vocab_size": spec.vocab_size}
    if spec.experts is not None and whole_experts:
        sizes["experts"] = spec.experts.count
    elif spec.experts is not None:
        sizes["intermediate_size of an expert"] = spec.experts.intermediate_size
    for what, size in sizes.items():
        if size < tensor:
            raise _refusal(model, f"its {what}, {size}, gives nothing to some of {tensor} ranks")


def _check_layers(layers: int, model: str, stage: PipelineStage) -> None:
    if layers < stage.count:
        raise InvalidArgument(
            f"model {model}: {layers} layers can't be split over {stage.count} stages",
            field="pipeline_parallel_size",
        )
    if stage.layer_counts and (
        len(stage.layer_counts) != stage.count or sum(stage.layer_counts) != layers or min(stage.layer_counts) < 1
    ):
        raise InvalidArgument(
            f"model {model}: pipeline_layers must give each of its {layers} layers to one of {stage.count} stages"
            f" (pipeline_parallel_size), at least one to each, got {','.join(map(str, stage.layer_counts))}",
            field="pipeline_layers",
        )


def _refusal(model: str, reason: str) -> InvalidArgument:
    return InvalidArgument(f"model {model}: {reason}", field="tensor_parallel_size")
