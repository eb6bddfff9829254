"""Towers in torch: transformers' own modules, with the weights of the tower alone.

Imported only where a tower is loaded.
"""

import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...core.errors import Internal, InvalidArgument
from ...core.media import FEATURES, MediaKind
from ...core.media_models import HEARING_FAMILIES, SEEING_FAMILIES, WRITING_FAMILIES
from ...core.runtime import Arrays
from ...processes.host import keep_large_blocks, map_large_blocks_separately, release_free_memory
from .hearing_modules import load_gemma3n_ear, sound_features
from .host_products import compute_on_host
from .lean_imports import lean_imports
from .tower_files import TowerFiles
from .tower_module import TowerFeatures, TowerModule, loading, read_config, read_weights, refuse_missing

_GRIDS, _PIXELS = "image_grid_thw", "pixel_values"
_LANGUAGE = ("lm_head.", "model.language_model.", "model.text_model.")
"""Beginnings of the names of modules that a tower lacks."""

_PARTS: Mapping[MediaKind, str] = {"image": "vision_config", "audio": "audio_config"}
"""By kind of media, the part of a configuration that has its tower."""

_SQUEEZED = ("mistral3", "mistral_large4")
"""Families whose class drops the first dimension of rows [length, hidden] if it is 1, as of an image of one place."""

