"""The stages of a pipeline, and the check whether a model can be split over ranks, before any weight is read. Imports
no torch."""

from dataclasses import dataclass, replace

from ...core.errors import InvalidArgument
from .model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """Stage `index` of a pipeline of `count`, with consecutive layers of the model."""

    index: int = 0
    count: int = 1
    layer_counts: tuple[int, ...] = ()
    """The layers of each stage; empty: as even as possible, with fewer in the last stages, since they have the head."""

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
    """Check that `tensor` ranks can share each layer, and `stage.count` stages all layers. Slices need not be equal,
    but every rank has as many whole heads as the others, and key/value heads to them.

    Raises:
        InvalidArgument: they cannot; the message names the model and the numbers.
    """
    if whole_experts and spec.experts is None:
        raise InvalidArgument(f"model {model}: it has no experts to share", field="enable_expert_parallel")
    if (refusal := _tensor_refusal(spec, tensor, whole_experts)) is not None:
        raise InvalidArgument(f"model {model}: {refusal}", field="tensor_parallel_size")
    if spec.layers < stage.count:
        message = f"model {model}: {spec.layers} layers can't be split over {stage.count} stages"
        raise InvalidArgument(message, field="pipeline_parallel_size")
    if stage.count > 1 and spec.gemma is not None and spec.gemma.per_layer_size:
        message = f"model {model}: embeddings that tokens have for each layer can't be shared by {stage.count} stages"
        raise InvalidArgument(message, field="pipeline_parallel_size")
    if stage.count > 1 and spec.shared_blocks is not None:
        message = f"model {model}: blocks that its layers use in turns can't be shared by {stage.count} stages"
        raise InvalidArgument(message, field="pipeline_parallel_size")
    counts = stage.layer_counts
    if counts and (len(counts) != stage.count or sum(counts) != spec.layers or min(counts) < 1):
        message = (
            f"model {model}: pipeline_layers must give each of its {spec.layers} layers to one of {stage.count} stages"
            f" (pipeline_parallel_size), at least one to each, got {','.join(map(str, counts))}"
        )
        raise InvalidArgument(message, field="pipeline_layers")
    for number in range(stage.count):
        layers = replace(stage, index=number).layers(spec.layers)
        if any(spec.attention) and all(spec.attention[layer] is None for layer in layers):
            message = f"model {model}: no layer of stage {number} of {stage.count} attends, and each must have a cache"
            raise InvalidArgument(message, field="pipeline_parallel_size")
        if away := [layer for layer in layers if spec.cache_owner(layer) not in layers]:
            owner = spec.cache_owner(away[0])
            message = f"model {model}: layer {away[0]} attends to the keys and values of layer {owner}"
            message += f", which is not in stage {number} of {stage.count} with it"
            raise InvalidArgument(message, field="pipeline_layers" if counts else "pipeline_parallel_size")


def can_share(spec: ModelSpec, tensor: int, whole_experts: bool = False) -> bool:
    """Whether so many ranks can share each layer."""
    return _tensor_refusal(spec, tensor, whole_experts) is None


def _tensor_refusal(spec: ModelSpec, tensor: int, whole_experts: bool) -> str | None:
    if spec.shared_blocks is not None and tensor > 1:
        return f"blocks that its layers use in turns can't be shared by {tensor} ranks"
    if spec.recurrence is not None and (refusal := spec.recurrence.refusal(tensor)) is not None:
        return f"{refusal}; stages of a pipeline can have its layers"
    if spec.gemma is not None and spec.gemma.altup is not None and tensor > 1:
        return f"layers with several streams of hidden states can't be shared by {tensor} ranks"
    if any(spec.attention) and spec.heads % tensor:
        return f"{spec.heads} attention heads can't be shared evenly by {tensor} ranks"
    for kv_heads in (spec.kv_heads, *(kind.kept.heads for kind in spec.cached_attention if kind.kept is not None)):
        if any(spec.attention) and kv_heads % tensor and tensor % kv_heads:
            shared = f"{kv_heads} key/value heads can be neither shared evenly by {tensor} ranks"
            return f"{shared} nor held by equally many of them each"
    sizes = {"intermediate_size": spec.intermediate_size, "vocab_size": spec.vocab_size}
    if spec.experts is not None and whole_experts:
        sizes["experts"] = spec.experts.count
    elif spec.experts is not None:
        sizes["intermediate_size of an expert"] = spec.experts.intermediate_size
    small = [name for name, size in sizes.items() if size < tensor]
    return f"its {small[0]}, {sizes[small[0]]}, gives nothing to some of {tensor} ranks" if small else None
