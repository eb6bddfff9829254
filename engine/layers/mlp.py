"""Feed-forward layers: the gated MLP (arXiv 2002.05202), gate and up projection computed as one product, and a mixture
of such MLPs as experts (arXiv 1701.06538, 2101.03961)."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.build_context import SingleRank, rank_slice
from ..checkpoint.model_spec import ExpertsSpec
from ..checkpoint.weights import TensorSlice, WeightLoader
from ..cpu import library
from ..cpu.elementwise import CLAMP, CLAMPED_SWIGLU, HAVE_NO_GATE, SQUARED_RELU, UNGATED, FusedGate
from ..cpu.experts import FusedMixture, Routing, gate_rows
from ..cpu.matmul import MatrixProduct
from ..cpu.op_trace import untraceable_reason
from ..gpu import runtime
from ..gpu.few_rows import FewRowMatmul
from .linear import LayerMatmul, OutputShard, RowLinear, column_linear, column_slices, split_reason
from .product_matrix import LAYER, ROUTER, ProductMatrix, build_matmul
from .step_context import StepContext
from .torch_matmul import Matmul

if TYPE_CHECKING:
    from ..gpu.experts import TritonExperts
    from ..gpu.gate import TritonGate

ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    SQUARED_RELU: lambda x: F.relu(x).square_(),
    "ungated_relu": F.relu,
}
ACTIVATION_FUNCTIONS |= {
    ungated: ACTIVATION_FUNCTIONS[name] for name, ungated in UNGATED.items() if name in ACTIVATION_FUNCTIONS
}
"""The functions by their names in `model_spec.ACTIVATIONS`, and in `elementwise.UNGATED`."""


class GatedMLPSpec(NamedTuple):
    """The names of a gated layer's matrices, its sizes and activation."""

    name: str
    """What the names of the matrices, which follow, come after."""
    hidden: int
    intermediate: int
    bias: bool = False
    activation: str = "silu"
    """One of ACTIVATION_FUNCTIONS or CLAMPED_SWIGLU. With one of HAVE_NO_GATE the layer has no gate, only `up`."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    fused: str | None = None
    """The one matrix that holds gate and up, where a checkpoint has them in one."""
    sparsity: float = 0.0
    """The share of a token's gates that become 0: those below what a normal distribution of their mean and spread has
    at this share; what others are more than that remains."""
    gate_factor: float = 1.0
    """What the gate is multiplied by before its activation."""

    def gate_and_up(self, features: slice) -> list[OutputShard]:
        """The matrices of gate and up, of each the output `features` that this rank computes."""
        if self.activation in HAVE_NO_GATE:
            return [OutputShard(f"{self.name}.{self.up}", self.intermediate, features)]
        if self.fused is None:
            gate = OutputShard(f"{self.name}.{self.gate}", self.intermediate, features, self.gate_factor)
            return [gate, OutputShard(f"{self.name}.{self.up}", self.intermediate, features)]
        matrix = OutputShard(f"{self.name}.{self.fused}", 2 * self.intermediate, features)
        return [matrix, matrix.shifted(self.intermediate)]


class GatedMLP:
    """x [N, hidden] -> down(activation(gate(x)) * up(x)) [N, hidden]; of a `partial` one, this rank's summand of it."""

    host_bound = False

    def __init__(self, loader: WeightLoader, spec: GatedMLPSpec, partial: bool = False) -> None:
        mine = rank_slice(spec.intermediate, loader.group)
        self._gate_up = column_linear(loader, spec.gate_and_up(mine), spec.hidden, bias=spec.bias)
        down = f"{spec.name}.{spec.down}"
        whole = RowLinear(loader, down, spec.intermediate, mine, spec.hidden, bias=spec.bias)
        self._down: RowLinear | LayerMatmul = whole.partial if partial else whole
        self._gate = fastest_gate(spec.activation, loader)
        self._spreads = NormalDist().inv_cdf(spec.sparsity) if spec.sparsity else None
        self._gated = None
        if loader.adaptable is None and self._spreads is None:
            self._gated = _gated_product(self._gate_up.product, spec.activation, self._gate)
        self.untraceable = whole.untraceable or (None if self._spreads is None else "its gates are thinned by torch")

    @property
    def products(self) -> tuple[MatrixProduct, MatrixProduct] | None:
        """Gate and up as one, and down, if they are the C kernels' and nothing else stands between."""
        parts = (self._gate_up, self._down) if self._spreads is None else ()
        products = [part.product for part in parts if isinstance(part, LayerMatmul)]
        packed = [product for product in products if isinstance(product, MatrixProduct)]
        return (packed[0], packed[1]) if len(packed) == 2 else None

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        if self._gated is not None:
            return self._down(self._gated(x), context)
        both = self._gate_up(x, context)
        if self._spreads is not None:
            _keep_largest(both.chunk(2, -1)[0], self._spreads)
        return self._down(self._gate(both), context)


