"""A tower's process leaves out what it does not use, and nothing else is different."""

import subprocess
import sys
from pathlib import Path

TOWER = """
import sys
from pathlib import Path

import numpy as np
import torch

from charonia.classic_backends.tower.tower_files import read_tower_files
from charonia.classic_backends.tower.tower import Tower

disable, available = torch.compiler.disable, torch.distributed.is_available()
tower = Tower(read_tower_files(Path(sys.argv[1]), "auto"), "cpu", together=False)
[medium] = tower.encode([{"pixel_values": np.ones((1, 3, 48, 48), np.float32)}])
assert medium.rows.shape == (36, 192)
for name in ("torch._dynamo", "torch.distributed.tensor", "scipy.optimize", "triton"):
    assert name not in sys.modules, name
assert torch.compiler.disable is disable
assert torch.distributed.is_available() == available
from transformers import masking_utils

with masking_utils.TransformGetItemToIndex():
    pass
import scipy.optimize
assert torch._dynamo.disable is sys.modules["torch._dynamo"].disable
assert hasattr(sys.modules["torch._dynamo"], "optimize")
"""


def test_a_tower_s_process_imports_no_compiler(root: Path) -> None:
    """Until something asks for it, which then has it."""
    command = [sys.executable, "-c", TOWER, str(root / "examples/model_repository/viewer/1")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
