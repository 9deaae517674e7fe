"""Keys and values on the device: one store per kind of KV policy, chosen by `KV_STORES`.

Shapes: S physical slots, K KV heads, H head dim, R rows of a pass, N query heads, C pages to copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from idlm.infer.state.device import to_device
from idlm.infer.state.kv_policy import KVKind
from idlm.kernels.paged_attention import Plan, paged_attention

MAX_PAGES_PER_COPY = 32
"""Bounds the temporary memory of copies."""


class KVCache:
    """Keys and values [S, K, H] of every layer, in physical slots page * page_size + offset.

    `shape`: layers of the model, S, K, H. `scales` [2, layers, K]: keys and values are divided by them when
    they are stored and multiplied by them when they are read; None is 1.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        scales: Tensor | None = None,
    ) -> None:
        self.scales = scales
        shape = (self.num_buffers(shape[0]), *shape[1:])
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @staticmethod
    def num_buffers(num_layers: int) -> int:
        """Key buffers (and as many value buffers) that `num_layers` layers need."""
        return num_layers

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values [S, K, H] of a layer."""
        return self.keys[number], self.values[number]

    def layer_scales(self, number: int) -> tuple[Tensor | None, Tensor | None]:
        """Scales [K] of a layer's keys and values; None is 1."""
        return (None, None) if self.scales is None else (self.scales[0, number], self.scales[1, number])

    def attend(self, number: int, q_RNH: Tensor, plan: Plan, *, scale: float) -> Tensor:
        """Attention output [R, N, H] of the rows of `plan` over what the layer holds."""
        keys, values = self.layer(number)
        k_scale_K, v_scale_K = self.layer_scales(number)
        return paged_attention(
            q_RNH, keys, values, plan, scale=scale, k_scale_K=k_scale_K, v_scale_K=v_scale_K
        )

    def copy_pages(self, copies: Sequence[tuple[int, int]], page_size: int) -> None:
        """Copy pages (from, to) of all layers, in order. No page is read after it was written."""
        for start in range(0, len(copies), MAX_PAGES_PER_COPY):
            part = copies[start : start + MAX_PAGES_PER_COPY]
            from_C, to_C = to_device(part, self.keys.device).unbind(dim=1)
            for slots in (self.keys, self.values):
                # As bytes: not every device can index eight-bit floats.
                slots = slots.view(torch.uint8) if slots.itemsize == 1 else slots
                pages = slots.view(slots.shape[0], -1, page_size, *slots.shape[2:])
                pages[:, to_C] = pages[:, from_C]


class CanvasCache(KVCache):
    """One key and one value buffer that all layers share, for passes that compute all KV anew.

    Each layer stores the keys and values of all rows before any row attends, and nothing reads them after
    the layer: the memory of one layer is enough.
    """

    @staticmethod
    def num_buffers(num_layers: int) -> int:
        """One, whatever the number of layers."""
        return 1

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """The shared keys and values [S, K, H]."""
        return self.keys[0], self.values[0]


KV_STORES: Mapping[KVKind, type[KVCache]] = {"append": KVCache, "block": KVCache, "none": CanvasCache}
"""The store by `KVWritePolicy.kind`."""
