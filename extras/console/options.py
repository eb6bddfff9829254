"""The flags of the console. Free of any server: the command line reads them."""

from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleOptions:
    """Whether there is a console, and under which names."""

    console: Annotated[bool, Parameter(negative=())] = False
    """Serve the console, a page for browsers, on /console."""
    console_host: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """Name of this server that browsers may show /console under, beside localhost and its address; may be given several
    times."""
