"""A real step taken apart."""

from pathlib import Path
from types import ModuleType

import pytest

from charonia.bench.checkpoint import write_random
from charonia.bench.peer_runner import PeerSetup
from charonia.bench.step_breakdown import PARTS, OfflineJob, Peer, _decode
from charonia.core.errors import InvalidArgument
from charonia.engine.cpu import library
from charonia.engine.models.native_decoder import NativeDecoder


@pytest.fixture(scope="module")
def tiny(making: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gap")
    write_random(directory, making.CONFIGS["qwen2"])
    return directory


def peer(checkpoint: Path) -> Peer:
    return Peer(PeerSetup(str(checkpoint), "fp32", 3, 24, 64, 1, "cpu", ""))


@pytest.mark.skipif(library.level() is None, reason="no C extension here")
def test_every_part_of_a_decode_step_is_timed(tiny: Path) -> None:
    step = _decode(peer(tiny), OfflineJob(3, 16, 6), 1)
    assert step.tokens == 3
    assert [*step.parts] == [*PARTS, "head"]
    assert all(seconds > 0 for seconds in step.parts.values())
    assert sum(step.parts.values()) <= step.whole


def test_layers_without_a_program_are_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeDecoder, "_program_for", lambda *_: None)
    with pytest.raises(InvalidArgument, match="no decode step was timed"):
        _decode(peer(tiny), OfflineJob(3, 16, 6), 1)
