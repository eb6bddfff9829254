"""What is known of a stored file and of a batch: as it lies on disk, and as clients see it.

https://platform.openai.com/docs/api-reference/files/object and .../batch/object. Times are whole seconds since 1970, as
clients see them.
"""

import secrets
from enum import StrEnum
from typing import Any

import msgspec

from ...core.errors import InvalidArgument

MAX_LISTED_ERRORS = 100
"""Errors of an input file that are told."""

_LEAST_SECONDS = 3600
"""The shortest time that a client may let a file live; OpenAI's."""


class FilePurpose(StrEnum):
    """Why a file is stored."""

    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of `tenant`. `made`: nanoseconds since 1970, which lists are ordered by; `filename` is the client's word
    for it, and never part of a path."""

    id: str
    tenant: str
    purpose: FilePurpose
    filename: str
    size: int
    made: int
    expires_at: int

    def view(self) -> dict[str, Any]:
        """The file object that clients see."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": self.made // 10**9,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose.value,
            "status": "processed",
            "status_details": None,
        }


class BatchStatus(StrEnum):
    """The state of a batch, in OpenAI's words."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in (BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)


class BatchError(msgspec.Struct, frozen=True):
    """Why a batch failed. `line`: of the input file, from 1 on; `param`: the member of the line that is wrong."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch, written to disk whenever its state changes."""

    id: str
    tenant: str
    tenant_weight: float
    made: int
    input_file_id: str
    endpoint: str
    completion_window: str
    expires_at: int
    output_id: str
    """The name of its file, as `error_id`, from the beginning; clients see it once the file is there."""
    error_id: str
    output_seconds: int
    """How long these files live."""
    model: str | None = None
    metadata: dict[str, str] | None = None
    status: BatchStatus = BatchStatus.VALIDATING
    ends_as: BatchStatus | None = None
    """The state that it comes to when its files are whole; None while it runs on."""
    times: dict[str, int] = {}
    """When it came into each state, by the state's name."""
    errors: list[BatchError] = []
    total: int = 0
    completed: int = 0
    """Requests that were answered well."""
    failed: int = 0
    """Requests that were answered otherwise."""
    has_output: bool = False
    has_errors: bool = False

    def view(self) -> dict[str, Any]:
        """The batch object that clients see."""
        errors = [{"code": e.code, "line": e.line, "message": e.message, "param": e.param} for e in self.errors]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": errors} if errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status.value,
            "output_file_id": self.output_id if self.has_output else None,
            "error_file_id": self.error_id if self.has_errors else None,
            "created_at": self.made // 10**9,
            **{f"{state.value}_at": self.times.get(state.value) for state in BatchStatus if state != "validating"},
            "expires_at": self.expires_at,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }


def new_id(kind: str) -> str:
    """An id that nobody can guess, and that is a safe name of a file."""
    return f"{kind}{secrets.token_hex(16)}"


def lifetime_of(anchor: object, seconds: object, most: int, field: str = "expires_after") -> int:
    """The seconds that a file lives: `most`, or those of `expires_after`.

    Raises:
        InvalidArgument: it is neither nothing nor a number of seconds from created_at on that can be granted.
    """
    if anchor is None and seconds is None:
        return most
    if anchor != "created_at":
        raise InvalidArgument(f"{field}.anchor must be created_at", field=f"{field}.anchor")
    if not isinstance(seconds, int) or isinstance(seconds, bool) or not _LEAST_SECONDS <= seconds <= most:
        message = f"{field}.seconds must be an integer from {_LEAST_SECONDS} to {most}"
        raise InvalidArgument(message, field=f"{field}.seconds")
    return seconds
