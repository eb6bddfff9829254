"""A process that has imported what a server is made of, and copies itself for each server that tests start.

Imports take two thirds of a server's start. All else of a copy is a server's own: it runs `main` with its arguments, in
its environment, as a child of the process that asked for it. The engine cores that it starts are copies, too.
"""

import atexit
import gc
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
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
    end_with_parent,
    fork_template,
    import_engine,
    run_child,
)

ROOT = str(Path(__file__).parents[2])
PROGRAM = (
    f"import sys; sys.path.insert(0, {ROOT!r}); from tests.e2e import server_template; "
    f"sys.path.remove({ROOT!r}); server_template.%s()"
)
COMMAND_MODULES = ("__main__", "processes.gc_tuning", "engine.core.prepared_core", "cli.app")
"""What `main` imports until it reads the flags. The parser of those asks what has been imported: with pydantic, which
`charonia serve` has not by then, it makes a validator of each."""
MODULES = (
    *("cli.plan", "cli.serve", "cli.frontend_servers", "repository.gateway", "telemetry.tracing"),
    *("classic_backends.batching.dispatcher", "engine.client.llm", "extras.batches.runner"),
    *("extras.console.graph_routes", "extras.rollouts.endpoints", "extras.rollouts.shadow"),
)
STUB_MODULES = ("asyncio", "concurrent.futures.thread", "ctypes", "mmap", "multiprocessing.util", "numpy", "queue")
"""What the package of a Python model's process imports."""
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
    stub_program = import_module("charonia.classic_backends.python.stub_process")._BOOTSTRAP
    return CopyingSubprocess({_child_program(): server_template, stub_program: stub_template}, EARLY)


def _child_program() -> str:
    """What an interpreter runs that is started for a function of ours."""
    program: str = import_module("charonia.processes.child_process")._PROGRAM
    return program


@cache
def server_template() -> Template:
    """The template of servers and their children for this process, which ends with it."""
    return _start_template("serve_copies")


@cache
def stub_template() -> Template:
    """The template of Python models' processes, which have nothing of ours but their package. Servers start theirs as
    ever: a copy of a server is large, and costs as much."""
    return _start_template("serve_stubs")


def _start_template(function: str) -> Template:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-P", "-c", PROGRAM % function, str(theirs.fileno())]
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
    end_with_parent()
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
        copying = CopyingSubprocess({_child_program(): lambda: template}, EARLY)
        import_module("charonia.processes.child_process").subprocess = copying
    import_module("charonia.__main__").main()


def serve_copies() -> None:
    """The template's `main`."""
    for module in COMMAND_MODULES:
        import_module(f"charonia.{module}")
    _keep_flags(import_module("charonia.cli.serve_command").serve_command)
    HiddenModules(_import_server)
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch's take apart what ends with the process, which takes longer than its start
    _serve(_run)


def _keep_flags(command: Any) -> None:
    """What the parser makes of the options of `charonia serve`, which are alike in all copies, is made here once."""
    assemble, flags = type(command).assemble_argument_collection, command.assemble_argument_collection()

    def assembled(asked: Any, **options: Any) -> Any:
        return flags if asked is command and not options else assemble(asked, **options)

    type(command).assemble_argument_collection = assembled


def _import_server() -> None:
    for module in MODULES:
        import_module(f"charonia.{module}")
    HiddenModules(import_engine)


def serve_stubs() -> None:
    """The `main` of the template of Python models' processes."""
    for module in STUB_MODULES:
        import_module(module)
    for module in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[module]
    gc.collect()
    gc.freeze()
    _serve(run_child)


def _serve(run: Callable[[Any, list[int]], None]) -> None:
    # What starts a child blocks signals meanwhile, and it may be the one that starts this template.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    copy_on_demand(socket.socket(fileno=int(sys.argv[1])), run)
