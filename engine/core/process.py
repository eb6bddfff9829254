"""The process of an engine core: build, load, warm up, run the step loop, leave nothing behind.

Knows of the server only the sockets and their directory, and that it must not outlive it.
"""

import logging
import os
import shutil
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import zmq

from ...core.errors import CharoniaError, InvalidArgument, SentError
from ...core.native_calls import CONTROL_FLOW
from ...kvcache.manager import KVCacheManager
from ...processes import gc_tuning
from ...processes.child_process import on_parent_death, print_traceback
from ...processes.host import limit_openmp_spins, usable_cores
from ...processes.log_forwarding import LogForwarder
from ...processes.private_directory import make_private_directory
from ...scheduler.config import SchedulerConfig
from ...scheduler.drafts.speculation import PREDICTION, Drafter, Speculation
from ...scheduler.scheduler import Scheduler
from ..checkpoint.hf_checkpoint import open_checkpoint
from ..checkpoint.model_spec import CheckpointError
from ..checkpoint.partition import PipelineStage, check_partition
from ..config import EngineConfig, LoraConfig
from ..drafters.custom import GuardedDrafter
from ..drafters.prediction import PredictionDrafter
from ..grammars.backend import GrammarBackend
from ..parallel.local_ranks import LocalRanks
from ..parallel.ranks_executor import RanksExecutor, StartRanks
from ..worker.executor import Capacity, Executor
from .cache_directory import check_cache_directory, landing_sizes, open_cache_directory
from .cache_events import CacheEventEncoder, CacheEventRecorder, group_kinds
from .cache_facts import cache_facts
from .cache_sizes import resolve_cache_sizes, retention_budget
from .drafters import build_drafter
from .event_publisher import EventPublisher
from .grammar_pool import GrammarPool
from .messages import CoreFailed, CoreLoading, CoreReady
from .prefix_transfers import PrefixTransfers
from .sockets import CoreEndpoints, CoreSockets
from .step_loop import EngineCore
from .warm_up import learn_step_times, warm_up

_SHAPE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_SHAPES = "256"
"""Shapes for which oneDNN and torch keep code: 0.3 MiB each, 1024 by default. A model has about five for each number of
tokens in a step, each made again in a millisecond."""
_OPENMP_SPINS = 25_000
"""Turns, about .2 ms, which models that torch computes on a CPU have between two operations. Threads that spun for
longer would take a core from the C kernels' own."""
_EXECUTORS = ("auto", "inline", "ranks", "fake")


def main(config: EngineConfig, directory: str) -> None:
    """Serve the server whose sockets lie in `directory` until it shuts the core down, or dies."""
    on_parent_death(lambda: shutil.rmtree(directory, ignore_errors=True))
    sockets = CoreSockets(CoreEndpoints.in_directory(directory))
    LogForwarder(sockets.send, zmq.ZMQError).install(logging.WARNING)
    try:
        _serve(config, sockets)
    except CONTROL_FLOW:
        raise
    except BaseException as error:
        if not isinstance(error, CharoniaError):
            print_traceback(error)
        sockets.send(CoreFailed(SentError.of(error)))
        sys.exit(1)
    finally:
        sockets.close()


def _serve(config: EngineConfig, sockets: CoreSockets) -> None:
    progress = LoadProgress(sockets)
    progress.report("libraries", 0.0)
    _prepare_libraries()
    keep_compiled_kernels(config)
    executor = build_executor(config)  # imports torch where it needs it
    progress.report("libraries", 1.0)
    try:
        core, ready = start_core(config, executor, progress)
        threading.excepthook = lambda thread: core.inbox.fail(thread.exc_value or RuntimeError("a thread died"))
        executor.watch(core.inbox.fail)
        sockets.listen(core.inbox.accept)
        sockets.send(ready)
        core.run(sockets.send)
        core.close()
    finally:
        executor.close()


def import_libraries() -> None:
    """Import what one rank needs, in a process that is prepared for `main`: torch takes a second."""
    _prepare_libraries()
    from ..worker.inline_executor import InlineExecutor  # noqa: F401

    gc_tuning.freeze_imports()


def keep_compiled_kernels(config: EngineConfig) -> None:
    """Let Triton, here and in ranks, keep what it compiles where packed weights are kept, by default in the user's home
    directory. Raises `InvalidArgument` if others may write there."""
    if config.cache_dir and config.device != "cpu":
        directory = Path(config.cache_dir).expanduser()
        make_private_directory(directory, "cache_dir")
        os.environ.setdefault("TRITON_CACHE_DIR", str(directory / "triton"))


def _prepare_libraries() -> None:
    """Before torch is imported, here and in ranks."""
    for name in _SHAPE_CACHES:
        os.environ.setdefault(name, _SHAPES)
    limit_openmp_spins(_OPENMP_SPINS)


