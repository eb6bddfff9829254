"""The trace settings of the server and of single models, and the sampling of requests by them: Triton's trace
extension.

Source: https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_trace.md
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from ..core.errors import CharoniaError, InvalidArgument, Unsupported

log = logging.getLogger(__name__)

TraceSettingsChange: TypeAlias = Mapping[str, Sequence[str] | None]
"""New values of settings by name; None or an empty list resets one."""

OFF = "OFF"
TIMESTAMPS = "TIMESTAMPS"
TENSORS = "TENSORS"

_LEVELS = {
    **dict.fromkeys((OFF, "FALSE"), OFF),
    **dict.fromkeys((TIMESTAMPS, "MIN", "MAX", "TRUE", "ON"), TIMESTAMPS),
    TENSORS: TENSORS,
}
"""Levels by all their names, former releases' and the command line's included, in any case."""

_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)
_RANGES = {"trace_rate": (1, 2**32 - 1), "trace_count": (-1, 2**31 - 1), "log_frequency": (0, 2**32 - 1)}
_FLAG_SETTINGS = {
    "level": "trace_level",
    "rate": "trace_rate",
    "count": "trace_count",
    "log-frequency": "log_frequency",
    "file": "trace_file",
}

OPENTELEMETRY_MODE = "opentelemetry"
_NUMBERS = ("bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size")


@dataclass(frozen=True, slots=True)
class SpanSettings:
    """How spans are sent, with tritonserver's defaults. They are sent every `bsp_schedule_delay` milliseconds, or once
    `bsp_max_export_batch_size` wait; at most `bsp_max_queue_size` wait. `resource` is the attributes of their source.
    """

    url: str = "http://localhost:4318/v1/traces"
    resource: tuple[tuple[str, str], ...] = (("service.name", "triton-inference-server"),)
    bsp_max_queue_size: int = 2048
    bsp_schedule_delay: int = 5000
    bsp_max_export_batch_size: int = 512

    def as_v2_texts(self) -> Mapping[str, tuple[str, ...]]:
        """The settings as texts, by the names of Triton's trace extension."""
        numbers = {name: (str(getattr(self, name)),) for name in _NUMBERS}
        return {"url": (self.url,), "resource": tuple(f"{key}={value}" for key, value in self.resource), **numbers}

    def with_setting(self, setting: str) -> "SpanSettings":
        """These settings with one replaced, given as `<name>=<value>`.

        Raises:
            InvalidArgument: the setting or its value is unknown.
        """
        name, _, value = setting.partition("=")
        changed: dict[str, Any]
        if name == "url" and value.startswith(("http://", "https://")):
            changed = {"url": value}
        elif name == "resource" and (pair := value.partition("="))[1] and pair[0]:
            changed = {"resource": tuple({**dict(self.resource), pair[0]: pair[2]}.items())}
        elif name in _NUMBERS and value.isdecimal() and int(value):
            changed = {name: int(value)}
        else:
            raise InvalidArgument(
                f"--trace-config {OPENTELEMETRY_MODE},{setting}: expected url=http://..., resource=<key>=<value>, "
                f"or a number above 0 for {', '.join(_NUMBERS)}"
            )
        return replace(self, **changed)


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """One request in `trace_rate` is traced, until `trace_count` are (-1: without end). A file holds `log_frequency`
    traces (0: any number). Without a file nothing is traced, except as `spans`."""

    trace_level: tuple[str, ...] = (OFF,)
    trace_rate: int = 1000
    trace_count: int = -1
    log_frequency: int = 0
    trace_file: str = ""
    spans: SpanSettings | None = None

    @property
    def enabled(self) -> bool:
        has_target = bool(self.trace_file) if self.spans is None else TIMESTAMPS in self.trace_level
        return has_target and self.has_level and self.trace_count != 0

    @property
    def has_level(self) -> bool:
        return self.trace_level != (OFF,)

    @property
    def numbers_files(self) -> bool:
        """Whether traces go into numbered files, each of `log_frequency` traces or of all until the count; otherwise
        one file has all."""
        return self.log_frequency > 0 or self.trace_count >= 0

    @property
    def records_tensors(self) -> bool:
        """Whether tensors are traced; spans hold none."""
        return TENSORS in self.trace_level and self.spans is None

    def as_v2_texts(self) -> dict[str, tuple[str, ...]]:
        """The settings as texts, by the names and in the order of Triton's trace extension."""
        texts = {"trace_level": self.trace_level}
        texts |= {"trace_rate": (str(self.trace_rate),), "trace_count": (str(self.trace_count),)}
        if self.spans is not None:
            return {**texts, "trace_mode": (OPENTELEMETRY_MODE,), **self.spans.as_v2_texts()}
        texts |= {"log_frequency": (str(self.log_frequency),), "trace_file": (self.trace_file,)}
        return {**texts, "trace_mode": ("triton",)}


@dataclass(slots=True)
class _Scope:
    """The settings of one model, or of all, and the requests counted under them."""

    values: dict[str, Any] = field(default_factory=dict)
    requests: int = 0
    traced: int = 0


