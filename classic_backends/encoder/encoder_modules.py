"""The parts of an encoder in torch: a transformer as published, pooling, linear layers. Padded batches in, vectors out.

Imported only where an encoder is loaded.
"""

from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ...core.errors import InvalidArgument
from ...processes.host import map_large_blocks_separately
from .encoder_files import Activation, CrossEncoderFiles, DenseFiles, EmbedderFiles, Pooling

_ACTIVATIONS: dict[Activation, nn.Module] = {
    Activation.IDENTITY: nn.Identity(),
    Activation.SIGMOID: nn.Sigmoid(),
    Activation.TANH: nn.Tanh(),
}


class PaddedTexts(Protocol):
    """A batch: `ids`, `mask` and `segments` are int64 [texts, tokens]; where `mask` is 0 is padding, at the end."""

    @property
    def ids(self) -> Tensor: ...

    @property
    def mask(self) -> Tensor: ...

    @property
    def segments(self) -> Tensor: ...


class Encoder(Protocol):
    """[texts, size] of a batch, FP32."""

    pad_id: int

    def __call__(self, batch: PaddedTexts) -> Tensor: ...


class Transformer:
    """transformers' module; it gets segments where its model knows them. `pad`: the id that fills up rows."""

    def __init__(self, module: Any) -> None:
        self._module = module
        config = module.config
        self._segmented = (getattr(config, "type_vocab_size", 0) or 0) > 1
        self.pad_id = int(config.pad_token_id or 0)

    def __call__(self, batch: PaddedTexts) -> Any:
        given = {"input_ids": batch.ids, "attention_mask": batch.mask}
        if self._segmented:
            given["token_type_ids"] = batch.segments
        return self._module(**given)


class Embedder:
    """Texts to vectors, as sentence-transformers makes them."""

    def __init__(self, files: EmbedderFiles, device: str) -> None:
        from transformers import AutoModel

        self._transformer = Transformer(_load(AutoModel, files.directory, device))
        self._pooling = files.pooling
        self._dense = nn.Sequential(*(_dense(each) for each in files.dense)).to(device)
        self._normalize = files.normalize
        self.pad_id = self._transformer.pad_id

    def __call__(self, batch: PaddedTexts) -> Tensor:
        tokens = self._transformer(batch).last_hidden_state
        pooled = pool_tokens(tokens.float(), batch.mask, self._pooling)
        vectors: Tensor = self._dense(pooled)
        return nn.functional.normalize(vectors, dim=-1) if self._normalize else vectors


class CrossEncoder:
    """Pairs of texts to scores, as sentence-transformers makes them."""

    def __init__(self, files: CrossEncoderFiles, device: str) -> None:
        from transformers import AutoModelForSequenceClassification

        self._transformer = Transformer(_load(AutoModelForSequenceClassification, files.directory, device))
        self._activation = _ACTIVATIONS[files.activation]
        self.pad_id = self._transformer.pad_id

    def __call__(self, batch: PaddedTexts) -> Tensor:
        scores: Tensor = self._activation(self._transformer(batch).logits.float())
        return scores


def pool_tokens(tokens: Tensor, mask: Tensor, how: Pooling) -> Tensor:
    """[texts, size] of [texts, tokens, size]; padding has no part in it."""
    if how is Pooling.CLS:
        return tokens[:, 0]
    if how is Pooling.LAST:
        last = mask.sum(1) - 1
        return tokens[torch.arange(len(tokens), device=tokens.device), last]
    there = mask[:, :, None].bool()
    if how is Pooling.MAX:
        return tokens.masked_fill(~there, -torch.inf).amax(1)
    return tokens.masked_fill(~there, 0).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


def _load(kind: Any, directory: Path, device: str) -> Any:
    from transformers.utils import logging

    map_large_blocks_separately()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        module = kind.from_pretrained(directory, dtype=torch.float32, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise InvalidArgument(f"transformers cannot load {directory}: {error}") from error
    return module.to(device).eval()


def _dense(files: DenseFiles) -> nn.Module:
    layer = nn.Linear(files.inputs, files.outputs, files.bias)
    weights = {name.removeprefix("linear."): tensor for name, tensor in _weights(files.directory).items()}
    try:
        layer.load_state_dict(weights)
    except RuntimeError as error:
        raise InvalidArgument(f"{files.directory} does not hold the weights of its config: {error}") from error
    return nn.Sequential(layer, _ACTIVATIONS[files.activation])


def _weights(directory: Path) -> dict[str, Tensor]:
    if (directory / "model.safetensors").is_file():
        return load_file(directory / "model.safetensors")
    file = directory / "pytorch_model.bin"
    if not file.is_file():
        raise InvalidArgument(f"{directory} has neither model.safetensors nor pytorch_model.bin")
    weights: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return weights