class LoadProgress:
    """Reports the phases of start-up to the server."""

    def __init__(self, sockets: CoreSockets) -> None:
        self._sockets = sockets
        self._phase = ""
        self._began = 0.0

    def report(self, phase: str, fraction: float, detail: str = "") -> None:
        """Report that `fraction` of `phase` is done; its first report starts its clock."""
        if phase != self._phase:
            self._phase = phase
            self._began = time.perf_counter()
        self._sockets.send(CoreLoading(phase, fraction, time.perf_counter() - self._began, detail))


def start_core(config: EngineConfig, executor: Executor, progress: LoadProgress) -> tuple[EngineCore, CoreReady]:
    """Load the model, allocate its cache and warm up; the core, and the message with its sizes."""
    check_cache_directory(config)
    progress.report("weights", 0.0)
    capacity = executor.load(progress.report)
    if capacity.machine:
        progress.report("machine", 1.0, capacity.machine)
    length = resolve_max_model_len(config.max_model_len, capacity)
    sizes = resolve_cache_sizes(config, capacity, length)
    progress.report("cache", 0.0)
    executor.allocate(sizes.blocks, sizes.host_blocks, sizes.extra_states, sizes.host_snapshots)
    described = sizes.describe(config.cache.block_size)
    if capacity.cross_bytes:
        rows = config.scheduler.max_num_seqs
        described += f", {capacity.cross_bytes / 1e6:.3g} MB for what {rows} sequences keep of an encoder's output"
    progress.report("cache", 1.0, described)
    caching = sizes.prefix_caching
    drafts = sizes.draft_states if capacity.state_bytes else None
    rules = scheduler_config(config, length, capacity.ahead)
    groups = capacity.groups._replace(in_flight=rules.tokens_in_flight)
    counts = sizes.blocks, config.cache.block_size, caching, sizes.host_blocks, sizes.snapshots, drafts
    events = _event_recorder(config, capacity)
    retention = retention_budget(config, sizes, capacity)
    landing = landing_sizes(config, capacity, sizes)
    cache = KVCacheManager(*counts, groups, sizes.host_snapshots, events, retention, *landing)
    speculation = None if drafts == 0 else _speculation(config, capacity.vocab_size)
    scheduler = Scheduler(rules, cache, speculation=speculation)
    grammars = GrammarPool(partial(_grammar_backend, config, capacity.vocab_size))
    core = EngineCore(
        scheduler,
        cache,
        executor,
        grammars=grammars,
        vocab_size=capacity.vocab_size,
        events=events,
        encoder=capacity.encoder,
        leaves_time=not capacity.ahead and _takes_all_processors(config),
    )
    progress.report("warm-up", 0.0)
    warm_up(core)
    progress.report("warm-up", 1.0)
    if (fetches := open_cache_directory(config, capacity, executor, cache, scheduler, core.inbox, events)) is not None:
        core.prefix_origins.append(fetches)
    address = None
    if config.kv_transfer is not None:
        facts = cache_facts(config, capacity, executor)
        transfers = PrefixTransfers(config, facts, scheduler, cache, executor, core.inbox, time.monotonic)
        core.prefix_origins.append(transfers)
        address = transfers.address
    if config.warm_up_graphs:
        executor.capture_usual_steps(progress.report)
    if capacity.on_gpu:
        learn_step_times(core)
    gc_tuning.collect_and_freeze(frozen_too=False)
    on_this_host = capacity.machine and not capacity.on_gpu and config.parallel.backend == "mp"
    states = (sizes.extra_states + config.scheduler.max_num_seqs) * capacity.state_bytes
    cached = sizes.blocks * capacity.block_bytes + states + capacity.cross_bytes
    cache_bytes = cached * config.parallel.world if on_this_host else 0
    source = capacity.encoder if capacity.encoder is not None and capacity.encoder.reads_text else None
    return core, CoreReady(
        capacity.vocab_size,
        length,
        config.cache.block_size,
        sizes.blocks,
        cache_bytes,
        groups.total,
        retention.blocks,
        capacity.splits,
        0 if source is None else source.rows,
        0 if source is None else source.vocab_size,
        address,
    )


def _event_recorder(config: EngineConfig, capacity: Capacity) -> CacheEventRecorder | None:
    """The recorder of what the cache holds, if anybody is told."""
    events = config.kv_events
    if events is None:
        return None
    kinds = group_kinds(capacity.groups, capacity.latent, keeps_tokens=capacity.block_bytes > 0)
    encoder = CacheEventEncoder(config.cache.block_size, kinds, config.replica, events.events == "array")
    return CacheEventRecorder(EventPublisher(events, encoder, config.replica))


def _speculation(config: EngineConfig, vocab_size: int) -> Speculation:
    """The configured drafter, if any, and that of predictions, which any request may bring."""
    drafters: dict[str, Drafter] = {PREDICTION: PredictionDrafter()}
    own = config.speculation
    if own is None:
        return Speculation(drafters, 0, vocab_size, config.most_sampled)
    drafters[own.method] = guarded = GuardedDrafter(build_drafter(own, vocab_size), own.method)
    most = own.num_speculative_tokens
    speculation = Speculation(drafters, most, vocab_size, config.most_sampled, own.computes)
    guarded.step_seconds = speculation.costs.expected_seconds
    guarded.on_off = speculation.note_off
    return speculation