def _gated_product(product: Matmul, activation: str, gate: "FusedGate | TorchGate | TritonGate") -> Matmul | None:
    """The product and its gate as one, where a kernel may compute both; None: none does."""
    if not isinstance(product, FewRowMatmul) or isinstance(gate, FusedGate | TorchGate):
        return None
    product.end_with(activation, gate)
    return product.gated


def _keep_largest(gates: Tensor, spreads: float) -> None:
    """Take from gates [N, n], in place, so many standard deviations above their mean, down to 0."""
    wide = gates.float()
    deviation, mean = torch.std_mean(wide, -1, correction=0, keepdim=True)
    gates.copy_(wide.sub_(mean + spreads * deviation).relu_())


def fastest_gate(activation: str, loader: WeightLoader) -> "FusedGate | TorchGate | TritonGate":
    if runtime.serves(loader.dtype, loader.device) and activation not in UNGATED.values():
        from ..gpu.gate import TritonGate

        return TritonGate(activation)
    fused = library.supports(loader.dtype, loader.device)
    return FusedGate(activation) if fused else TorchGate(activation)


class TorchGate:
    """The same as `FusedGate` by torch, and its reference."""

    def __init__(self, activation: str) -> None:
        self._name = activation
        self._activation = ACTIVATION_FUNCTIONS["quick_gelu" if activation == CLAMPED_SWIGLU else activation]

    def __call__(self, x: Tensor) -> Tensor:
        if self._name in HAVE_NO_GATE:
            return self._activation(x)
        gate, up = x.chunk(2, -1)
        if self._name == CLAMPED_SWIGLU:
            gate, up = gate.clamp(max=CLAMP), up.clamp(-CLAMP, CLAMP) + 1
        return self._activation(gate).mul_(up)


