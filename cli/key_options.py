"""The flags of API keys. Free of any server: the command line reads it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyOptions:
    """Who may ask. Without any key everybody may."""

    api_key: Annotated[tuple[str, ...], Parameter(negative=())] = field(default=(), repr=False)
    """A key clients must show, as `key`, `name:key` or `name:key:weight`; may be given several times. Other users of
    the machine can see it: prefer --api-key-file, or CHARONIA_API_KEYS with keys apart by commas or spaces."""
    api_key_file: Path | None = None
    """File of such keys, one a line."""
