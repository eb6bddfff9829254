"""`charonia doctor`: what of this machine a server could use or would miss, and the command that mends it.

Changes nothing. Reads the kernel's files below `root`; what a system does not tell is not judged.
"""

import ctypes
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, distribution, requires
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec
from cyclopts.exceptions import CycloptsError

from ..core.errors import InvalidArgument, Unavailable
from ..engine.kernel_choice import FP8_CAPABILITY, LEVEL_VARIABLE, computes_with_triton
from ..processes.host import available_memory, processor_name, torch_has_cuda, usable_cores
from ..repository.memory_budget import format_bytes
from ..telemetry.host_metrics import usable_gpus
from ..telemetry.roofline import read_machine_file
from .flag_sources import command_flags, environment_values, file_values, strays
from .options import ServeOptions
from .plan import machine_files
from .ports import bind_port
from .serve_command import serve_command

_ROOT = Path("/")
_PACKAGE = str(__package__).partition(".")[0]
_ENOUGH_MEMORY = 2 << 30
_ENOUGH_SHARED = 256 << 20
_ENOUGH_FILES = 65536
_EXTRA_REQUIREMENT = re.compile(r'([\w.-]+).*;.*extra == "([\w-]+)"')
_NOT_FOR_SERVING = {"analyze", "dev", "bench", "clients"}
_CLOCK_UNSYNCHRONISED = 5
"""TIME_ERROR of adjtimex(2)."""


class Verdict(StrEnum):
    """What a finding says: a server would run well, worse than it could, or not at all."""

    GOOD = "good"
    SLOW = "slow"
    WRONG = "wrong"


class Finding(msgspec.Struct, frozen=True):
    """What was found of one subject; `mend` is what to do about it, empty where nothing is to be done."""

    subject: str
    verdict: Verdict
    text: str
    mend: str = ""


def examine_machine(root: Path = _ROOT, config: Path | None = None) -> Iterator[Finding]:
    """Every finding of this machine and this process's limits, for a server whose flags are those of the environment
    and of the file `config`."""
    settings, options = _settings(config)
    yield from settings
    yield _cores(root)
    yield _kernels()
    yield _gpus(root, options)
    yield _memory(root)
    yield _huge_pages(root)
    yield _shared_memory(root)
    yield _open_files()
    yield from _ports(options)
    yield from _machine_files(options)
    yield _clock(root)
    yield _extras()


def print_findings(as_json: bool, config: Path | None = None) -> int:
    """Print what was found; returns the exit status, 1 if a server would not serve."""
    findings = list(examine_machine(config=config))
    if as_json:
        print(msgspec.json.encode(findings).decode())
    else:
        for finding in findings:
            print(f"{finding.subject:<14}{finding.verdict}: {finding.text}")
            if finding.mend:
                print(f"{'':<14}mend: {finding.mend}")
    return int(any(finding.verdict is Verdict.WRONG for finding in findings))


def _settings(config: Path | None) -> tuple[list[Finding], ServeOptions]:
    """What is set beside the command line, and the options that it makes."""
    flags, findings = command_flags(serve_command.assemble_argument_collection()), []
    named = [] if config is None else ["--config", str(config)]
    try:
        _, bound, _ = serve_command.parse_args(named, exit_on_error=False, print_error=False)
        options: ServeOptions = bound.arguments.get("options", ServeOptions())
        values = environment_values(flags, os.environ)
        if options.server.config is not None:
            values += file_values(flags, options.server.config)
    except CycloptsError as error:
        mend = "correct it, or leave it out: charonia serve would refuse to start"
        findings.append(Finding("settings", Verdict.WRONG, str(error), mend))
        return findings, ServeOptions()
    text = "; ".join(map(str, values)) or "none beside the command line"
    findings.append(Finding("settings", Verdict.GOOD, text))
    mend = "correct the variable's name, or unset it"
    findings += [Finding("settings", Verdict.SLOW, stray, mend) for stray in strays(flags, os.environ)]
    return findings, options


def _judge(subject: str, good: bool, text: str, mend: str) -> Finding:
    return Finding(subject, Verdict.GOOD, text) if good else Finding(subject, Verdict.SLOW, text, mend)


