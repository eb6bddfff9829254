"""Zamba 2 (arXiv 2411.15242): layers are Mamba-2's, and what some of them read is added to by a transformer block, of
which there are few. They take turns, and see the embeddings beside the residual stream; each use has an adapter of its
own in the block's MLP, and a projection behind the block."""

from torch import Tensor

from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.recurrence import SharedBlocksSpec
from ..checkpoint.weights import WeightLoader
from ..cpu.elementwise import join_features
from ..cpu.op_trace import untraceable_reason
from ..layers.embed_and_head import build_ends
from ..layers.linear import OutputShard, RowLinear, column_linear
from ..layers.mamba2 import Mamba2
from ..layers.mlp import GatedMLPSpec, fastest_gate
from ..layers.norm import Norm, rms_norm
from ..layers.rotary import Rotary
from ..layers.step_context import StepContext
from .interfaces import Decoder
from .llama import shared_rotary
from .native_decoder import NativeDecoder


def build_zamba2(spec: ModelSpec, loader: WeightLoader) -> Decoder:
    shared = spec.shared_blocks
    assert shared is not None, "config.json of this architecture is read with it"
    rotary = shared_rotary(spec.rope, spec, loader)
    uses = [layer for layer, kind in enumerate(spec.attention) if kind is not None]
    # A block's tensors are those of the first layer that uses it.
    blocks = [SharedBlock(spec, loader, f"model.layers.{layer}.shared_transformer") for layer in uses[: shared.blocks]]
    layers = []
    for index in range(spec.layers):
        name, part = f"model.layers.{index}", None
        if index in uses:
            number = uses.index(index)
            part = BlockUse(spec, loader, index, number, blocks[number % shared.blocks], shared, rotary)
            name += ".mamba_decoder"
        norm = rms_norm(loader.vector(f"{name}.input_layernorm.weight", spec.hidden_size), spec.norm_eps)
        layers.append(Zamba2Layer(norm, Mamba2(loader, spec, index, f"{name}.mamba"), part))
    ends = build_ends(spec, loader, rms_norm, last_norm="model.final_layernorm.weight")
    return NativeDecoder(ends, layers)


class SharedBlock:
    """The matrices and norms of a transformer block, whose `inputs` are the residual stream and the embeddings."""

    def __init__(self, spec: ModelSpec, loader: WeightLoader, name: str) -> None:
        hidden, width = spec.hidden_size, spec.intermediate_size
        inputs, queries, keys = 2 * hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        attention, self.mlp_name = f"{name}.self_attn", f"{name}.feed_forward"
        sizes = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        shards = [OutputShard(f"{attention}.{part}", size, slice(0, size)) for part, size in sizes.items()]
        self.before_attention = rms_norm(loader.vector(f"{name}.input_layernorm.weight", inputs), spec.norm_eps)
        self.qkv = column_linear(loader, shards, inputs, bias=False)
        self.out = RowLinear(loader, f"{attention}.o_proj", queries, slice(0, queries), hidden, bias=False)
        self.before_mlp = rms_norm(loader.vector(f"{name}.pre_ff_layernorm.weight", hidden), spec.norm_eps)
        mlp = GatedMLPSpec(self.mlp_name, hidden, width, spec.mlp_bias, spec.activation, fused="gate_up_proj")
        self.gate_up = column_linear(loader, mlp.gate_and_up(slice(0, width)), hidden, bias=mlp.bias)
        self.gate = fastest_gate(spec.activation, loader)
        self.down = RowLinear(loader, f"{self.mlp_name}.down_proj", width, slice(0, width), hidden, bias=mlp.bias)
        self.untraceable = untraceable_reason((self.out, self.down))


class BlockUse:
    """The residual stream x [N, hidden] and the embeddings -> what layer `index` reads beside x, [N, hidden]. It is the
    use of this `number`, from 0, of any block."""

    def __init__(
        self,
        spec: ModelSpec,
        loader: WeightLoader,
        index: int,
        number: int,
        block: SharedBlock,
        shared: SharedBlocksSpec,
        rotary: Rotary,
    ) -> None:
        hidden, wide = spec.hidden_size, 2 * spec.intermediate_size
        self._block = block
        self._rotary = rotary
        self._cache_layer = spec.cache_index(index, 0)
        self._heads = spec.heads + 2 * spec.kv_heads, spec.head_dim
        adapter = f"{block.mlp_name}.gate_up_proj_adapter_list.{number}"
        narrow = OutputShard(f"{adapter}.0", shared.adapter_rank, slice(0, shared.adapter_rank))
        self._narrow = column_linear(loader, [narrow], hidden, bias=False)
        back = OutputShard(f"{adapter}.1", wide, slice(0, wide))
        self._back = column_linear(loader, [back], shared.adapter_rank, bias=False)
        self._project = RowLinear(loader, f"model.layers.{index}.linear", hidden, slice(0, hidden), hidden, bias=False)
        self.untraceable = untraceable_reason((block, rotary, self._project))

    def __call__(self, x: Tensor, embedded: Tensor, context: StepContext) -> Tensor:
        block = self._block
        packed = block.qkv(block.before_attention(join_features(x, embedded)), context).view(-1, *self._heads)
        angles = context.angles(self._rotary)
        attended = block.out(context.attention.apply_rope_and_attend(self._cache_layer, packed, angles), context)
        seen = block.before_mlp(attended)
        adapted = block.gate_up(seen, context).add_(self._back(self._narrow(seen, context), context))
        return self._project(block.down(block.gate(adapted), context), context)


class Zamba2Layer:
    """A `DecoderLayer` of Mamba-2, which reads what a block makes of the residual stream, if it uses one, too."""

    def __init__(self, norm: Norm, mamba: Mamba2, part: BlockUse | None) -> None:
        self._norm = norm
        self._mamba = mamba
        self._part = part
        self.untraceable = untraceable_reason((mamba, part))
        self.host_bound = mamba.host_bound

    def __call__(self, x: Tensor, delta: Tensor, context: StepContext) -> Tensor:
        embedded = context.shared(_copy, x)
        if self._part is None:
            return self._mamba(self._norm.add_and_norm(x, delta), context)
        x.add_(delta)
        return self._mamba(self._norm(self._part(x, embedded, context).add_(x)), context)


def _copy(x: Tensor, context: StepContext) -> Tensor:
    return x.clone()
