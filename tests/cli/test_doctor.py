"""`charonia doctor` on this machine, and on made-up ones."""

import json
import os
import resource
import socket
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from charonia.cli import doctor
from charonia.cli.app import app
from charonia.cli.doctor import Finding, Verdict, examine_machine
from charonia.engine.gpu import runtime
from charonia.telemetry.roofline import MACHINE_FORMAT

FILES = {
    "proc/meminfo": "MemAvailable: 524288 kB\n",
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/cpu.max": "50000 100000",
    "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
    "sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet",
}


SETTINGS = {
    "CHARONIA_MAX_NUM_SEQS": "8",
    "CHARONIA_API_KEY": "a:secret",
    "CHARONIA_HTTP_RESTRICTED_API": "health:x-key=hidden",
    "CHARONIA_API_KEYS": "b:other",
    "CHARONIA_HTTP_PROT": "1",
}


def found(root: Path = Path("/")) -> dict[str, Finding]:
    return {finding.subject: finding for finding in examine_machine(root)}


def test_a_poor_machine_is_told_what_to_mend(tmp_path: Path) -> None:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    findings = found(tmp_path)
    poor = ("cores", "memory", "huge pages", "clock", "shared memory")
    assert [findings[subject].verdict for subject in poor] == [Verdict.SLOW] * len(poor)
    assert all(findings[subject].mend for subject in poor)
    assert "a quota of 0.5" in findings["cores"].text
    assert findings["memory"].text == "512.0 MiB free"
    assert findings["huge pages"].text == "never"


def test_gpus_want_torch_s_build_for_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "dev" / "shm").mkdir(parents=True)
    (tmp_path / "dev" / "nvidia0").touch()
    monkeypatch.setattr(doctor, "torch_has_cuda", lambda: False)
    assert (found(tmp_path)["GPUs"].verdict, found(tmp_path)["GPUs"].text[0]) == (Verdict.SLOW, "1")
    monkeypatch.setattr(doctor, "torch_has_cuda", lambda: True)
    assert found(tmp_path)["GPUs"].verdict is Verdict.GOOD


def test_fp8_takes_a_gpu_that_converts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "dev" / "shm").mkdir(parents=True)
    for number in range(2):
        (tmp_path / f"dev/nvidia{number}").touch()
    monkeypatch.setattr(doctor, "torch_has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(runtime, "capability", lambda device: (80, 89)[device.index])
    told = "2, and torch is built for CUDA; compute capability 8.0, 8.9: 1 of them can do fp8, which takes 8.9"
    assert found(tmp_path)["GPUs"].text == told


def test_a_gpu_without_recorded_steps_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "dev" / "shm").mkdir(parents=True)
    (tmp_path / "dev" / "nvidia0").touch()
    monkeypatch.setattr(doctor, "torch_has_cuda", lambda: True)
    monkeypatch.setenv("CHARONIA_ENFORCE_EAGER", "true")
    eager = found(tmp_path)["GPUs"]
    assert (eager.verdict, "--enforce-eager" in eager.text) == (Verdict.SLOW, True)
    monkeypatch.setenv("CHARONIA_KERNELS", "none")
    alone = found(tmp_path)["GPUs"]
    assert (alone.verdict, "torch alone" in alone.text, "[gpu]" in alone.mend) == (Verdict.SLOW, True, True)


@pytest.mark.parametrize(
    ("processor", "verdict", "text"),
    [
        ("NVIDIA H200", Verdict.GOOD, "demo's was measured on NVIDIA H200"),
        ("", Verdict.GOOD, "demo's was measured on a server over HTTP"),
        ("another", Verdict.SLOW, "demo's was measured on another"),
    ],
)
def test_machine_files_are_of_what_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processor: str, verdict: Verdict, text: str
) -> None:
    file = tmp_path / "machine.json"
    file.write_text(json.dumps({"format": MACHINE_FORMAT, "origin": {"how": "measured", "processor": processor}}))
    monkeypatch.setattr(runtime, "gpu_names", lambda: ["NVIDIA H200"])
    monkeypatch.setenv("CHARONIA_MACHINE", f"demo={file}")
    finding = found()["machine files"]
    assert (finding.verdict, finding.text) == (verdict, text)
    file.write_text("{}")
    assert found()["machine files"].verdict is Verdict.WRONG


def test_a_port_that_is_taken_is_named_with_its_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("CHARONIA_HOST", "127.0.0.1")
        monkeypatch.setenv("CHARONIA_HTTP_PORT", str(port))
        finding = found()[f"port {port}"]
    assert finding.verdict is Verdict.SLOW
    assert "--http-port" in finding.mend
    assert os.strerror(98) in finding.text


def test_few_open_files_and_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    from charonia.engine.cpu import library

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    monkeypatch.setattr(library, "level", lambda: None)
    findings = found()
    assert findings["open files"].text == "at most 4,096"
    assert "65536" in findings["open files"].mend
    assert findings["kernels"].verdict is Verdict.SLOW
    assert library.BUILD_COMMAND.removeprefix("python") in findings["kernels"].mend
    assert sys.executable in findings["kernels"].mend


def test_the_command_tells_everything_and_a_server_without_torch_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert app(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "\nkernels       " in said
    assert "extras        good: " in said
    wrong = Finding("kernels", Verdict.WRONG, "torch cannot be imported", "pip install torch")
    monkeypatch.setattr(doctor, "examine_machine", lambda config: [wrong])
    assert app(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == [
        {"subject": "kernels", "verdict": "wrong", "text": "torch cannot be imported", "mend": "pip install torch"}
    ]


def test_without_torch_a_server_has_tensors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    [kernels] = [finding for finding in examine_machine() if finding.subject == "kernels"]
    assert kernels.verdict is Verdict.GOOD
    assert kernels.text.startswith("none: without torch tensors are served alone (pip install '")


def test_settings_are_told_with_where_they_come_from_and_without_secrets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("host: 127.0.0.1\ngrpc-port: 0\n")
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    settings, stray = (finding for finding in examine_machine(config=file) if finding.subject == "settings")
    assert settings.verdict is Verdict.GOOD
    for part in ("--max-num-seqs 8 (CHARONIA_MAX_NUM_SEQS)", f"--grpc-port 0 ({file}: grpc-port)", "--api-key ... ("):
        assert part in settings.text
    assert not any(hidden in settings.text for hidden in ("secret", "hidden", "other"))
    assert (stray.verdict, stray.text) == (
        Verdict.SLOW,
        "CHARONIA_HTTP_PROT sets no flag; did you mean '--http-port'?",
    )
    file.write_text("max-num-seqs: many\n")
    monkeypatch.delenv("CHARONIA_MAX_NUM_SEQS")
    assert app(["doctor", "--config", str(file)]) == 1
    assert "settings      wrong: " in capsys.readouterr().out


@pytest.mark.parametrize(("origin", "named"), [("{root}", "'{root}[NAME]'"), ("{root}/gone", "'.[NAME]'")])
def test_extras_are_installed_from_where_the_package_came_from(
    origin: str, named: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = msgspec.json.encode({"url": f"file://{origin.format(root=root)}", "dir_info": {}}).decode()
    monkeypatch.setattr(doctor, "distribution", lambda name: SimpleNamespace(read_text=lambda file: url))
    monkeypatch.setattr(doctor, "_is_installed", lambda package: package != "s3fs")
    assert f"without s3 (pip install {named.format(root=root)})" in found()["extras"].text
