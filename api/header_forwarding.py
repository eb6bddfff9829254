"""The headers of a client that its model gets as parameters: `--http-header-forward-pattern` and gRPC's flag like it.

As tritonserver has it:
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_parameters.md. Knows headers by name
and text, not which protocol brought them.
"""

import re
from collections.abc import Iterable, Mapping

from ..core.errors import InvalidArgument

_RESERVED = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)
_PREFIX = "triton_"
_EXACT = "(?-i)"
_NOTHING: Mapping[str, str] = {}


class HeaderForwarding:
    """The headers of which `pattern` matches a part of the name; case does not matter unless it begins with `(?-i)`.

    Raises:
        InvalidArgument: it is no regular expression; the message names `flag`.
    """

    def __init__(self, pattern: str = "", flag: str = "--http-header-forward-pattern") -> None:
        exact = pattern.startswith(_EXACT)
        try:
            found = re.compile(pattern.removeprefix(_EXACT), 0 if exact else re.IGNORECASE)
        except re.error as error:
            raise InvalidArgument(f"{flag}: '{pattern}' is no regular expression: {error}") from None
        self._matches = found.search if pattern else None

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
        found = {name: value for name, value in headers if self._matches(name)}
        for name in found:
            if name in _RESERVED or name.startswith(_PREFIX):
                raise InvalidArgument(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
        return found
