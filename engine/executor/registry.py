"""Which executors there are. Each is imported when it is asked for: some of them load torch."""

from collections.abc import Callable

from ...core.errors import InvalidArgument
from ..config import EngineConfig
from .base import Capacity, Executor


def build_executor(config: EngineConfig) -> Executor:
    """The executor that `config.executor` names.

    Raises:
        InvalidArgument: there is none of that name, or it has no ranks.
    """
    if config.executor in ("inline", "fake") and config.parallel.world > 1:
        raise InvalidArgument(
            f"executor {config.executor!r} is one rank, and {config.parallel.world} are wanted", field="executor"
        )
    if config.executor not in _BUILDERS:
        raise InvalidArgument(f"unknown executor {config.executor!r}; there are {', '.join(_BUILDERS)}")
    return _BUILDERS[config.executor](config)


def _auto(config: EngineConfig) -> Executor:
    return _inline(config) if config.parallel.world == 1 else _ranks(config)


def _inline(config: EngineConfig) -> Executor:
    from .inline import InlineExecutor

    return InlineExecutor(config)


def _ranks(config: EngineConfig) -> Executor:
    from .ranks import RanksExecutor

    return RanksExecutor(config)


def _fake(config: EngineConfig) -> Executor:
    from .fake import FakeExecutor, Manner

    fake = config.fake
    return FakeExecutor(
        Capacity(fake.vocab_size, fake.max_model_len, block_bytes=1 << 16, free_bytes=1 << 30),
        block_size=config.cache.block_size,
        manner=Manner(fake.step_seconds, fake.token_seconds),
        check_contents=False,
    )


_BUILDERS: dict[str, Callable[[EngineConfig], Executor]] = {
    "auto": _auto,
    "inline": _inline,
    "ranks": _ranks,
    "fake": _fake,
}
