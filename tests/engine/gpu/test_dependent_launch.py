"""Kernels that are launched while those before them end: who is, and that each waits before anything else."""

import ast
from pathlib import Path

import pytest
import torch

from charonia.engine.gpu import runtime
from tests.cuda_stand_in import StandInCuda

FOLDER = Path(runtime.__file__).parent


def taking_part() -> list[ast.FunctionDef]:
    trees = [ast.parse(file.read_text()) for file in sorted(FOLDER.glob("*.py"))]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [function for function in functions if "DEPENDENT" in {argument.arg for argument in function.args.args}]


@pytest.mark.parametrize("kernel", taking_part(), ids=lambda kernel: kernel.name)
def test_a_kernel_waits_before_anything_else(kernel: ast.FunctionDef) -> None:
    """Also before it returns: a kernel that is over before the one before it lets the next one read too early."""
    if kernel.name != "begin_dependent":
        assert ast.unparse(kernel.body[1]) == "begin_dependent(DEPENDENT)"
        assert ast.unparse(kernel.args.defaults[-1]) == "False"


@pytest.mark.parametrize(
    ("capability", "wanted", "device"), [(90, True, 1), (100, True, 0), (80, True, 0), (90, False, 0)]
)
def test_devices_that_can_are_asked_to(
    monkeypatch: pytest.MonkeyPatch, capability: int, wanted: bool, device: int
) -> None:
    stand_in = StandInCuda()
    stand_in.put_in_place(monkeypatch)
    monkeypatch.setattr(runtime, "_launches_dependently", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(capability, 10))
    monkeypatch.setattr(runtime, "capability", runtime.capability.__wrapped__)
    runtime.use_dependent_launch(wanted)
    options = {"DEPENDENT": True, "launch_pdl": True} if wanted and capability >= 90 else {}
    assert runtime.dependent_launch(torch.device("cuda", device)) == options
    assert runtime.dependent_launch(torch.device("cpu")) == {}
