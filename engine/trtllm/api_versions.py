"""What we rely on of TensorRT-LLM's Python API, as data by version world: every call of ours, and what we read.

The data are the `world_*.json` beside this module, and the only truth: the adapter makes no call that is not in them,
`charonia check --tensorrt-llm` compares them with the installed package, and the tests make a fake package of them.
Knows nothing of the package itself.
"""

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, TypeAlias

import msgspec

from ...core.errors import Internal, Unsupported

_WORLDS = ("world_1_1.json", "world_1_3.json")
_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?:rc(\d+))?")

Version: TypeAlias = tuple[int, int, int, float]


class ApiArgument(msgspec.Struct, frozen=True):
    """One that we pass or leave out. Without a `default` here it has one that we do not rely on."""

    required: bool = False
    default: Any = msgspec.UNSET


class ApiCall(msgspec.Struct, frozen=True):
    """A class or function by its dotted `path`. `fields`: the model whose fields it takes as further keywords."""

    path: str
    arguments: dict[str, ApiArgument]
    fields: str = ""


class ApiVersion(msgspec.Struct, frozen=True):
    """An API as the versions from `since` to before `below` have it; an empty `below` is open.

    `engine_directories`: prebuilt TensorRT engines load. `unapplied`: fields of a request that the PyTorch sampler
    accepts and does not apply. `speculation`: decoding types and their classes. `attributes`: what we read of results,
    by class. `request_error`: what is raised for one request. `statistics`: what we read of an iteration, as paths.
    """

    since: str
    below: str
    engine_directories: bool
    unapplied: tuple[str, ...]
    speculation: dict[str, str]
    calls: dict[str, ApiCall]
    attributes: dict[str, tuple[str, ...]]
    request_error: str
    finish_reasons: tuple[str, ...]
    statistics: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.since} and newer" if not self.below else f"{self.since} to before {self.below}"

    def check(self, call: str, arguments: Mapping[str, Any]) -> ApiCall:
        """The call, if it takes these keywords.

        Raises:
            Internal: it does not: the adapter would do what nobody has compared with the package.
        """
        known = self.calls.get(call)
        if known is None:
            raise Internal(f"TensorRT-LLM {self} has no {call} that this adapter knows")
        if unknown := arguments.keys() - known.arguments.keys():
            raise Internal(f"{call} of TensorRT-LLM {self} has no {', '.join(sorted(unknown))} that this adapter knows")
        if missing := [name for name, each in known.arguments.items() if each.required and name not in arguments]:
            raise Internal(f"{call} of TensorRT-LLM {self} needs {', '.join(missing)}")
        return known


@cache
def api_versions() -> tuple[ApiVersion, ...]:
    """Every world there is data of, oldest first."""
    here = files(__package__)
    return tuple(msgspec.convert(json.loads((here / name).read_text()), ApiVersion) for name in _WORLDS)


def api_version_of(version: str) -> ApiVersion:
    """The world of an installed version.

    Raises:
        Unsupported: there are no data of it; the message names the versions there are.
    """
    installed = parse_version(version)
    for world in api_versions():
        if parse_version(world.since) <= installed and (not world.below or installed < parse_version(world.below)):
            return world
    known = "; ".join(map(str, api_versions()))
    raise Unsupported(f"tensorrt_llm {version} is installed, which this adapter does not know; it knows {known}")


def parse_version(version: str) -> Version:
    """A version in numbers; a release comes after its candidates. What follows them is not looked at.

    Raises:
        Unsupported: it is none.
    """
    found = _VERSION.match(version)
    if found is None:
        raise Unsupported(f"tensorrt_llm says that its version is '{version}', which is none")
    major, minor, patch, candidate = found.groups()
    return int(major), int(minor), int(patch or 0), float(candidate) if candidate else math.inf