class TraceControl:
    """The trace settings of the server and its models, and the sampling by them. `on_change` is called after each
    change; `open_traces` counts traced requests that have not ended.
    """

    def __init__(self, settings: TraceSettings = TraceSettings()) -> None:
        self._base = settings
        self._all = _Scope()
        self._models: dict[str, _Scope] = {}
        self.open_traces = 0
        self.samples = settings.enabled
        """Whether a new request may be sampled, by the settings of any model."""
        self.sends_spans = False
        """Whether every request has spans."""
        self.may_trace = self.samples
        """Whether a new request may leave a trace, or spans."""
        self.on_change: Callable[[], None] = lambda: None

    def send_spans(self, wanted: bool) -> None:
        """Let every request have spans, or none."""
        self.sends_spans = wanted
        self.may_trace = self.samples or wanted

    def settings(self, model: str = "") -> TraceSettings:
        """The settings that apply to a model; `trace_count` is the remaining number."""
        scope = self._models.get(model, self._all)
        settings = replace(self._base, **{**self._all.values, **scope.values})
        remaining = settings.trace_count if settings.trace_count < 0 else max(0, settings.trace_count - scope.traced)
        return replace(settings, trace_count=remaining)

    def update(self, change: TraceSettingsChange, model: str = "") -> TraceSettings:
        """Change the settings of a model, or of all; return those that apply then.

        Raises:
            InvalidArgument: a setting or its value is unknown.
            Unsupported: it cannot be changed.
        """
        if self._base.spans is not None:
            raise Unsupported(f"trace settings can not be updated in mode {OPENTELEMETRY_MODE}")
        parsed = {name: _parse_setting(name, values) for name, values in change.items()}
        values = (self._models.get(model, _Scope()) if model else self._all).values | parsed
        scope = _Scope({name: value for name, value in values.items() if value is not None})
        if not model:
            self._all = scope
        elif scope.values:
            self._models[model] = scope
        else:
            self._models.pop(model, None)
        settings = self.settings(model)
        self.samples = any(settings.enabled for settings in (self.settings(), *map(self.settings, self._models)))
        self.may_trace = self.samples or self.sends_spans
        if settings.has_level and not settings.trace_file:
            log.warning("nothing is traced: trace file name is not given (--trace-config triton,file=PATH)")
        self.on_change()
        return settings

    def sample_request(self, model: str) -> TraceSettings | None:
        """Count one more request of this model; return the settings to trace it by, if it is sampled."""
        if not self.samples:
            return None
        settings = self.settings(model)
        scope = self._models.get(model, self._all)
        if not settings.enabled:
            return None
        scope.requests += 1
        if scope.requests % settings.trace_rate:
            return None
        scope.traced += 1
        return settings


def _parse_setting(name: str, values: Sequence[str] | None) -> Any:
    if name == "trace_file":
        raise Unsupported("trace file location can not be updated through network protocol", field=name)
    if name not in (*_RANGES, "trace_level"):
        raise InvalidArgument(f"unknown trace setting '{name}'", field=name)
    if not values:
        return None
    if name == "trace_level":
        levels = {_LEVELS.get(value.upper()): value for value in values}
        if None in levels:
            raise InvalidArgument(f"Unable to parse '{name}', got: {levels[None]}", field=name)
        if OFF in levels and len(levels) > 1:
            raise InvalidArgument("Expect only one trace level 'OFF' is specified", field=name)
        return tuple(level for level in (OFF, TIMESTAMPS, TENSORS) if level in levels)
    if len(values) > 1:
        raise InvalidArgument(f"expect only 1 value for '{name}'", field=name)
    text, (low, high) = values[0], _RANGES[name]
    if not _INTEGER.fullmatch(text):
        raise InvalidArgument(f"Unable to parse '{name}', got: {text}", field=name)
    if len(text) > 20 or not low <= int(text) <= high:
        bounds = f"value is out of range [ {low}, {high} ]"
        raise InvalidArgument(f"Unable to parse '{name}', {bounds}, got: {text}", field=name)
    return int(text)


def parse_trace_config(words: Iterable[str]) -> TraceSettings:
    """The settings that the server starts with, from the values of --trace-config.

    Raises:
        InvalidArgument: a setting or value is unknown; the message names the flag.
    """
    settings = TraceSettings()
    spans = SpanSettings()
    mode = ""
    for word in words:
        name, equals, value = word.removeprefix("triton,").partition("=")
        if word.startswith(f"{OPENTELEMETRY_MODE},"):
            spans = spans.with_setting(word.removeprefix(f"{OPENTELEMETRY_MODE},"))
        elif name == "mode" and value.lower() in ("triton", OPENTELEMETRY_MODE):
            mode = value.lower()
        else:
            settings = replace(settings, **_parse_flag(word, name if equals else "", value, settings))
    return replace(settings, spans=spans) if mode == OPENTELEMETRY_MODE else settings


def _parse_flag(word: str, name: str, value: str, so_far: TraceSettings) -> dict[str, Any]:
    setting = _FLAG_SETTINGS.get(name)
    if setting is None:
        raise InvalidArgument(f"--trace-config {word}: expected mode, or a setting of {', '.join(_FLAG_SETTINGS)}")
    if setting == "trace_file":
        return {setting: value}
    # Levels that are given one by one hold together; OFF takes back those before it.
    adds = setting == "trace_level" and so_far.has_level and _LEVELS.get(value.upper()) != OFF
    try:
        return {setting: _parse_setting(setting, (*so_far.trace_level, value) if adds else (value,))}
    except CharoniaError as error:
        raise InvalidArgument(f"--trace-config {word}: {error.message}") from None
