"""`--frontends` on this machine: how many processes answer requests, and when."""

import os
from collections.abc import Mapping
from typing import Literal, NamedTuple

from ..core.errors import InvalidArgument
from ..processes.host import usable_cores
from ..telemetry.host_metrics import usable_gpus
from ..telemetry.loop_lag import BusyLimit

VARIABLE = "CHARONIA_TEST_GROWTH"
"""The variable by which our tests have a small machine grow, as `cores=8 busy=0.1 seconds=0.5`."""

_ONE_UP_TO = 4
"""Cores, up to which one process is all: engine cores, instances and the system want the others."""

_CORES_OF_EACH = 4
_MOST = 4
"""More are `--frontends`' to ask for: from about five on the process behind them is full (docs/performance.md)."""


class FrontendCount(NamedTuple):
    """The frontends of a server. `setting`: the flag; `auto`: as many as auto has here at most; `limit`: beyond it the
    one that auto begins with is not enough."""

    setting: int | Literal["auto"]
    auto: int
    limit: BusyLimit

    @property
    def most(self) -> int:
        return self.auto if self.setting == "auto" else self.setting

    @property
    def grows(self) -> bool:
        """Whether there is one at first, and more when that is busy."""
        return self.setting == "auto" and self.auto > 1


def count_frontends(setting: int | Literal["auto"], environment: Mapping[str, str] = os.environ) -> FrontendCount:
    """What the flag comes to with this machine's cores and GPUs. Raises `InvalidArgument` for a variable of another
    form."""
    limit, cores = BusyLimit(), usable_cores().threads
    if text := environment.get(VARIABLE, ""):
        try:
            figures = {name: float(value) for name, value in (word.split("=") for word in text.split())}
            cores, limit = int(figures.pop("cores", cores)), BusyLimit(**figures)
        except (TypeError, ValueError):
            raise InvalidArgument(f"{VARIABLE} must be as 'cores=8 busy=0.1 seconds=0.5', got '{text}'") from None
    return FrontendCount(setting, most_frontends(cores, len(usable_gpus(environment))), limit)


def most_frontends(cores: int, gpus: int) -> int:
    """As many as auto has at most: one on up to four cores, else one for four, and two at least where a GPU computes;
    four at most."""
    if cores <= _ONE_UP_TO:
        return 1
    return min(max(cores // _CORES_OF_EACH, 2 if gpus else 1), _MOST)
