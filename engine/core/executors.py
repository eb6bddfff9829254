"""Which executors there are. Each is imported when it is asked for: some of them load torch."""

from collections.abc import Callable
from contextlib import suppress

from ...core.errors import InvalidArgument
from ..checkpoint.hf_checkpoint import open_checkpoint
from ..checkpoint.model_spec import CheckpointError
from ..checkpoint.partition import PipelineStage, check_partition
from ..config import EngineConfig
from ..parallel.local_ranks import LocalRanks
from ..parallel.ranks_executor import RanksExecutor, StartRanks
from ..worker.executor import Capacity, Executor


def build_executor(config: EngineConfig) -> Executor:
    """The executor that `config.executor` names.

    Raises:
        CharoniaError: there is none of that name, it has no ranks, or there is no checkpoint that they can share.
    """
    if config.executor in ("inline", "fake") and config.parallel.world > 1:
        raise InvalidArgument(
            f"executor {config.executor!r} is one rank, and {config.parallel.world} are wanted", field="executor"
        )
    if config.executor in ("inline", "fake") and config.parallel.backend != "mp":
        message = f"executor {config.executor!r} has no ranks for {config.parallel.backend!r} to place"
        raise InvalidArgument(message, field="distributed_executor_backend")
    if config.executor not in _BUILDERS:
        message = f"unknown executor {config.executor!r}; there are {', '.join(_BUILDERS)}"
        raise InvalidArgument(message, field="executor")
    return _BUILDERS[config.executor](config)


def _auto(config: EngineConfig) -> Executor:
    parallel = config.parallel
    return _inline(config) if parallel.world == 1 and parallel.backend == "mp" else _ranks(config)


def _inline(config: EngineConfig) -> Executor:
    from ..worker.inline_executor import InlineExecutor

    return InlineExecutor(config)


def _ranks(config: EngineConfig) -> Executor:
    _check_split(config)
    return RanksExecutor(config, _rank_launcher(config.parallel.backend))


def _rank_launcher(backend: str) -> StartRanks:
    if backend not in ("mp", "ray"):
        message = f"distributed_executor_backend must be mp or ray, got {backend!r}"
        raise InvalidArgument(message, field="distributed_executor_backend")
    if backend == "mp":
        return LocalRanks
    try:
        from ..parallel.ray_ranks import RayRanks
    except ModuleNotFoundError as error:
        message = f"distributed_executor_backend ray needs Ray ({error.name}): pip install 'charonia[ray]'"
        raise InvalidArgument(message, field="distributed_executor_backend") from None
    return RayRanks


def _check_split(config: EngineConfig) -> None:
    """Refuse now what ranks would refuse when all of them have torch; what only they can tell is left to them."""
    checkpoint, parallel = open_checkpoint(config.model), config.parallel
    with suppress(CheckpointError):
        spec, stage = checkpoint.spec, PipelineStage(0, parallel.pipeline, parallel.layers)
        check_partition(spec, str(checkpoint.directory), parallel.tensor, stage, parallel.whole_experts)


def _fake(config: EngineConfig) -> Executor:
    from ..worker.fake_executor import FakeBehaviour, FakeExecutor

    fake = config.fake
    return FakeExecutor(
        Capacity(fake.vocab_size, fake.max_model_len, block_bytes=1 << 16, free_bytes=1 << 30),
        block_size=config.cache.block_size,
        manner=FakeBehaviour(fake.step_seconds, fake.token_seconds),
        check_contents=False,
    )


_BUILDERS: dict[str, Callable[[EngineConfig], Executor]] = {
    "auto": _auto,
    "inline": _inline,
    "ranks": _ranks,
    "fake": _fake,
}
