"""One throughput figure of the engine on a CUDA device, with the reference attention, beside transformers there.

    python -m charonia.bench.gpu

Whether the tokens are right is tests/gpu's business; `make gpu` runs both.
"""

import sys

import torch
from rich.console import Console

from .offline import Work, at_hand, machine, measure, show

WORK = Work(prompt=128, new=64, chunk=2048, dtype="bfloat16", device="cuda")
SEQUENCES = 32


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("no CUDA device on this machine, or a torch without CUDA")
    console = Console()
    console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    with at_hand(None, console) as checkpoint:
        figures = measure(checkpoint, WORK, [SEQUENCES], 1, console.print)
    show(console, WORK, machine(WORK), figures)


if __name__ == "__main__":
    main()
