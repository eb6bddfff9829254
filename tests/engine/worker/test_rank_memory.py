"""The memory that a rank has left for its cache, and how its steps' own is measured."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.gpu.graph_buckets import GRAPH_BYTES, GraphBuckets
from charonia.engine.gpu.graphs import StepGraphs
from charonia.engine.layers.step_context import StepContext
from charonia.engine.models.interfaces import LogitsIterator
from charonia.engine.worker import rank_memory
from charonia.engine.worker.device_step_computer import DeviceStepComputer
from charonia.engine.worker.loaded_rank import load_rank
from charonia.engine.worker.model_runner import ModelRunner
from charonia.engine.worker.rank_memory import measure_step_bytes
from charonia.engine.worker.row_states import RowStates
from charonia.engine.worker.step_computer import RowStores
from charonia.scheduler.config import SchedulerConfig


def test_a_replica_counts_what_it_took_already_into_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_memory, "available_memory", lambda: 5000)
    monkeypatch.setattr(rank_memory, "own_anonymous_memory", lambda: 300)
    cpu = torch.device("cpu")

    def left(neighbours: int, granted: int | None) -> int:
        return rank_memory.free_memory(cpu, neighbours, EngineConfig(model="", host_memory=granted, gpu_memory=1))

    assert (left(1, None), left(1, 1000), left(2, 1000)) == (5000, 700, 200)
    assert left(1, 9000) == 5000  # more was promised than there is by now


def test_on_a_gpu_it_takes_what_it_was_granted_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5000, 8000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)

    def left(granted: int | None, utilization: float | None = None) -> int:
        cache = CacheConfig(gpu_utilization=utilization)
        config = EngineConfig(model="", host_memory=1, gpu_memory=granted, cache=cache)
        return rank_memory.free_memory(torch.device("cuda:1"), 1, config)

    assert (left(None), left(1000), left(9000)) == (5000, 700, 5000)
    assert (left(None, 0.5), left(1000, 0.5), left(9000, 0.5), left(None, 1.0)) == (3700, 700, 3700, 5000)


def test_the_worst_step_is_measured_with_what_graphs_keep(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU a stand-in counts what is computed; afterwards rows and cache are as before."""
    scheduler = SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=600, max_model_len=256)
    rank = load_rank(EngineConfig(model=str(checkpoint("llama")), device="cpu", scheduler=scheduler))
    sizes: list[tuple[int, int]] = []
    compute = rank.runner.computer.decoder.compute_logits

    def watched(context: StepContext, selections: Sequence[Tensor]) -> LogitsIterator | None:
        sizes.append((context.batch.size, len(selections[0])))
        return compute(context, selections)

    def peak(device: torch.device, measured: Callable[[], object]) -> int:
        measured()
        return 1000

    monkeypatch.setattr(rank.runner.computer.decoder, "compute_logits", watched)
    monkeypatch.setattr(rank_memory, "peak_bytes", peak)
    rows = RowStates(256, 16, torch.device("cpu"), lines=3)
    computer = DeviceStepComputer(
        rank.runner.computer.decoder, rank.runner.computer.attention, rows, torch.device("cpu")
    )
    runner = ModelRunner(computer, rows)
    assert measure_step_bytes(rank.config, rank.context, rank.shape, runner, computer) == 1000
    assert sizes == [(600, 64)]
    buckets = GraphBuckets((1, 2), (256,))
    cpu = torch.device("cpu")
    computer.graphs = StepGraphs(computer.compute_static, buckets, cpu, lambda launches: launches)
    assert (
        measure_step_bytes(rank.config, rank.context, rank.shape, runner, computer)
        == 2000 + 2 * GRAPH_BYTES + 2 * 384 * 4
    )
    assert sizes[1:] == [(600, 64), (2, 2)]
    rank.close()


def test_states_of_rows_are_no_part_of_a_step_and_gone_when_memory_is_read(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache is divided after them: counted here they would be taken twice or three times. A step of all rows is
    computed, too, for it copies the state of each."""
    scheduler = SchedulerConfig(max_num_seqs=40, max_num_batched_tokens=600, max_model_len=256)
    rank = load_rank(EngineConfig(model=str(checkpoint("qwen3.5")), device="cpu", scheduler=scheduler))
    decoder, states = rank.runner.computer.decoder, rank.runner.computer.stores.states
    assert states is not None
    rows = RowStates(256, 16, torch.device("cpu"), lines=40)
    computer = DeviceStepComputer(decoder, rank.runner.computer.attention, rows, torch.device("cpu"), RowStores(states))
    counts: list[list[int]] = []
    compute = decoder.compute_logits

    def held() -> int:
        return sum(tensor.nbytes for layer in states.layers for tensor in layer)

    def watched(context: StepContext, selections: Sequence[Tensor]) -> LogitsIterator | None:
        counts.append(context.batch.counts.tolist())
        return compute(context, selections)

    def peak(device: torch.device, measured: Callable[[], object]) -> int:
        before = held()
        assert before == 40 * states.slot_bytes
        measured()
        return 1000 + held() - before

    monkeypatch.setattr(decoder, "compute_logits", watched)
    monkeypatch.setattr(rank_memory, "peak_bytes", peak)
    assert measure_step_bytes(rank.config, rank.context, rank.shape, ModelRunner(computer, rows), computer) == 1000
    assert held() == 0
    assert sum(blocks.nbytes for blocks in computer.attention.device_blocks) == 0
    assert counts == [[256, 256, 88], [1] * 40]
    rank.close()
