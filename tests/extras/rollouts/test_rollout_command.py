"""`charonia rollout` without a server; with one see tests/e2e."""

import pytest

from charonia.cli.app import app
from charonia.core.errors import InvalidArgument
from charonia.extras.rollouts.rollout_command import rollout_plan

NOBODY = "--url", "http://127.0.0.1:9"


def test_flags_become_a_plan() -> None:
    assert rollout_plan("m:2", "1, 50,100", "2.5m", 10, "p99 < 2x") == {
        "to": "m:2",
        "steps": [1, 50, 100],
        "every": 150,
        "min_requests": 10,
        "guard": "p99 < 2x",
    }
    assert [rollout_plan("2", "100", every, 1, "")["every"] for every in ("90", "30s", "1h", "1d")] == [
        90,
        30,
        3600,
        86400,
    ]
    with pytest.raises(InvalidArgument, match="--every must be a duration"):
        rollout_plan("2", "100", "5 fortnights", 1, "")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "nothing to do: say one of --to VERSION, --status and --abort"),
        (["--to", "2", "--abort"], "nothing to do: say one of"),
        (["--to", "2", "--steps", "1,x"], "--steps must be per cents apart by commas, such as 1,5,25,100, got '1,x'"),
        (["--to", "2", *NOBODY], "http://127.0.0.1:9/v2/routes/r/rollout: "),
        (["--status", "--url", "x:1"], "--url must be http://HOST:PORT, got 'x:1'"),
        (["--status", *NOBODY, "--header", "x"], "--header must be NAME: VALUE, got 'x'"),
    ],
)
def test_what_cannot_be_done_is_told(capsys: pytest.CaptureFixture[str], arguments: list[str], error: str) -> None:
    assert app(["rollout", "r", *arguments]) == 1
    assert error in capsys.readouterr().err
