"""Encoders in torch: a transformer as published, pooling, linear layers.

Imported only where an encoder is loaded.
"""

from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

from ...core.errors import InvalidArgument
from ...processes.host import map_large_blocks_separately
from ...tokenization.bounded_encoder import EncodedText
from .encoder_files import Activation, CrossEncoderFiles, DenseFiles, EmbedderFiles, Pooling

_ACTIVATIONS: dict[Activation, nn.Module] = {
    Activation.IDENTITY: nn.Identity(),
    Activation.SIGMOID: nn.Sigmoid(),
    Activation.TANH: nn.Tanh(),
}


_transformers = Lock()
"""Held while transformers imports its modules, which it does by the name and not for two threads at once."""


class Transformer:
    """A module of transformers, of the auto class of that name; it gets segments if its model knows them.
    `pads_left`: texts end in the last column, and their positions count from their first token."""

    def __init__(self, auto_class: str, directory: Path, device: str, pads_left: bool = False) -> None:
        map_large_blocks_separately()
        options = {"dtype": torch.float32, "local_files_only": True, "trust_remote_code": False}
        with _transformers:
            import transformers

            log: Any = transformers.utils.logging
            log.disable_progress_bar()
            verbosity = log.get_verbosity()
            log.set_verbosity_error()  # its report of what is missing is ours
            try:
                module, report = getattr(transformers, auto_class).from_pretrained(
                    directory, output_loading_info=True, **options
                )
            except (OSError, ValueError, RuntimeError, KeyError) as error:
                raise InvalidArgument(f"transformers cannot load {directory}: {error}") from error
            finally:
                log.set_verbosity(verbosity)
        # A base model's own pooler is not asked: those of embedders lie in files of their own.
        missing = sorted(name for name in report["missing_keys"] if not name.startswith("pooler."))
        if missing:
            raise InvalidArgument(f"{directory} lacks weights of its model: {', '.join(missing)}")
        self._module = module.to(device).eval()
        self._device = device
        self._has_segments = (getattr(module.config, "type_vocab_size", 0) or 0) > 1
        self._pad_id = int(module.config.pad_token_id or 0)
        self._pads_left = pads_left

    def __call__(self, texts: Sequence[EncodedText], **options: Any) -> tuple[Any, Tensor]:
        """The module's outputs for texts, padded at one end, and the mask, int64 [texts, tokens]: 0 is padding. The
        module gets `options` too."""
        shape = len(texts), max(len(text.ids) for text in texts)
        ids = np.full(shape, self._pad_id)
        mask = np.zeros(shape, np.int64)
        segments = np.zeros(shape, np.int64)
        for row, text in enumerate(texts):
            length = len(text.ids)
            columns = slice(shape[1] - length, None) if self._pads_left else slice(length)
            ids[row, columns] = text.ids
            mask[row, columns] = 1
            segments[row, columns] = text.segments
        arrays = {"input_ids": ids, "attention_mask": mask}
        if self._pads_left:
            arrays["position_ids"] = (mask.cumsum(1) - 1).clip(0)
        if self._has_segments:
            arrays["token_type_ids"] = segments
        tensors = {name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()}
        return self._module(**tensors, **options), tensors["attention_mask"]


class Embedder:
    """Texts to vectors, as sentence-transformers makes them."""

    def __init__(self, files: EmbedderFiles, device: str) -> None:
        self._transformer = Transformer("AutoModel", files.directory, device)
        self._pooling = files.pooling
        self._dense = nn.Sequential(*(_load_dense(dense) for dense in files.dense)).to(device)
        self._normalize = files.normalize

    @torch.inference_mode()
    def encode(self, texts: Sequence[EncodedText]) -> NDArray[np.float32]:
        outputs, mask = self._transformer(texts)
        vectors: Tensor = self._dense(pool_tokens(outputs.last_hidden_state.float(), mask, self._pooling))
        if self._normalize:
            vectors = nn.functional.normalize(vectors, dim=-1)
        array: NDArray[np.float32] = vectors.cpu().numpy()
        return array


class CrossEncoder:
    """Pairs of texts to scores, as sentence-transformers makes them."""

    def __init__(self, files: CrossEncoderFiles, device: str) -> None:
        self._transformer = Transformer("AutoModelForSequenceClassification", files.directory, device)
        self._activation = _ACTIVATIONS[files.activation]

    @torch.inference_mode()
    def encode(self, texts: Sequence[EncodedText]) -> NDArray[np.float32]:
        outputs, _ = self._transformer(texts)
        scores: NDArray[np.float32] = self._activation(outputs.logits.float()).cpu().numpy()
        return scores


class CausalCrossEncoder:
    """Prompts to scores by the logits of `tokens`, the relevant one and maybe the irrelevant one, as
    sentence-transformers makes them."""

    def __init__(self, files: CrossEncoderFiles, tokens: Sequence[int], device: str) -> None:
        self._transformer = Transformer("AutoModelForCausalLM", files.directory, device, pads_left=True)
        self._tokens = list(tokens)
        self._activation = _ACTIVATIONS[files.activation]

    @torch.inference_mode()
    def encode(self, texts: Sequence[EncodedText]) -> NDArray[np.float32]:
        outputs, _ = self._transformer(texts, logits_to_keep=1, use_cache=False)
        relevant, *irrelevant = outputs.logits[:, -1:, self._tokens].float().unbind(-1)
        logits = relevant - irrelevant[0] if irrelevant else relevant
        scores: NDArray[np.float32] = self._activation(logits).cpu().numpy()
        return scores


Encoder: TypeAlias = Embedder | CrossEncoder | CausalCrossEncoder
"""An encoder whose `encode` makes an array [texts, size]."""


def pool_tokens(tokens: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """[texts, tokens, size] -> [texts, size]; padding has no part in it."""
    if pooling is Pooling.CLS:
        return tokens[:, 0]
    if pooling is Pooling.LAST:
        last = mask.sum(1) - 1
        return tokens[torch.arange(len(tokens), device=tokens.device), last]
    kept = mask[:, :, None].bool()
    if pooling is Pooling.MAX:
        return tokens.masked_fill(~kept, -torch.inf).amax(1)
    return tokens.masked_fill(~kept, 0).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


def _load_dense(files: DenseFiles) -> nn.Module:
    layer = nn.Linear(files.inputs, files.outputs, files.bias)
    directory = files.directory
    if (directory / "model.safetensors").is_file():
        weights = load_file(directory / "model.safetensors")
    elif (directory / "pytorch_model.bin").is_file():
        weights = torch.load(directory / "pytorch_model.bin", map_location="cpu", weights_only=True)
    else:
        raise InvalidArgument(f"{directory} has neither model.safetensors nor pytorch_model.bin")
    try:
        layer.load_state_dict({name.removeprefix("linear."): tensor for name, tensor in weights.items()})
    except RuntimeError as error:
        raise InvalidArgument(f"{directory} does not hold the weights of its config: {error}") from error
    return nn.Sequential(layer, _ACTIVATIONS[files.activation])
