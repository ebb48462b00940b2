"""Between rows laid end to end and rows padded on the right; sizes come from host integers alone.

Axes: ``B`` rows, ``T`` columns, ``M`` entries of all rows laid end to end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def pad_rows(flat_M: Tensor, lengths: Sequence[int], fill: float = 0.0) -> Tensor:
    """Cuts flat values into rows, padded on the right to the longest; gradients flow back to the flat values.

    Args:
        flat_M: (M, ...), any type; rows laid end to end.
        lengths: entries of each row; they add up to M.
        fill: value of the padding.

    Returns:
        (B, T, ...), of the type of ``flat_M``; T is the greatest length.
    """
    if not lengths:
        return flat_M.reshape(0, 0, *flat_M.shape[1:])
    return pad_sequence(list(torch.split(flat_M, list(lengths))), batch_first=True, padding_value=fill)


def row_mask(lengths: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """Marks the entries of rows padded on the right, as `pad_rows` lays them out.

    Args:
        lengths: entries of each row.
        device: where the result goes, None for the default device.

    Returns:
        (B, T) float32, 1 where a row has an entry.
    """
    lengths_B = torch.tensor(list(lengths), dtype=torch.int64, device=device)
    columns_T = torch.arange(max(lengths, default=0), device=device)
    return (columns_T < lengths_B[:, None]).float()
