"""Encoders of sounds in torch: transformers' own modules, with the weights of the encoder alone.

Imported only where one is loaded.
"""

from typing import Any

import torch

from ...core.errors import InvalidArgument
from ...core.media import FEATURES
from ...processes.host import map_large_blocks_separately
from .tower_module import TowerModule, read_weights
from .vision_files import VisionFiles

_PREFIXES = ("model.encoder.", "encoder.")
"""Beginnings of the encoder's names in checkpoints, by the class that wrote them."""


def load_hearing(files: VisionFiles, dtype: torch.dtype) -> TowerModule:
    """Whisper's encoder, in the host's memory. Raises `InvalidArgument` for a checkpoint that lacks some of it."""
    import transformers
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    map_large_blocks_separately()
    config = transformers.AutoConfig.from_pretrained(files.directory, local_files_only=True, trust_remote_code=False)
    weights = {
        name.removeprefix(prefix): weight
        for name, weight in read_weights(files).items()
        for prefix in _PREFIXES
        if name.startswith(prefix)
    }
    log: Any = transformers.utils.logging
    log.disable_progress_bar()
    verbosity = log.get_verbosity()
    log.set_verbosity(log.CRITICAL)  # its report of what is missing is ours
    try:
        known: Any = WhisperEncoder
        encoder, report = known.from_pretrained(
            None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
        )
    except (OSError, ValueError, RuntimeError, KeyError, AttributeError) as error:
        raise InvalidArgument(f"transformers cannot load the encoder of {files.directory}: {error}") from error
    finally:
        log.set_verbosity(verbosity)
    missing = sorted(report["missing_keys"])
    if missing:
        shown = ", ".join(missing[:3])
        raise InvalidArgument(f"{files.directory} lacks {len(missing)} weights of its encoder: {shown}")
    return TowerModule(encoder, FEATURES, encoder, "last_hidden_state")
