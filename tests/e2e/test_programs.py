"""Programs that embed the server: whatever ends them, no process of theirs is left."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from charonia.bench.load.fake_model import write_words
from tests.waiting import TIMEOUT

PROGRAM = """if True:
    import os, signal, sys, threading
    import charonia

    def main():
        fake = {"executor": "fake", "fake_vocab_size": 1024, "fake_max_model_len": 200_000, "fake_step_seconds": 0.01}
        llm = charonia.LLM(sys.argv[1], **fake)
        pids = llm.server.look(lambda gateway: gateway.registry.find_loaded("words").model.client.pids)
        assert not {"torch", "fastapi"} & {*sys.modules}, "the program has what it does not need"
        print(*pids, flush=True)
        long = charonia.SamplingParams(max_tokens=100_000, ignore_eos=True)
        match sys.argv[2]:
            case "over":
                llm.generate("a")
            case "streaming":
                stream = llm.stream("a")
                print(next(stream).outputs[0].text)
            case "raise":
                raise ValueError("enough")
            case "exit":
                threading.Thread(target=lambda: llm.generate("a", long), daemon=True).start()
                next(llm.stream("a", long))
                sys.exit(3)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "forked":
                if not os.fork():
                    try:
                        llm.generate("a")
                    except charonia.Unavailable as error:
                        print(error, flush=True)
                        sys.exit()
                os.wait()
                print(llm.generate([7], charonia.SamplingParams(max_tokens=1))[0].outputs[0].token_ids)
            case "waits":
                llm.generate("a", long)

    main()
"""
"""It has no `if __name__ == "__main__"`, which spawned processes would need if they imported it."""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "words"
    write_words(directory)
    return directory


def start(words: Path, ending: str) -> "subprocess.Popen[str]":
    program = words.parent / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(words), ending]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, process_group=0)


def end(program: "subprocess.Popen[str]", first_line: str = "") -> tuple[int, str, str]:
    """Its status, and what it wrote; its engine is gone."""
    assert program.stdout is not None
    [pid] = map(int, (first_line or program.stdout.readline()).split())
    out, err = program.communicate(timeout=TIMEOUT)
    deadline = time.monotonic() + TIMEOUT
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, "the engine is still there"
        time.sleep(0.01)
    return program.returncode, out, err


def test_a_program_that_is_over(words: Path) -> None:
    status, out, err = end(start(words, "over"))
    assert (status, out, err) == (0, "", "")


@pytest.mark.proof
def test_a_program_that_raises(words: Path) -> None:
    status, _, err = end(start(words, "raise"))
    assert status == 1
    assert err.endswith("ValueError: enough\n")
    assert err.count("Traceback") == 1


def test_a_program_that_is_interrupted(words: Path) -> None:
    """By Ctrl-C, which all processes of its group get, while it waits for an answer."""
    program = start(words, "waits")
    assert program.stdout is not None
    line = program.stdout.readline()
    time.sleep(0.1)
    os.killpg(program.pid, signal.SIGINT)
    status, _, err = end(program, line)
    assert status == -signal.SIGINT
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert err.count("Traceback") == 1


@pytest.mark.proof
@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        ("streaming", 0, ""),
        ("exit", 3, "Server exiting"),
        ("killed", -signal.SIGKILL, ""),
        ("forked", 0, "the server is another process's: a forked process has to start its own\n[8]\n"),
    ],
)
def test_other_ends_of_a_program(words: Path, ending: str, status: int, said: str) -> None:
    ended, out, err = end(start(words, ending))
    assert ended == status
    assert said in out + err
    assert err == "" or ending == "exit"
