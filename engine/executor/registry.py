"""Which executors there are. Each is imported when it is asked for: some of them load torch."""

from collections.abc import Callable

from ...core.errors import InvalidArgument
from ..config import EngineConfig
from .base import Capacity, Executor


def build_executor(config: EngineConfig) -> Executor:
    """The executor that `config.executor` names.

    Raises:
        InvalidArgument: there is none of that name.
    """
    if config.executor not in _BUILDERS:
        raise InvalidArgument(f"unknown executor {config.executor!r}; there are {', '.join(_BUILDERS)}")
    return _BUILDERS[config.executor](config)


def _inline(config: EngineConfig) -> Executor:
    from .inline import InlineExecutor

    return InlineExecutor(config)


def _fake(config: EngineConfig) -> Executor:
    from .fake import FakeExecutor, Manner

    fake = config.fake
    return FakeExecutor(
        Capacity(fake.vocab_size, fake.max_model_len, block_bytes=1 << 16, free_bytes=1 << 30),
        block_size=config.cache.block_size,
        manner=Manner(fake.step_seconds, fake.token_seconds),
        check_contents=False,
    )


_BUILDERS: dict[str, Callable[[EngineConfig], Executor]] = {"inline": _inline, "fake": _fake}
