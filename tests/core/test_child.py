"""What processes of ours owe who started them."""

import os
import subprocess
import sys

BROKEN = """
from charonia.core.child import show
try:
    raise ValueError("why")
except ValueError as error:
    show(error)
print("ended")
"""


def run(stderr: int) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", BROKEN]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=60, check=True)


def test_who_broke_says_why() -> None:
    done = run(subprocess.PIPE)
    assert done.stderr.endswith("ValueError: why\n")
    assert done.stdout == "ended\n"


def test_who_broke_ends_though_nobody_reads_why() -> None:
    taken, given = os.pipe()
    try:
        os.set_blocking(given, False)
        while True:
            os.write(given, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(given, True)
        assert run(given).stdout == "ended\n"
    finally:
        os.close(taken)
        os.close(given)
