"""The readiness of a model that asks others, by what these say of themselves."""

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

from ..core.gateway import Gateway


class AskedVersion(NamedTuple):
    """A model that another one asks; an empty `version` stands for the latest."""

    model: str
    version: str = ""


async def first_unready_reason(gateway: Gateway, asked: Iterable[AskedVersion]) -> str:
    """Why one of these is not ready; empty where all are. They are asked side by side, each once."""
    reasons = await asyncio.gather(*(gateway.unready_reason(*each) for each in set(asked)))
    return next(filter(None, reasons), "")
