"""The core's process: how it sizes its cache, and that it dies with its frontend."""

import os
import signal
import subprocess
import sys
import time
from math import inf
from pathlib import Path
from unittest.mock import Mock

import pytest

from charonia.core.errors import InvalidArgument
from charonia.engine.config import CacheConfig, EngineConfig, ParallelConfig, SpeculationConfig
from charonia.engine.core import process
from charonia.engine.core.cache_sizes import resolve_cache_blocks, resolve_cache_sizes
from charonia.engine.core.messages import PatientWorkWaits, Shutdown
from charonia.engine.core.process import (
    LoadProgress,
    keep_compiled_kernels,
    resolve_max_model_len,
    scheduler_config,
    start_core,
)
from charonia.engine.core.sockets import CoreSockets
from charonia.engine.worker.executor import Capacity, ProgressCallback, StepFuture
from charonia.engine.worker.fake_executor import FakeExecutor
from charonia.kvcache.layer_groups import ONE_GROUP, LayerGroups
from charonia.processes.host import Cores
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.plan import MaskSource, StepPlan

CAPACITY = Capacity(vocab_size=100, max_model_len=1024, block_bytes=1000, free_bytes=100_000)
FRONTEND = """
import asyncio, signal, sys, tempfile
from charonia.engine.client.client import EngineClient
from charonia.engine.config import EngineConfig
from charonia.engine.core.messages import AddRequest

async def main():
    client = EngineClient(EngineConfig(model="", executor="fake"))
    await client.start()
    print(client.pids[0], flush=True)
    {then}

tempfile.tempdir = sys.argv[1]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("cache", "blocks"),
    [
        (CacheConfig(memory_fraction=0.5), 50),
        (CacheConfig(memory_fraction=1.0), 100),
        (CacheConfig(bytes=7999), 7),
        (CacheConfig(blocks=3, bytes=7999), 3),
    ],
)
def test_the_cache_is_as_large_as_configured(cache: CacheConfig, blocks: int) -> None:
    assert resolve_cache_blocks(cache, CAPACITY, useful_tokens=10_000) == blocks


def test_a_gpu_is_taken_whole_unless_somebody_says_otherwise(caplog: pytest.LogCaptureFixture) -> None:
    """And half of the host's memory, which other programs use, too."""
    on_gpu = CAPACITY._replace(on_gpu=True)

    def blocks(capacity: Capacity, **settings: float) -> int:
        return resolve_cache_sizes(engine(CacheConfig(**settings), rows=40), capacity, 1024).blocks

    assert (blocks(CAPACITY), blocks(on_gpu)) == (50, 90)
    assert (blocks(CAPACITY, memory_fraction=0.2), blocks(on_gpu, memory_fraction=0.2)) == (20, 20)
    assert blocks(on_gpu, gpu_utilization=0.9) == 100  # the share is taken before: `free_memory`
    assert not caplog.records
    assert blocks(CAPACITY, gpu_utilization=0.9) == 50
    assert "gpu_memory_utilization has no effect: no GPU computes" in caplog.text
    with pytest.raises(InvalidArgument, match=r"gpu_memory_utilization 0.1 leaves 0$"):
        blocks(on_gpu._replace(free_bytes=0), gpu_utilization=0.1)


def test_a_share_of_memory_stops_at_what_is_useful() -> None:
    assert resolve_cache_blocks(CacheConfig(), CAPACITY, useful_tokens=64) == 4 * 64 // 16 + 1
    assert resolve_cache_blocks(CacheConfig(blocks=90), CAPACITY, useful_tokens=64) == 90


def test_a_cache_without_room_for_a_block_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"16 tokens takes 1000 bytes, and kv_cache_bytes is 999$") as exact:
        resolve_cache_blocks(CacheConfig(bytes=999), CAPACITY, useful_tokens=64)
    with pytest.raises(InvalidArgument, match=r"it may have kv_cache_memory_fraction 1e-05$") as share:
        resolve_cache_blocks(CacheConfig(memory_fraction=1e-5), CAPACITY, useful_tokens=64)
    assert (exact.value.field, share.value.field) == ("kv_cache_bytes", "kv_cache_memory_fraction")


STATEFUL = CAPACITY._replace(state_bytes=2_000)


def engine(cache: CacheConfig, rows: int = 4, speculation: SpeculationConfig | None = None) -> EngineConfig:
    return EngineConfig(model="", cache=cache, scheduler=SchedulerConfig(max_num_seqs=rows), speculation=speculation)


