"""Models of transformers' `AutoModelForImageTextToText` that have no description here: whether one is a language part
with rows at its images' places, and nothing else. Its class is called with a part that notes what it is given.

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
    """Raises `CheckpointError`, as `try_image_wrapper`, of a checkpoint whose language part is computed natively: its
    logits must be those of that part alone."""
    try:
        try_image_wrapper(directory, architecture)
    except CheckpointError as error:
        reason = f"architecture {architecture} is not supported: {error.message}"
        raise CheckpointError(f"{directory / 'config.json'}: {reason}") from error


def try_image_wrapper(directory: Path, architecture: str, own_logits: bool = False) -> None:
    """Try whether images enter as rows at their tokens' places, and logits are the language part's; with `own_logits`,
    what the class makes of them. It takes no weights: all but the noting part is on torch's meta device.

    Raises:
        CheckpointError: they enter otherwise; the message is the reason alone.
    """
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        known: Any = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
        if known is None or known.__name__ != architecture:
            raise CheckpointError("transformers has no such model of images and texts")
        if getattr(config, "text_config", None) is None:
            raise CheckpointError("its config.json has no text_config, a language part of its own")
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
    name = "" if inner is None else _part_name(inner)
    takes = {*signature(known.forward).parameters, *(() if inner is None else signature(inner.forward).parameters)}
    if hasattr(inner, "get_rope_index"):
        raise CheckpointError("its images' places have positions in three dimensions")
    if types := takes.intersection(_TYPES):
        raise CheckpointError(f"its places are told apart by {min(types)}, which may change what they see")
    if not name or "mm_encoder_outputs" not in takes or not hasattr(model, "lm_head"):
        raise CheckpointError("its class has no language part that takes rows in place of tokens")
    token = getattr(config, "image_token_id", None)
    if not isinstance(token, int):
        raise CheckpointError("its config.json names no image_token_id")
    noting = _NotingPart(int(config.text_config.hidden_size))
    setattr(inner, name, noting)
    model.lm_head = nn.Linear(noting.hidden, 5)
    _try_rows(model, noting, token, own_logits)


def _part_name(inner: Any) -> str:
    """The attribute that is a model's language part; empty if none is known."""
    return next((name for name in _PARTS if isinstance(getattr(inner, name, None), nn.Module)), "")


def drop_towers(model: Any) -> None:
    """Free what a loaded model has beside its language part, and what makes logits."""
    kept = _part_name(model.model)
    for name, _ in [*model.model.named_children()]:
        if name != kept:
            setattr(model.model, name, None)


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
        from transformers.modeling_outputs import MoeModelOutputWithPast

        self.calls.append(inputs)
        return MoeModelOutputWithPast(last_hidden_state=inputs["inputs_embeds"].sin())


class _Numbers(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.register_buffer("columns", torch.arange(hidden) / hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.unsqueeze(-1) + self.get_buffer("columns")


@torch.inference_mode()
def _try_rows(model: Any, noting: _NotingPart, token: int, own_logits: bool) -> None:
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
            if isinstance(error, AttributeError) and isinstance(error.obj, BaseModelOutputWithPooling):
                raise CheckpointError(f"its images are more than rows: it takes their {error.name}, too") from error
            failed = f"{type(error).__name__}: {error}".partition("\n")[0]
            continue
        _check_call(noting.calls, wanted)
        right = model(inputs_embeds=wanted, use_cache=False).logits if own_logits else model.lm_head(wanted.sin())
        if not torch.equal(logits, right):
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
