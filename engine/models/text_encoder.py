"""The encoder of a model that reads a text and writes another: transformers' own, one text at a time.

This module imports transformers, so it is imported for such checkpoints alone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from ..checkpoint.model_spec import CheckpointError

TextEncoder: TypeAlias = Callable[[Tensor], Tensor]
"""Tokens [length] -> rows [length, width]."""


def load_text_encoder(directory: Path, dtype: torch.dtype, device: torch.device) -> TextEncoder:
    """Read the encoder's weights; those of the decoder are read, too, and dropped.

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
        rows: Tensor = encoder(input_ids=tokens.long().to(device)[None]).last_hidden_state[0]
        return rows

    return encode
