"""FLOPs of a training step, counted from the rows that are fed.

Products only, 2 FLOPs per multiply-add. What costs time but trains nothing is left out of the count: padding,
recomputed activations, the extra passes of a balanced loss, clean rows through the head where their weight is
0. So MFU by this count is low rather than flattering."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from idlm.train.distributed.deepspeed import whole_shape
from idlm.train.model.gated_lora import AdaptedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PRODUCT = 2
"""FLOPs per weight and row of a product, of its gradient of the input, and of that of the weight."""
PAIR_FORWARD, PAIR_BACKWARD = 4, 10
"""FLOPs per visible pair and element of a query: two products forward; backward four, and that of queries and
keys once more, because the scores are not saved."""
PEAK_BF16 = {"B200": 2250, "H200": 989, "GH200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989}
PEAK_BF16 |= {"H800": 989, "A100": 312, "A800": 312, "L40S": 362}
"""Dense bf16 TFLOP/s of the data sheets; the first name that a device's name contains."""


class TokenCounts(NamedTuple):
    """Rows, visible (query, key) pairs and rows with a target, by half, padding left out."""

    clean_rows: float = 0
    noisy_rows: float = 0
    clean_pairs: float = 0
    noisy_pairs: float = 0
    clean_targets: float = 0
    noisy_targets: float = 0

    @property
    def rows(self) -> float:
        return self.clean_rows + self.noisy_rows

    @property
    def document_tokens(self) -> float:
        """Tokens of the documents: an objective without clean rows feeds each as one noisy row."""
        return self.clean_rows or self.noisy_rows

    @property
    def pairs(self) -> float:
        return self.clean_pairs + self.noisy_pairs


class Passes(NamedTuple):
    """How many rows go through the products of `layers`, `head` and `adapter`; a gradient of the input or of
    the weight counts as once more. `pairs`: FLOPs of attention per element of a query."""

    layers: float = 0
    head: float = 0
    adapter: float = 0
    pairs: float = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """Multiply-adds of one row: `layers` in the linear layers, `head` in the output head, `adapter` in a
    LoRA, and under the same names in `ends` the elements that go into and come out of these products;
    `queries`: elements of a query vector, summed over layers, `head_dim`: of one head. `is_frozen`: an
    adapter trains, `is_gated`: which changes noisy rows alone."""

    layers: int
    head: int
    queries: int
    head_dim: int
    num_layers: int
    ends: Passes
    adapter: int = 0
    is_frozen: bool = False
    is_gated: bool = False

    def products(self, passes: Passes) -> float:
        adds = self.layers * passes.layers + self.head * passes.head + self.adapter * passes.adapter
        return PRODUCT * adds

    def flops(self, passes: Passes) -> float:
        return self.products(passes) + self.queries * passes.pairs

    def moved(self, passes: Passes) -> float:
        """Elements that go into and come out of the products."""
        ends = self.ends
        return ends.layers * passes.layers + ends.head * passes.head + ends.adapter * passes.adapter


def work_of(model: PreTrainedModel) -> ModelWork | None:
    """The multiply-adds per row of a transformers model, also on the meta device.

    None where weights other than linear layers do, as in mixtures of experts and in GPT-2, or where the heads
    are unknown: no count is better than a wrong one."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    sizes = ("hidden_size", "num_attention_heads", "num_hidden_layers")
    head_dim = head_dim_of(config)
    if not isinstance(head, nn.Linear) or not all(hasattr(config, name) for name in sizes) or not head_dim:
        return None
    layers, adapter, layer_ends, adapter_ends, is_gated = 0, 0, 0, 0, False
    for module in model.modules():
        if isinstance(module, nn.Linear):
            ends = module.in_features + module.out_features
            if module is not head:
                layers += module.in_features * module.out_features
                layer_ends += ends
            if isinstance(module, AdaptedLinear):
                rank = whole_shape(module.lora_A)[0]
                adapter += rank * ends
                adapter_ends += ends + 2 * rank
                is_gated = module.gate.is_gated
        elif isinstance(module, nn.Embedding):
            continue
        elif any(len(whole_shape(value)) > 1 for value in module.parameters(recurse=False)):
            return None
    return ModelWork(
        layers=layers,
        head=head.in_features * head.out_features,
        queries=config.num_hidden_layers * config.num_attention_heads * head_dim,
        head_dim=head_dim,
        num_layers=config.num_hidden_layers,
        ends=Passes(layer_ends, head.in_features + head.out_features, adapter_ends),
        adapter=adapter,
        is_frozen=adapter > 0,
        is_gated=is_gated,
    )


def head_dim_of(config: Any) -> int | None:
    """Elements of a query head; None where layers differ in it."""
    try:
        head_dim: int | None = getattr(config, "head_dim", None)
        return head_dim or config.hidden_size // config.num_attention_heads
    # So transformers answers for a value that layers have of their own.
    except (AttributeError, RuntimeError, TypeError):
        return None


def train_flops(work: ModelWork, fed: TokenCounts, *, trains_clean: bool = True) -> float:
    return work.flops(train_passes(work, fed, trains_clean=trains_clean))


def train_passes(work: ModelWork, fed: TokenCounts, *, trains_clean: bool = True) -> Passes:
    """What forward and backward of `fed` need; without `trains_clean` the clean loss is only reported.

    All weights train: three products per weight and row, in the layers for every row, in the head for rows
    with a target. Gated LoRA: one product for every row; for noisy rows, which alone are changed by what
    trains, also that for the gradient of the activations, three products with A and B, and the backward pass
    of attention. A LoRA that is not gated does so for every row. The head of a frozen base gives no gradient
    of its weights."""
    targets = fed.noisy_targets + (fed.clean_targets if trains_clean else 0)
    if not work.is_frozen:
        return Passes(3 * fed.rows, 3 * targets, pairs=(PAIR_FORWARD + PAIR_BACKWARD) * fed.pairs)
    changed, pairs = (fed.noisy_rows, fed.noisy_pairs) if work.is_gated else (fed.rows, fed.pairs)
    return Passes(
        layers=fed.rows + changed,
        head=2 * (fed.noisy_targets if work.is_gated else targets),
        adapter=3 * changed,
        pairs=PAIR_FORWARD * fed.pairs + PAIR_BACKWARD * pairs,
    )


def extra_passes(
    fed: TokenCounts,
    *,
    is_gated: bool,
    recomputes: float,
    distills: bool,
    balances: bool,
    copies_base: bool = False,
) -> Passes:
    """What the settings add: a forward pass of the share of layers that `recomputes` activations, the
    teacher's logits, and a forward pass, with the head, that balances the terms of an accumulated step. With
    a copy of the base: its forward pass over clean rows, and four products with heads for each target."""
    again = fed._replace(clean_rows=0, clean_pairs=0) if is_gated else fed
    targets = fed.clean_targets + fed.noisy_targets
    return Passes(
        layers=recomputes * again.rows + balances * fed.rows + copies_base * fed.clean_rows,
        head=distills * fed.noisy_targets + balances * targets + copies_base * 4 * fed.clean_targets,
        pairs=PAIR_FORWARD
        * (recomputes * again.pairs + balances * fed.pairs + copies_base * fed.clean_pairs),
    )


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by its name; None for an unknown one."""
    rates = (rate * 1e12 for name, rate in PEAK_BF16.items() if name.lower() in device_name.lower())
    return next(rates, None)


def span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
    minutes = round(seconds / 60)
    days, hours, minutes = minutes // 1440, minutes % 1440 // 60, minutes % 60
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
