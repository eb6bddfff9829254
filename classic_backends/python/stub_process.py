"""The server's end of a Python model's process: starts it, exchanges messages with it, logs what it prints.

Messages arrive in the event loop and may be sent from any thread; they are those of `python_stub.messages`. Knows
nothing of models, batches and metrics.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from ...processes import gc_tuning
from ...processes.child_process import ChildProcess, anonymous_file, describe_exit
from ..python_stub import messages
from ..python_stub.tensor_memory import BlockReader, BlockWriter

log = logging.getLogger(__name__)

_STUB = Path(__file__).parent.parent / "python_stub"
_BOOTSTRAP = (
    "import importlib.util, sys; sys.path[:] = [path for path in sys.path if path]; directory = sys.argv.pop(); "
    "spec = importlib.util.spec_from_file_location('charonia_stub', directory + '/__init__.py'); "
    "package = sys.modules['charonia_stub'] = importlib.util.module_from_spec(spec); spec.loader.exec_module(package); "
    "from charonia_stub.main import main; main()"
)
_MAX_LINE_BYTES = 1 << 14
_PIPE_BYTES = 1 << 16
"""What a pipe holds."""
_LAST_MESSAGES_SECONDS = 0.2
"""How long a process that has ended may still be heard."""
_RELEASED_BLOCKS = 64
"""Released blocks that are told to the process by themselves, where no other message takes them along."""

_ENVELOPE = msgspec.json.Decoder(tuple[str, msgspec.Raw, list[int]])
_BODIES: Mapping[str, Callable[[msgspec.Raw], Any]] = {
    name: msgspec.json.Decoder(body).decode for name, body in vars(messages).items() if hasattr(body, "_fields")
}
"""Decoders of all bodies by the names of their classes, those that only the server sends among them."""


class MemorySizes(NamedTuple):
    """Bytes of the memory for each direction: at the start, and the least by which it grows."""

    initial: int = 1 << 20
    growth: int = 1 << 20


class Interpreter(NamedTuple):
    """The Python that runs a model, and its environment variables, the server's own if None."""

    program: str = sys.executable
    environment: Mapping[str, str] | None = None


SAME_INTERPRETER = Interpreter()
DEFAULT_SIZES = MemorySizes()


class StubListener(Protocol):
    """Hears of a process, in the event loop."""

    def on_message(self, message: Any) -> None: ...

    def on_end(self, how: str) -> None:
        """The process has ended, by itself or not; the last call. `how`: see `describe_exit`."""


