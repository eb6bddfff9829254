"""Child processes of ours, as copies of a process that has imported torch: importing it again for each engine core
takes most of the processor's time that starting one does.

What differs from a process that `python_child` starts is its past alone: it is a child of who asked for it, has the
descriptors that it is given and no others, and runs the same program with the same arguments.
"""

import atexit
import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from ctypes import CDLL
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_SET_CHILD_SUBREAPER = 36
"""Of prctl(2): whether a process below this one whose parent ends becomes a child of this one."""
_SET_PARENT_DEATH_SIGNAL = 1
"""Of prctl(2): what this process is sent when its parent ends."""
_MOST_BYTES = 2**20
_EARLY = ("PYTHON", "LD_", "MALLOC_", "GOMP_", "OMP_", "MKL_", "OPENBLAS_", "TORCH_", "TRITON_")
"""What libraries read when a process begins, or when they are loaded, and not later. Without `KMP_`: scikit-learn sets
two of these in a process that imports it, for its own sake."""


class CopiedProcess:
    """A copy of a template, which is a child of this process; as `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None if it runs."""
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; raises `TimeoutExpired` if it runs for so many seconds more."""
        if self.poll() is None:
            end = os.pidfd_open(self.pid)
            try:
                if not select.select([end], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("a copied process", timeout or 0.0)
            finally:
                os.close(end)
        code = self._reap(0)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it with SIGKILL, if it runs."""
        self.send_signal(9)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


class Template:
    """The end of a connection to a process below this one that runs `copy_on_demand`; for any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lock, self._libc = connection, threading.Lock(), CDLL(None)

    def copy(self, request: Any, descriptors: Sequence[int]) -> CopiedProcess:
        """A copy, a child of this process, that does what was requested."""
        with self._lock:
            self._libc.prctl(_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._connection, [json.dumps(request).encode()], descriptors)
                return CopiedProcess(int(self._connection.recv(_MOST_BYTES)))
            finally:
                self._libc.prctl(_SET_CHILD_SUBREAPER, 0)


def copy_on_demand(requests: socket.socket, run: Callable[[Any, list[int]], None]) -> None:
    """In the template: a copy for each request, which runs it, until the other end is closed."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 253)
        if not message:
            os._exit(0)
        request = json.loads(message)
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            # The copy's parent ends at once: then it is a child of the process that asks.
            between = os.getpid()
            if copy := os.fork():
                if request.get("group"):
                    os.setpgid(copy, copy)
                os.write(writer, str(copy).encode())
                os._exit(0)
            for descriptor in (reader, writer, requests.detach()):
                os.close(descriptor)
            while os.getppid() == between:
                time.sleep(0.0001)
            run(request, descriptors)
            return
        os.waitpid(child, 0)
        requests.send(os.read(reader, _MOST_BYTES))
        for descriptor in (reader, writer, *descriptors):
            os.close(descriptor)


def end_with_parent() -> None:
    """Have this copy asked to end when the process that asked for it does, whatever ends that."""
    CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


class HiddenModules(MetaPathFinder, Loader):
    """Modules that this process has imported, but that are as if it had not until it imports one of them."""

    def __init__(self, load: Callable[[], object]) -> None:
        """The modules that `load()` imports."""
        before = {*sys.modules}
        load()
        self._modules = {name: sys.modules.pop(name) for name in {*sys.modules} - before}
        self._specs = {name: module.__spec__ for name, module in self._modules.items()}
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in self._modules or name in sys.modules:
            return None
        others = self._modules | sys.modules
        del others[name]  # what is there already would be executed again
        sys.modules.update(others)
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._specs[module.__name__]


def early_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that count when a process begins and not later."""
    return {name: value for name, value in environment.items() if name.startswith(_EARLY)}


class CopyingSubprocess:
    """What processes/child_process.py calls of `subprocess`; an interpreter that it starts for one of these programs is
    a copy of the program's template, if it is to have the `early` variables of that."""

    DEVNULL = subprocess.DEVNULL
    _args_from_interpreter_flags = staticmethod(subprocess._args_from_interpreter_flags)  # type: ignore[attr-defined]

    def __init__(self, templates: Mapping[str, Callable[[], Template]], early: Mapping[str, str]) -> None:
        """`templates` by their programs, which follow `-c`."""
        self._templates, self._early = templates, early

    def Popen(self, arguments: Sequence[str], *, pass_fds: Sequence[int], **others: Any) -> Any:
        environment = others["env"] or os.environ
        program = arguments[arguments.index("-c") + 1 :] if "-c" in arguments else [""]
        template = self._templates.get(program[0])
        if not template or arguments[0] != sys.executable or early_variables(environment) != self._early:
            return subprocess.Popen(arguments, pass_fds=pass_fds, **others)
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        request = {
            "arguments": program,
            "environment": dict(environment),
            "group": others["process_group"] == 0,
            "directory": os.getcwd(),
            "descriptors": [1, 2, *pass_fds],
            "limits": limits,
            "cores": [*os.sched_getaffinity(0)],
            "parent": os.getpid(),
        }
        return template().copy(request, [1, 2, *pass_fds])


def run_child(request: Any, received: Sequence[int]) -> None:
    """In a copy: what `python -c` would do with the arguments."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    if starting := sys.modules.get("charonia.processes.child_process"):
        starting.subprocess = subprocess  # type: ignore[attr-defined]
    numbers = request["descriptors"]
    free = max(*numbers, *received) + 1
    for descriptor in received:
        fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, free)
    os.closerange(3, free)
    for place, number in enumerate(numbers):
        os.dup2(free + place, number)
    os.closerange(free, free + len(numbers))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    resource.setrlimit(resource.RLIMIT_NOFILE, request["limits"])
    os.sched_setaffinity(0, request["cores"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    program, *arguments = request["arguments"]
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = ModuleType("__main__")
    while os.getppid() != request["parent"]:
        os.kill(request["parent"], 0)  # raises if it has ended meanwhile
        time.sleep(0.0005)
    _end_process(lambda: exec(program, vars(main)))


def _end_process(run: Callable[[], None]) -> None:
    """Run the program, and end as an interpreter does, but for taking apart all modules: much of the memory that this
    process shares would be copied for it."""
    status: Any = 1
    try:
        run()
        status = 0
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


def fork_template(run: Callable[[Any, list[int]], None]) -> Template:
    """A template that is a copy of this process, which has one thread."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        return Template(ours)
    ours.close()
    # Who stops a group of processes does not mean this one.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    Path("/proc/self/comm").write_text("charonia-copies")
    copy_on_demand(theirs, run)
    raise AssertionError("a copy has ended")


def import_engine() -> None:
    """What an engine core of one rank needs."""
    import_module("charonia.engine.core.process").import_libraries()
    gc.collect()
    gc.freeze()
