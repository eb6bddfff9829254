"""The flags of files and batches. Free of any server: the command line reads them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from cyclopts import Parameter
from cyclopts.validators import Number


class FileLimits(NamedTuple):
    """Bytes of one file of /v1/files, of all, and of those of one tenant; requests of a batch; seconds that a file is
    kept."""

    file_bytes: int = 200 << 20
    total_bytes: int = 10 << 30
    tenant_bytes: int = 10 << 30
    lines: int = 50_000
    seconds: int = 30 * 86_400


FILE_LIMITS = FileLimits()
"""The limits of files and batches unless flags say otherwise; those of one file and of a batch are OpenAI's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesOptions:
    """Files of clients, and batches of requests."""

    files_dir: Path | None = None
    """Directory for files and batches of /v1/files and /v1/batches, this server's alone; without it, there are none."""
    files_max_bytes: Annotated[int, Parameter(validator=Number(gte=1))] = FILE_LIMITS.file_bytes
    """Bytes of one file."""
    files_total_bytes: Annotated[int, Parameter(validator=Number(gte=1))] = FILE_LIMITS.total_bytes
    """Bytes of all files together."""
    files_tenant_bytes: Annotated[int | None, Parameter(validator=Number(gte=1))] = None
    """Bytes of all files of one tenant; without it, half of all where keys name several tenants."""
    files_max_days: Annotated[int, Parameter(validator=Number(gte=1, lte=36_500))] = FILE_LIMITS.seconds // 86_400
    """Days after which a file is removed."""
    batch_max_requests: Annotated[int, Parameter(validator=Number(gte=1, lte=10_000_000))] = FILE_LIMITS.lines
    """Requests of one batch."""
    batch_concurrency: Annotated[int, Parameter(validator=Number(gte=1, lte=65_536))] = 32
    """Requests of all batches that are under way at a time."""

    def limits(self, tenants: int) -> FileLimits:
        """The limits where keys name so many `tenants`."""
        seconds = self.files_max_days * 86_400
        total = self.files_total_bytes
        share = self.files_tenant_bytes or (total if tenants < 2 else total // 2)
        return FileLimits(self.files_max_bytes, total, share, self.batch_max_requests, seconds)
