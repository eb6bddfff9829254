"""The count of a server's instructions."""

import shutil
from pathlib import Path

import pytest

from charonia.bench.instructions import CountedServer, app
from charonia.bench.server_process import ServerAddress
from charonia.core.errors import Unavailable


@pytest.mark.skipif(shutil.which("callgrind_control") is None, reason="valgrind is not here")
def test_a_process_that_is_not_counted_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="not detected"):
        CountedServer(ServerAddress("127.0.0.1", 1, 1, 1), tmp_path / "counts")


@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not here")
def test_the_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    app(["--doors", "completions", "binary", "unary"], result_action="return_value")
    told = capsys.readouterr().out
    for door in ("completions", "binary", "unary"):
        [line] = [line for line in told.splitlines() if line.startswith(f"{door}") and "│" not in line]
        assert int(line.rpartition(" ")[2].replace(",", "")) > 10_000
