"""Where in a sound the tokens of a transcript begin, by the attention of some of Whisper's heads to it (arXiv
2212.04356): one pass of the decoder over tokens that are known, in torch.

Weights stay in the checkpoint's files, and a pass has those of one layer at a time: few requests ask for such times.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...tokenization.checkpoint_files import read_json
from ..checkpoint.hf_checkpoint import open_checkpoint
from ..checkpoint.model_spec import CheckpointError, ModelSpec
from ..checkpoint.quantised_weights import open_weights
from ..checkpoint.weights import TensorSlice, WeightSource
from ..cpu.elementwise import UNGATED
from ..layers.mlp import TorchGate
from .time_warping import align_by_warping, median_filter

log = logging.getLogger(__name__)

_FILTER = 7
"""Neighbouring rows of the encoder that attention is the median of, if config.json says nothing else."""


def load_sound_aligner(directory: Path, stored: torch.dtype, device: torch.device) -> Callable[..., list[Tensor]]:
    """The aligner of a checkpoint, for rows in `stored`. The host computes in float32, a GPU in `stored`.

    Raises:
        CheckpointError: its weights cannot be opened, or generation_config.json names heads by no pairs.
    """
    checkpoint = open_checkpoint(directory)
    heads = _alignment_heads(directory, checkpoint.spec)
    width = checkpoint.config.get("median_filter_width", _FILTER)
    if type(width) is not int or width < 1 or width % 2 == 0:
        raise CheckpointError(f"{directory}: config.json: median_filter_width must be odd, got {width!r}")
    weights = open_weights(checkpoint)
    return SoundAligner(weights, checkpoint.spec, heads, width, stored, device)


def _alignment_heads(directory: Path, spec: ModelSpec) -> Mapping[int, list[int]]:
    """By layer the heads that follow the sound: all of the upper half of layers, unless the checkpoint names some that
    its decoder has. Others are those of a larger model that it was distilled from."""
    upper = {layer: [*range(spec.heads)] for layer in range(spec.layers // 2, spec.layers)}
    named = read_json(directory / "generation_config.json").get("alignment_heads") or []
    heads: dict[int, list[int]] = {}
    for pair in named if isinstance(named, list) else [named]:
        match pair:
            case [int(layer), int(head)] if layer >= 0 and head >= 0:
                heads.setdefault(layer, []).append(head)
            case _:
                message = f"alignment_heads must be pairs of a layer and a head, got {pair!r}"
                raise CheckpointError(f"{directory}: generation_config.json: {message}")
    if any(layer >= spec.layers or max(numbers) >= spec.heads for layer, numbers in heads.items()):
        sizes = f"{spec.layers} layers of {spec.heads} heads"
        log.warning(
            "%s: its alignment_heads are not those of %s; times of words go by the upper half", directory, sizes
        )
        return upper
    return heads or upper


class _Window(NamedTuple):
    """The tokens and the rows of a window that count."""

    tokens: slice
    sounding: int


class SoundAligner:
    """Called with the inputs that `core.media` describes. `heads`: by layer those that follow the sound."""

    def __init__(
        self,
        weights: WeightSource,
        spec: ModelSpec,
        heads: Mapping[int, Sequence[int]],
        filter_width: int,
        stored: torch.dtype,
        device: torch.device,
    ) -> None:
        self._weights = weights
        self._spec = spec
        self._heads = heads
        self._filter_width = filter_width
        self._stored = stored
        self._device = device
        self._dtype = torch.float32 if device.type == "cpu" else stored
        self._activation = TorchGate(UNGATED[spec.activation])

    @torch.inference_mode()
    def __call__(self, aligned_tokens: Tensor, aligned_spans: Tensor, aligned_rows: Tensor) -> list[Tensor]:
        """Of each window int32 [longest, 1]: the row at which each token behind its prompt begins, and zeros. Raises
        `ValueError` for windows that no decoder has heard."""
        windows = [_Window(slice(prompt, end), sounding) for prompt, end, sounding in aligned_spans.tolist()]
        rows = aligned_rows.cpu().view(self._stored).view(len(windows), -1, self._spec.hidden_size)
        self._check(aligned_tokens, windows, rows.shape[1])
        attention = self._attention_of(aligned_tokens, windows, rows.to(self._device, self._dtype))
        begins = align_by_warping([matrix.cpu().numpy() for matrix in attention])
        padded = np.zeros(aligned_tokens.shape, np.int32)
        for line, window in zip(padded, begins, strict=True):
            line[: len(window)] = window
        return [*torch.from_numpy(padded).unsqueeze(-1)]

    def _check(self, tokens: Tensor, windows: Sequence[_Window], rows: int) -> None:
        length = tokens.shape[1]
        if length > self._spec.max_position or not 0 <= int(tokens.min()) <= int(tokens.max()) < self._spec.vocab_size:
            raise ValueError(f"{length} tokens are too many, or none of the vocabulary's")
        for part, sounding in windows:
            if not (0 <= part.start < part.stop <= length and 1 <= sounding <= rows):
                raise ValueError(f"tokens {part.start} to {part.stop} of {length} have no {sounding} of {rows} rows")

    def _attention_of(self, tokens: Tensor, windows: Sequence[_Window], rows: Tensor) -> list[Tensor]:
        """Of each window how much its tokens attend to its rows, over the mean of the heads [tokens, sounding]."""
        spec = self._spec
        sums = [torch.zeros(part.stop - part.start, sounding, device=self._device) for part, sounding in windows]
        x = self._lines("embed_tokens", tokens) + self._lines("embed_positions", torch.arange(tokens.shape[1]))
        last = max(self._heads)
        for layer in range(last + 1):
            name = f"layers.{layer}"
            normed = self._norm(f"{name}.self_attn_layer_norm", x)
            own, seen, kept = (self._heads_of(f"{name}.self_attn.{part}_proj", normed) for part in "qkv")
            mixed = F.scaled_dot_product_attention(own, seen, kept, is_causal=True)
            x = x + self._joined(f"{name}.self_attn", mixed)
            queries = self._heads_of(f"{name}.encoder_attn.q_proj", self._norm(f"{name}.encoder_attn_layer_norm", x))
            keys = self._heads_of(f"{name}.encoder_attn.k_proj", rows)
            for index, window in enumerate(windows):
                for head in self._heads.get(layer, ()):
                    sums[index] += self._followed(queries[index, head], keys[index, head], window)
            if layer == last:
                break
            values = self._heads_of(f"{name}.encoder_attn.v_proj", rows)
            x = x + self._joined(f"{name}.encoder_attn", F.scaled_dot_product_attention(queries, keys, values))
            wide = self._linear(f"{name}.fc1", self._norm(f"{name}.final_layer_norm", x), spec.intermediate_size)
            x = x + self._linear(f"{name}.fc2", self._activation(wide), spec.hidden_size)
        count = sum(map(len, self._heads.values()))
        return [total / count for total in sums]

    def _followed(self, queries: Tensor, keys: Tensor, window: _Window) -> Tensor:
        """The attention of a head, normalised over tokens and smoothed over rows."""
        scores = queries[window.tokens] @ keys.t() * self._spec.head_dim**-0.5
        weights = scores.float().softmax(-1)[:, : window.sounding]
        spread, mean = torch.std_mean(weights, 0, unbiased=False)
        return median_filter((weights - mean) / spread.clamp_min(torch.finfo(spread.dtype).tiny), self._filter_width)

    def _read(self, name: str, *shape: int) -> Tensor:
        return self._weights.read(TensorSlice(f"model.{name}", shape)).to(self._device, self._dtype)

    def _lines(self, name: str, lines: Tensor) -> Tensor:
        """The lines of a table of embeddings or positions."""
        sizes = {"embed_tokens": self._spec.vocab_size, "embed_positions": self._spec.max_position}
        table = self._weights.read(TensorSlice(f"model.{name}.weight", (sizes[name], self._spec.hidden_size)))
        return table[lines.cpu()].to(self._device, self._dtype)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = (self._read(f"{name}.{part}", self._spec.hidden_size) for part in ("weight", "bias"))
        return F.layer_norm(x, x.shape[-1:], weight, bias, self._spec.norm_eps)

    def _linear(self, name: str, x: Tensor, size: int) -> Tensor:
        """Products of x [..., inputs], which have a bias unless they make keys."""
        bias = None if name.endswith("k_proj") else self._read(f"{name}.bias", size)
        return F.linear(x, self._read(f"{name}.weight", size, x.shape[-1]), bias)

    def _heads_of(self, name: str, x: Tensor) -> Tensor:
        """[windows, heads, places, head_dim] of x [windows, places, hidden]."""
        heads, size = self._spec.heads, self._spec.head_dim
        return self._linear(name, x, heads * size).view(*x.shape[:2], heads, size).transpose(1, 2)

    def _joined(self, name: str, heads: Tensor) -> Tensor:
        return self._linear(f"{name}.out_proj", heads.transpose(1, 2).flatten(2), self._spec.hidden_size)
