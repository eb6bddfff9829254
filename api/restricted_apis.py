"""The parts of v2 that can be restricted to requests with a certain header, and the flags that do it.

The parts and the flags' form are tritonserver's:
https://github.com/triton-inference-server/server/blob/main/docs/customization_guide/inference_protocols.md.
Endpoints of OpenAI and vLLM go with those of v2 that do the same.
"""

import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..core.errors import InvalidArgument

_MODEL = r"/v2/models/[^/]+(/versions/[0-9]+)?"
_PATHS = {
    "health": rf"/health|/ping|/v2/health/(live|ready)|{_MODEL}/ready",
    "statistics": rf"/metrics|/v2/models/stats|{_MODEL}/stats",
    "metadata": rf"/|/version|/v2|{_MODEL}|/v1/models(/.*)?",
    "inference": rf"{_MODEL}/(infer|generate|generate_stream)|/v1/(?!models).*|/tokenize|/detokenize",
    "shared-memory": r"/v2/(system|cuda)sharedmemory/.*",
    "model-config": rf"{_MODEL}/config",
    "model-repository": r"/v2/repository/.*",
    "trace": r"/v2/trace/setting|/v2/models/[^/]+/trace/setting",
    "logging": r"/v2/logging",
}
_API = re.compile("|".join(f"(?P<{name.replace('-', '_')}>{path})" for name, path in _PATHS.items()), re.DOTALL)

APIS = tuple(_PATHS)
"""Names of the parts, as flags have them."""


class RequiredHeader(NamedTuple):
    """The header, or gRPC metadata, that a request must have with this value."""

    key: str
    value: str

    def matches(self, shown: str | None) -> bool:
        return shown is not None and hmac.compare_digest(shown.encode(), self.value.encode())


def read_restrictions(groups: Sequence[str], flag: str) -> Mapping[str, RequiredHeader]:
    """The header that each restricted API requires. `groups`: `<api>[,<api>]:<key>=<value>`.

    Raises:
        InvalidArgument: one is malformed (its value is not told), or restricts what is restricted already.
    """
    required: dict[str, RequiredHeader] = {}
    for group in groups:
        names, colon, rest = group.partition(":")
        key, equals, value = rest.partition("=")
        if not (colon and equals and key and value):
            raise InvalidArgument(f"{flag} must be <api>[,<api>]:<key>=<value>, got one that begins '{names}'")
        for name in names.split(","):
            _check_api(name, required, flag)
            required[name] = RequiredHeader(key, value)
    return required


def _check_api(name: str, known: Iterable[str], flag: str) -> None:
    """In tritonserver's words: it calls parts as the end of its flag does, api or protocol."""
    what = f"restricted {flag.rpartition('-')[2]} '{name}'"
    if name not in APIS:
        raise InvalidArgument(f"{flag}: unknown {what}, there are {', '.join(APIS)}")
    if name in known:
        raise InvalidArgument(f"{flag}: {what} can not be specified in multiple config groups")


def restricted_api_of(path: str) -> str | None:
    """The part of v2 that an HTTP path belongs to; None for a path that cannot be restricted."""
    found = _API.fullmatch(path)
    return None if found is None else next(name for name in APIS if found[name.replace("-", "_")] is not None)