class MixtureOfExperts:
    """x [N, hidden] -> the weighted sum of its experts' outputs [N, hidden]. The router takes the likeliest experts of
    each token by a softmax or sigmoids in float32. Every rank holds all of the router, so all ranks decide the same,
    and a slice of every expert, or some experts whole: the sum over ranks is the same."""

    def __init__(
        self,
        loader: WeightLoader,
        expert: GatedMLPSpec,
        spec: ExpertsSpec,
        router: str = "gate",
        bias: str = "",
        scales: str = "",
        bias_shape: tuple[int, ...] = (),
    ) -> None:
        """`expert` is what all experts are like, with the name of the mixture, which those of tensors follow: the
        `router`, its `bias`, and `scales` that multiply the weights of each expert, if there are any. If experts
        have biases, the router has one, too. `bias_shape`: that of the `bias`, if it is no vector."""
        weight = TensorSlice(f"{expert.name}.{router}.weight", (spec.count, expert.hidden))
        scores_bias = loader.floats(f"{expert.name}.{router}.bias", spec.count) if expert.bias else None
        exact = loader.for_dtype(torch.float32) if spec.float32_router else loader
        self._scores_dtype = exact.dtype
        self._scores = build_matmul(exact, [weight], scores_bias, ROUTER)
        self._latent: tuple[LayerMatmul, LayerMatmul] | None = None
        if spec.latent_size:
            into = OutputShard(f"{expert.name}.fc1_latent_proj", spec.latent_size, slice(0, spec.latent_size))
            back = OutputShard(f"{expert.name}.fc2_latent_proj", expert.hidden, slice(0, expert.hidden))
            self._latent = (
                column_linear(loader, [into], expert.hidden, bias=expert.bias),
                column_linear(loader, [back], spec.latent_size, bias=expert.bias),
            )
            expert = expert._replace(hidden=spec.latent_size)
        self._bias = None
        if spec.biased:
            self._bias = loader.floats(f"{expert.name}.{bias}", *(bias_shape or (spec.count,))).flatten()
        self._scales = loader.floats(f"{expert.name}.{scales}", spec.count) if scales else None
        self._spec = spec
        self._group = loader.group
        mine = range(spec.count)
        if loader.context.whole_experts:
            mine = mine[rank_slice(spec.count, loader.group)]
            loader = loader.for_group(SingleRank())
        named = [expert._replace(name=f"{expert.name}.experts.{number}") for number in range(spec.count)]
        self._experts = build_experts(loader, [named[number] for number in mine], mine)
        self.host_bound = isinstance(self._experts, EachExpert)
        self._mixture = self._in_one(loader, expert.activation)
        alone = None if self._mixture is not None else "its experts are called one by one"
        self.untraceable = alone or split_reason(self._group)
        others = (expert for number, expert in enumerate(named) if number not in mine)
        loader.elsewhere.update(
            f"{other.name}.{part}" for other in others for part in (other.gate, other.up, other.down)
        )

    def __call__(self, x: Tensor, context: StepContext, routed: Tensor | None = None) -> Tensor:
        """`routed` [N, hidden]: what the router sees in place of x."""
        scores = self._scores((x if routed is None else routed).to(self._scores_dtype))
        inner = x if self._latent is None else self._latent[0](x, context)
        if self._mixture is not None:
            expert_sum = self._mixture(inner, scores)
        else:
            weights, chosen = self._choose(scores.float())
            expert_sum = self._experts(inner, chosen, weights, context)
        if self._group.size > 1:
            expert_sum = self._group.all_reduce(expert_sum)
        return expert_sum if self._latent is None else self._latent[1](expert_sum, context)

    def _in_one(self, loader: WeightLoader, activation: str) -> FusedMixture | None:
        """All of its experts here as one of the C kernels; None: they can't be."""
        experts = self._experts
        if not isinstance(experts, EachExpert):
            return None
        products = [expert.products for expert in experts.experts]
        packed = [product for product in products if product is not None]
        if not packed or len(packed) < len(products) or loader.adaptable is not None:
            return None
        spec = self._spec
        routing = Routing(
            experts=spec.count,
            per_token=spec.per_token,
            sigmoid=spec.sigmoid,
            normalised=spec.normalised,
            least_sum=spec.least_sum,
            scale=spec.scale,
            bias=self._bias,
            scales=self._scales,
            groups=spec.groups,
            chosen_groups=spec.chosen_groups,
            group_judges=spec.group_judges,
        )
        return FusedMixture(routing, packed, experts.numbers.start, activation, loader.dtype)

    def _choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts of each token, [N, per token]."""
        spec = self._spec
        likely = _sigmoids(scores) if spec.sigmoid else scores.softmax(-1)
        judged = likely if self._bias is None else likely + self._bias
        if spec.groups > 1:
            judged = _within_best_groups(judged, spec)
        chosen = judged.topk(spec.per_token, -1).indices
        weights = likely.gather(-1, chosen)
        if spec.normalised:
            weights = weights / (weights.sum(-1, keepdim=True) + (spec.least_sum if spec.sigmoid else 0.0))
        if self._scales is not None:
            weights = weights * self._scales[chosen]
        return weights * spec.scale if spec.scale != 1 else weights, chosen


def _sigmoids(x: Tensor) -> Tensor:
    """The sigmoid of each number. torch's own rounds by where a number stands in memory, and so by what shares a step;
    its softmax does not."""
    return torch.stack((x, torch.zeros_like(x)), -1).softmax(-1)[..., 0]


def _within_best_groups(judged: Tensor, spec: ExpertsSpec) -> Tensor:
    """The numbers by which experts are chosen, [N, experts]; minus infinity outside a token's best groups."""
    by_group = judged.view(len(judged), spec.groups, -1)
    best = by_group.topk(min(spec.group_judges, by_group.shape[-1]), -1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(spec.chosen_groups, -1).indices, True)
    return by_group.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)


