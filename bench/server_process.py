"""The server under load: one that runs already, or one that is started on free loopback ports and stopped at the end.

Knows its addresses and the cost of its processes; nothing of the requests.
"""

import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from ..core.errors import InvalidArgument, NotFound, Unavailable

LOOPBACK = "127.0.0.1"
GRPC_PORT = 8001
_STOP_SECONDS = 30.0
_LOAD_SECONDS = 600.0
_POLL_SECONDS = 0.05
_FAILED = ": FAILED: "
"""What a server says behind the name of a model that it cannot load."""
_TAIL = 2000
"""Characters of what a server said that are shown when it ends."""
_END_WITH_PARENT = """\
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(parent):
    os.execv(command[0], command)
"""
"""Becomes the command behind it, which the kernel ends (PR_SET_PDEATHSIG) when the thread that started it ends."""

# No proxy stands between us and a server we measure.
_http = build_opener(ProxyHandler({}))


class ServerAddress(NamedTuple):
    """The addresses of a server. If it was started here: `pid` of its process, its `metrics_port`, and the `log` of its
    output."""

    host: str
    http_port: int
    grpc_port: int
    pid: int | None = None
    metrics_port: int | None = None
    log: Path | None = None

    def port_of(self, door: str) -> int:
        """The port that takes a door's requests."""
        return self.grpc_port if door == "grpc" else self.http_port


class CpuSeconds(NamedTuple):
    """CPU time: by the server's own process, and by its children, which are engine cores."""

    frontend: float
    engine: float


class CpuMeter:
    """CPU time of a server of ours from `start` on; nothing where the server is not ours."""

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._before: CpuSeconds | None = None
        self._begun = 0.0

    def start(self) -> None:
        self._before, self._begun = cpu_seconds(self._pid), time.perf_counter()

    def spent(self) -> CpuSeconds | None:
        """CPU seconds since."""
        before, after = self._before, cpu_seconds(self._pid)
        if before is None or after is None:
            return None
        return CpuSeconds(after.frontend - before.frontend, after.engine - before.engine)

    def cores(self) -> CpuSeconds | None:
        """Cores used since, on average."""
        spent, seconds = self.spent(), time.perf_counter() - self._begun
        return None if spent is None else CpuSeconds(spent.frontend / seconds, spent.engine / seconds)


def parse_server_url(url: str, grpc_port: int, allow_remote: bool) -> ServerAddress:
    """Where `url` (http://host:port) points.

    Raises:
        InvalidArgument: not such a URL, or not this machine and `allow_remote` is false.
    """
    try:
        parts = urlsplit(url if "//" in url else f"//{url}", scheme="http")
        host, port = parts.hostname, 8000 if parts.port is None else parts.port
    except ValueError:  # a port that is none, or half an IPv6 address
        host = None
    if not host or parts.scheme != "http" or parts.path.strip("/") or parts.query or not port:
        raise InvalidArgument(f"give the server as http://host:port, not {url}", field="url")
    if not allow_remote and not is_loopback(host):
        raise InvalidArgument(f"{host} is not this machine; if its owner agrees, add --allow-remote", field="url")
    return ServerAddress(host, port, grpc_port)


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own, decided without a lookup."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_open(place: ServerAddress, port: int, what: str) -> None:
    """Raises `Unavailable` where nothing listens on the port."""
    try:
        socket.create_connection((place.host, port), timeout=5).close()
    except OSError as error:
        raise Unavailable(f"{what} is closed: nothing listens on {place.host}:{port} ({error.strerror})") from None


def fetch(
    place: ServerAddress,
    path: str,
    body: object = None,
    *,
    timeout: float = 60.0,
    headers: Mapping[str, str] = {"Content-Type": "application/json"},
) -> bytes:
    """The content of an answer: to a POST of `body` (bytes, or what becomes JSON), without one to a GET.

    Raises:
        HTTPError: an error's status, in `code`.
        OSError: there is no such server, or no answer in time, or none that HTTP knows.
    """
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with _http.open(Request(f"http://{_netloc(place)}{path}", data, dict(headers)), timeout=timeout) as answer:
            content: bytes = answer.read()
            return content
    except HTTPError as error:
        error.close()
        raise
    except HTTPException as error:
        raise ConnectionError(f"what answers speaks no HTTP: {error!r}") from None


def fetch_metrics(place: ServerAddress) -> str:
    """The metrics of a server that was started here. Raises as `fetch` does."""
    assert place.metrics_port is not None
    return fetch(place._replace(http_port=place.metrics_port), "/metrics").decode()


def first_model(place: ServerAddress) -> str:
    """The name of the first model the server offers. Raises as `list_models` does."""
    return list_models(place)[0]