_ON_HOST = {"THP_MEM_ALLOC_ENABLE": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128"}
"""Variables of torch and oneDNN, read for the first tensor and the first product: large tensors lie in huge pages, and
code is kept for few shapes. It takes 0.3 MiB each, 1024 by default, and a picture of another size has about twelve."""

LoadTower: TypeAlias = Callable[[TowerFiles, torch.dtype, str], tuple[TowerModule, ...]]
"""Loads the tower of a checkpoint to compute in a dtype, on a device: a part for each kind of media."""


class MediumRows(NamedTuple):
    """What the tower makes of one medium."""

    rows: Tensor
    """[length, hidden]"""
    deepstack: Tensor
    """[layers, length, hidden], of no layers in most families."""


def load_beside_text(files: TowerFiles, dtype: torch.dtype, device: str) -> tuple[TowerModule, ...]:
    """The whole model without layers of text."""
    if files.family == "gemma3n":
        return (load_gemma3n_ear(files, dtype, device),)
    import transformers

    config = read_config(files)
    text = config.text_config
    text.num_hidden_layers = 0
    text.vocab_size = 1
    text.pad_token_id = None
    if getattr(text, "layer_types", None):
        text.layer_types = []
    described = files.family in SEEING_FAMILIES | HEARING_FAMILIES  # other classes may need all of their parts
    for kind, part in _PARTS.items():
        if described and kind not in files.kinds and hasattr(config, part):
            setattr(config, part, None)
    if hasattr(config, "quantization_config"):  # the language part's
        del config.quantization_config
    with loading(files):
        known: Any = transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
        model, report = known.from_pretrained(
            None, config=config, state_dict=read_weights(files), dtype=dtype, output_loading_info=True
        )
    refuse_missing(files, (name for name in report["missing_keys"] if not name.startswith(_LANGUAGE)))
    tower: Any = model.model.requires_grad_(False).to(device).eval()
    if device == "cpu":
        compute_on_host(tower, _PARTS.values())

    if files.family in _SQUEEZED:
        tower.multi_modal_projector.register_forward_hook(lambda module, args, rows: rows.unsqueeze(0))

    def image_features(**inputs: Tensor) -> TowerFeatures:
        output = tower.get_image_features(**inputs, return_dict=True)
        return TowerFeatures(output.pooler_output, getattr(output, "deepstack_features", None) or ())

    modules = [TowerModule(_PIXELS, image_features)] if "image" in files.kinds else []
    if "audio" in files.kinds:
        modules.append(TowerModule(FEATURES, sound_features(files.family, tower)))
    return tuple(modules)


class Tower:
    """A tower and its projector, of images or sounds or both, or an encoder of sounds. Its rows have the files' dtype.

    With `together` several images or windows of sounds are computed at once, which keeps a GPU busy. Without, a row
    never depends on other media.
    """

    def __init__(self, files: TowerFiles, device: str, together: bool, load: LoadTower = load_beside_text) -> None:
        self._device = device
        # Of a family that is not described it is not known which part of the rows belongs to which medium.
        self._described = files.family in SEEING_FAMILIES | HEARING_FAMILIES | WRITING_FAMILIES or not files.kinds
        self._together = together and self._described
        self._stored: torch.dtype = getattr(torch, files.dtype)
        self._dtype = self._stored if device != "cpu" or _computes_halves() else torch.float32
        if device == "cpu":
            keep_large_blocks()
            for name, value in _ON_HOST.items():
                os.environ.setdefault(name, value)
        else:
            map_large_blocks_separately()
        with lean_imports():
            self._modules = load(files, self._dtype, device)
        release_free_memory()  # of weights as they were read, and before they were packed

    @torch.inference_mode()
    def encode(self, media: Sequence[Arrays]) -> list[MediumRows]:
        """The rows of each medium, from its inputs by the processor's names.

        Raises:
            InvalidArgument: its inputs are not what the tower takes.
        """
        groups: dict[Hashable, list[int]] = {}
        for index, inputs in enumerate(media):
            shapes = tuple((name, array.shape[1:]) for name, array in sorted(inputs.items()))
            groups.setdefault(shapes if self._together else index, []).append(index)
        encoded: dict[int, MediumRows] = {}
        for indices in groups.values():
            encoded.update(zip(indices, self._encode_group([media[index] for index in indices]), strict=True))
        return [encoded[index] for index in range(len(media))]

    def _encode_group(self, media: Sequence[Arrays]) -> list[MediumRows]:
        inputs = {name: torch.cat([torch.tensor(inputs[name]) for inputs in media]) for name in media[0]}
        inputs = {name: tensor.to(self._device) for name, tensor in inputs.items()}
        module = next((module for module in self._modules if module.main_input in inputs), None)
        if module is None:
            wanted = " or ".join(module.main_input for module in self._modules)
            raise InvalidArgument(f"the processor has made no {wanted}")
        main = module.main_input
        if inputs[main].is_floating_point():
            inputs[main] = inputs[main].to(self._dtype)
        counts = [len(medium[_GRIDS if _GRIDS in medium else main]) for medium in media]
        try:
            features = module.features(**inputs)
        except (ValueError, TypeError, RuntimeError) as error:
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())
            raise InvalidArgument(f"the tower refuses {shapes}: {error}") from error
        rows = _split(features.rows, counts) if self._described else [_flat(features.rows)]
        if not module.counts:
            rows = [part.to(self._stored) for part in rows]
        layers = [_split(layer, counts) for layer in features.deepstack]
        return [
            MediumRows(
                part,
                torch.stack([layer[index] for layer in layers]).to(self._stored) if layers else part.new_empty(0),
            )
            for index, part in enumerate(rows)
        ]


def _computes_halves() -> bool:
    """Whether the host multiplies numbers of 16 bits: where it does not, that takes six times as long as in single
    precision."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _flat(features: Iterable[Tensor]) -> Tensor:
    """The features [length, hidden] of one medium, in parts or as one tensor."""
    parts = [features] if isinstance(features, Tensor) else features
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _split(features: Iterable[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """The features [length, hidden] of each medium, which come in parts of an image, a tile or a grid."""
    parts = [part.reshape(-1, part.shape[-1]) for part in features]
    if len(parts) != sum(counts):
        raise Internal(f"the tower has made {len(parts)} parts for {sum(counts)} of the batch's media")
    ends = [sum(counts[: index + 1]) for index in range(len(counts))]
    return [torch.cat(parts[end - count : end]) for end, count in zip(ends, counts, strict=True)]
