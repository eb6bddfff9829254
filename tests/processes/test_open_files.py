"""The limit of open files, of processes that are given little."""

import subprocess
import sys

import pytest

PROGRAM = """
import logging, resource, sys
from charonia.processes.host import raise_open_file_limit
logging.basicConfig(format="%(message)s", stream=sys.stdout)
resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT, HARD))
print(raise_open_file_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))
print(raise_open_file_limit(100))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "said"),
    [
        (64, 4096, ["4096 (4096, 4096)", "4096"]),
        (64, 200, ["200 files may be open at once, connections included; ulimit -n raises that", "200 (200, 200)"]),
    ],
)
def test_it_is_raised_as_far_as_may_be(soft: int, hard: int, said: list[str]) -> None:
    program = PROGRAM.replace("SOFT", str(soft)).replace("HARD", str(hard))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[: len(said)] == said