class StubProcess:
    """Runs the package `python_stub` with an interpreter, once it is connected. `name` is the instance's, and stands
    before each line that it prints.

    Raises:
        OSError: the process cannot be started.
        MemoryError: there is no memory for its tensors.
    """

    def __init__(
        self,
        name: str,
        listener: StubListener,
        interpreter: Interpreter = SAME_INTERPRETER,
        memory: MemorySizes = DEFAULT_SIZES,
    ) -> None:
        self.name = name
        self.lost = False
        """The end of the process was noticed."""
        self._listener = listener
        self._encode = msgspec.json.Encoder().encode
        self._resources = ExitStack()
        with ExitStack() as theirs:
            try:
                files = [self._own(anonymous_file(f"charonia-tensors-{way}")) for way in ("in", "out")]
                self.writer = BlockWriter(files[0], *memory)
                """Takes the tensors for the process."""
                self.reader = BlockReader(files[1], self._count_release)
                """Has the tensors from the process."""
                self._resources.callback(self.writer.close)
                self._resources.callback(self.reader.close)
                self._socket, their_socket = socket.socketpair()
                self._resources.callback(self._socket.close)
                theirs.callback(their_socket.close)
                output, their_output = os.pipe()
                self._output = _OutputLog(name, self._own(output))
                theirs.callback(os.close, their_output)
                inherited = [their_socket.fileno(), *files, their_output]
                program = [interpreter.program, "-c", _BOOTSTRAP, *map(str, (*inherited, *memory)), str(_STUB)]
                self._process = ChildProcess(program, inherited, interpreter.environment, grouped=True)
                self.pid = self._process.pid
                self.sentinel = self._process.sentinel
                """A descriptor that becomes readable when the process has ended."""
                self.kill = self._process.kill
                """Ends the process; from any thread."""
                # The instance's pool watches the sentinel for itself.
                self._end = self._own(os.dup(self.sentinel))
            except BaseException:
                self._resources.close()
                raise

    def _own(self, descriptor: int) -> int:
        self._resources.callback(os.close, descriptor)
        return descriptor

    async def connect(self) -> None:
        """Begin to exchange messages, in this event loop.

        Raises:
            OSError: it cannot be; the process is gone.
        """
        self._loop = asyncio.get_running_loop()
        try:
            receiver = partial(_MessageReceiver, self._receive)
            self._transport, _ = await self._loop.create_unix_connection(receiver, sock=self._socket)
        except BaseException:
            self._process.kill()
            await asyncio.to_thread(self._process.close)
            self._resources.close()
            raise
        self._output.follow(self._loop)
        self._loop.add_reader(self._end, self._on_end)
        gc_tuning.memory_releases.add(self._trim_memory)

    def send(self, body: Any) -> None:
        """Send a message, one of the named tuples of `python_stub.messages`; from any thread. Nothing happens once the
        process has ended."""
        payload = self._encode((type(body).__name__, body, self.reader.take_released()))
        self._loop.call_soon_threadsafe(self._write, messages.frame(payload))

    def _trim_memory(self) -> None:
        self.writer.trim()
        self.send(messages.TrimMemory())

    async def close(self, seconds: float) -> None:
        """Let the process finalize its model and end, or else kill it after so many seconds; it is gone afterwards."""
        self.send(messages.Finalize())
        await asyncio.to_thread(self._process.wait, seconds)
        self._process.kill()
        self._finish()
        self._transport.abort()
        self._output.leave(self._loop)
        await asyncio.to_thread(self._process.close)
        self._resources.close()

    def _write(self, frame: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(frame)

    def _receive(self, payload: bytes) -> None:
        try:
            kind, body, released = _ENVELOPE.decode(payload)
            message = _BODIES[kind](body)
            self.writer.release(released)
        except (msgspec.DecodeError, KeyError):
            log.exception("the process of '%s' sent what is no message: it is ended", self.name)
            self.kill()
        else:
            self._listener.on_message(message)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._end)
        # Its last messages may still be on their way, and its own children may hold the connection open.
        self._loop.call_later(0 if self._transport.is_closing() else _LAST_MESSAGES_SECONDS, self._finish)

    def _finish(self) -> None:
        gc_tuning.memory_releases.discard(self._trim_memory)
        if not self.lost:
            self.lost = True
            self._loop.remove_reader(self._end)
            self._listener.on_end(describe_exit(self._process.wait(0)))

    def _count_release(self) -> None:
        # Called when an array is collected, which may be anywhere: nothing here may need a lock of ours.
        if self.reader.released_count == _RELEASED_BLOCKS:
            with suppress(RuntimeError):  # the loop is closed, and the process with it
                self._loop.call_soon_threadsafe(self._send_released)

    def _send_released(self) -> None:
        if self.reader.released_count and not self.lost:
            self.send(messages.Release())


class _MessageReceiver(asyncio.Protocol):
    """Cuts what a process sends into messages."""

    def __init__(self, receive: Callable[[bytes], None]) -> None:
        self._receive = receive
        self._frames = messages.FrameReader()

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            self._receive(payload)


class _OutputLog:
    """Logs what a process prints into a pipe, line by line, each cut after `_MAX_LINE_BYTES`; `descriptor`: the end to
    read from, which stays the caller's. No transport: uvloop's closes a pipe twice, and by then its number may be that
    of another file."""

    def __init__(self, name: str, descriptor: int) -> None:
        self._name = name
        self._descriptor = descriptor
        self._line = b""
        self._left_out = 0

    def follow(self, loop: asyncio.AbstractEventLoop) -> None:
        os.set_blocking(self._descriptor, False)
        loop.add_reader(self._descriptor, self._read, loop)

    def leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """Log what is there, and read no more."""
        self._read(loop)
        loop.remove_reader(self._descriptor)
        if self._line:
            self._end_line()

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            data = os.read(self._descriptor, _PIPE_BYTES)
        except BlockingIOError:
            return
        if not data:
            loop.remove_reader(self._descriptor)
        *ends, begin = data.split(b"\n")
        for part in ends:
            self._add(part)
            self._end_line()
        self._add(begin)

    def _add(self, part: bytes) -> None:
        room = _MAX_LINE_BYTES - len(self._line)
        self._line += part[:room]
        self._left_out += len(part[room:])

    def _end_line(self) -> None:
        more = f"... ({self._left_out} bytes more)" if self._left_out else ""
        log.info("%s: %s%s", self._name, escape_controls(self._line.decode(errors="replace")), more)
        self._line = b""
        self._left_out = 0


_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) != "\t"}
"""How control characters are logged: a terminal would obey them, and a reader take what follows for another line."""


def escape_controls(line: str) -> str:
    """A line for the log."""
    return line.translate(_CONTROLS)
