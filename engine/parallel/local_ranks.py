"""The ranks of one machine: child processes of the engine core.

Knows nothing of the messages on their connections. Imports no torch.
"""

import os
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from ...processes.child_process import ChildProcess, python_child
from ..config import EngineConfig
from .rank_layout import RankLayout, RankPlace

_DEATH_SECONDS = 5.0
"""How long a process may take to end once its connection is closed."""


class LocalRanks:
    """`LaunchedRanks` on this machine.

    Raises:
        OSError: connections or processes cannot be made; none is left.
    """

    def __init__(self, config: EngineConfig, layout: RankLayout) -> None:
        self.connections: list[Connection] = []
        self._processes: list[ChildProcess] = []
        try:
            for rank in range(layout.world):
                ours, theirs = Pipe()
                self.connections.append(ours)
                with theirs:  # only the rank has it then, so it closes when the rank ends
                    place = RankPlace(rank, layout, "127.0.0.1", rank, layout.world)
                    self._processes.append(python_child("charonia-rank", _rank_main, config, place, theirs))
        except BaseException:
            self.wait_for_exit(0.0)
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def exit_reason(self, rank: int) -> str:
        exit_code = self._processes[rank].wait(_DEATH_SECONDS)
        return f"died (exit code {exit_code})" if exit_code is not None else "does not answer"

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def wait_for_exit(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for process in self._processes:
            process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()
        for process in self._processes:
            process.wait()

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self._processes:
            process.close()


def _rank_main(config: EngineConfig, place: RankPlace, connection: Connection) -> None:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # or a lost rank is logged in pages of C++
    from .rank import run_rank  # imports torch

    run_rank(config, place, connection)
    os._exit(0)  # torch's own cleanup takes seconds
