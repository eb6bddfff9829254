"""Child processes: engine cores, ranks and isolated instances.

`ChildProcess` runs any program; `python_child` runs a function of ours in this interpreter. Such a child leaves SIGINT
and SIGTERM to its parent and ends when that ends.
"""

import atexit
import io
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any

from .gc_tuning import collect_less_often
from .log_forwarding import write_stderr

STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
"""Signals that service managers and Ctrl-C send to the whole process group: the server decides what its children do."""

_KILL_RETRY_SECONDS = 1.0
"""Seconds until a killed process is killed again."""
_UNKNOWN_EXIT_CODE = 255
"""The exit code of a process that something else has reaped, as in asyncio."""
_STDERR_SECONDS = 1.0
"""How long `print_traceback` waits for a pipe without a reader."""
_PARENT_CHECK_SECONDS = 1.0
"""How often a child checks its parent on a system without process descriptors."""

_PROGRAM = (
    "import pickle, sys; file = open(int(sys.argv[3]), 'rb'); sys.path[:] = pickle.load(file); "
    f"from {__name__} import run_target; run_target(sys.argv[1], int(sys.argv[2]), file)"
)


class ChildProcess:
    """A process started from an argument vector, for any thread. Raises `OSError` if it cannot be started.

    It inherits `descriptors` alone, starts with SIGINT and SIGTERM blocked, and is killed when this interpreter exits,
    with its process group if `grouped`. `multiprocessing` and `subprocess` do not know it. `sentinel` is a descriptor
    that is readable once it has ended.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        descriptors: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        grouped: bool = False,
    ) -> None:
        self._grouped = grouped
        # Where the system has no descriptors of processes, the end of the child closes this pipe.
        self.sentinel, held_by_child = os.pipe()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            inherited = (*descriptors, held_by_child)
            self._popen = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                pass_fds=inherited,
                env=environment,
                process_group=0 if grouped else None,
            )
        except BaseException:
            os.close(self.sentinel)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(held_by_child)
        self.pid = self._popen.pid
        with suppress(AttributeError, OSError):
            process = os.pidfd_open(self.pid)
            os.close(self.sentinel)
            self.sentinel = process
        self._exit_code: int | None = None
        self._lock = threading.Lock()
        self._parent = os.getpid()
        atexit.register(self.kill)

    def wait(self, seconds: float | None = None) -> int | None:
        """The exit code, or minus the signal that ended the process; None if it still runs after `seconds`."""
        if self._reap() is None:
            connection.wait([self.sentinel], seconds)
        return self._reap()

    def kill(self) -> None:
        """End the process with SIGKILL; does not wait for its end. A process that was forked from its parent lets it
        be."""
        if os.getpid() != self._parent:
            return
        with self._lock:
            if self._exit_code is None:
                self._kill()

    def _kill(self) -> None:
        """Kill the process, which is not reaped: nothing else can have its number, or its group's."""
        with suppress(OSError):
            (os.killpg if self._grouped else os.kill)(self.pid, signal.SIGKILL)

    def close(self, timeout: float = 0.0) -> int:
        """Wait for the end, with SIGKILL after `timeout` seconds, free the descriptors, and return the exit code."""
        exit_code = self.wait(timeout)
        while exit_code is None:
            self.kill()
            exit_code = self.wait(_KILL_RETRY_SECONDS)
        atexit.unregister(self.kill)
        os.close(self.sentinel)
        return exit_code

    def _reap(self) -> int | None:
        with self._lock:
            if self._exit_code is None:
                try:
                    if self._grouped and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                        self._kill()
                    reaped, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # another part waits for all processes, or the system is told to
                    self._exit_code = _UNKNOWN_EXIT_CODE
                else:
                    self._exit_code = os.waitstatus_to_exitcode(status) if reaped else None
                self._popen.returncode = self._exit_code
            return self._exit_code


def describe_exit(exit_code: int | None) -> str:
    """How a process ended, from the result of `ChildProcess.wait`."""
    if exit_code is None:
        return "it hung up"
    if exit_code >= 0:
        return f"it exited with {exit_code}"
    is_named = -exit_code in set(signal.Signals)
    return f"it was ended by {signal.Signals(-exit_code).name if is_named else f'signal {-exit_code}'}"


