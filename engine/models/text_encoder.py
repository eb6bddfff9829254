"""The encoder of a model that reads a text and writes another: transformers' own, a tower beside the engine.

This module imports transformers, so it is imported for such checkpoints alone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from ..checkpoint.model_spec import CheckpointError


def load_text_encoder(
    directory: Path, dtype: torch.dtype, device: torch.device, quantization: str
) -> Callable[[Tensor], Tensor]:
    """What makes of tokens [texts, length] rows [texts, length, width], in `dtype` whatever the `quantization`. The
    decoder's weights are read, too, and dropped.

    Raises:
        CheckpointError: transformers can't.
    """
    try:
        model: Any = AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"{directory}: its encoder: {error}") from error
    encoder = model.get_encoder().to(device).eval()
    del model

    @torch.inference_mode()
    def encode(tokens: Tensor) -> Tensor:
        rows: Tensor = encoder(input_ids=tokens.to(device)).last_hidden_state
        return rows

    return encode
