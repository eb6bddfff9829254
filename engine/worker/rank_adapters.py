"""The adapters that a rank holds."""

from concurrent.futures import Future, ThreadPoolExecutor

from ...core.adapter import Adapter
from ...core.errors import InvalidArgument
from ...processes.host import lower_thread_priority
from ..checkpoint.adapter_files import read_adapter
from ..checkpoint.adapter_targets import AdapterTargets
from ..config import LoraConfig
from ..step_adapters import RankAdapter
from .row_states import RowStates


class RankAdapters:
    """Adapters that are read and prepared beside a rank's steps. Those of steps that are being computed live as long as
    these, whatever is unloaded."""

    def __init__(
        self, targets: AdapterTargets, limits: LoraConfig, held: dict[str, RankAdapter], rows: RowStates
    ) -> None:
        """`held`: by digest, what is loaded; `rows` read it, too."""
        self._targets = targets
        self._limits = limits
        self.held = held
        self._rows = rows
        self._thread = ThreadPoolExecutor(1, "adapters", initializer=lower_thread_priority, initargs=(19,))

    def load(self, path: str) -> Future[Adapter]:
        return self._thread.submit(self._load, path)

    def unload(self, digest: str) -> None:
        adapter = self.held.pop(digest, None)
        if adapter is not None:
            self._rows.forget_adapter(adapter)

    def close(self) -> None:
        """Load nothing more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(self, path: str) -> Adapter:
        files = read_adapter(path, self._limits)
        adapter = self.held.get(files.digest)
        if adapter is None:
            adapter = self._targets.prepare(files)
            if adapter.bytes > self._limits.max_bytes:
                message = f"{path}: {adapter.bytes} bytes in memory, more than max_lora_bytes {self._limits.max_bytes}"
                raise InvalidArgument(message, field="lora_path")
            self.held[files.digest] = adapter
        return Adapter("", path, adapter.digest, adapter.rank, adapter.bytes)
