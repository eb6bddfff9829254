"""The file of a machine."""

from pathlib import Path

import pytest

from charonia.core.errors import InvalidArgument
from charonia.extras.optimizer.machine_file import MachineFile, MachineOrigin, read_machine_file, write_machine_file
from charonia.extras.optimizer.simulated_machine import SimulatedMachine, StepSpread
from charonia.extras.optimizer.simulation import EngineShape
from charonia.scheduler.config import SchedulerConfig
from charonia.telemetry.roofline import read_roofline

FILE = MachineFile(
    origin=MachineOrigin(how="by hand", model={"hidden_size": 8}),
    machine=SimulatedMachine(products=((1, 0.01), (2, 0.02)), spread=(StepSpread(0.01, (0.9, 1.1)),)),
    engine=EngineShape(scheduler=SchedulerConfig(max_num_seqs=4, ahead=1), blocks=7),
    block_bytes=1024,
)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_machine_file(tmp_path / "machine.json", FILE)
    assert read_machine_file(tmp_path / "machine.json") == FILE
    assert [each.name for each in tmp_path.iterdir()] == ["machine.json"]


def test_explain_reads_it_too(tmp_path: Path) -> None:
    write_machine_file(tmp_path / "machine.json", FILE)
    found = read_roofline(tmp_path / "machine.json")
    assert (found.products, found.decode_context) == (FILE.machine.products, FILE.machine.decode_context)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no file of charonia calibrate"),
        ('{"origin": {"how": ""}}', "missing required field `machine`"),
        ('{"origin": {"how": 3}, "machine": {}, "engine": {}, "block_bytes": 1}', r"\$.origin.how"),
        ('{"format": "charonia-machine-1", "machine": {"spread": [1]}}', "format 'charonia-machine-1', .*: calibrate"),
        (
            '{"origin": {"how": ""}, "machine": {"spread": [[1, []]]}, "engine": ENGINE, "block_bytes": 1}',
            "length >= 1",
        ),
        (
            '{"origin": {"how": ""}, "machine": {"between": -1}, "engine": ENGINE, "block_bytes": 1}',
            r">= 0.0 - at `\$.machine.between`",
        ),
        (
            '{"origin": {"how": ""}, "machine": {"weigths": 1}, "engine": ENGINE, "block_bytes": 1}',
            "unknown field `weigths`",
        ),
        (
            '{"origin": {"how": ""}, "machine": {"heads": [[4, 1], [4, 2]]}, "engine": ENGINE, "block_bytes": 1}',
            "`heads` must ascend",
        ),
        (
            '{"origin": {"how": ""}, "machine": {}, "engine": {"scheduler": {}, "blocks": 0}, "block_bytes": 1}',
            r">= 1 - at `\$.engine.blocks`",
        ),
        (
            '{"origin": {"how": ""}, "machine": {}, "block_bytes": 1,'
            ' "engine": {"scheduler": {"max_num_seqs": 0}, "blocks": 1}}',
            "machine.json is no file of charonia calibrate: max_num_seqs 0 must be",
        ),
    ],
)
def test_another_file_is_refused_by_field(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(content.replace("ENGINE", '{"scheduler": {}, "blocks": 1}'))
    with pytest.raises(InvalidArgument, match=says):
        read_machine_file(path)


def test_a_file_that_is_nowhere_and_a_place_that_is_none_are_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"cannot read .*none.json: No such file"):
        read_machine_file(tmp_path / "none.json")
    with pytest.raises(InvalidArgument, match=r"cannot write .*none/machine.json: No such file"):
        write_machine_file(tmp_path / "none" / "machine.json", FILE)
