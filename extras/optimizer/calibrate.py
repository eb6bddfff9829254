"""`charonia calibrate`: measures what steps take of an engine here, or estimates it, into a file for `simulate`."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ... import __version__
from ...bench.load.driver import RequestOptions
from ...bench.roofline import Precision
from ...bench.server_process import (
    ServerAddress,
    exit_on_signals,
    first_model,
    list_models,
    model_length,
    own_server,
    parse_server_url,
    require_open,
)
from ...core.errors import InvalidArgument
from ...engine.attention.layer_places import groups_of, token_room
from ...engine.build import granted_config
from ...engine.checkpoint.hf_checkpoint import open_checkpoint
from ...engine.checkpoint.model_spec import CheckpointError, ModelSpec
from ...engine.config import EngineConfig
from ...engine.core.cache_sizes import resolve_cache_sizes
from ...engine.options import EngineOptions, engine_config
from ...engine.worker.executor import Capacity
from ...processes.host import processor_name, usable_cores
from .device_roofline import DEVICES, estimate_machine
from .engine_measurement import LONGEST, Tell, measure_engine
from .machine_file import MachineFile, MachineOrigin, require_writable, write_machine_file
from .options import CalibrationOptions, DeviceShares, parse_budget
from .served_fit import add_serving, fit_served_machine
from .served_steps import ServedSteps
from .simulated_machine import StepLoad
from .simulation import EngineShape
from .step_fit import fit_machine

_SERVED_SHARE = 0.35
"""The share of the budget for what a server adds."""

_ESTIMATED: dict[str, Precision] = {"none": "bf16", "int8": "int8", "fp8": "int8"}
"""What is estimated of a quantization."""

_NOISY = 0.06
"""From this difference on the machine was not idle; steps on an idle one differ by three percent. At so much already a
99th percentile of gaps was simulated a sixth too long."""

_SIZES = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
}
"""config.json's name of a size -> `ModelSpec`'s."""

_ROWS, _CONTEXT, _PROMPT = (1, 4, 16, 64), 256, 512
"""What is printed of a formula."""


def calibrate_machine(checkpoint: str, options: CalibrationOptions, engine: EngineOptions, console: Console) -> None:
    """Measure or estimate a machine, write its file, and print what it tells.

    Raises:
        CharoniaError: there is nothing to measure, it cannot be, or the options mean nothing.
    """
    machine = _calibrate(checkpoint, options, engine)
    write_machine_file(options.output, machine)
    _print_machine(console, options.output, machine)


def _calibrate(checkpoint: str, options: CalibrationOptions, engine: EngineOptions) -> MachineFile:
    seconds = parse_budget(options.budget)
    if bool(checkpoint) == bool(options.url):
        raise InvalidArgument("name a checkpoint to measure, or a server by --url")
    if options.url and options.roofline:
        raise InvalidArgument("--roofline estimates a checkpoint, and --url measures a server: give one")
    _check_belonging(options)
    require_writable(options.output, "output")
    if options.roofline:
        return _estimate(checkpoint, options, engine)
    with exit_on_signals(), _progress() as tell:
        if options.url:
            return _measure_server(options, engine, seconds, tell)
        return _measure_checkpoint(checkpoint, options, engine, seconds, tell)


def _check_belonging(options: CalibrationOptions) -> None:
    """Nothing is given that this way of measuring would not look at."""
    for name in ("model", "api_key", "allow_remote") if not options.url else ("engine_alone",):
        if getattr(options, name):
            message = "is of --url" if not options.url else "means nothing with --url"
            raise InvalidArgument(f"--{name.replace('_', '-')} {message}", field=name)
    if options.shares != DeviceShares() and not options.roofline:
        raise InvalidArgument("shares of a device's limits are of --roofline, which is not given", field="roofline")


@contextmanager
def _progress() -> Iterator[Tell]:
    columns = BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    # Drawn seldom: what draws shares the interpreter with the steps that are measured.
    console = Console(stderr=True)
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, refresh_per_second=1, disable=quiet) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda share, text: bar.update(task, completed=min(share, 1.0), description=text)


def _measure_checkpoint(
    checkpoint: str, options: CalibrationOptions, engine: EngineOptions, seconds: float, tell: Tell
) -> MachineFile:
    began = perf_counter()
    config = granted_config(checkpoint, engine.given())
    model = {} if config.executor == "fake" else _sizes(checkpoint)
    served = 0.0 if options.engine_alone else _SERVED_SHARE
    measurement = measure_engine(config, (1 - served) * seconds, lambda share, text: tell((1 - served) * share, text))
    machine, error = fit_machine(measurement.samples)
    how = "the engine measured in process"
    if served:
        tell(1 - served, "starting a server")
        with own_server(checkpoint, *_flags_of(engine)) as address:
            limits = measurement.shape.scheduler.max_num_seqs, measurement.shape.scheduler.max_model_len
            steps = ServedSteps(address, RequestOptions(first_model(address)), *limits)
            rest = 1 - served
            seen = steps.measure_waits(served * seconds, lambda share, text: tell(rest + served * share, text))
        machine, how = add_serving(machine, seen, measurement.overhead), f"{how}, and a server over HTTP"
    origin = MachineOrigin(
        how=how,
        processor=measurement.gpu.partition(",")[0] or processor_name(),
        cores=str(usable_cores()),
        kernels=measurement.gpu or _kernels(),
        threads=config.threads_each(),
        checkpoint=_name_of(checkpoint),
        model=model,
        precision=_precision(config),
        versions=_versions(),
        steps=len(measurement.samples),
        seconds=round(perf_counter() - began, 1),
        error=error,
    )
    return MachineFile(
        origin=origin,
        machine=machine,
        engine=measurement.shape,
        block_bytes=measurement.block_bytes,
        state_bytes=measurement.state_bytes,
    )


def _measure_server(options: CalibrationOptions, engine: EngineOptions, seconds: float, tell: Tell) -> MachineFile:
    address = parse_server_url(options.url, 0, options.allow_remote)
    began = perf_counter()
    require_open(address, address.http_port, "the server")
    config = engine_config("", engine)
    (model, longest) = _served_model(address, options)
    shape = _default_shape(config, min(filter(None, (config.max_model_len, longest)), default=LONGEST))
    manner = RequestOptions(model, api_key=options.api_key)
    steps = ServedSteps(address, manner, shape.scheduler.max_num_seqs, shape.scheduler.max_model_len)
    seen = steps.measure_times(seconds, tell)
    machine, error = fit_served_machine(seen)
    origin = MachineOrigin(
        how="a server measured over HTTP",
        checkpoint=model,
        versions={"charonia": __version__},
        steps=sum(len(decode.gaps) for decode in seen.decodes),
        seconds=round(perf_counter() - began, 1),
        error=error,
    )
    return MachineFile(origin=origin, machine=machine, engine=shape, block_bytes=0)


def _served_model(address: ServerAddress, options: CalibrationOptions) -> tuple[str, int | None]:
    """The model that is named, or the first that is no pipeline of others, and its longest sequence; where the server
    tells no lengths the first model."""
    names = [options.model] if options.model else list_models(address, options.api_key)
    lengths = ((name, model_length(address, name, options.api_key)) for name in names)
    return next(((name, length) for name, length in lengths if length), (names[0], None))


def _estimate(checkpoint: str, options: CalibrationOptions, engine: EngineOptions) -> MachineFile:
    device = DEVICES.get(options.roofline)
    if device is None:
        known = ", ".join(DEVICES)
        raise InvalidArgument(f"--roofline knows {known}, and not {options.roofline!r}", field="roofline")
    config = engine_config(checkpoint, engine)
    spec = open_checkpoint(checkpoint).spec
    precision = _ESTIMATED.get(config.quantization)
    if precision is None:
        known = ", ".join(_ESTIMATED)
        message = f"--roofline estimates the quantizations {known}, and not {config.quantization}"
        raise InvalidArgument(message, field="quantization")
    estimate = estimate_machine(spec, precision, device, options.shares, config.cache.dtype)
    length = min(config.max_model_len or spec.max_position, spec.max_position)
    shape = _default_shape(config, length)
    groups = groups_of(spec, length)
    share = token_room(spec, groups, length) / max(spec.token_numbers, 1)
    block_bytes = round(estimate.token_bytes * shape.block_size * share)
    room = block_bytes, estimate.cache_bytes
    capacity = Capacity(spec.vocab_size, length, *room, state_bytes=estimate.state_bytes, groups=groups)
    if config.cache.blocks is None and config.cache.bytes is None:
        if estimate.cache_bytes < block_bytes:
            raise InvalidArgument(f"the weights leave no room for a cache on one {options.roofline}", field="roofline")
        # All of it, for `memory_share` of the device is taken already.
        cache = msgspec.structs.replace(config.cache, bytes=estimate.cache_bytes)
        config = msgspec.structs.replace(config, cache=cache)
    sizes = resolve_cache_sizes(config, capacity, length)
    ahead = max(shape.scheduler.ahead, 0 if config.ahead_given else 1)
    shape = msgspec.structs.replace(
        shape,
        blocks=sizes.blocks,
        snapshots=sizes.snapshots,
        host_blocks=sizes.host_blocks,
        host_snapshots=sizes.host_snapshots,
        groups=groups,
        prefix_caching=sizes.prefix_caching,
        scheduler=msgspec.structs.replace(shape.scheduler, ahead=ahead),
    )
    origin = MachineOrigin(
        how=f"an estimate from the roofline: {device.about}; {options.shares}",
        processor=options.roofline,
        checkpoint=_name_of(checkpoint),
        model=_sizes(checkpoint),
        precision={"weights": precision, "kv_cache_dtype": config.cache.dtype},
        versions={"charonia": __version__},
    )
    return MachineFile(
        origin=origin,
        machine=estimate.machine,
        engine=shape,
        block_bytes=block_bytes,
        state_bytes=estimate.state_bytes,
    )


def _default_shape(config: EngineConfig, length: int) -> EngineShape:
    """The engine with these options and sequences of this length, as far as no checkpoint says more."""
    scheduler = msgspec.structs.replace(config.scheduler, max_model_len=length)
    size = config.cache.block_size
    return EngineShape(
        scheduler=scheduler,
        blocks=config.cache.blocks or scheduler.max_num_seqs * (length // size + 1),
        block_size=size,
        prefix_caching=config.cache.prefix_caching,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
    )


def _flags_of(engine: EngineOptions) -> Iterator[str]:
    """The command line that gives a server these options."""
    for name, value in engine.given().items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield f"--{flag}={value}"


def _name_of(checkpoint: str) -> str:
    """A checkpoint's name without the directories above it, but for that of a model in a repository."""
    path = Path(checkpoint)
    return str(Path(path.parent.name, path.name)) if path.name.isdecimal() else path.name


