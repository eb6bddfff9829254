"""The executor of a configuration. Each is imported when it is asked for: some of them load torch."""

from contextlib import suppress

from ...core.errors import InvalidArgument
from ..checkpoint.hf_checkpoint import open_checkpoint
from ..checkpoint.model_spec import CheckpointError
from ..checkpoint.partition import PipelineStage, check_partition
from ..config import EngineConfig
from ..parallel.local_ranks import LocalRanks
from ..parallel.ranks_executor import RanksExecutor, StartRanks
from ..worker.executor import Capacity, Executor

_EXECUTORS = ("auto", "inline", "ranks", "fake")


def build_executor(config: EngineConfig) -> Executor:
    """The executor that `config.executor` names; "auto" computes in this process if there is one rank.

    Raises:
        CharoniaError: there is none of that name, it has no ranks, or there is no checkpoint that they can share.
    """
    name, parallel = config.executor, config.parallel
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
        return _fake(config)
    if name == "inline" or (name == "auto" and parallel.world == 1 and parallel.backend == "mp"):
        from ..worker.inline_executor import InlineExecutor

        return InlineExecutor(config)
    # Ranks would refuse a split only when all of them have loaded torch; what only they can tell is left to them.
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
        message = f"distributed_executor_backend ray needs Ray ({error.name}): pip install 'charonia[ray]'"
        raise InvalidArgument(message, field="distributed_executor_backend") from None
    return RayRanks


def _fake(config: EngineConfig) -> Executor:
    from ..worker.fake_executor import FakeBehaviour, FakeExecutor

    fake = config.fake
    return FakeExecutor(
        Capacity(fake.vocab_size, fake.max_model_len, block_bytes=1 << 16, free_bytes=1 << 30),
        block_size=config.cache.block_size,
        behaviour=FakeBehaviour(fake.step_seconds, fake.token_seconds),
        check_contents=False,
    )
