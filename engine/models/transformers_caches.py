"""What a transformers model keeps of a sequence in a cache of its own, and the way of that into our blocks and slots
and back.

Of every token these are keys, values and an indexer's keys, of the sequence windows of convolutions and recurrent
states. A token's numbers of all layers lie side by side; so do the states'.
"""

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoint.model_spec import CheckpointError
from .transformers_attention import refuse_failures

_TOKEN_TENSORS = "keys", "values", "indexer_keys"
_STATE_TENSORS = "conv_states", "recurrent_states"
_CACHE_ARGUMENTS = "cache", "past_key_values", "cache_params"
"""The names that the classes of transformers have for the cache which they are called with."""

_PROBE_LENGTH = 3
"""Tokens that find out what is kept."""


class KeptTensor(NamedTuple):
    """A tensor of a layer of transformers' cache."""

    layer: int
    name: str
    part: int | None
    """Its key where a layer has several of the name; None: it has one."""
    shape: torch.Size
    """The shape of a state, and of what one token leaves."""
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return self.shape.numel()


class SequenceCaches:
    """Caches of transformers for one sequence at a time, and what lies where in them."""

    def __init__(self, config: Any, argument: str) -> None:
        """`config`: the model's; `argument`: the name by which the model takes a cache."""
        self.argument = argument
        self._config = config
        self.tokens: list[KeptTensor] = []
        """What is kept of every token."""
        self.states: list[KeptTensor] = []
        """What is kept of a sequence."""

    @property
    def token_size(self) -> int:
        """Numbers that a token leaves."""
        return sum(tensor.size for tensor in self.tokens)

    @property
    def state_size(self) -> int:
        """Numbers of a sequence's state."""
        return sum(tensor.size for tensor in self.states)

    def probe(self, model: Any) -> None:
        """Find out what is kept by calling the model."""
        cache = self.empty()
        ids = torch.arange(1, 1 + _PROBE_LENGTH, device=model.device).unsqueeze(0)
        with refuse_failures("over a cache of its own"):
            model(input_ids=ids, use_cache=True, **{self.argument: cache})
        self.tokens = [*_token_tensors(cache)]
        self.states = [*_state_tensors(cache)]
        if not self.tokens and not self.states:
            raise CheckpointError("it keeps nothing in a cache of transformers that it is called with")

    def empty(self) -> Any:
        """A cache of a sequence of which nothing is computed. Layers with a window keep all tokens in it."""
        from transformers import cache_utils

        kinds = {
            cache_utils.DynamicSlidingWindowLayer: cache_utils.DynamicLayer,
            cache_utils.LinearAttentionAndSlidingWindowAttentionLayer: (
                cache_utils.LinearAttentionAndFullAttentionLayer
            ),
        }
        cache: Any = cache_utils.DynamicCache(config=self._config)
        for number, layer in enumerate(cache.layers):
            if type(layer) in kinds:
                states = getattr(layer, "number_of_states", None)
                kind: Any = kinds[type(layer)]
                cache.layers[number] = kind() if states is None else kind(number_of_states=states)
        return cache

    def filled(self, tokens: Tensor, state: Tensor | None) -> Any:
        """A cache of a sequence whose tokens [n, token_size] and state [state_size] are known; n is more than 0."""
        cache = self.empty()
        columns = torch.split(tokens, [tensor.size for tensor in self.tokens], 1)
        for tensor, column in zip(self.tokens, columns, strict=True):
            values = column.reshape(len(column), *tensor.shape).to(tensor.dtype)
            _put_tokens(_layer(cache, tensor.layer), tensor, values.movedim(0, -2).unsqueeze(0))
        if state is not None:
            parts = torch.split(state, [tensor.size for tensor in self.states])
            for tensor, part in zip(self.states, parts, strict=True):
                _put_state(cache.layers[tensor.layer], tensor, part.reshape(tensor.shape).to(tensor.dtype))
        return cache

    def new_tokens(self, cache: Any, known: int) -> Tensor:
        """What the tokens after the `known` first ones left: [n, token_size].

        Raises:
            ValueError: the cache does not hold all tokens; of a layer that forgets some.
        """
        columns = [getattr(cache.layers[tensor.layer], tensor.name)[0].movedim(-2, 0) for tensor in self.tokens]
        if len({len(column) for column in columns}) > 1:
            raise ValueError("layers keep different numbers of tokens")
        return torch.cat([column[known:].flatten(1) for column in columns], 1)

    def state(self, cache: Any) -> Tensor:
        """The state that a cache holds, float32 [state_size]."""
        layers = cache.layers
        parts = (getattr(layers[tensor.layer], tensor.name)[tensor.part] for tensor in self.states)
        return torch.cat([part.float().flatten() for part in parts])


