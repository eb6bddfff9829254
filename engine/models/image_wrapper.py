"""Whether a model of transformers' `AutoModelForImageTextToText` that has no description here is a language part of
ours with rows at its images' places, and nothing else: its class is called with one that notes what it is given.

This module imports transformers, so it is imported for such checkpoints alone.
"""

from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.model_spec import CheckpointError

_PARTS = ("language_model", "text_model")
_TYPES = ("token_type_ids", "mm_token_type_ids")
_PLACES = 3


def check_image_wrapper(directory: Path, architecture: str) -> None:
    """Raises `CheckpointError` with the reason unless images enter as rows at their tokens' places, and logits are the
    language part's. It takes no weights: all but the noting part is on torch's meta device."""
    try:
        _check(directory, architecture)
    except CheckpointError as error:
        reason = f"architecture {architecture} is not supported: {error.message}"
        raise CheckpointError(f"{directory / 'config.json'}: {reason}") from error


def _check(directory: Path, architecture: str) -> None:
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        known: Any = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
        if known is None or known.__name__ != architecture:
            raise CheckpointError("transformers has no such model of images and texts")
        config.text_config.num_hidden_layers = 0
        if getattr(config.text_config, "layer_types", None):
            config.text_config.layer_types = []
        with torch.device("meta"):
            model = known(config)
    except CheckpointError:
        raise
    except Exception as error:  # of a library, by whatever is wrong with the file
        first = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"transformers cannot make it: {type(error).__name__}: {first}") from error
    inner: Any = getattr(model, "model", None)
    if inner is None:
        raise CheckpointError("its class has no language part that takes rows in place of tokens")
    if hasattr(inner, "get_rope_index"):
        raise CheckpointError("its images' places have positions in three dimensions")
    takes = {*signature(inner.forward).parameters, *signature(known.forward).parameters}
    if types := takes.intersection(_TYPES):
        raise CheckpointError(f"its places are told apart by {min(types)}, which may change what they see")
    name = next((name for name in _PARTS if isinstance(getattr(inner, name, None), nn.Module)), "")
    if not name or "mm_encoder_outputs" not in takes or not hasattr(model, "lm_head"):
        raise CheckpointError("its class has no language part that takes rows in place of tokens")
    token = getattr(config, "image_token_id", None)
    if not isinstance(token, int):
        raise CheckpointError("its config.json names no image_token_id")
    noting = _NotingPart(int(config.text_config.hidden_size))
    setattr(inner, name, noting)
    model.lm_head = nn.Linear(noting.hidden, 5)
    _try_rows(model, noting, token)


class _NotingPart(nn.Module):
    """A language part of one function, that keeps what it was called with. Embeddings are numbers of the token."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.embed_tokens = _Numbers(hidden)
        self.gradient_checkpointing = False
        self.calls: list[dict[str, Any]] = []

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(self, **inputs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        self.calls.append(inputs)
        return BaseModelOutputWithPast(last_hidden_state=inputs["inputs_embeds"].sin())


class _Numbers(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.register_buffer("columns", torch.arange(hidden) / hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.unsqueeze(-1) + self.get_buffer("columns")


@torch.inference_mode()
def _try_rows(model: Any, noting: _NotingPart, token: int) -> None:
    """Two images of several rows between texts."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    images = [torch.randn(_PLACES, noting.hidden) for _ in range(2)]
    ids = torch.tensor([[1, *[token] * _PLACES, 2, 3, *[token] * _PLACES, 4]])
    wanted = noting.embed_tokens(ids)
    wanted[ids == token] = torch.cat(images)
    failed = ""
    forms: tuple[Any, ...] = (images, torch.stack(images), torch.cat(images))  # in which transformers' towers give them
    for rows in forms:
        noting.calls.clear()
        try:
            features = {"image": BaseModelOutputWithPooling(pooler_output=rows)}
            logits = model(input_ids=ids, mm_encoder_outputs=features, use_cache=False).logits
        except Exception as error:
            failed = f"{type(error).__name__}: {error}".partition("\n")[0]
            continue
        _check_call(noting.calls, wanted)
        if not torch.equal(logits, model.lm_head(wanted.sin())):
            raise CheckpointError("its logits are more than those of its language part")
        return
    raise CheckpointError(f"its class takes no rows of images ({failed})")


def _check_call(calls: list[dict[str, Any]], wanted: Tensor) -> None:
    if len(calls) != 1 or not torch.equal(calls[0]["inputs_embeds"], wanted):
        raise CheckpointError("its images are more than rows in place of tokens")
    places = torch.arange(wanted.shape[1])[None]
    for name, value in calls[0].items():
        plain = name == "position_ids" and isinstance(value, Tensor) and torch.equal(value, places)
        if name != "inputs_embeds" and isinstance(value, Tensor | list | tuple | dict) and not plain:
            raise CheckpointError(f"its language part is given {name} beside the rows of its images")
