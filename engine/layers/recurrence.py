"""Recurrences over the matrices that heads keep of a sequence, by C kernels, Triton's or torch: the gated delta rule
(arXiv 2412.06464) and Mamba-2's selective scan (arXiv 2405.21060). Rows go token by token: where a prompt is cut
changes nothing, by kernels not a bit. On a GPU prompts go by chunks, unless results must not depend on the batch."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.weights import WeightLoader
from ..cpu import library
from ..cpu.recurrent import MAX_KEY_SIZE, Recurrence, RecurrenceShape, ScanSteps, gated_delta_rule, selective_scan
from ..gpu import runtime
from .recurrent_state import StepSlotStates
from .step_context import StepContext

if TYPE_CHECKING:
    from ..gpu.recurrence import TritonRecurrence

StateScan: TypeAlias = Iterator[tuple[Tensor, Tensor]]
"""See `StepSlotStates.scan`."""

_UNIT_EPS = 1e-6
"""Added to the sum of squares by which queries and keys become unit vectors."""


class StateRecurrence:
    """x [N, width] with queries, keys and values, and gates [N, other width] -> [N, heads * value size], of the layer
    that keeps the `number`th state of this rank."""

    def __init__(self, number: int, recur: "Recurrence | TritonRecurrence | TorchRecurrence") -> None:
        self._number = number
        self._recur = recur
        self.untraceable = recur.untraceable
        self.host_bound = isinstance(recur, TorchRecurrence)

    def __call__(self, x: Tensor, gates: Tensor, context: StepContext) -> Tensor:
        states = context.states
        if isinstance(self._recur, Recurrence):
            return self._recur(x, gates, self._number, states.kernel)
        matrices = states.layers[self._number].matrices
        if isinstance(self._recur, TorchRecurrence):
            return self._recur(x, gates, matrices, states)
        return self._recur(x, gates, matrices, states.on_device)


class DeltaRuleGates(NamedTuple):
    """The parameters of a delta rule's decays, float32 [heads], and the columns where decays and betas begin."""

    rates: Tensor
    """-exp(A_log)."""
    bias: Tensor
    """dt_bias."""
    decay_column: int
    beta_column: int


def build_delta_rule(
    loader: WeightLoader, number: int, shape: RecurrenceShape, gates: DeltaRuleGates
) -> StateRecurrence:
    """For each token S *= exp(rate * softplus(decay + bias)), then S += k (sigmoid(beta) (v - k^T S)), and the result
    is q^T S, of queries and keys of length 1, queries by key_size^-0.5."""
    if _served_by_kernels(loader, shape):
        columns = gates.decay_column, gates.beta_column
        native = gated_delta_rule(shape, *columns, gates.rates, gates.bias, loader.dtype)
        return StateRecurrence(number, native)
    if _served_by_triton(loader, shape):
        from ..gpu.recurrence import TritonRecurrence

        steps = ScanSteps(gates.rates, gates.bias, None)
        columns, chunked = (gates.decay_column, gates.beta_column), loader.context.recurrence_chunks
        return StateRecurrence(number, TritonRecurrence(shape, *columns, steps, chunked))
    return StateRecurrence(number, TorchRecurrence(shape, gates))


def build_selective_scan(
    loader: WeightLoader, number: int, shape: RecurrenceShape, step_column: int, steps: ScanSteps
) -> StateRecurrence:
    """For each token dt = softplus(step + bias) within its bounds, S *= exp(rate * dt), S += B (dt x), and the result
    is C^T S + skip x: B is the key, C the query. Steps, [heads], begin at a column of the gates."""
    if _served_by_kernels(loader, shape):
        return StateRecurrence(number, selective_scan(shape, step_column, steps, loader.dtype))
    if _served_by_triton(loader, shape):
        from ..gpu.recurrence import TritonRecurrence

        chunked = loader.context.recurrence_chunks
        return StateRecurrence(number, TritonRecurrence(shape, step_column, None, steps, chunked))
    return StateRecurrence(number, TorchRecurrence(shape, TorchScanSteps(steps, step_column)))


