"""Cuts a long sound at its silences into windows that an encoder takes. Runs in a process that may be killed."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_SOUGHT_SECONDS = 6.0
"""How far before a window's latest end its silence is looked for."""
_FRAME_SECONDS, _HOP_SECONDS = 0.2, 0.02


class Window(NamedTuple):
    """Samples from `begin` on and before `end`."""

    begin: int
    end: int


def cut_windows(samples: NDArray[np.float32], rate: int, longest: int) -> list[Window]:
    """Windows of at most `longest` samples that have all of them: each but the last one ends in the middle of the
    quietest fifth of a second of its last six."""
    windows: list[Window] = []
    begin = 0
    while len(samples) - begin > longest:
        first = begin + max(longest - int(_SOUGHT_SECONDS * rate), longest // 2)
        end = first + _quietest(samples[first : begin + longest], rate)
        windows.append(Window(begin, end))
        begin = end
    windows.append(Window(begin, len(samples)))
    return windows


def _quietest(samples: NDArray[np.float32], rate: int) -> int:
    """The middle of the frame with the least energy; the latest one of equals, so that windows are long."""
    frame, hop = int(_FRAME_SECONDS * rate), int(_HOP_SECONDS * rate)
    energy = np.concatenate(([0.0], np.cumsum(np.square(samples, dtype=np.float64))))
    starts = np.arange(0, len(samples) - frame + 1, hop)
    sums = energy[starts + frame] - energy[starts]
    return int(starts[len(starts) - 1 - int(np.argmin(sums[::-1]))]) + frame // 2
