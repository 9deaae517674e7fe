"""Linear layers that read the same input, computed as one product: gate and up.

The first of them to be called multiplies by the weights of all, one below the other, and the others take
their parts. Weights stay where they are, under their names: to put them together costs little compared with a
product with the rows of a micro-batch. The gradient of the input becomes one product too, summed in float32,
where parts would be rounded and added.

Not queries, keys and values: the values of the backward pass would hold the whole product, and to write three
gradients side by side took longer on an H100 than three products."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from idlm.train.model.gated_lora import AdaptedLinear

GROUPS = (("gate_proj", "up_proj"),)


class SharedInput:
    """Computes `layers`, all plain or all adapted, each with a bias or none of them."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers
        self.x: Tensor | None = None
        self.parts: list[Tensor] = []
        self.num_left = 0

    def output(self, x: Tensor, index: int) -> Tensor:
        """What the layer at `index` makes of `x`."""
        if self.x is not x:
            self.x, self.parts, self.num_left = x, self._outputs(x), len(self.layers)
        part = self.parts[index]
        self.num_left -= 1
        if self.num_left == 0:
            self.x, self.parts = None, []
        return part

    def _outputs(self, x: Tensor) -> list[Tensor]:
        layers = self.layers
        biases = [layer.bias for layer in layers if layer.bias is not None]
        bias = torch.cat(biases) if biases else None
        together = functional.linear(x, torch.cat([layer.weight for layer in layers]), bias)
        bases = together.split([layer.out_features for layer in layers], dim=-1)
        if not isinstance(layers[0], AdaptedLinear) or not layers[0].gate.is_open:
            return list(bases)
        low = layers[0].reduced(x, torch.cat([layer.lora_A for layer in layers]))
        lows = low.split([len(layer.lora_A) for layer in layers], dim=-1)
        return [layer.adapted(*both) for layer, *both in zip(layers, bases, lows, strict=True)]


class SharedLinear(nn.Linear):
    """A linear layer of a group."""

    shared: SharedInput
    index: int

    def forward(self, input: Tensor) -> Tensor:
        return self.shared.output(input, self.index)


class SharedAdaptedLinear(AdaptedLinear):
    """An adapted layer of a group."""

    shared: SharedInput
    index: int

    def forward(self, x: Tensor) -> Tensor:
        return self.shared.output(x, self.index)


CLASSES: dict[type, type] = {nn.Linear: SharedLinear, AdaptedLinear: SharedAdaptedLinear}


def share_inputs(layers: nn.ModuleList) -> int:
    """Compute layers of one input together in all decoder `layers`; returns how many groups there are.
    Weights must be whole: not under ZeRO-3."""
    num_groups, group = 0, list[Any]()
    for parent in layers.modules():
        for group in ([getattr(parent, name, None) for name in names] for names in GROUPS):
            if not all(type(one) in CLASSES for one in group):
                continue
            if len({(type(one), one.in_features, one.bias is None) for one in group}) > 1:
                continue
            shared = SharedInput(group)
            for index, layer in enumerate(group):
                layer.__class__ = CLASSES[type(layer)]
                layer.shared, layer.index = shared, index
            num_groups += 1
    return num_groups
