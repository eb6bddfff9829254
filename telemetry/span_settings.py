"""What tritonserver's trace mode `opentelemetry` is told of spans: where they go, whose they are, how they leave.

Settings of `--trace-config opentelemetry,...`; knows nothing of OpenTelemetry.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..core.errors import InvalidArgument

OPENTELEMETRY_MODE = "opentelemetry"
_NUMBERS = ("bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size")


@dataclass(frozen=True, slots=True)
class SpanSettings:
    """tritonserver's defaults. `resource`: attributes of whoever makes them. Spans leave every `bsp_schedule_delay`
    milliseconds, or when `bsp_max_export_batch_size` are there; `bsp_max_queue_size` wait at most."""

    url: str = "http://localhost:4318/v1/traces"
    resource: tuple[tuple[str, str], ...] = (("service.name", "triton-inference-server"),)
    bsp_max_queue_size: int = 2048
    bsp_schedule_delay: int = 5000
    bsp_max_export_batch_size: int = 512

    def as_v2_texts(self) -> Mapping[str, tuple[str, ...]]:
        """As v2's trace settings say them."""
        numbers = {name: (str(getattr(self, name)),) for name in _NUMBERS}
        return {"url": (self.url,), "resource": tuple(f"{key}={value}" for key, value in self.resource), **numbers}

    def with_setting(self, setting: str) -> "SpanSettings":
        """With one more `<name>=<value>`.

        Raises:
            InvalidArgument: that is none.
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

    @property
    def batch_size(self) -> int:
        """Spans that leave together at most: no more than may wait."""
        return min(self.bsp_max_export_batch_size, self.bsp_max_queue_size)