@pytest.mark.parametrize(
    ("cache", "blocks", "snapshots"),
    [
        (CacheConfig(memory_fraction=0.5), 31, 5),  # 50,000 bytes, of which the rows take 8,000
        (CacheConfig(bytes=28_000, state_fraction=0.5), 10, 5),
        (CacheConfig(blocks=30), 30, 5),
        (CacheConfig(bytes=28_000, state_fraction=0.0), 20, 0),
        (CacheConfig(bytes=28_000, prefix_caching=False), 20, 0),
    ],
)
def test_states_of_rows_come_first_and_snapshots_get_a_share(cache: CacheConfig, blocks: int, snapshots: int) -> None:
    sizes = resolve_cache_sizes(engine(cache), STATEFUL, 1024)
    assert (sizes.blocks, sizes.snapshots, sizes.prefix_caching) == (blocks, snapshots, snapshots > 0)


@pytest.mark.parametrize(
    ("cache", "blocks", "snapshots"),
    [
        (CacheConfig(bytes=28_000), 1025, 10),
        (CacheConfig(bytes=28_000, blocks=30), 30, 10),
        (CacheConfig(bytes=28_000, prefix_caching=False), 1025, 0),
        (CacheConfig(bytes=28_000, block_size=64), 257, 10),
    ],
)
def test_of_a_model_that_keeps_no_tokens_snapshots_get_all_and_blocks_are_numbers(
    cache: CacheConfig, blocks: int, snapshots: int
) -> None:
    """As many as all rows of full length have, several times; they take no memory."""
    sizes = resolve_cache_sizes(engine(cache), STATEFUL._replace(block_bytes=0), 1024)
    assert (sizes.blocks, sizes.snapshots, sizes.prefix_caching) == (blocks, snapshots, snapshots > 0)
    endless = resolve_cache_sizes(engine(cache), STATEFUL._replace(block_bytes=0), 1 << 30)
    assert endless.blocks == (cache.blocks or 1 << 20)


def test_a_model_without_states_has_all_of_the_cache_for_blocks() -> None:
    sizes = resolve_cache_sizes(engine(CacheConfig(bytes=28_000)), CAPACITY, 1024)
    assert sizes == (28, 0, 0, True, 0, 0, ONE_GROUP, 0)
    assert sizes.describe(16) == "28 blocks of 16 tokens"
    windows = CAPACITY._replace(groups=LayerGroups(1, 3, 128))
    sliding = resolve_cache_sizes(engine(CacheConfig(bytes=28_000)), windows, 1024)
    line = "28 blocks of 16 tokens and one of 4 groups of layers, 3 of which keep the last 128 tokens"
    assert sliding.describe(16) == line
    stateful = resolve_cache_sizes(engine(CacheConfig(bytes=28_000)), STATEFUL, 1024)
    assert stateful.describe(16) == "15 blocks of 16 tokens, 2 snapshots of states of 0.002 MB"


def test_more_blocks_than_rows_can_use_are_not_allocated_whatever_groups_there_are() -> None:
    for capacity in (CAPACITY, STATEFUL):
        whole, windows = (
            resolve_cache_sizes(engine(CacheConfig()), capacity._replace(free_bytes=1 << 40, groups=groups), 1024)
            for groups in (ONE_GROUP, LayerGroups(1, 3, 128))
        )
        assert windows.blocks == 4 * whole.blocks


@pytest.mark.parametrize(("cache", "states"), [(CacheConfig(bytes=60_000), 6), (CacheConfig(bytes=200_000), 12)])
def test_states_before_drafts_take_a_part_of_what_rows_leave_and_suffice_for_one_row(
    cache: CacheConfig, states: int
) -> None:
    drafts = SpeculationConfig(method="ngram", num_speculative_tokens=2)
    sizes = resolve_cache_sizes(engine(cache, speculation=drafts), STATEFUL, 1024)
    assert sizes.draft_states == states
    assert sizes.extra_states == sizes.snapshots + states
    assert sizes.describe(16).endswith(f", {states} more for drafts")
    many = SpeculationConfig(method="ngram", num_speculative_tokens=8)
    assert resolve_cache_sizes(engine(cache, speculation=many), STATEFUL, 1024).draft_states >= 9


