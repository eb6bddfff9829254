"""`charonia calibrate`: what it is asked for, and the estimate of a device; what is measured is tested in e2e."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from charonia.cli.app import app
from charonia.core.errors import InvalidArgument
from charonia.engine.options import EngineOptions
from charonia.extras.optimizer.calibrate import _flags_of
from charonia.extras.optimizer.machine_file import MachineFile, read_machine_file
from charonia.extras.optimizer.options import SimulatedEngineOptions
from charonia.extras.optimizer.simulate import resolve_engine
from charonia.extras.optimizer.simulated_machine import StepLoad
from charonia.telemetry.roofline import read_roofline

SHAPE = str(Path(__file__).parents[3] / "examples/shapes/llama-3.1-8b")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "name a checkpoint to measure, or a server by --url"),
        (("x", "--url", "http://127.0.0.1:1"), "name a checkpoint to measure, or a server by --url"),
        (("--url", "http://127.0.0.1:1", "--roofline", "h200"), "give one"),
        (("--url", "http://127.0.0.1:1"), "nothing listens on 127.0.0.1:1"),
        (("--url", "http://192.0.2.1"), "is not this machine"),
        (("/no/where",), "/no/where"),
        (("/no/where", "--roofline", "tpu"), "--roofline knows h100, h200, and not 'tpu'"),
        (("x", "--budget", "soon"), "--budget must be a time"),
        (("x", "--model", "m"), "--model is of --url"),
        (("--url", "http://127.0.0.1:1", "--engine-alone"), "--engine-alone means nothing with --url"),
        (("x", "--read-share", "0.4"), "are of --roofline, which is not given"),
        (("--url", "http://127.0.0.1:many"), "give the server as http://host:port, not http://127.0.0.1:many"),
        ((SHAPE, "--roofline", "h200", "--quantization", "int4"), "estimates the quantizations none, int8, fp8"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_in_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    output = tmp_path / "machine.json"
    status = app(["calibrate", *arguments, "--output", str(output)], result_action="return_value")
    assert status == 1
    assert says in capsys.readouterr().err
    assert not output.exists()


def test_where_no_file_can_be_written_nothing_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for output, says in ((tmp_path / "none/machine.json", "there is no directory"), (tmp_path, "it is a directory")):
        assert app(["calibrate", "/no/where", "--output", str(output)], result_action="return_value") == 1
        assert f"cannot write {output}: {says}" in capsys.readouterr().err


def test_a_server_gets_the_options_that_were_measured() -> None:
    options = EngineOptions(max_num_seqs=4, quantization="int8", prefix_caching=False, enforce_eager=True)
    assert sorted(_flags_of(options)) == [
        "--enforce-eager",
        "--max-num-seqs=4",
        "--no-prefix-caching",
        "--quantization=int8",
    ]


def estimate(root: Path, tmp_path: Path, *arguments: str, checkpoint: Path | None = None) -> MachineFile:
    output = tmp_path / "machine.json"
    shape = str(checkpoint or root / "examples/shapes/llama-3.1-8b")
    assert app(["calibrate", shape, "--output", str(output), *arguments], result_action="return_value") == 0
    return read_machine_file(output)


def test_an_estimate_follows_from_the_limits_of_a_device(root: Path, tmp_path: Path) -> None:
    """8.03 billion parameters, of which the table of embeddings is only looked up: by hand."""
    arguments = ("--roofline", "h200", "--read-share", "0.5", "--peak-share", "0.4", "--step-ms", "0")
    found = estimate(root, tmp_path, *arguments)
    read = 2 * (8.03e9 - 128256 * 4096)
    assert found.machine.seconds(StepLoad.of_decoding(1, 0)) == pytest.approx(read / 2.4e12, rel=0.01)
    products = 2 * (8.03e9 - 2 * 128256 * 4096) * 2048 / (0.4 * 989e12)
    attention = 32 * 4 * 4096 * 2048**2 / 2 / (0.3 * 989e12)
    assert found.machine.seconds(StepLoad.of_prompt(2048)) == pytest.approx(products + attention, rel=0.02)
    assert found.block_bytes == 16 * 32 * 2 * 8 * 128 * 2
    assert found.engine.blocks * found.block_bytes == pytest.approx(0.9 * 141e9 - 2 * 8.03e9, rel=0.01)
    assert (found.engine.scheduler.ahead, found.engine.scheduler.max_model_len) == (1, 131072)
    assert "50% of reading, 40% of products" in found.origin.how
    assert found.origin.steps == 0


def test_a_cache_in_fp8_is_read_and_kept_in_about_half_the_bytes(root: Path, tmp_path: Path) -> None:
    plain, half = (estimate(root, tmp_path, "--roofline", "h100", *more) for more in ((), ("--kv-cache-dtype", "fp8")))
    assert half.block_bytes == 16 * 32 * 2 * 8 * (128 + 4)
    assert half.engine.blocks / plain.engine.blocks == pytest.approx(plain.block_bytes / half.block_bytes, rel=1e-3)
    ratio = half.machine.decode_context / plain.machine.decode_context
    assert ratio == pytest.approx(132 / 256)
    assert half.origin.precision == {"weights": "bf16", "kv_cache_dtype": "fp8"}


def test_states_have_room_beside_the_cache_and_are_read_once_a_step(
    root: Path, tmp_path: Path, making: ModuleType
) -> None:
    """Three layers of four keep a window of 3 inputs of 160 channels and 4 matrices of 16 x 24: by hand."""
    config = making.CONFIGS["qwen3.5"] | {"architectures": ["Qwen3_5ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("--roofline", "h200", "--read-share", "0.5", "--max-num-seqs", "16", "--kv-cache-bytes", "4000000")
    state_bytes = 3 * (3 * 160 * 2 + 4 * 16 * 24 * 4)
    left = 4_000_000 - 16 * state_bytes
    plain, uncached = (
        estimate(root, tmp_path, *arguments, *more, checkpoint=tmp_path) for more in ((), ("--no-prefix-caching",))
    )
    explained = read_roofline(tmp_path / "machine.json")
    states_read = explained.reading_seconds(0, 16) - explained.reading_seconds(0)
    assert states_read == pytest.approx(16 * 2 * state_bytes / 2.4e12)
    assert plain.block_bytes == 16 * 2 * 2 * 32 * 2
    assert plain.engine.prefix_caching
    assert plain.engine.snapshots == left // 4 // state_bytes
    assert plain.engine.blocks == (left - left // 4) // plain.block_bytes
    assert (uncached.engine.snapshots, uncached.engine.blocks) == (0, left // plain.block_bytes)
    states = (4 + plain.engine.snapshots) * state_bytes
    smaller = SimulatedEngineOptions(kv_cache_bytes=states + 9 * plain.block_bytes, max_num_seqs=4)
    assert resolve_engine(plain, smaller).blocks == 9
    with pytest.raises(InvalidArgument, match=f"no room for a block of 4096 bytes beside {states} bytes of states"):
        resolve_engine(plain, SimulatedEngineOptions(kv_cache_bytes=states + 99, max_num_seqs=4))
    one, eight = (plain.machine.seconds(StepLoad.of_decoding(rows, 0)) for rows in (1, 8))
    assert eight - one == pytest.approx(7 * 2 * state_bytes / 2.4e12)
    assert plain.machine.decode_context == pytest.approx(2 * 2 * 32 * 2 / 2.4e12)


def test_a_cache_may_be_named_and_one_without_room_is_refused(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = estimate(root, tmp_path, "--roofline", "h100", "--kv-cache-blocks", "99", "--ahead", "0")
    assert (found.engine.blocks, found.engine.scheduler.ahead) == (99, 0)
    shape = str(root / "examples/shapes/llama-3.1-8b")
    arguments = ["calibrate", shape, "--roofline", "h100", "--memory-share", "0.1", "--output", str(tmp_path / "x")]
    assert app(arguments, result_action="return_value") == 1
    assert "the weights leave no room" in capsys.readouterr().err
