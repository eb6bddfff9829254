"""What transformers chooses, which our own models are compared with."""

from typing import Any

import torch


@torch.inference_mode()
def chosen_after(model: Any, prompt: list[int], tokens: list[int]) -> list[int]:
    """The likeliest tokens of transformers' `model` after the prompt and each of the `tokens` but the last."""
    logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    return list(logits.argmax(-1).tolist())
