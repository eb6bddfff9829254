"""A decoder's layers one after the other; where our kernels are all they need, by one call of a recorded program."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from ..attention.base import Attend
from ..attention.native import NativeAttend
from ..kernels import library
from ..kernels.program import Ends, Program
from ..kernels.tape import ATTENTION, Operation, Slot, Tape
from .rotary import Angles, FusedAngles

DecoderLayer: TypeAlias = Callable[[Tensor, Tensor, Angles, Attend], Tensor]
"""The residual stream x [N, hidden], changed in place, and what is still to be added to it; what to add after it."""


class Stack:
    """x [N, hidden] -> the residual stream and what is still to be added to it, both [N, hidden]."""

    def __init__(self, layers: Sequence[DecoderLayer], ropes: Sequence[int] | None = None) -> None:
        """`ropes`: which of the angles turn each layer; without it the first turn all."""
        self._layers = list(zip(layers, ropes or [0] * len(layers), strict=True))
        self._program: Program | None = None
        self._tried = False

    def __call__(self, x: Tensor, angles: Sequence[Angles], attend: Attend) -> tuple[Tensor, Tensor]:
        """Both are good until the next call; x may be one of them."""
        if isinstance(attend, NativeAttend) and (program := self._recorded(x, attend)):
            turns = [each.turns for each in angles if isinstance(each, FusedAngles)]
            return program(x, turns, attend.scene)
        delta = torch.zeros_like(x)
        for layer, rope in self._layers:
            delta = layer(x, delta, angles[rope], attend)
        return x, delta

    def _recorded(self, x: Tensor, attend: NativeAttend) -> Program | None:
        if not self._tried:
            self._tried = True
            self._program = self._record(x.shape[1], x.dtype, attend)
        return self._program

    def _record(self, hidden: int, dtype: torch.dtype, attend: NativeAttend) -> Program | None:
        """The layers as a program, found by calling them with what stands for tensors (see `Tape`)."""
        if dtype not in library.DTYPES:
            return None
        tape = Tape(dtype)
        stream, zeros = Slot(tape, hidden), Slot(tape, hidden)
        told = cast(Attend, _Recorder(attend.width))
        rest = cast(Tensor, zeros)
        try:
            for layer, rope in self._layers:
                rest = layer(cast(Tensor, stream), rest, cast(Angles, _Turned(rope)), told)
        except (TypeError, AttributeError):
            return None  # something is computed in between that only torch can
        return Program(tape, Ends(stream, zeros, cast(Slot, rest)))


class _Turned(NamedTuple):
    """Stands for angles."""

    number: int


class _Recorder(NamedTuple):
    """Stands for the attention of a step; what comes out has `width` features."""

    width: int

    def turned(self, layer: int, packed: Slot, angles: _Turned) -> Slot:
        return packed.tape.add(Operation(kind=ATTENTION, layer=layer, angles=angles.number), packed, self.width)
