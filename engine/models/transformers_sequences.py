"""A transformers model as it is, attention and all, one sequence after the other: for architectures whose attention
ours can't replace.

What it keeps of a sequence lies in our blocks and slots (`transformers_caches.py`), so its requests are batched,
preempted and resumed as any other's; its steps are as slow as its rows are many.
"""

import inspect
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..attention.torch_attention import StoredTokens
from ..checkpoint.model_spec import DecoderShape, KeyValueShape, LayerAttention
from ..checkpoint.recurrence import LayerState
from ..layers.step_context import StepContext
from ..step_batch import SampledTokens, StepBatch
from .interfaces import LogitsIterator
from .transformers_caches import SequenceCaches


class SequenceDecoder:
    """A transformers model as a `Decoder` that calls it once for each row of a step."""

    def __init__(self, model: Any, caches: SequenceCaches, resumes_singly: bool = False) -> None:
        """`resumes_singly`: tokens after the first call for a sequence are computed one by one, since the model begins
        anew where it is given several."""
        self._model = model
        self._resumes_singly = resumes_singly
        self._caches = caches
        self._selects_logits = "logits_to_keep" in inspect.signature(type(model).forward).parameters

    def compute_logits(self, context: StepContext, selections: Sequence[Tensor]) -> LogitsIterator:
        batch = context.batch
        wanted = torch.cat([batch.positions[:0], *selections]).sort().values
        inputs = step_inputs(self._model, batch)
        states = context.states if self._caches.states else None
        state = None if states is None else states.read(states.layers[0].matrices).flatten(1)
        logits: list[Tensor] = []
        for index, first in enumerate(batch.first_places.tolist()):
            end = first + int(batch.counts[index])
            places = wanted[(wanted >= first) & (wanted < end)] - first
            known = None if state is None else state[index]
            logits += self._compute_row(context, index, inputs[first:end], known, places)
        if states is not None and state is not None:
            slots = states.layers[0].matrices
            states.write(slots, state.view(-1, *slots.shape[1:]))
        every = torch.cat(logits) if logits else torch.empty(0)
        return (every[torch.searchsorted(wanted, selection)] for selection in selections)

    def begin_step(self, context: StepContext, logits_indices: Tensor, samples: SampledTokens | None = None) -> None:
        """Returns None: transformers computes in the caller's thread alone."""

    def close(self) -> None:
        """Nothing is to be ended: the decoder has no threads of its own."""

    def _compute_row(
        self, context: StepContext, index: int, inputs: Tensor, state: Tensor | None, places: Tensor
    ) -> Iterator[Tensor]:
        """Compute a row's tokens by its `inputs`; yields the logits of its `places`. `state` is what the row begins
        with, and becomes what it ends with."""
        start = int(context.batch.starts[index])
        store = context.attention
        assert isinstance(store, StoredTokens), "the attention of these models is a store"
        width = self._caches.token_size
        known = store.read(0, index).flatten(1)[:, :width]
        cache = self._caches.filled(known, state) if start else self._caches.empty()
        saves = {} if state is None else context.states.saves_of(index)
        first = 0 if start else min((len(inputs), *saves))
        single = range(first, len(inputs)) if self._resumes_singly else ()
        for begin, end in pairwise(sorted({0, len(inputs), *saves, *single})):
            some = places[(places >= begin) & (places < end)] - begin
            logits = self._call(inputs[begin:end], cache, some)
            if len(some):
                yield logits
            if state is not None:
                state.copy_(self._caches.state(cache))
                for slot in saves.get(end, ()):
                    context.states.layers[0].matrices[slot].view(-1).copy_(state)
        if width:
            store.write(0, index, self._caches.new_tokens(cache, start).unsqueeze(1).to(known.dtype))

    def _call(self, inputs: Tensor, cache: Any, places: Tensor) -> Tensor:
        """The logits [S, vocabulary] of `places` [S] among the tokens, by which the cache grows."""
        named = {self._caches.argument: cache, "use_cache": True, **named_inputs(inputs)}
        if self._selects_logits:
            named["logits_to_keep"] = places if len(places) else 1
            logits: Tensor = self._model(**named).logits[0]
            return logits
        logits = self._model(**named).logits[0]
        return logits[places]


def step_inputs(model: Any, batch: StepBatch) -> Tensor:
    """What a transformers model computes a step of: token ids [N], or, where some place is none, embeddings
    [N, hidden]."""
    tokens = batch.tokens.long()
    return tokens if batch.embedded is None else batch.embedded.fill(model.get_input_embeddings()(tokens))


def named_inputs(inputs: Tensor) -> dict[str, Tensor]:
    """Them as the argument that they are for one sequence."""
    return {"input_ids" if inputs.dim() == 1 else "inputs_embeds": inputs.unsqueeze(0)}


def sequence_shape(config: Any, caches: SequenceCaches) -> DecoderShape:
    """The shape of a model whose first layer keeps everything for all, as one key without a value."""
    hidden = int(config.hidden_size)
    layers = int(getattr(config, "num_hidden_layers", None) or 1)
    state = LayerState(0, 0, 1, 1, caches.state_size) if caches.states else None
    # Blocks count tokens even where no token leaves anything.
    kept = KeyValueShape(1, max(1, caches.token_size), 0, values_in_keys=True)
    return DecoderShape(
        vocab_size=int(config.vocab_size),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        heads=1,
        kv_heads=1,
        head_dim=kept.key_size,
        attention=(LayerAttention(kept=kept), *(layers - 1) * [None]),
        states=() if state is None else (state, *(layers - 1) * [None]),
        attends_itself=True,
    )
