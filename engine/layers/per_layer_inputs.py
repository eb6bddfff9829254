"""Embeddings that a token has for each layer (Gemma 3n and 4). Their table is larger than the rest of a small model,
and only gathered from: it stays in the host's memory, on a CPU in its file."""

import math
from collections.abc import Callable

from torch import Tensor

from ..checkpoint.model_spec import GemmaSpec, ModelSpec
from ..checkpoint.row_table import RowTable
from ..checkpoint.weights import TensorSlice, WeightLoader
from ..cpu.elementwise import join_features, trace_embedding
from ..cpu.op_trace import SymbolicTensor
from ..gpu import runtime
from .linear import OutputShard, column_linear
from .mlp import fastest_gate
from .norm import divided_rms_norm, rms_norm
from .product_matrix import build_matmul
from .step_context import StepContext


class PerLayerInputs:
    """Embeddings x [N, hidden] of a step's tokens -> [N, layers * size]: of each layer the projection of x, normalised,
    and the token's own embedding, the sum divided by sqrt(2). Every rank of a group has all of it."""

    def __init__(self, loader: WeightLoader, spec: ModelSpec, gemma: GemmaSpec) -> None:
        self._layers = spec.layers
        self.size = gemma.per_layer_size
        """Numbers of a layer's inputs."""
        width = spec.layers * self.size
        table = TensorSlice("model.embed_tokens_per_layer.weight", (gemma.per_layer_vocab, width))
        self._table = loader.table(table, on_host=True)
        self._factor = math.sqrt(gemma.per_layer_size / 2)
        projection = TensorSlice("model.per_layer_model_projection.weight", (width, spec.hidden_size))
        self._project = build_matmul(loader, [projection])
        weight = loader.vector("model.per_layer_projection_norm.weight", gemma.per_layer_size)
        # The projection is divided by sqrt(hidden) before its norm, which is as if the norm's epsilon were larger.
        self._norm = divided_rms_norm(weight, spec.norm_eps * spec.hidden_size, math.sqrt(2))
        self._add_embeddings = _fastest_addition(self._table, self._factor, loader)
        self.host_bound = self._table.rows.device != loader.device and not runtime.serves(loader.dtype, loader.device)
        whole = self._table.rows.is_contiguous() and gemma.per_layer_vocab >= spec.vocab_size
        self.untraceable = None if whole else "its embeddings for layers are not one table of all tokens"

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        inputs = self._project(x)
        self._norm.norm_heads(inputs.view(-1, self._layers, self.size), self._layers)
        traced: object = x  # declared for tensors
        if isinstance(traced, SymbolicTensor):
            table = self._table
            rows = trace_embedding(traced.trace, table.rows, table.width, table.block_type, self._factor)
            return inputs.add_(rows)  # type: ignore[arg-type]
        self._add_embeddings(inputs, context.batch.tokens)
        return inputs


class PerLayerGate:
    """x [N, hidden] and the step's `PerLayerInputs` -> what layer `index` adds to the residual stream [N, hidden]: its
    inputs, gated by x."""

    def __init__(self, loader: WeightLoader, spec: ModelSpec, index: int, inputs: PerLayerInputs) -> None:
        name = f"model.layers.{index}"
        hidden = spec.hidden_size
        size = inputs.size
        self._column = index * size
        gate = OutputShard(f"{name}.per_layer_input_gate", size, slice(0, size))
        self._gate = column_linear(loader, [gate], hidden, bias=False)
        back = OutputShard(f"{name}.per_layer_projection", hidden, slice(0, hidden))
        self._project = column_linear(loader, [back], size, bias=False)
        self._activate = fastest_gate(spec.activation, loader)
        weight = loader.vector(f"{name}.post_per_layer_input_norm.weight", hidden)
        self._norm = rms_norm(weight, spec.norm_eps)
        self.untraceable = inputs.untraceable

    def __call__(self, x: Tensor, inputs: Tensor, context: StepContext) -> Tensor:
        gated = self._activate(join_features(self._gate(x, context), inputs, self._column))
        return self._norm(self._project(gated, context))


def _fastest_addition(table: RowTable, factor: float, loader: WeightLoader) -> Callable[[Tensor, Tensor], object]:
    """Adds to x [N, width], on the model's device, the rows of tokens [N] times `factor`; of tokens beyond the table,
    such as those of images, the first one."""
    if runtime.serves(loader.dtype, loader.device):
        from ..gpu.host_rows import add_rows

        return lambda x, tokens: add_rows(x, table.rows, tokens, factor)

    def add(x: Tensor, tokens: Tensor) -> Tensor:
        stored = tokens.to(table.rows.device)
        rows = table.gather(stored.where(stored < len(table), 0))
        return x.add_(rows.to(x.device).mul_(factor))

    return add