def list_models(place: ServerAddress, api_key: str = "") -> list[str]:
    """The names of the language models and pipelines that the server offers.

    Raises:
        NotFound, Unavailable: there is none, or no such server.
    """
    try:
        answer = json.loads(fetch(place, "/v1/models", headers=_headers(api_key)))
        names = [str(model["id"]) for model in answer["data"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise Unavailable(f"{_netloc(place)} does not list its models: {error}; name one with --model") from None
    if not names:
        raise NotFound(f"{_netloc(place)} has no language model")
    return names


def model_length(place: ServerAddress, model: str, api_key: str = "") -> int | None:
    """The tokens of a model's longest sequence, which our server and vLLM's tell beside those of a text; None where
    there is no such answer."""
    try:
        answer = json.loads(fetch(place, "/tokenize", {"model": model, "prompt": "a"}, headers=_headers(api_key)))
        return int(answer["max_model_len"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _headers(api_key: str) -> dict[str, str]:
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})


@contextmanager
def own_server(
    *what: str,
    on_open: Callable[[], None] = lambda: None,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    checkout: Path | None = None,
) -> Iterator[ServerAddress]:
    """Run a server over `what` (arguments of `charonia serve`) on free loopback ports, and stop it in the end.

    `on_open` is called when it takes connections, which is before it is ready. `python` is the interpreter that has
    charonia, or another `charonia` is in the directory `checkout`; `environment` joins ours.

    Raises:
        Unavailable: it ended before it was ready; the message holds its last words.
    """
    ports = free_ports(3)
    flags = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), ports, strict=True)]
    addresses = ("--http-address", LOOPBACK, "--grpc-address", LOOPBACK)
    command = [python, "-m", "charonia", "serve", *what, *addresses, *flags]
    path = {} if checkout is None else {"PYTHONPATH": str(checkout.resolve())}
    with run_process(command, {**path, **(environment or {})}) as (pid, alive):
        place = ServerAddress(LOOPBACK, ports[0], ports[1], pid, ports[2], alive.output)
        until_open(place, alive)
        on_open()
        _until_ready(place, alive)
        yield place


class LivenessCheck:
    """Asks a process whether it still runs, and all is well; `output` is all that it said."""

    def __init__(self, running: "subprocess.Popen[bytes]", output: Path) -> None:
        self._running, self.output = running, output

    def check(self) -> None:
        """Raises `Unavailable` with its last words when it has ended."""
        if self._running.poll() is not None:
            raise Unavailable(f"the server ended:\n{self._said()}")

    def check_loads(self) -> None:
        """Raises `Unavailable` with its last words when a model could not be loaded: it will never be ready."""
        if _FAILED in (said := self._said()):
            raise Unavailable(f"the server cannot load a model:\n{said}")

    def _said(self) -> str:
        return self.output.read_text(errors="replace")[-_TAIL:]


@contextmanager
def run_process(
    command: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[tuple[int, LivenessCheck]]:
    """Run a process of ours, its output kept for when it fails, and end it by its pid; `environment` joins ours. On
    Linux it ends with this thread, too, whatever ends that."""
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", _END_WITH_PARENT, str(os.getpid()), *command]
    with ExitStack() as stack:
        output = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="charonia-bench-"))) / "output"
        file = stack.enter_context(output.open("wb"))
        whole = os.environ | (environment or {})
        running = subprocess.Popen(command, env=whole, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        stack.callback(_end, running)
        yield running.pid, LivenessCheck(running, output)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that goes away, end the block as `sys.exit` does, and so its servers; but not
    where they are ignored, as nohup has it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    heard = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in heard:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for number, handler in heard.items():
            signal.signal(number, handler)


def _end(running: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        running.send_signal(signal.SIGTERM)
    try:
        running.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        running.kill()
        running.wait()


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind((LOOPBACK, 0))
        return [sock.getsockname()[1] for sock in sockets]


def until_open(place: ServerAddress, alive: LivenessCheck) -> None:
    """Return when the HTTP port takes connections."""
    while True:
        alive.check()
        with suppress(Unavailable):
            return require_open(place, place.http_port, "the server")
        time.sleep(_POLL_SECONDS)


def _until_ready(place: ServerAddress, alive: LivenessCheck) -> None:
    deadline = time.monotonic() + _LOAD_SECONDS
    while not is_ready(place):
        alive.check()
        alive.check_loads()
        if time.monotonic() > deadline:
            raise Unavailable(f"the server was not ready after {_LOAD_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)


def is_ready(place: ServerAddress) -> bool:
    """Whether the server reports that it is ready."""
    try:
        fetch(place, "/v2/health/ready", timeout=5)
    except OSError:
        return False
    return True


def _netloc(place: ServerAddress) -> str:
    return f"[{place.host}]:{place.http_port}" if ":" in place.host else f"{place.host}:{place.http_port}"


def cpu_seconds(pid: int | None) -> CpuSeconds | None:
    """The CPU seconds of a server's processes so far; None if it was not started here, or the system does not tell."""
    if pid is None:
        return None
    try:
        return CpuSeconds(process_cpu(pid), sum(process_cpu(child) for child in children(pid)))
    except OSError:
        return None


def children(pid: int) -> list[int]:
    """The processes that a process has started and that are not reaped yet; /proc lists them per thread."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile has none
            children += map(int, (task / "children").read_text().split())
    return children


def process_name(pid: int) -> str:
    """What a process calls itself."""
    return Path(f"/proc/{pid}/comm").read_text().strip()


def process_cpu(pid: int) -> float:
    """The CPU seconds of one process so far. Raises `OSError` if it has ended, or the system does not tell."""
    return sum(process_times(pid))


def process_times(pid: int) -> tuple[float, float]:
    """The CPU seconds of one process so far in its own code, and in the kernel's for it. Raises as `process_cpu`."""
    # The second field is a name in parentheses, which may hold anything.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    tick = os.sysconf("SC_CLK_TCK")
    return int(fields[11]) / tick, int(fields[12]) / tick
