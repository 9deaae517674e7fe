"""The matrices of gated LoRAs next to the projection that they change.

D width, E output width (of B: those of all adapters), r rank, P parts of a fused projection, L adapters, X
ranks of all parts and adapters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from idlm.kernels.gated_lora import Gate, GatedLora, HostGroups


class LowRank(nn.Module):
    """Gated LoRA of a fused projection, with an A and a B per part of each adapter (one for each of
    `scalings`), zero for a part without adapter. The projection's weight is stored before the A, so that one
    product computes both; where no kernel runs A has MASK rows alone, and a product of its own."""

    def __init__(
        self,
        sizes: tuple[int, ...],
        weight_ED: Tensor,
        bias_E: Tensor | None,
        *,
        rank: int,
        scalings: tuple[float, ...],
    ) -> None:
        super().__init__()
        num_outputs, width = weight_ED.shape
        self.sizes, self.num_adapters = sizes, len(scalings)
        a_XD = weight_ED.new_zeros(len(scalings) * len(sizes) * rank, width)
        self.stacked = nn.Parameter(torch.cat((weight_ED.data, a_XD)), requires_grad=False)
        weight_ED.data = self.stacked.data[:num_outputs]
        self.bias = None if bias_E is None else torch.cat((bias_E, bias_E.new_zeros(len(a_XD))))
        self.b_Er = nn.Parameter(a_XD.new_zeros(len(scalings) * sum(sizes), rank), requires_grad=False)
        scaling_L = torch.tensor(scalings, dtype=torch.float64, device=weight_ED.device)
        self.scaling: float | Tensor = scaling_L if len(scalings) > 1 else scalings[0]

    def matrices(self, number: int, rank: int) -> tuple[Tensor, Tensor]:
        """Views of an adapter's A of all parts [P, r, D] and its B [E, r]; what is above its rank is 0."""
        b_LEr = self.b_Er.data.unflatten(0, (self.num_adapters, -1))
        a_XD = self.stacked.data[b_LEr.shape[1] :]
        a_LPrD = a_XD.unflatten(0, (self.num_adapters, len(self.sizes), -1))
        return a_LPrD[number, :, :rank], b_LEr[number, :, :rank]

    def gated(self, gate: Gate) -> GatedLora:
        is_apart = isinstance(gate, HostGroups) and isinstance(self.stacked, Tensor)
        a_XD = self.stacked[len(self.b_Er) // self.num_adapters :] if is_apart else None
        return GatedLora(a_XD=a_XD, b_Er=self.b_Er, gate=gate, sizes=self.sizes, scaling=self.scaling)