def _cores(root: Path) -> Finding:
    cores = usable_cores(root)
    mend = "give the container whole cores, or as many as its quota pays for (docker run --cpuset-cpus=0-3)"
    return _judge("cores", cores.quota >= cores.physical or cores.quota.is_integer(), str(cores), mend)


def _kernels() -> Finding:
    if find_spec("torch") is None:
        text = f"none: without torch tensors are served alone (pip install '{_source_directory()}[llm]')"
        return Finding("kernels", Verdict.GOOD, text)
    try:
        from ..engine.cpu import library
    except ImportError as error:
        return Finding(
            "kernels",
            Verdict.WRONG,
            f"torch cannot be imported: {error}",
            "pip install torch, or for CPUs alone pip install torch --index-url https://download.pytorch.org/whl/cpu",
        )
    text = library.describe()
    mend = "raise the limit of signal stacks (ulimit -s), or allow AMX in the container's seccomp profile"
    if library.level() is None:
        command = library.BUILD_COMMAND.replace("python", sys.executable, 1)
        mend = f"unset {LEVEL_VARIABLE}, or install a C compiler (apt-get install gcc libc6-dev) and run {command}"
    return _judge("kernels", library.level() is not None and "AMX" not in text, text, mend)


def _gpus(root: Path, options: ServeOptions) -> Finding:
    gpus, built_for_cuda = usable_gpus(devices=root / "dev"), torch_has_cuda()
    if not gpus:
        return Finding("GPUs", Verdict.GOOD, "none: the engine computes on the CPU")
    text = f"{len(gpus)}, and torch is built {'for' if built_for_cuda else 'without'} CUDA"
    if not built_for_cuda:
        return Finding("GPUs", Verdict.SLOW, text, "install torch's build for CUDA (pytorch.org/get-started)")
    text += _fp8()
    if not computes_with_triton(on_gpu=True):
        text += "; torch alone computes on them, and launches each step kernel by kernel"
        mend = f"pip install '{_source_directory()}[gpu]', and unset {LEVEL_VARIABLE}"
        return Finding("GPUs", Verdict.SLOW, text, mend)
    if options.engine.enforce_eager:
        text += "; each step is launched kernel by kernel, for --enforce-eager is set"
        return Finding("GPUs", Verdict.SLOW, text, "leave it out: steps are then recorded as CUDA graphs")
    return Finding("GPUs", Verdict.GOOD, text)


def _fp8() -> str:
    """Which GPUs serve weights and caches in fp8; empty where CUDA finds none."""
    try:
        from ..engine.gpu import runtime
    except ImportError:  # another finding says so
        return ""
    capabilities = runtime.capabilities()
    able = sum(capability >= FP8_CAPABILITY for capability in capabilities)
    versions = ", ".join(f"{capability / 10:.1f}" for capability in capabilities)
    if not capabilities:
        return ""
    return f"; compute capability {versions}: {able or 'none'} of them can do fp8, which takes 8.9"


def _memory(root: Path) -> Finding:
    free = available_memory(root)
    mend = "raise the container's limit, or end what holds memory: weights and cache must fit"
    return _judge("memory", free >= _ENOUGH_MEMORY, f"{format_bytes(free)} free", mend)


def _huge_pages(root: Path) -> Finding:
    file = root / "sys/kernel/mm/transparent_hugepage/enabled"
    allowed = re.search(r"\[(\w+)\]", _text_of(file))
    if allowed is None:
        return Finding("huge pages", Verdict.GOOD, "the system does not tell")
    mend = f"echo madvise | sudo tee {file}: a lone sequence decodes a twelfth faster from huge pages"
    return _judge("huge pages", allowed[1] != "never", allowed[1], mend)


def _shared_memory(root: Path) -> Finding:
    try:
        at = os.statvfs(root / "dev/shm")
    except OSError as error:
        text = f"/dev/shm: {error.strerror}"
        return Finding("shared memory", Verdict.SLOW, text, "mount a tmpfs there: clients' regions need it")
    free = at.f_bavail * at.f_frsize
    mend = "docker run --shm-size 1g: clients' shared-memory regions are there"
    return _judge("shared memory", free >= _ENOUGH_SHARED, f"{format_bytes(free)} free", mend)


