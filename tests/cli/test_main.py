"""The command's first moments and its last: signals, and standard streams that nobody gave it."""

import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from charonia.cli.app import app

INTERRUPTED = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "charonia.cli.app":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
sys.meta_path.insert(0, Interrupting())
from charonia.__main__ import main
main()
"""

STUCK = """
import uvloop
from charonia.cli.serve import StopSignals

async def serve():
    with StopSignals():
        print("serving", flush=True)
        while True:
            pass

uvloop.run(serve())
"""
HANGING = """
import atexit, threading
from concurrent.futures import ThreadPoolExecutor
from charonia import __main__
from charonia.cli import app

def serve():
    atexit.register(print, "tidied up")
    ThreadPoolExecutor(1).submit(threading.Event().wait)
    return 3

app.app = serve
__main__.main()
"""


def test_ctrl_c_is_quiet_while_imports_still_go_on() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_server_starts_without_standard_streams(tmp_path: Path) -> None:
    """As far as its ports: by then its event loop has opened files of its own."""
    (tmp_path / "m.identity" / "1").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "charonia", "serve", "--model-repository", str(tmp_path)]
        command += ["--http-address=127.0.0.1", "--http-port", port]
        shell = f'exec "$@" <&- >&- 2>{tmp_path}/said'
        done = subprocess.run(["sh", "-c", shell, "sh", *command], timeout=60, check=False)
    assert done.returncode == 1
    # Before it, a line may tell of what a server left that was killed.
    assert (tmp_path / "said").read_text().splitlines()[-1].startswith(f"charonia: cannot open port {port}")


def test_output_that_finds_no_room_is_told_of_in_a_line() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "charonia", "--version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "charonia: cannot write: No space left on device\n")


def test_what_it_starts_inherits_streams_that_were_closed() -> None:
    code = "import os; from charonia.__main__ import _open_what_was_closed as go; go(); os.execlp('cat', 'cat')"
    done = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == 0


def test_the_third_signal_ends_a_server_whose_event_loop_is_stuck() -> None:
    with subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"serving\n"
        deadline = time.monotonic() + 60
        while server.poll() is None and time.monotonic() < deadline:
            server.send_signal(signal.SIGTERM)  # one that comes before the last was taken is none
            time.sleep(0.01)
        server.kill()
    assert server.returncode == -signal.SIGTERM


def test_a_thread_that_hangs_does_not_hold_up_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "tidied up\n", "")


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_a_shell_completes_commands_flags_and_choices(capsys: pytest.CaptureFixture[str]) -> None:
    assert app(["completion", "bash"]) == 0
    asked = ("charonia serve --max-num-s", "charonia serve --dtype bf", "charonia doc", "charonia check --model-rep")
    completed = "".join(
        f'COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}; _charonia; echo "${{COMPREPLY[@]}}"\n'
        for words in asked
    )
    script = capsys.readouterr().out + completed
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["--max-num-seqs", "bfloat16", "doctor", "--model-repository"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "charonia: nothing to serve: name a checkpoint, or give --model-repository"),
        (["/no/where"], "charonia: there is no directory '/no/where'"),
        (["/" + "x" * 300], "charonia: cannot read '/xxx"),
        (["--model-repository", "/no/where"], "charonia: model repository '/no/where' is not a directory"),
        (["--model-repository", "/", "--ahead", "1"], "charonia: --ahead is for a single checkpoint"),
        (["x/y", "--http-port", "70000"], "--http-port"),
        (["x/y", "--strict-readiness=maybe"], "--strict-readiness"),
    ],
)
def test_what_cannot_be_served_ends_before_a_port_is_open(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = app(["serve", *arguments])
    except SystemExit as exit:
        status = exit.code
    said = "".join(capsys.readouterr())
    assert status in (1, 2)
    assert says in said
    assert "Listening" not in said