def sequence_caches(model_class: Any, config: Any) -> SequenceCaches:
    """The caches of a class of models that takes one of transformers'.

    Raises:
        CheckpointError: it takes none, or one with layers of its own kind.
    """
    from transformers import cache_utils

    known = inspect.signature(model_class.forward).parameters
    argument = next((name for name in _CACHE_ARGUMENTS if name in known), None)
    if argument is None:
        raise CheckpointError("its class takes no cache of transformers")
    caches = SequenceCaches(config, argument)
    with refuse_failures("to make a cache of its configuration"):
        layers = caches.empty().layers
    served = (
        cache_utils.DynamicLayer,
        cache_utils.DynamicIndexedLayer,
        cache_utils.LinearAttentionLayer,
        cache_utils.LinearAttentionAndFullAttentionLayer,
        cache_utils.DummyLayer,
    )
    strange = {type(layer).__name__ for layer in layers if type(layer) not in served}
    if strange:
        raise CheckpointError(f"its cache has layers of its own kind ({', '.join(sorted(strange))})")
    return caches


def keeps_states(caches: SequenceCaches) -> bool:
    """Whether the model keeps a state, as far as its configuration says."""
    return any(hasattr(layer, "recurrent_states") for layer in caches.empty().layers)


def _token_tensors(cache: Any) -> Iterator[KeptTensor]:
    for number, layer in enumerate(cache.layers):
        for name in _TOKEN_TENSORS:
            kept = getattr(layer, name, None)
            if not isinstance(kept, Tensor):
                continue
            if kept.ndim < 3 or kept.shape[0] != 1 or kept.shape[-2] != _PROBE_LENGTH:
                raise CheckpointError(f"layer {number} keeps {name} of another shape than one line a token")
            one = torch.Size((*kept.shape[1:-2], kept.shape[-1]))
            yield KeptTensor(number, name, None, one, kept.dtype)
        if getattr(layer, "indexer_position_ids", None) is not None:
            raise CheckpointError(f"layer {number} keeps positions of its indexer")


def _state_tensors(cache: Any) -> Iterator[KeptTensor]:
    for number, layer in enumerate(cache.layers):
        for name in _STATE_TENSORS:
            for part, kept in getattr(layer, name, {}).items():
                if kept is not None:
                    yield KeptTensor(number, name, part, kept.shape, kept.dtype)


def _layer(cache: Any, number: int) -> Any:
    """The layer of that number, made where the cache makes its layers when they are used."""
    while len(cache.layers) <= number:
        cache.layers.append(cache.layer_class_to_replicate())
    return cache.layers[number]


def _put_tokens(layer: Any, tensor: KeptTensor, values: Tensor) -> None:
    if tensor.name == "indexer_keys":
        layer.lazy_initialization_indexer(values)
    elif not layer.is_initialized:
        layer.lazy_initialization(values, values)
    setattr(layer, tensor.name, values)


def _put_state(layer: Any, tensor: KeptTensor, values: Tensor) -> None:
    layer.lazy_initialization(**{tensor.name: values, "state_idx": tensor.part})
    getattr(layer, tensor.name)[tensor.part].copy_(values)
    layer.has_previous_state[tensor.part] = True
