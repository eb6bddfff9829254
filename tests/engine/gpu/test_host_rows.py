"""Rows of a table, added on the interpreter beside torch's."""

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_are_added_once_rounded(kernels: dict[str, ModuleType], dtype: torch.dtype) -> None:
    """Of a token beyond the table the first one."""
    generator = torch.Generator().manual_seed(2)
    for count, size in ((0, 8), (3, 5), (4, 1030)):
        x, table = (torch.randn(rows, size, generator=generator).to(dtype) for rows in (count, 7))
        tokens = torch.tensor([6, 0, 9, 3][:count], dtype=torch.int32)
        right = x.double() + 2.5 * F.embedding(tokens.where(tokens < 7, 0), table.double())
        kernels["host_rows"].add_rows(x, table, tokens, 2.5)
        torch.testing.assert_close(x, right.to(dtype))
