"""A decoder that attends to an encoder's output, on the path of a GPU, interpreted."""

from pathlib import Path

import pytest

from charonia.engine.attention.triton_attention import TritonAttention
from charonia.engine.worker.device_step_computer import DeviceStepComputer
from tests.engine.models import test_seq2seq
from tests.engine.models.test_equality import Setting


@pytest.mark.proof
@pytest.mark.parametrize("family", ["bart", "m2m_100"])
def test_texts_are_those_of_transformers(interpreted: None, family: str, tmp_path: Path) -> None:
    own = test_seq2seq.written(family, tmp_path)
    own = own._replace(sources=own.sources[:2], prompts=own.prompts[:2])
    bench = test_seq2seq.WrittenBench(own.directory, "triton")
    bench.written = own
    rank = bench.executor.rank
    assert isinstance(rank.runner.computer.attention, TritonAttention)
    computer = rank.runner.computer
    attention = computer.attention, rank.rows, rank.context.device, computer.stores
    rank.runner.computer = DeviceStepComputer(computer.decoder, *attention)
    outcome, _ = bench.run(Setting(chunk=29), asked=own.prompts)
    bench.executor.close()
    for number in range(2):
        assert outcome.tokens[number] == test_seq2seq.chosen(own, number, outcome.tokens[number])
