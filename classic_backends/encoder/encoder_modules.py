"""Encoders in torch: a transformer as published, pooling, linear layers.

Imported only where an encoder is loaded.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from pickle import UnpicklingError
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from ...core.encoder_tensors import EMBEDDING, SCORE, TOKEN_EMBEDDING, TOKEN_EMBEDDING_COUNT, TOKEN_IDS, TOKEN_WEIGHT
from ...core.errors import InvalidArgument
from ...core.runtime import Arrays
from ...processes.host import map_large_blocks_separately
from ...tokenization.bounded_encoder import EncodedText
from .encoder_files import Activation, CrossEncoderFiles, DenseFiles, EmbedderFiles, Pooling, TokenHeadFiles
from .late_interaction import MarkedText
from .late_interaction_files import PROJECTION, LateInteractionFiles

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

    def __call__(
        self, texts: Sequence[EncodedText], attended: Sequence[int] | None = None, **options: Any
    ) -> tuple[Any, Tensor]:
        """The module's outputs for texts, padded at one end, and the mask, int64 [texts, tokens]: 0 is padding. The
        module gets `options` too. `attended`: how many of each text's tokens others see, if not all."""
        shape = len(texts), max(len(text.ids) for text in texts)
        ids = np.full(shape, self._pad_id)
        mask = np.zeros(shape, np.int64)
        segments = np.zeros(shape, np.int64)
        for row, text in enumerate(texts):
            length = len(text.ids)
            columns = slice(shape[1] - length, None) if self._pads_left else slice(length)
            ids[row, columns] = text.ids
            mask[row, columns if attended is None else slice(attended[row])] = 1
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
        self._heads = TokenHeads(files.token_heads, device) if files.token_heads else None

    @torch.inference_mode()
    def encode(self, texts: Sequence[EncodedText], outputs: Collection[str]) -> Iterator[Arrays]:
        states, mask = self._transformer(texts)
        tokens = states.last_hidden_state.float()
        vectors: Tensor = self._dense(pool_tokens(tokens, mask, self._pooling))
        if self._normalize:
            vectors = nn.functional.normalize(vectors, dim=-1)
        for row, (text, vector) in enumerate(zip(texts, vectors.cpu().numpy(), strict=True)):
            heads = self._heads.outputs(text, tokens[row, : len(text.ids)], outputs) if self._heads else {}
            yield {EMBEDDING: vector, **heads}


class TokenHeads:
    """bge-m3's weights and vectors of tokens."""

    def __init__(self, files: TokenHeadFiles, device: str) -> None:
        self._sparse = _load_linear(files.sparse, files.size, 1).to(device)
        self._colbert = _load_linear(files.colbert, files.size, files.size).to(device)
        self._first_token = files.first_token
        self._last_token = files.last_token

    def outputs(self, text: EncodedText, tokens: Tensor, wanted: Collection[str]) -> Arrays:
        """What is `wanted` of a text by the states of its tokens [tokens, size]."""
        start = int(text.ids[0] == self._first_token)
        stop = len(text.ids) - (text.ids[-1] == self._last_token)
        arrays: dict[str, NDArray[Any]] = {}
        if not {TOKEN_WEIGHT, TOKEN_IDS}.isdisjoint(wanted):
            arrays[TOKEN_WEIGHT] = torch.relu(self._sparse(tokens[start:stop])[:, 0]).cpu().numpy()
            arrays[TOKEN_IDS] = np.asarray(text.ids[start:stop], np.int64)
        if not {TOKEN_EMBEDDING, TOKEN_EMBEDDING_COUNT}.isdisjoint(wanted):
            arrays |= _token_embeddings(self._colbert(tokens[start:]))
        return arrays


