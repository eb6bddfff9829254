"""Why steps of a GPU are launched kernel by kernel, as they are counted."""

from enum import StrEnum


class EagerReason(StrEnum):
    """Why a GPU's step was launched kernel by kernel: its bucket has no CUDA graph yet, it is too large for any, it
    computes a prompt's part, or no step of the model is recorded."""

    NOT_CAPTURED = "not_captured"
    TOO_LARGE = "too_large"
    PROMPT = "prompt"
    NOT_RECORDED = "not_recorded"
