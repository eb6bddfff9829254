"""The adapters that a rank holds: read and prepared beside its steps, and found by their digests."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from ...core.adapter import Adapter
from ...core.errors import InvalidArgument
from ...processes.host import lower_thread_priority
from ..checkpoint.adapter_files import read_adapter
from ..checkpoint.adapter_targets import AdapterTargets
from ..config import LoraConfig
from ..cpu.lora import RankAdapter


class RankAdapters(Mapping[str, RankAdapter]):
    """Adapters by digest. Those of steps that are being computed live as long as these, whatever is unloaded."""

    def __init__(self, targets: AdapterTargets, limits: LoraConfig) -> None:
        self._targets, self._limits = targets, limits
        self._held: dict[str, RankAdapter] = {}
        self._thread = ThreadPoolExecutor(1, "adapters", initializer=lower_thread_priority)

    def __getitem__(self, digest: str) -> RankAdapter:
        return self._held[digest]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def load(self, path: str) -> Future[Adapter]:
        """See `Executor.load_adapter`."""
        return self._thread.submit(self._load, path)

    def unload(self, digest: str) -> None:
        self._held.pop(digest, None)

    def close(self) -> None:
        """Load nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(self, path: str) -> Adapter:
        files = read_adapter(path, self._limits)
        found = self._held.get(files.digest)
        if found is None:
            found = self._targets.prepare(files)
            if found.bytes > self._limits.max_bytes:
                message = f"{path}: {found.bytes} bytes in memory, more than max_lora_bytes {self._limits.max_bytes}"
                raise InvalidArgument(message, field="lora_path")
            self._held[files.digest] = found
        return Adapter("", path, found.digest, found.rank, found.bytes)