def python_child(
    name: str, target: Callable[..., None], *arguments: Any, inherited: Sequence[int] = ()
) -> ChildProcess:
    """Run `target(*arguments)`, which are pickled, in a new interpreter or a prepared one; `ps` shows 15 characters of
    `name`. The child inherits the `inherited` descriptors and those of `Connection` arguments. Raises `OSError` if it
    cannot be started."""
    call = io.BytesIO()
    pickler = _ArgumentPickler(call)
    pickler.dump((target, arguments))
    descriptors = (*pickler.descriptors, *inherited)
    while not descriptors and _prepared[name]:
        child, pipe = _prepared[name].pop()
        try:
            with pipe:
                pipe.write(call.getbuffer())
            return child
        except BrokenPipeError:
            child.close()
    with open(anonymous_file("charonia-arguments"), "w+b") as file:
        _write_start(file)
        file.write(call.getbuffer())
        file.flush()
        file.seek(0)
        return _start_interpreter(name, file.fileno(), descriptors)


_prepared: defaultdict[str, list[tuple[ChildProcess, IO[bytes]]]] = defaultdict(list)
"""Children that wait for a call, by name, each with the pipe for it."""


def prepared_children(name: str) -> int:
    return len(_prepared[name])


def prepare_child(name: str, module: str, function: str) -> None:
    """Start the interpreter of the next `python_child` called `name`. It calls `function` of `module`, which does slow
    imports, and waits. Raises `OSError` if it cannot be started."""
    reader, writer = os.pipe()
    pipe = open(writer, "wb")  # noqa: SIM115
    try:
        _prepared[name].append((_start_interpreter(name, reader), pipe))
        _write_start(pipe, (module, function))
        pipe.flush()
    except BaseException:
        pipe.close()
        raise
    finally:
        os.close(reader)


def drop_prepared_children() -> None:
    while _prepared:
        for child, pipe in _prepared.popitem()[1]:
            child.kill()
            with suppress(BrokenPipeError):
                pipe.close()
            child.close()


def _write_start(file: IO[bytes], prelude: tuple[str, str] | None = None) -> None:
    """Write what a child reads before its call."""
    pickle.dump(sys.path, file)
    pickle.dump(prelude, file)


def _start_interpreter(name: str, file: int, inherited: Sequence[int] = ()) -> ChildProcess:
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    program = [sys.executable, *flags, "-P", "-c", _PROGRAM, name, str(os.getpid()), str(file)]
    return ChildProcess(program, (file, *inherited))


def anonymous_file(name: str) -> int:
    """The descriptor of a new file without a path, in memory if the system allows. `name` only shows in /proc."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class _ArgumentPickler(pickle.Pickler):
    """Pickles connections by the numbers of their descriptors, which it collects."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.descriptors: list[int] = []

    def reducer_override(self, item: object) -> Any:
        if not isinstance(item, connection.Connection):
            return NotImplemented
        self.descriptors.append(item.fileno())
        return connection.Connection, (item.fileno(), item.readable, item.writable)


def run_target(name: str, parent: int, file: IO[bytes]) -> None:
    """In the child: run what `python_child` or `prepare_child` of the process `parent` wrote into `file`."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    set_process_name(name)
    collect_less_often()
    threading.Thread(target=_end_with_parent, args=(parent,), name="parent", daemon=True).start()
    with file:
        if prelude := pickle.load(file):
            module, function = prelude
            with suppress(Exception):  # the call meets it again, and says so
                getattr(import_module(module), function)()
        try:
            target, arguments = pickle.load(file)
        except EOFError:  # it is not needed
            return
    target(*arguments)


_cleanups: list[Callable[[], None]] = []


def on_parent_death(cleanup: Callable[[], None]) -> None:
    """In a child: call `cleanup` before this process ends because its parent did."""
    _cleanups.append(cleanup)


def _end_with_parent(parent: int) -> None:
    try:
        process = os.pidfd_open(parent)
    except (AttributeError, OSError):
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_SECONDS)
    else:
        if os.getppid() == parent:
            connection.wait([process])
    for cleanup in _cleanups:
        cleanup()
    os._exit(1)


def set_process_name(name: str) -> None:
    """Set the name, of at most 15 characters, that ps, top and pkill show."""
    with suppress(OSError):  # Linux alone has it
        Path("/proc/self/comm").write_text(name)


def print_traceback(error: BaseException) -> None:
    """Write the error's traceback to stderr; give up on a pipe without a reader."""
    write_stderr("".join(traceback.format_exception(error))).join(_STDERR_SECONDS)


class RestartBackoff:
    """The delay before a lost process is restarted: `first` seconds, doubled with each loss up to `longest`, and reset
    after a process that worked for `stable` seconds."""

    def __init__(self, first: float, longest: float, stable: float) -> None:
        self._first = first
        self._longest = longest
        self._stable = stable
        self._delay = 0.0

    def next_delay(self, worked: float = 0.0) -> float:
        """The seconds to wait now. The lost process had worked for `worked` seconds; 0 if it did not start."""
        if worked >= self._stable or not self._delay:
            self._delay = self._first
        else:
            self._delay = min(self._longest, 2.0 * self._delay)
        return self._delay
