"""The entry points by which packages extend the server: our own, and anybody's.

| group | an entry's name | what it names |
|---|---|---|
| `charonia.backends` | of a backend in config.pbtxt | a `RuntimeLoader`, a `TextBackend` or a `CompositionBackend` |
| `charonia.backend_aliases` | of a backend in config.pbtxt | the name of the backend that it stands for |
| `charonia.native_models` | free | a `NativeBackendFinder`: what serves a model in the place of its Python code |
| `charonia.routes` | free | routes of HTTP over a gateway |
| `charonia.commands` | of a command line `charonia NAME` | a function, its flags by annotations as of cyclopts |
| `charonia.request_observers` | free | what follows the requests of the server |
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from importlib.util import find_spec


@cache
def installed_extensions(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name, in the order of their names; nothing but our own packages is imported.

    One of ours whose module is not there is left out: the server without a part of it still works. A name of ours stays
    ours, whoever else declares it.
    """
    declared = sorted(_select_declared()(group=group), key=lambda entry: (entry.name, is_own_extension(entry)))
    return {entry.name: entry for entry in declared if not is_own_extension(entry) or _is_there(entry)}


@cache
def absent_extensions(group: str) -> Mapping[str, str]:
    """The packages of ours that this installation lacks, by the names of their entry points in a group."""
    lacking = (entry for entry in _select_declared()(group=group) if is_own_extension(entry) and not _is_there(entry))
    return {entry.name: entry.module.rpartition(".")[0] for entry in lacking}


def describe_absent(*groups: str) -> str:
    """The packages of ours that this installation lacks and that would extend one of `groups`, as a message ends with
    them; empty where it lacks none."""
    packages = sorted({package for group in groups for package in absent_extensions(group).values()})
    return f"; this installation lacks {', '.join(packages)}" if packages else ""


@cache
def _select_declared() -> Callable[..., EntryPoints]:
    """Selects among those of all groups: several are asked for, and each reading opens all packages' files."""
    return entry_points().select


def is_own_extension(entry: EntryPoint) -> bool:
    """Whether an entry point's module is of this package."""
    return entry.module.partition(".")[0] == __name__.partition(".")[0]


def _is_there(entry: EntryPoint) -> bool:
    """Whether the module of `entry` exists; one that cannot be imported does, and says why when it is loaded."""
    try:
        return find_spec(entry.module) is not None
    except ModuleNotFoundError as error:  # of a package above it, or of what that imports
        return not f"{entry.module}.".startswith(f"{error.name}.")
