"""Where a server's CPU time goes: with every tick of the kernel's clock in it, each of its processes notes which module
of ours it is in, from one signal to the next, and writes the counts down when it ends.

Samples cost time: turns with them are measured apart.
"""

import atexit
import os
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import msgspec

START_OR_STOP = signal.SIGUSR2
"""Begins the sampling of a process, and ends it for good."""
_FOLDER = "CHARONIA_BENCH_STAGES"
_SECONDS = 1e-3
_START = """\
try:
    from charonia.bench.load.stage_sampler import start_sampling
except ImportError:
    pass  # an interpreter of another environment
else:
    start_sampling()
"""


def start_sampling() -> None:
    """Called in a process before anything of it runs."""
    package = str(Path(__file__).parents[2]) + os.sep
    modules: dict[str, str] = {}
    counts = Counter[str]()

    def sample(_: int, frame: FrameType | None) -> None:
        stage = "event loop"
        while frame is not None:
            path = frame.f_code.co_filename
            module = modules.get(path)
            if module is None:
                inside = path.startswith(package) and not path.startswith(__file__)
                module = modules[path] = path.removeprefix(package).removesuffix(".py") if inside else ""
            if module and module not in ("__main__", "cli/serve", "cli/serve_command", "cli/frontend_process"):
                stage = module
                break
            frame = frame.f_back
        counts[stage] += 1

    def write() -> None:
        name = Path("/proc/self/comm").read_text().strip()
        (Path(os.environ[_FOLDER]) / f"{name}.{os.getpid()}").write_bytes(msgspec.json.encode(counts))

    def start(*_: object) -> None:
        signal.setitimer(signal.ITIMER_PROF, _SECONDS, _SECONDS)
        signal.signal(START_OR_STOP, lambda *_: signal.setitimer(signal.ITIMER_PROF, 0.0))

    signal.signal(signal.SIGPROF, sample)
    signal.signal(START_OR_STOP, start)
    atexit.register(write)


def write_environment(folder: Path) -> Mapping[str, str]:
    """The environment of a server whose processes sample, and write into `folder`."""
    (folder / "sitecustomize.py").write_text(_START)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {_FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(paths)}


def read_stages(folder: Path) -> dict[str, Counter[str]]:
    """By process: its samples by module."""
    stages: dict[str, Counter[str]] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix[1:].isdigit():
            stages.setdefault(path.stem, Counter()).update(msgspec.json.decode(path.read_bytes(), type=dict[str, int]))
    return stages
