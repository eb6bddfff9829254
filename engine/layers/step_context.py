"""The context of one step: the worker makes one for each step, the decoder hands it to every layer.

A layer is called with its hidden states and this. Whatever else a step must tell its layers becomes a field here and
not one more argument of every layer.
"""

from collections.abc import Callable
from copy import copy
from typing import Protocol, TypeAlias

from torch import Tensor

from ..cpu.recurrent import StepSlots
from ..step_adapters import StepAdapters
from ..step_batch import StepBatch
from .norm import QKNorm
from .recurrent_state import StepSlotStates
from .rotary import Rotary, RotaryAngles


class StepAttention(Protocol):
    """One step's attention over the paged cache, made by `AttentionBackend.begin_step`. A call stores keys and values
    of the step's N tokens in this rank's cache numbered `layer` (`DecoderShape.cache_index`); then each token attends
    to its sequence's tokens up to itself, as far back as the layer's window. Without keys the layer attends to what an
    earlier one stored there."""

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        """Queries [N, heads, key_size], keys [N, kv_heads, key_size] and values [N, kv_heads, value_size], or none
        where keys have them -> [N, heads * value_size]. `sinks`, float32 [heads], is given for a layer whose
        `LayerAttention` has sinks, and of a layer with distances float32 [heads, distances], what is added to
        scores."""

    def apply_rope_and_attend(
        self, layer: int, packed: Tensor, angles: RotaryAngles, sinks: Tensor | None = None, norm: QKNorm | None = None
    ) -> Tensor:
        """The same for queries, keys and values of one size side by side, [N, heads + 2 kv_heads, head_dim], or queries
        alone, [N, heads, head_dim], contiguous, after `angles` rotated queries and keys; of keys that have values in
        them queries and the key, [N, heads + 1, key_size], are rotated behind the value. `norm` comes first, in place
        or not. The next layer's call overwrites the result."""


SharedPart: TypeAlias = Callable[[Tensor, "StepContext"], Tensor]
"""Makes of the hidden states [N, hidden] that go into the first layer what all layers take."""


class StepContext:
    """The tokens of one step, how they attend, the adapters that some of them have, if any does, and the states of
    their rows, if layers keep any; and how they attend to an encoder's output, if there is one."""

    def __init__(
        self,
        batch: StepBatch,
        attention: StepAttention,
        adapters: StepAdapters | None = None,
        states: StepSlotStates | None = None,
        cross: StepAttention | None = None,
    ) -> None:
        self.batch = batch
        self.attention = attention
        self.adapters = adapters
        self._states = states
        self._cross = cross
        self._angles: dict[Rotary, RotaryAngles] = {}
        self._shared: dict[SharedPart, Tensor] = {}

    @property
    def states(self) -> StepSlotStates:
        """The states of a model whose layers keep some."""
        assert self._states is not None, "who computes a model with states has a store of them"
        return self._states

    @property
    def cross(self) -> StepAttention:
        """The attention to an encoder's output, whose keys and values are there already."""
        assert self._cross is not None, "who computes a model with an encoder has a cache of its output"
        return self._cross

    @property
    def attends_across(self) -> bool:
        return self._cross is not None

    @property
    def state_slots(self) -> StepSlots | None:
        """Where C finds the states, if layers keep some."""
        return None if self._states is None else self._states.kernel

    def shared(self, part: SharedPart, x: Tensor) -> Tensor:
        """What `part`, which layers share, makes of the first one's x; computed once."""
        if part not in self._shared:
            self._shared[part] = part(x, self)
        return self._shared[part]

    def angles(self, rotary: Rotary) -> RotaryAngles:
        """The rotation of the step's tokens by `rotary`, computed once for all layers that share it."""
        if rotary not in self._angles:
            self._angles[rotary] = rotary(self.batch.rotary_positions)
        return self._angles[rotary]

    def for_rows(self, rows: Tensor) -> "StepContext":
        """The context of linear layers that compute these `rows` [n] of the step alone: their adapters are theirs."""
        if self.adapters is None:
            return self
        context = copy(self)
        context.adapters = self.adapters.among(rows.cpu().numpy())
        return context
