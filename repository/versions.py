"""Which versions of a model there are, and which of them are served: model-config.md sections 1 and 9.

A version is a folder whose name is a number without leading zeros.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from ..core.errors import InvalidArgument
from .config_io import ConfigMessage

log = logging.getLogger(__name__)

_VERSION = re.compile(r"[1-9][0-9]*")
_MISNAMED_VERSION = re.compile(r"0[0-9]*")


def find_versions(model: Path) -> list[int]:
    """The numbered folders, lowest first; anything else in a model's folder is no version."""
    if not model.is_dir():
        return []
    return sorted(int(entry.name) for entry in model.iterdir() if _VERSION.fullmatch(entry.name) and entry.is_dir())


def find_misnamed_versions(model: Path) -> list[str]:
    """The folders that somebody may take for versions: numbers that begin with 0."""
    if not model.is_dir():
        return []
    return sorted(entry.name for entry in model.iterdir() if _MISNAMED_VERSION.fullmatch(entry.name) and entry.is_dir())


def choose_versions(config: ConfigMessage, there: list[int], almost: Sequence[str] = ()) -> list[int]:
    """Those that the config's policy serves, lowest first; without a policy the latest. `almost`: folders that are no
    versions, though they look it.

    Raises:
        InvalidArgument: none of them is there.
    """
    policy = config.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            served = there
        case "specific":
            served = _specific(config.name, sorted(set(policy.specific.versions)), there)
        case "latest":
            served = there[-max(policy.latest.num_versions, 1) :]
        case _:
            served = there[-1:]
    if not served:
        message = f"at least one version must be available under the version policy of model '{config.name}'"
        hint = f"; '{almost[0]}' is none, for it begins with 0" if almost else ""
        raise InvalidArgument(message + hint, field="version_policy")
    return served


def _specific(name: str, wanted: list[int], there: list[int]) -> list[int]:
    for version in wanted:
        if version not in there:
            log.warning("version %d of model '%s' is asked for by its version policy and is not there", version, name)
    return [version for version in wanted if version in there]