def _served_by_kernels(loader: WeightLoader, shape: RecurrenceShape) -> bool:
    return library.supports(loader.dtype, loader.device) and shape.key_size <= MAX_KEY_SIZE


def _served_by_triton(loader: WeightLoader, shape: RecurrenceShape) -> bool:
    return runtime.serves(loader.dtype, loader.device) and shape.key_size <= MAX_KEY_SIZE


class TorchScanSteps(NamedTuple):
    """A selective scan's steps, and their column of the gates."""

    steps: ScanSteps
    column: int


class _HeadInputs(NamedTuple):
    """Queries, keys and values of tokens, float32 [N, heads, size]."""

    q: Tensor
    k: Tensor
    v: Tensor


class TorchRecurrence:
    """The same as `Recurrence` by torch."""

    untraceable: str | None = "its recurrence is torch's"

    def __init__(self, shape: RecurrenceShape, rule: DeltaRuleGates | TorchScanSteps) -> None:
        self._shape = shape
        self._rule = rule

    def __call__(self, x: Tensor, gates: Tensor, matrices: Tensor, states: StepSlotStates) -> Tensor:
        shape = self._shape
        wide = x.float()
        keyed = shape.key_heads * shape.key_size
        q, k = (
            wide[:, first : first + keyed].reshape(len(x), shape.key_heads, -1) for first in (shape.queries, shape.keys)
        )
        v = wide[:, shape.values : shape.values + shape.heads * shape.value_size].reshape(len(x), shape.heads, -1)
        served = shape.heads // shape.key_heads
        if isinstance(self._rule, DeltaRuleGates):
            q, k = ((part * _inverse_length(part)).repeat_interleave(served, 1) for part in (q, k))
            inputs = _HeadInputs(q * shape.key_size**-0.5, k, v)
            out = self._delta_rule(self._rule, inputs, gates, states.scan(matrices))
        else:
            q, k = (part.repeat_interleave(served, 1) for part in (q, k))
            out = self._scan(self._rule, _HeadInputs(q, k, v), gates, states.scan(matrices))
        return out.flatten(1).to(x.dtype)

    def _gate(self, gates: Tensor, column: int) -> Tensor:
        return gates[:, column : column + self._shape.heads].float()

    def _delta_rule(self, rule: DeltaRuleGates, inputs: _HeadInputs, gates: Tensor, scan: StateScan) -> Tensor:
        q, k, v = inputs
        decay = (rule.rates * F.softplus(self._gate(gates, rule.decay_column) + rule.bias)).exp_()
        beta = self._gate(gates, rule.beta_column).sigmoid()
        out = torch.empty_like(v)
        for tokens, state in scan:
            state *= decay[tokens][..., None, None]
            key = k[tokens].unsqueeze(-1)
            wrong = v[tokens] - (state * key).sum(-2)
            state += key * (beta[tokens].unsqueeze(-1) * wrong).unsqueeze(-2)
            out[tokens] = (state * q[tokens].unsqueeze(-1)).sum(-2)
        return out

    def _scan(self, rule: TorchScanSteps, inputs: _HeadInputs, gates: Tensor, scan: StateScan) -> Tensor:
        q, k, v = inputs
        rates, bias, skip, least, most = rule.steps
        dt = F.softplus(self._gate(gates, rule.column) + bias).clamp_(least, most)
        decay = (rates * dt).exp_()
        out = torch.empty_like(v)
        for tokens, state in scan:
            state *= decay[tokens][..., None, None]
            state += k[tokens].unsqueeze(-1) * (dt[tokens].unsqueeze(-1) * v[tokens]).unsqueeze(-2)
            out[tokens] = (state * q[tokens].unsqueeze(-1)).sum(-2)
        return out if skip is None else out.addcmul_(skip.unsqueeze(-1), v)


def _inverse_length(x: Tensor) -> Tensor:
    return (x.square().sum(-1, keepdim=True) + _UNIT_EPS).rsqrt_()