def _kernels() -> str:
    from ...engine.cpu import library  # torch takes a second to import

    return library.describe()


def _sizes(checkpoint: str) -> dict[str, int]:
    """Empty where no architecture of ours computes it."""
    try:
        spec: ModelSpec = open_checkpoint(checkpoint).spec
    except CheckpointError:
        return {}
    return {name: int(getattr(spec, field)) for name, field in _SIZES.items()}


def _precision(config: EngineConfig) -> dict[str, str]:
    return {"dtype": config.dtype, "quantization": config.quantization, "kv_cache_dtype": config.cache.dtype}


def _versions() -> dict[str, str]:
    versions = {"charonia": __version__}
    for package in ("torch", "triton", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _print_machine(console: Console, path: Path, file: MachineFile) -> None:
    machine = file.machine
    origin = file.origin
    table = Table("what", "ms", title=origin.how)
    table.columns[1].justify = "right"
    for rows in (rows for rows in _ROWS if rows <= file.engine.scheduler.max_num_seqs):
        name = f"a step of {rows} sequence{'s' if rows > 1 else ''} with {_CONTEXT} tokens each"
        table.add_row(name, _milliseconds(machine.seconds(StepLoad.of_decoding(rows, _CONTEXT))))
    tokens = min(_PROMPT, file.engine.scheduler.max_num_batched_tokens)
    table.add_row(f"a prompt of {tokens} tokens", _milliseconds(machine.seconds(StepLoad.of_prompt(tokens))))
    table.add_row(
        f"from a step to the next, with {_ROWS[-2]} sequences", _milliseconds(machine.seconds_between(_ROWS[-2]))
    )
    table.add_row(f"until {tokens} tokens are in the engine", _milliseconds(machine.arrival_seconds(tokens)))
    console.print(table)
    if origin.steps:
        text = f"{origin.steps:,} steps in {origin.seconds:,.0f} s, which differ by {origin.error:.1%} from the formula"
        console.print(text)
        if origin.error > _NOISY:
            console.print("something else ran here: measure again when nothing does, or believe less", style="yellow")
    console.print(f"written to {path}", soft_wrap=True)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"
