"""Copies of a process stay with who asked for them."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json, sys
from tests.e2e.copied_children import run_child
run_child(json.loads(sys.argv[1]), [1, 2])
"""


def test_a_copy_whose_parent_has_ended_ends_too(root: Path) -> None:
    parent = subprocess.Popen(["true"])
    parent.wait()
    request = {
        "arguments": ["print('run')"],
        "environment": dict(os.environ),
        "directory": str(root),
        "descriptors": [1, 2],
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "cores": [*os.sched_getaffinity(0)],
        "parent": parent.pid,
    }
    command = [sys.executable, "-c", PROGRAM, json.dumps(request)]
    copy = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert copy.returncode == 1
    assert copy.stdout == ""
    assert "ProcessLookupError" in copy.stderr
