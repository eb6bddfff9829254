"""One throughput figure of the engine on a CUDA device, with the reference attention, beside transformers there.

    python -m charonia.bench.gpu

Whether the tokens are right is tests/gpu's business; `make gpu` runs both.
"""

import sys

import torch
from rich.console import Console

from .offline import OfflineOptions, compare, prepare_checkpoint, show

WORK = OfflineOptions(sequences=(32,), precisions=("bf16",), chunk=2048, device="cuda", repeats=2)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("no CUDA device on this machine, or a torch without CUDA")
    console = Console()
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with prepare_checkpoint(None, "qwen2.5-0.5b", None, console.print) as (checkpoint, folder):
        show(console, compare(checkpoint, folder, WORK, ["transformers"], console.print))


if __name__ == "__main__":
    main()
