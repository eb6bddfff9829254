"""The entry points by which packages extend the server, ours and anybody's.

| group | an entry's name | its object |
|---|---|---|
| `charonia.backends` | of a backend in config.pbtxt | a `RuntimeLoader`, a `TextBackend` or a `CompositionBackend` |
| `charonia.backend_aliases` | of a backend in config.pbtxt | the name of another backend |
| `charonia.native_models` | free | a `NativeBackendFinder` |
| `charonia.routes` | free | a `RoutesExtension` |
| `charonia.commands` | of a command `charonia NAME` | a function with cyclopts annotations |
| `charonia.request_observers` | free | an `ObserverExtension` |
"""

from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from importlib.util import find_spec


@cache
def installed_extensions(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name, in order. Imports no other package's code.

    Entry points of ours whose module is missing are left out. A name that one of ours has cannot be taken by another
    package.
    """
    declared = sorted(_select_declared()(group=group), key=lambda entry: (entry.name, is_own_extension(entry)))
    return {entry.name: entry for entry in declared if not is_own_extension(entry) or _is_there(entry)}


@cache
def absent_extensions(group: str) -> Mapping[str, str]:
    """Our packages that this installation lacks, by the names of their entry points."""
    lacking = (entry for entry in _select_declared()(group=group) if is_own_extension(entry) and not _is_there(entry))
    return {entry.name: entry.module.rpartition(".")[0] for entry in lacking}


def describe_absent(*groups: str) -> str:
    """The end of a message that names our missing packages for these groups; empty if none is missing."""
    packages = sorted({package for group in groups for package in absent_extensions(group).values()})
    return f"; this installation lacks {', '.join(packages)}" if packages else ""


@cache
def _select_declared() -> Callable[..., EntryPoints]:
    """Selects among those of all groups: several are asked for, and each reading opens all packages' files."""
    return entry_points().select


def is_own_extension(entry: EntryPoint) -> bool:
    return entry.module.partition(".")[0] == __name__.partition(".")[0]


def _is_there(entry: EntryPoint) -> bool:
    """Whether the module of `entry` exists, even if its import fails."""
    try:
        return find_spec(entry.module) is not None
    except ModuleNotFoundError as error:  # of a package above it, or of what that imports
        return not f"{entry.module}.".startswith(f"{error.name}.")
