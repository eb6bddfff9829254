"""Rules for the headers of HTTP and the metadata of gRPC: those that parts of v2 require, those that models get.

The flags are tritonserver's (docs/customization_guide/inference_protocols.md, docs/protocol/extension_parameters.md in
https://github.com/triton-inference-server/server). Endpoints of OpenAI and vLLM go with v2's that do the same.
"""

import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..core.errors import InvalidArgument

_MODEL = r"/v2/models/[^/]+(/versions/[0-9]+)?"
_ADAPTERS = "(un)?load_lora_adapter"
_VLLM = r"(/v2)?/rerank|/(de)?tokenize|/score|/classify|/pooling|/invocations"
_PATHS = {
    "health": rf"/health|/ping|/v2/health/(live|ready)|{_MODEL}/ready",
    "statistics": rf"/metrics|/load|/v2/models/stats|{_MODEL}/(stats|explain)",
    "metadata": rf"/|/version|/v2|{_MODEL}|/v1/models(/.*)?|/(tokenizer|server|model)_info|/docs|/openapi\.json",
    "inference": rf"{_MODEL}/(infer|generate|generate_stream)|/v1/(?!models|{_ADAPTERS}).*|{_VLLM}",
    "shared-memory": r"/v2/(system|cuda)sharedmemory/.*",
    "model-config": rf"{_MODEL}/(config|graph)",
    "model-repository": rf"/v2/(repository|routes)/.*|/v2/routes|/v1/{_ADAPTERS}",
    "trace": r"/v2/trace/setting|/v2/models/[^/]+/trace/setting",
    "logging": r"/v2/logging",
}
_API = re.compile("|".join(f"(?P<{name.replace('-', '_')}>{path})" for name, path in _PATHS.items()), re.DOTALL)

APIS = tuple(_PATHS)
"""Names of the parts of v2 that can be restricted, as flags have them."""

_RESERVED = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)
_EXACT = "(?-i)"
_NOTHING: Mapping[str, str] = {}


class RequiredHeader(NamedTuple):
    """The header, or gRPC metadata, that a request must have with this value."""

    key: str
    value: str

    def matches(self, shown: str | None) -> bool:
        return shown is not None and hmac.compare_digest(shown.encode(), self.value.encode())


def read_restrictions(groups: Sequence[str], flag: str) -> Mapping[str, RequiredHeader]:
    """The header that each restricted API requires. `groups`: `<api>[,<api>]:<key>=<value>`. Raises `InvalidArgument`
    if one is malformed (its value is not told), or restricts what is restricted already."""
    required: dict[str, RequiredHeader] = {}
    for group in groups:
        names, colon, rest = group.partition(":")
        key, equals, value = rest.partition("=")
        if not (colon and equals and key and value):
            raise InvalidArgument(f"{flag} must be <api>[,<api>]:<key>=<value>, got one that begins '{names}'")
        for name in names.split(","):
            what = f"restricted {flag.rpartition('-')[2]} '{name}'"  # api or protocol, as tritonserver says it
            if name not in APIS:
                raise InvalidArgument(f"{flag}: unknown {what}, there are {', '.join(APIS)}")
            if name in required:
                raise InvalidArgument(f"{flag}: {what} can not be specified in multiple config groups")
            required[name] = RequiredHeader(key, value)
    return required


def restricted_api_of(path: str) -> str | None:
    """The part of v2 that an HTTP path belongs to; None for a path that cannot be restricted."""
    match = _API.fullmatch(path)
    return None if match is None else next(name for name in APIS if match[name.replace("-", "_")] is not None)


class HeaderForwarding:
    """The headers of which `pattern` matches a part of the name; case does not matter unless it begins with `(?-i)`.
    Raises `InvalidArgument`, which names `flag`, if it is no regular expression."""

    def __init__(self, pattern: str = "", flag: str = "--http-header-forward-pattern") -> None:
        exact = pattern.startswith(_EXACT)
        try:
            expression = re.compile(pattern.removeprefix(_EXACT), 0 if exact else re.IGNORECASE)
        except re.error as error:
            raise InvalidArgument(f"{flag}: '{pattern}' is no regular expression: {error}") from None
        self._matches = expression.search if pattern else None

    def __bool__(self) -> bool:
        """Whether any header is wanted."""
        return self._matches is not None

    def parameters(self, headers: Mapping[bytes, bytes]) -> Mapping[str, str]:
        """The parameters from the headers of an HTTP request, whose names are in lower case."""
        if self._matches is None:
            return _NOTHING
        return self.select((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers.items())

    def select(self, headers: Iterable[tuple[str, str]]) -> Mapping[str, str]:
        """Raises `InvalidArgument` for a header that matches and whose name means something else as a parameter."""
        if self._matches is None:
            return _NOTHING
        parameters = {name: value for name, value in headers if self._matches(name)}
        for name in parameters:
            if name in _RESERVED or name.startswith("triton_"):
                raise InvalidArgument(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
        return parameters