class TokenEmbedder:
    """Texts to a vector for each token that counts, as sentence-transformers' MultiVectorEncoder makes them."""

    def __init__(self, files: LateInteractionFiles, device: str) -> None:
        self._transformer = Transformer("AutoModel", files.directory, device)
        layers = [_load_dense(dense) for dense in files.dense] or [_load_projection(files)]
        self._dense = nn.Sequential(*layers).to(device)

    @torch.inference_mode()
    def encode(self, texts: Sequence[MarkedText], outputs: Collection[str]) -> Iterator[Arrays]:
        plain = [EncodedText(text.ids, text.segments) for text in texts]
        states, _ = self._transformer(plain, attended=[text.attended for text in texts])
        tokens = self._dense(states.last_hidden_state.float())
        for row, text in enumerate(texts):
            yield _token_embeddings(tokens[row, text.counted])


def _token_embeddings(tokens: Tensor) -> Arrays:
    vectors = nn.functional.normalize(tokens, dim=-1).cpu().numpy()
    return {TOKEN_EMBEDDING: vectors, TOKEN_EMBEDDING_COUNT: np.array([len(vectors)], np.int32)}


class CrossEncoder:
    """Pairs of texts to scores, as sentence-transformers makes them."""

    def __init__(self, files: CrossEncoderFiles, device: str) -> None:
        self._transformer = Transformer("AutoModelForSequenceClassification", files.directory, device)
        self._activation = _ACTIVATIONS[files.activation]

    @torch.inference_mode()
    def encode(self, texts: Sequence[EncodedText], outputs: Collection[str]) -> Iterator[Arrays]:
        states, _ = self._transformer(texts)
        yield from ({SCORE: scores} for scores in self._activation(states.logits.float()).cpu().numpy())


class CausalCrossEncoder:
    """Prompts to scores by the logits of `tokens`, the relevant one and maybe the irrelevant one, as
    sentence-transformers makes them."""

    def __init__(self, files: CrossEncoderFiles, tokens: Sequence[int], device: str) -> None:
        self._transformer = Transformer("AutoModelForCausalLM", files.directory, device, pads_left=True)
        self._tokens = list(tokens)
        self._activation = _ACTIVATIONS[files.activation]

    @torch.inference_mode()
    def encode(self, texts: Sequence[EncodedText], outputs: Collection[str]) -> Iterator[Arrays]:
        states, _ = self._transformer(texts, logits_to_keep=1, use_cache=False)
        relevant, *irrelevant = states.logits[:, -1:, self._tokens].float().unbind(-1)
        logits = relevant - irrelevant[0] if irrelevant else relevant
        yield from ({SCORE: scores} for scores in self._activation(logits).cpu().numpy())


class Encoder(Protocol):
    def encode(self, texts: Sequence[Any], outputs: Collection[str]) -> Iterator[Arrays]:
        """The arrays of each text by the names of outputs: those in `outputs`, and maybe others."""


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


def _load_linear(file: Path, inputs: int, outputs: int) -> nn.Module:
    layer = nn.Linear(inputs, outputs)
    try:
        layer.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    except (RuntimeError, OSError, ValueError, EOFError, AttributeError, TypeError, UnpicklingError) as error:
        raise InvalidArgument(f"{file} does not hold a layer of {inputs} by {outputs}: {error}") from error
    return layer


def _load_projection(files: LateInteractionFiles) -> nn.Module:
    """Stanford's, among the transformer's own weights."""
    file = files.directory / "model.safetensors"
    try:
        with safe_open(file, "pt") as weights:
            weight = weights.get_tensor(PROJECTION).float()
    except (OSError, SafetensorError) as error:
        raise InvalidArgument(f"{file} has no projection {PROJECTION}: {error}") from error
    if weight.ndim != 2 or len(weight) != files.size:
        message = f"{PROJECTION} is {list(weight.shape)}, and artifact.metadata tells a dim of {files.size}"
        raise InvalidArgument(f"{file}: {message}")
    layer = nn.Linear(weight.shape[1], files.size, bias=False)
    layer.load_state_dict({"weight": weight})
    return layer


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
