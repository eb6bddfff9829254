"""What a tower is to those that ask it, and how the engine, or transformers from its weights, loads it. Imported only
where one is loaded."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from ...core.errors import InvalidArgument
from ...core.media import ALIGNED_TOKENS, FEATURES, SOURCE
from ...core.published_form import flat_config, flat_name
from ...tokenization.checkpoint_files import read_json
from .tower_files import TowerFiles


class TowerFeatures(NamedTuple):
    """What a module makes of some media."""

    rows: Iterable[Tensor]
    """[length, hidden] of each medium, or of parts of it."""
    deepstack: Sequence[Iterable[Tensor]] = ()
    """For each layer that takes some: rows that are added to its states, as `rows` has them."""


class OwnParts(NamedTuple):
    """The engine's functions that load a tower, and its precision: the fields of `TowerSpec`."""

    encoder: str
    aligner: str
    quantization: str


class TowerModule(NamedTuple):
    """A loaded module, on its device, as it is asked for media of a kind."""

    main_input: str
    """The processor's name of the input that is in the module's dtype."""
    features: Callable[..., TowerFeatures]
    """Takes the inputs by the processor's names."""
    counts: bool = False
    """Its rows are counts, int32, and no numbers of the tower's dtype."""


def load_own_parts(own: OwnParts, files: TowerFiles, dtype: torch.dtype, device: str) -> tuple[TowerModule, ...]:
    """An encoder of the engine, which has its decoder, and what aligns tokens with its rows, if anything does. Raises
    as their own functions."""
    load: Any = resolve_name(own.encoder)
    encode = load(files.directory, dtype, torch.device(device), own.quantization)
    name = FEATURES if files.kinds else SOURCE
    encoder = TowerModule(name, lambda **inputs: TowerFeatures(encode(inputs[name])))
    if not own.aligner:
        return (encoder,)
    load = resolve_name(own.aligner)
    align = load(files.directory, getattr(torch, files.dtype), torch.device(device))
    return encoder, TowerModule(ALIGNED_TOKENS, lambda **inputs: TowerFeatures(align(**inputs)), counts=True)


def read_weights(files: TowerFiles) -> dict[str, Tensor]:
    """The tensors by their names in transformers."""
    tensors: dict[str, Tensor] = {}
    for file in {weight.file for weight in files.weights}:
        with safe_open(file, framework="pt") as opened:
            for weight in files.weights:
                if weight.file == file:
                    tensors[flat_name(weight.name)] = opened.get_tensor(weight.name)
    return tensors


def read_config(files: TowerFiles) -> Any:
    """The configuration as transformers has it."""
    import transformers

    published = read_json(files.directory / "config.json")
    if (flat := flat_config(published)) != published:
        return transformers.AutoConfig.for_model(**flat)
    return transformers.AutoConfig.from_pretrained(files.directory, local_files_only=True, trust_remote_code=False)


@contextmanager
def loading(files: TowerFiles) -> Iterator[None]:
    """The block in which transformers loads the tower, in silence: its report of what is missing is
    ours. Raises `InvalidArgument` if it cannot."""
    import transformers

    log: Any = transformers.utils.logging
    log.disable_progress_bar()
    verbosity = log.get_verbosity()
    log.set_verbosity(log.CRITICAL)
    try:
        yield
    except (OSError, ValueError, TypeError, RuntimeError, LookupError, AttributeError) as error:
        raise InvalidArgument(f"transformers cannot load the tower of {files.directory}: {error}") from error
    finally:
        log.set_verbosity(verbosity)


def refuse_missing(files: TowerFiles, weights: Iterable[str]) -> None:
    """Raises `InvalidArgument` if some weights of the tower are missing."""
    if missing := sorted(weights):
        shown = ", ".join(missing[:3])
        raise InvalidArgument(f"{files.directory} lacks {len(missing)} weights of its tower: {shown}")