def _open_files() -> Finding:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return Finding("open files", Verdict.GOOD, "no limit")
    mend = f"ulimit -Hn {_ENOUGH_FILES} (docker run --ulimit nofile={_ENOUGH_FILES}): each connection is one"
    return _judge("open files", hard >= _ENOUGH_FILES, f"at most {hard:,}", mend)


def _ports(options: ServeOptions) -> Iterator[Finding]:
    server, grpc = options.server, options.grpc
    for flag, address, port in (
        ("--http-port", server.http_address, server.http_port),
        ("--grpc-port", grpc.grpc_address, grpc.grpc_port),
        ("--metrics-port", server.metrics_address or server.http_address, server.metrics_port),
    ):
        try:
            with closing(bind_port(address, port, flag)) as reserved:
                reserved.listen()  # two may bind a port that nothing listens on
        except (Unavailable, OSError) as error:
            mend = f"end what listens there, or serve with another {flag}"
            yield Finding(f"port {port}", Verdict.SLOW, str(error), mend)
        else:
            yield Finding(f"port {port}", Verdict.GOOD, f"free ({flag})")


class _MeasuredOn(msgspec.Struct):
    processor: str = ""


class _MeasuredMachine(msgspec.Struct):
    """The field of a file of `charonia calibrate` that says where it is from."""

    origin: _MeasuredOn


def _machine_files(options: ServeOptions) -> Iterator[Finding]:
    """Whether the files by which `explain` tells a model's limits are of a processor that is here."""
    try:
        files = machine_files(options.server.machine)
        origins = {name: read_machine_file(file, _MeasuredMachine).origin for name, file in files.items()}
    except InvalidArgument as error:
        mend = "correct it, or leave it out: charonia serve would refuse to start"
        yield Finding("machine files", Verdict.WRONG, error.message, mend)
        return
    here = {processor_name(), *_gpu_names()} if origins else set()
    mend = "run charonia calibrate here, with the flags that the model is served with"
    for name, origin in origins.items():
        text = f"{name}'s was measured on {origin.processor or 'a server over HTTP'}"
        yield _judge("machine files", not origin.processor or origin.processor in here, text, mend)


def _gpu_names() -> list[str]:
    try:
        from ..engine.gpu import runtime
    except ImportError:  # another finding says so
        return []
    return runtime.gpu_names()


def _clock(root: Path) -> Finding:
    source = _text_of(root / "sys/devices/system/clocksource/clocksource0/current_clocksource")
    text = source or "the system does not tell its source"
    if source in ("hpet", "acpi_pm", "jiffies"):
        mend = "boot with clocksource=tsc: each look at the clock is a system call of a microsecond"
        return Finding("clock", Verdict.SLOW, text, mend)
    adjtimex: Callable[..., int] | None = getattr(ctypes.CDLL(None), "adjtimex", None)
    state = 0 if adjtimex is None else adjtimex(ctypes.create_string_buffer(1024))  # larger than any struct timex
    if state == _CLOCK_UNSYNCHRONISED:
        mend = "start chrony or systemd-timesyncd: logs and traces of several machines do not line up"
        return Finding("clock", Verdict.SLOW, f"{text}, not synchronised", mend)
    return Finding("clock", Verdict.GOOD, text)


def _extras() -> Finding:
    try:
        requirements = requires(_PACKAGE) or []
    except PackageNotFoundError:  # run from its source
        requirements = []
    missing: set[str] = set()
    known: set[str] = set()
    for requirement in requirements:
        parsed = _EXTRA_REQUIREMENT.match(requirement)
        if parsed is None or parsed[2] in _NOT_FOR_SERVING:
            continue
        known.add(parsed[2])
        if not _is_installed(parsed[1]):
            missing.add(parsed[2])
    there, absent = ", ".join(sorted(known - missing)) or "none", ", ".join(sorted(missing))
    text = there if not absent else f"{there}; without {absent} (pip install '{_source_directory()}[NAME]')"
    return Finding("extras", Verdict.GOOD, text)


def _source_directory() -> str:
    """The directory that this package was installed from, if it is still there: no index has it."""
    try:
        origin = msgspec.json.decode(distribution(_PACKAGE).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, msgspec.MsgspecError):
        return "."
    path = Path(unquote(urlsplit(origin.get("url", "")).path))
    return str(path) if (path / "pyproject.toml").is_file() else "."


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def _text_of(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
