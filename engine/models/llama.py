"""Llama 1 to 3.x (arXiv 2302.13971, 2407.21783), and the shape of its kin: pre-norm, RoPE, grouped queries, SwiGLU."""

from typing import NamedTuple

from torch import Tensor

from ..attention.base import Attend
from ..layers.attention import SelfAttention
from ..layers.embedding import Embedding
from ..layers.linear import Head
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rotary import Angles, Rotary
from ..spec import ModelSpec
from ..weights import Loader


class Biases(NamedTuple):
    """Which linear layers have one."""

    qkv: bool
    out: bool
    mlp: bool


class Llama:
    """Token ids and positions [N] of packed sequences -> hidden states [N, hidden] -> logits of chosen rows."""

    def __init__(self, spec: ModelSpec, load: Loader, positions: int, biases: Biases) -> None:
        """Build from the checkpoint; `positions` is the longest sequence to be served, in tokens."""
        self._embed = Embedding(load, "model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self._rotary = Rotary(spec.rope, spec.head_dim, positions, load.dtype, load.device)
        self._layers = [Layer(spec, load, index, biases) for index in range(spec.layers)]
        self._norm = RMSNorm(load.vector("model.norm.weight", spec.hidden_size), spec.norm_eps)
        head = "model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"
        self._head = Head(load, head, spec.vocab_size, spec.hidden_size)

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self._embed(tokens)
        angles = self._rotary(positions)
        for layer in self._layers:
            layer(x, angles, attend)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, hidden] -> [S, vocabulary], in the model's dtype."""
        return self._head(self._norm(hidden))


class Layer:
    """One decoder layer; adds to the residual stream in place."""

    def __init__(self, spec: ModelSpec, load: Loader, index: int, biases: Biases) -> None:
        name = f"model.layers.{index}"
        hidden, eps = spec.hidden_size, spec.norm_eps
        self._before_attention = RMSNorm(load.vector(f"{name}.input_layernorm.weight", hidden), eps)
        self._attention = SelfAttention(load, spec, index, qkv_bias=biases.qkv, out_bias=biases.out)
        self._before_mlp = RMSNorm(load.vector(f"{name}.post_attention_layernorm.weight", hidden), eps)
        self._mlp = GatedMLP(load, f"{name}.mlp", hidden, spec.intermediate_size, bias=biases.mlp)

    def __call__(self, x: Tensor, angles: Angles, attend: Attend) -> None:
        x += self._attention(self._before_attention(x), angles, attend)
        x += self._mlp(self._before_mlp(x))


def llama(spec: ModelSpec, load: Loader, positions: int) -> Llama:
    return Llama(spec, load, positions, Biases(spec.attention_bias, spec.attention_bias, spec.mlp_bias))