def _takes_all_processors(config: EngineConfig) -> bool:
    """Whether steps on the host leave no processor to others."""
    cores = usable_cores()
    return (config.threads or cores.threads) * config.data_parallel_size >= min(cores.logical, cores.quota)


def _grammar_backend(config: EngineConfig, vocab_size: int) -> GrammarBackend:
    """The backend for the model's vocabulary; reading a large tokenizer takes a second or two."""
    from ..grammars.llguidance_backend import LLGuidanceBackend
    from ..grammars.vocabulary import read_vocabulary

    return LLGuidanceBackend(read_vocabulary(config.model, config.tokenizer, vocab_size))


def scheduler_config(config: EngineConfig, length: int, ahead: int = 0) -> SchedulerConfig:
    """The scheduler's configuration for sequences of at most `length` tokens. The device wants `ahead` steps ahead; a
    configured number replaces that, and drafts, which follow the last token, allow none. A pipeline has a step for each
    other stage, or raises `InvalidArgument`."""
    max_loras = 0 if config.lora is None else config.lora.max_loras
    scheduler = msgspec.structs.replace(config.scheduler, max_model_len=length, max_loras=max_loras)
    stages = config.parallel.pipeline
    if stages == 1:
        wanted = 0 if config.ahead_given or config.speculation is not None else ahead
        return msgspec.structs.replace(scheduler, ahead=max(scheduler.ahead, wanted))
    if scheduler.ahead not in (0, stages - 1):
        raise InvalidArgument(
            f"ahead: {stages} stages have {stages - 1} steps ahead, not {scheduler.ahead}", field="ahead"
        )
    return msgspec.structs.replace(scheduler, ahead=stages - 1, in_flight_per_sequence=1)


def resolve_max_model_len(wanted: int | None, capacity: Capacity) -> int:
    """The most tokens that a sequence may have. Raises `InvalidArgument` for more than the model's own length."""
    if wanted is not None and wanted > capacity.max_model_len:
        message = f"max_model_len {wanted} exceeds the model's own {capacity.max_model_len}"
        raise InvalidArgument(message, field="max_model_len")
    return wanted or capacity.max_model_len


def build_executor(config: EngineConfig) -> Executor:
    """The executor that `config.executor` names; "auto" computes in this process if there is one rank. Plans are made
    by the groups of layers that it reports.

    Raises:
        CharoniaError: the name is unknown, it cannot have these ranks, or they cannot share the checkpoint.
    """
    config = msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, layer_groups=True))
    # Executors are imported when they are wanted: some of them load torch.
    name = config.executor
    parallel = config.parallel
    if name in ("inline", "fake") and parallel.world > 1:
        message = f"executor {name!r} is one rank, and {parallel.world} are wanted"
        raise InvalidArgument(message, field="executor")
    if name in ("inline", "fake") and parallel.backend != "mp":
        message = f"executor {name!r} has no ranks for {parallel.backend!r} to place"
        raise InvalidArgument(message, field="distributed_executor_backend")
    if name not in _EXECUTORS:
        message = f"unknown executor {name!r}; there are {', '.join(_EXECUTORS)}"
        raise InvalidArgument(message, field="executor")
    if name == "fake":
        from ..worker.fake_executor import FakeBehaviour, FakeExecutor

        fake = config.fake
        return FakeExecutor(
            Capacity(
                fake.vocab_size,
                fake.max_model_len,
                block_bytes=1 << 16,
                free_bytes=1 << 30,
                state_bytes=fake.state_bytes,
            ),
            block_size=config.cache.block_size,
            behaviour=FakeBehaviour(fake.step_seconds, fake.token_seconds),
            check_contents=False,
            lora=config.lora or LoraConfig(),
        )
    if name == "inline" or (name == "auto" and parallel.world == 1 and parallel.backend == "mp"):
        from ..worker.inline_executor import InlineExecutor

        return InlineExecutor(config)
    # Ranks would refuse a split only after all of them have loaded torch. What only they can tell is left to them.
    checkpoint = open_checkpoint(config.model)
    with suppress(CheckpointError):
        spec, stage = checkpoint.spec, PipelineStage(0, parallel.pipeline, parallel.layers)
        check_partition(spec, str(checkpoint.directory), parallel.tensor, stage, parallel.whole_experts)
    return RanksExecutor(config, _rank_launcher(parallel.backend))


def _rank_launcher(backend: str) -> StartRanks:
    if backend not in ("mp", "ray"):
        message = f"distributed_executor_backend must be mp or ray, got {backend!r}"
        raise InvalidArgument(message, field="distributed_executor_backend")
    if backend == "mp":
        return LocalRanks
    try:
        from ..parallel.ray_ranks import RayRanks
    except ModuleNotFoundError as error:
        message = f"distributed_executor_backend ray needs Ray ({error.name}): pip install '.[ray]'"
        raise InvalidArgument(message, field="distributed_executor_backend") from None
    return RayRanks
