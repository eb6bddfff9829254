"""The log settings that clients may change while the server runs, as Triton's logging extension has them:
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_logging.md.

Knows nothing of loggers: `logging_setup` applies a change.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..core.errors import InvalidArgument, Unsupported

LogFormat: TypeAlias = Literal["default", "ISO8601", "json"]

_FILE_IS_FIXED = "log file location can not be updated through network protocol"


@dataclass(frozen=True, slots=True)
class LogSettings:
    """v2's settings, by their names there and in their order. `log_file` "": the log goes to stderr."""

    log_file: str = ""
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: LogFormat = "default"


def parse_log_format(name: str, setting: str = "log_format") -> LogFormat:
    """The form of that name; Triton says differently over HTTP which `setting` is wrong.

    Raises:
        InvalidArgument: there is none.
    """
    forms: dict[str, LogFormat] = {"default": "default", "ISO8601": "ISO8601", "json": "json"}
    if name not in forms:
        raise InvalidArgument(f"invalid argument for {setting}, got: {name}", field="log_format")
    return forms[name]


class LogControl:
    """The log settings of the server, and the function that applies others."""

    def __init__(
        self,
        settings: LogSettings = LogSettings(),
        apply: Callable[[LogSettings], None] = lambda settings: None,
    ) -> None:
        self._settings = settings
        self._apply = apply

    @property
    def settings(self) -> LogSettings:
        return self._settings

    def update(self, settings: LogSettings) -> LogSettings:
        """Log like this from now on.

        Raises:
            Unsupported: it names another file.
        """
        if settings.log_file != self._settings.log_file:
            raise Unsupported(_FILE_IS_FIXED, field="log_file")
        self._apply(settings)
        self._settings = settings
        return settings