@pytest.mark.parametrize(
    ("config", "field"),
    [
        (engine(CacheConfig(bytes=28_000), rows=14), "max_num_seqs"),
        (engine(CacheConfig(blocks=30), rows=40), "max_num_seqs"),
        (engine(CacheConfig(host_bytes=7_000)), "kv_cache_host_bytes"),
        (engine(CacheConfig(host_bytes=10_000, state_fraction=0.95)), "kv_cache_host_bytes"),
        (engine(CacheConfig(host_bytes=10_000, state_fraction=0.0)), "kv_cache_host_bytes"),
    ],
)
def test_what_has_no_room_beside_states_is_refused_by_name(config: EngineConfig, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        resolve_cache_sizes(config, STATEFUL, 1024)
    assert refused.value.field == field
    assert field in refused.value.message


@pytest.mark.parametrize(("block_bytes", "host"), [(1_000, (7, 1)), (0, (0, 5))])
def test_snapshots_get_the_same_share_of_the_hosts_memory(block_bytes: int, host: tuple[int, int]) -> None:
    """All of it where layers keep no tokens."""
    config = engine(CacheConfig(blocks=12, bytes=20_000, host_bytes=10_000))
    sizes = resolve_cache_sizes(config, STATEFUL._replace(block_bytes=block_bytes), 1024)
    assert (sizes.host_blocks, sizes.host_snapshots) == host
    assert f" snapshots of states of 0.002 MB, {host[1]} more in the host's memory" in sizes.describe(16)


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (CacheConfig(state_fraction=0.0), "state_cache_fraction is 0"),
        (CacheConfig(bytes=28_000, state_fraction=0.05), "state_cache_fraction 0.05 has no room for a state of 2000"),
        (CacheConfig(bytes=28_000), None),
        (CacheConfig(bytes=28_000, prefix_caching=False), None),
    ],
)
def test_where_no_snapshot_has_room_the_log_says_that_prefixes_are_not_cached(
    cache: CacheConfig, reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = resolve_cache_sizes(engine(cache), STATEFUL, 1024)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (reason is not None)
    assert (reason or "") in "".join(messages)
    assert sizes.prefix_caching == (reason is None and cache.prefix_caching)


def test_the_length_is_the_models_or_less() -> None:
    assert resolve_max_model_len(None, CAPACITY) == 1024
    assert resolve_max_model_len(100, CAPACITY) == 100
    with pytest.raises(InvalidArgument, match="2000"):
        resolve_max_model_len(2000, CAPACITY)


class Recording(FakeExecutor):
    """An executor that records steps."""

    def capture_usual_steps(self, progress: ProgressCallback) -> None:
        progress("graphs", 0.5)
        progress("graphs", 1.0)


@pytest.mark.parametrize("wanted", [True, False])
def test_graphs_are_captured_behind_the_first_token(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[tuple[str, float]] = []
    progress = LoadProgress(Mock(spec=CoreSockets))
    monkeypatch.setattr(progress, "report", lambda phase, fraction, detail="": reports.append((phase, fraction)))
    start_core(EngineConfig(model="", executor="fake", warm_up_graphs=wanted), Recording(), progress)
    graphs = [("graphs", 0.5), ("graphs", 1.0)] if wanted else []
    assert reports[-2 - len(graphs) :] == [("warm-up", 0.0), ("warm-up", 1.0), *graphs]


@pytest.mark.parametrize(
    ("cores", "fields", "leaves"),
    [
        (Cores(2, 2, 1, inf), {}, True),
        (Cores(4, 2, 1, inf), {}, False),  # what waits has the other half of each core
        (Cores(4, 2, 1, inf), {"threads": 4}, True),
        (Cores(2, 2, 1, inf), {"threads": 1}, False),
        (Cores(2, 2, 1, inf), {"threads": 1, "data_parallel_size": 2}, True),
        (Cores(64, 32, 1, 2.0), {}, True),  # a container's part of a large machine
        (Cores(64, 32, 1, 2.0), {"threads": 1}, False),
    ],
)
def test_steps_that_take_all_processors_leave_time(
    cores: Cores, fields: dict[str, int], leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "usable_cores", lambda: cores)
    config = EngineConfig(model="", executor="fake", **fields)
    core, _ = start_core(config, FakeExecutor(), LoadProgress(Mock(spec=CoreSockets)))
    core.inbox.accept(PatientWorkWaits(True))
    core.inbox.accept(Shutdown())
    core.run(lambda message: None)
    assert core._patient_work_waits == leaves


def test_a_gpus_steps_are_timed_when_their_graphs_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    class OnGpu(FakeExecutor):
        def load(self, progress: ProgressCallback) -> Capacity:
            return super().load(progress)._replace(on_gpu=True)

        def capture_usual_steps(self, progress: ProgressCallback) -> None:
            steps.clear()

        def execute(self, plan: StepPlan, masks: MaskSource | None = None) -> StepFuture:
            steps.append(plan.tokens)
            return super().execute(plan, masks)

    config = EngineConfig(model="", executor="fake")
    core, _ = start_core(config, OnGpu(), LoadProgress(Mock(spec=CoreSockets)))
    assert sum(steps) > 2 * min(config.scheduler.max_num_batched_tokens, CAPACITY.max_model_len // 2)
    assert core.scheduler.step_times.model is not None
    assert core.scheduler.totals.prefix_queries == 0


def test_compiled_kernels_are_kept_where_nobody_else_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # so that it is put back
    monkeypatch.delenv("TRITON_CACHE_DIR")
    kept = tmp_path / "kept"
    keep_compiled_kernels(EngineConfig(model="", cache_dir=str(kept), device="cpu"))
    assert "TRITON_CACHE_DIR" not in os.environ
    keep_compiled_kernels(EngineConfig(model="", cache_dir=str(kept)))
    assert os.environ["TRITON_CACHE_DIR"] == str(kept / "triton")
    keep_compiled_kernels(EngineConfig(model="", cache_dir=str(tmp_path / "other")))
    assert os.environ["TRITON_CACHE_DIR"] == str(kept / "triton")  # who says where has said it
    kept.chmod(0o777)
    with pytest.raises(InvalidArgument, match="nobody else may write to it"):
        keep_compiled_kernels(EngineConfig(model="", cache_dir=str(kept)))


def gone(pid: int) -> bool:
    """Dead; an orphan may stay a zombie where nobody reaps."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def until_nothing_is_left(core: int, sockets: Path) -> None:
    deadline = time.monotonic() + 60
    while not gone(core) or list(sockets.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_core_dies_with_its_frontend(tmp_path_factory: pytest.TempPathFactory, sign: signal.Signals) -> None:
    sockets, script = tmp_path_factory.mktemp("s"), tmp_path_factory.mktemp("frontend") / "frontend.py"
    script.write_text(FRONTEND.format(then="await asyncio.sleep(600)"))
    with subprocess.Popen(
        [sys.executable, script, sockets], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as frontend:
        assert frontend.stdout is not None
        core = int(frontend.stdout.readline())
        frontend.send_signal(sign)
        frontend.wait(60)
    until_nothing_is_left(core, sockets)


def test_a_frontend_that_forgets_to_close_leaves_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    sockets, script = tmp_path_factory.mktemp("s"), tmp_path_factory.mktemp("frontend") / "frontend.py"
    script.write_text(FRONTEND.format(then="return"))
    frontend = subprocess.run([sys.executable, script, sockets], capture_output=True, timeout=60, check=True)
    until_nothing_is_left(int(frontend.stdout), sockets)


@pytest.mark.parametrize(
    ("stages", "wanted", "ahead", "each"), [(1, 0, 0, None), (1, 2, 2, None), (2, 0, 1, 1), (3, 0, 2, 1), (3, 2, 2, 1)]
)
def test_every_stage_has_a_step_of_its_own(stages: int, wanted: int, ahead: int, each: int | None) -> None:
    config = EngineConfig(
        model="", parallel=ParallelConfig(pipeline=stages), scheduler=SchedulerConfig(ahead=wanted, max_num_seqs=9)
    )
    found = scheduler_config(config, 77)
    assert (found.ahead, found.in_flight_per_sequence, found.max_model_len, found.max_num_seqs) == (ahead, each, 77, 9)


def test_a_pipeline_has_no_other_number_of_steps_ahead() -> None:
    config = EngineConfig(model="", parallel=ParallelConfig(pipeline=2), scheduler=SchedulerConfig(ahead=2))
    with pytest.raises(InvalidArgument, match="ahead: 2 stages have 1 steps ahead, not 2"):
        scheduler_config(config, 77)


@pytest.mark.parametrize(
    ("config", "ahead"),
    [
        (EngineConfig(model=""), 1),
        (EngineConfig(model="", ahead_given=True), 0),
        (EngineConfig(model="", speculation=SpeculationConfig(method="ngram")), 0),
        (EngineConfig(model="", scheduler=SchedulerConfig(ahead=2)), 2),
    ],
    ids=["its own", "none is asked for", "drafts", "more are asked for"],
)
def test_a_device_that_wants_a_step_ahead_gets_it(config: EngineConfig, ahead: int) -> None:
    assert scheduler_config(config, 128, 1).ahead == ahead
    assert scheduler_config(config, 128).ahead == config.scheduler.ahead
