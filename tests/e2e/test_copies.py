"""Servers that are copies of a template, as most of tests are."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serving import TIMEOUT

_ASKS = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from tests.e2e.server_template import copy_process
flags = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
with open(sys.argv[2] + "/output", "wb") as output:
    server = copy_process(["serve", "--model-repository", sys.argv[2], *flags], output, os.environ)
print(server.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux alone")
def test_a_server_ends_with_the_tests_that_started_it(root: Path, tmp_path: Path) -> None:
    """Also where these are killed."""
    command = (sys.executable, "-P", "-c", _ASKS, str(root), str(tmp_path))
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path) as tests:
        assert tests.stdout is not None
        server = os.pidfd_open(int(tests.stdout.readline()))
        tests.kill()
    assert select.select([server], [], [], TIMEOUT)[0], (tmp_path / "output").read_text()
    os.close(server)