class SharedExpert:
    """A mixture's sum, and beside it an expert that every token goes through; `gated` by the sigmoid of a number of the
    token's own, or not."""

    def __init__(
        self, loader: WeightLoader, experts: MixtureOfExperts, shared: GatedMLPSpec, gate: str | None = None
    ) -> None:
        """`gate`: the name of the matrix that makes those numbers."""
        self._experts = experts
        self._shared = GatedMLP(loader, shared)
        self._gate = None
        if gate is not None:
            self._gate = build_matmul(loader, [TensorSlice(f"{gate}.weight", (1, shared.hidden))], use=ROUTER)
        self._in_c = library.supports(loader.dtype, loader.device)
        ungated = None if self._gate is None or self._in_c else "its shared expert is gated by torch"
        self.untraceable = untraceable_reason((experts, self._shared)) or ungated
        self.host_bound = experts.host_bound

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        shared = self._shared(x, context)
        if self._gate is not None and self._in_c:
            shared = gate_rows(shared, self._gate(x))
        elif self._gate is not None:
            shared = shared * self._gate(x).sigmoid().to(x.dtype)
        return self._experts(x, context).add_(shared)


FeedForward: TypeAlias = GatedMLP | MixtureOfExperts | SharedExpert
"""The second part of a layer, x [N, hidden] and the step's context -> [N, hidden]."""


def build_experts(
    loader: WeightLoader, experts: Sequence[GatedMLPSpec], numbers: range
) -> "EachExpert | TritonExperts":
    """The experts of these `numbers`, as grouped products where kernels serve and multiply with their weights, without
    biases, adapters, or activations that are not of the gate alone."""
    mine = rank_slice(experts[0].intermediate, loader.group) if experts else slice(0)
    gate_up = [piece for expert in experts for piece in column_slices(expert.gate_and_up(mine), expert.hidden)]
    down = [TensorSlice(f"{e.name}.{e.down}.weight", (e.hidden, e.intermediate), columns=mine) for e in experts]
    plain = bool(experts) and not experts[0].bias and loader.context.observer is None and loader.adaptable is None
    plain = plain and experts[0].activation not in (CLAMPED_SWIGLU, SQUARED_RELU)
    if not plain or not runtime.serves(loader.dtype, loader.device):
        return EachExpert(loader, experts, numbers)
    matrices = ProductMatrix(loader, gate_up, LAYER), ProductMatrix(loader, down, LAYER)
    if not all(matrix.stacks for matrix in matrices):
        return EachExpert(loader, experts, numbers)
    from ..gpu.experts import TritonExperts

    halves, downs = (matrix.stacked() for matrix in matrices)
    return TritonExperts(halves, downs, experts[0].activation, numbers, loader.context.batch_invariance)


class EachExpert:
    """Some experts of a mixture, from number `numbers.start` on, each of which computes the rows that chose it; the
    host learns how many there are, so on a GPU it waits."""

    def __init__(self, loader: WeightLoader, experts: Sequence[GatedMLPSpec], numbers: range) -> None:
        self.numbers = numbers
        self.experts = [GatedMLP(loader, spec, partial=True) for spec in experts]

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, context: StepContext) -> Tensor:
        """x [N, hidden], `chosen` int64 [N, per token], any experts, with `weights` -> the weighted sum [N, hidden]."""
        order = chosen.flatten().argsort(stable=True)
        tokens = torch.div(order, chosen.shape[1], rounding_mode="floor")
        sorted_weights = weights.to(x.dtype).flatten()[order].unsqueeze(-1)
        counts = torch.bincount(chosen.flatten(), minlength=self.numbers.stop).tolist()
        total = torch.zeros_like(x)
        shares = list(zip(torch.split(tokens, counts), torch.split(sorted_weights, counts), strict=True))
        for number, expert in zip(self.numbers, self.experts, strict=True):
            mine, weight = shares[number]
            if len(mine):
                total.index_add_(0, mine, expert(x[mine], context.for_rows(mine)).mul_(weight))
        return total
