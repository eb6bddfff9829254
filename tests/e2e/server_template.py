"""A process that has imported what a server is made of, and copies itself for each server that tests start.

Imports take two thirds of a server's start. All else of a copy is a server's own: it runs `main` with its arguments, in
its environment, as a child of the process that asked for it. The engine cores that it starts are copies, too.
"""

import atexit
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from tests.e2e.copied_children import (
    CopiedProcess,
    CopyingSubprocess,
    HiddenModules,
    Template,
    copy_on_demand,
    early_variables,
    fork_template,
    import_engine,
    run_child,
)

ROOT = str(Path(__file__).parents[2])
PROGRAM = (
    f"import sys; sys.path.insert(0, {ROOT!r}); from tests.e2e.server_template import serve_copies; "
    f"sys.path.remove({ROOT!r}); serve_copies()"
)
MODULES = (
    *("cli.app", "cli.plan", "cli.serve", "cli.frontend_servers", "repository.gateway", "telemetry.tracing"),
    *("classic_backends.batching.dispatcher", "engine.client.llm", "extras.batches.runner"),
    *("extras.console.graph_routes", "extras.rollouts.endpoints", "extras.rollouts.shadow"),
)
EARLY = early_variables(os.environ)
"""As this process, or the template in its own, began."""
SWITCH = "CHARONIA_TEST_COPIES"
"""The variable with the name of what is copied: `all`, which it is without it; `servers`, whose children are started as
users' are; or `none`, for a debugger."""


def copies(kind: str, environment: Mapping[str, str]) -> bool:
    """Whether `servers`, or their `children`, are to be copies."""
    return environment.get(SWITCH, "all") in ("all", kind)


def copy_process(arguments: Sequence[str], output: IO[bytes], environment: Mapping[str, str]) -> CopiedProcess:
    """`charonia` with these arguments, in a session of its own, which writes all it says into `output`."""
    request = {"server": [*arguments], "environment": dict(environment), "directory": os.getcwd()}
    return server_template().copy(request, [output.fileno()])


def copying_subprocess() -> Any:
    """What is to be `subprocess` for processes/child_process.py in this process, so that children are copies."""
    if not copies("children", os.environ):
        return subprocess
    return CopyingSubprocess(server_template, EARLY)


@cache
def server_template() -> Template:
    """The template of this process, which ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-P", "-c", PROGRAM, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    atexit.register(process.wait)
    atexit.register(ours.close)
    return Template(ours)


def _run(request: Any, descriptors: list[int]) -> None:
    """In a copy of the template: a server, or a child of the process that asks."""
    if "server" not in request:
        run_child(request, descriptors)
        return
    [output] = descriptors
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(request["directory"])
    template = fork_template(run_child) if copies("children", request["environment"]) else None
    sys.path.insert(0, request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["charonia", *request["server"]]
    if template:
        import_module("charonia.processes.child_process").subprocess = CopyingSubprocess(lambda: template, EARLY)
    import_module("charonia.__main__").main()


def serve_copies() -> None:
    """The template's `main`."""
    for module in MODULES:
        import_module(f"charonia.{module}")
    HiddenModules(import_engine)
    copy_on_demand(socket.socket(fileno=int(sys.argv[1])), _run)
