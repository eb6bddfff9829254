"""Memory of processes and of those that they started."""

import os
import subprocess
import sys
from pathlib import Path

from charonia.core.model import ReservedMemory
from charonia.processes.host import resident_memory_of


def process(root: Path, pid: int, anonymous: int, shared: int = 0, children: str = "") -> None:
    (root / "proc" / str(pid) / "task" / str(pid)).mkdir(parents=True)
    (root / "proc" / str(pid) / "status").write_text(
        f"Name:\tx\nRssAnon:\t{anonymous} kB\nRssFile:\t9 kB\nRssShmem:\t{shared} kB\n"
    )
    (root / "proc" / str(pid) / "task" / str(pid) / "children").write_text(children)


def test_a_process_counts_with_all_below_it(tmp_path: Path) -> None:
    process(tmp_path, 1, 10, children="2 3 ")
    process(tmp_path, 2, 20, shared=5, children="4 ")
    process(tmp_path, 3, 40)
    assert resident_memory_of([1], tmp_path) == 75 * 1024
    assert resident_memory_of([3, 7], tmp_path) == 40 * 1024


def test_of_real_processes() -> None:
    mine = resident_memory_of([os.getpid()])
    code = "held = bytearray(64 << 20); held[::4096] = b'1' * len(held[::4096]); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert resident_memory_of([child.pid]) >= 64 << 20
        assert resident_memory_of([os.getpid()]) >= mine + (60 << 20)
        child.communicate(b"\n")
    assert resident_memory_of([child.pid]) == 0


def test_what_is_promised_and_there_is_not_to_come() -> None:
    assert (ReservedMemory(10, 4).outstanding, ReservedMemory(10, 14).outstanding) == (6, 0)
