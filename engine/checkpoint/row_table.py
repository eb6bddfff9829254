"""Tables of which a step takes single rows, such as the embeddings of tokens: as numbers, or as a file has them."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .code_forms import dequantise_codes
from .gguf_blocks import BLOCKS, decode_rows


class RowTable(NamedTuple):
    """Rows of `width` numbers of a `dtype`, in the model's memory or a mapped file."""

    rows: Tensor
    """[rows, width] numbers; or uint8 [rows, bytes], blocks of GGUF's that a step decodes."""
    width: int
    dtype: torch.dtype
    blocks: str = ""
    """The type of the blocks, one of BLOCKS; "": they are numbers."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def block_type(self) -> int:
        """The number of the type in C, where 0 stands for numbers."""
        return 1 + list(BLOCKS).index(self.blocks) if self.blocks else 0

    def gather(self, tokens: Tensor) -> Tensor:
        """The rows of `tokens` [N], numbers [N, width] in memory of their own."""
        rows = F.embedding(tokens, self.rows)
        if not self.blocks:
            return rows
        return dequantise_codes(decode_rows(self.blocks, rows), BLOCKS[self.blocks].form).to(self.dtype)
