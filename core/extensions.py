"""The entry points by which packages extend the server: ours under `extras/`, and anybody's.

| group | an entry's name | what it names |
|---|---|---|
| `charonia.backends` | of a backend in config.pbtxt | a `RuntimeLoader` |
| `charonia.routes` | free | routes of HTTP over a gateway |
| `charonia.commands` | of a command line `charonia NAME` | a function, its flags by annotations as of cyclopts |
| `charonia.request_observers` | free | what follows the requests of the server |
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec


@cache
def installed_extensions(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name, in the order of their names; nothing is imported.

    One whose module is not there is left out: a package that was installed without a part of it still works.
    """
    found = sorted(entry_points(group=group), key=lambda entry: entry.name)
    return {entry.name: entry for entry in found if _is_there(entry)}


def _is_there(entry: EntryPoint) -> bool:
    """Whether the module of `entry` exists; one that cannot be imported does, and says why when it is loaded."""
    try:
        return find_spec(entry.module) is not None
    except ModuleNotFoundError as error:  # of a package above it, or of what that imports
        return not f"{entry.module}.".startswith(f"{error.name}.")
