"""How much memory one GPU needs at the peak of a training step: every term with its formula, no GPU asked.

The peak is the first layer of the backward pass, when all that the forward pass keeps is there. What a layer
keeps was read off autograd's saved tensors, eager and compiled (tests/unit/planning/test_memory_plan.py does it again):
attention kernels that keep scores (`idlm_sdpa`) are outside of this model.

D width, F ffn, Q and K elements of all query and KV heads, V vocabulary, L layers, R rows fed at once, M of
them MASK rows, r rank; P trained and Z frozen parameters; e bytes of a parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from idlm.kernels.linear_cross_entropy.op import MAX_LOGITS_BYTES
from idlm.train.distributed.deepspeed import (
    BUCKET_ELEMENTS,
    LIVE_ELEMENTS,
    SHARDS_WEIGHTS,
    num_elements,
    whole_shape,
)
from idlm.train.model.gated_lora import is_trained

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GIB = 2**30
CONTEXT_BYTES = 600 * 2**20
COMMUNICATION_BYTES = 1400 * 2**20
"""Outside of torch's allocator: a CUDA context with loaded kernels, and NCCL's buffers with several GPUs."""
DEVICE_BYTES = {"B200": 178 * GIB, "H200": 139 * GIB, "H100": 79 * GIB, "A100": 79 * GIB}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the memory of a decoder depends on; `queries` and `keys` are elements of all heads of a layer."""

    width: int
    ffn: int
    queries: int
    keys: int
    layers: int
    vocabulary: int
    has_qk_norm: bool
    is_tied: bool
    num_parameters: int
    layer_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """How a model is trained. `rows` and `targets` (rows with a label) of a micro-batch, `mask_rows` of them
    noisy; `zero_stage` None: without DeepSpeed. `is_bf16`: weights are bfloat16; `autocast`: float32 weights,
    bfloat16 products. `rank` 0: all weights train; else a gated LoRA with `adapter_parameters`.
    """

    rows: int
    targets: int
    mask_rows: int
    accumulation: int = 1
    world_size: int = 1
    zero_stage: int | None = None
    is_bf16: bool = True
    autocast: bool = False
    is_checkpointed: bool = False
    is_compiled: bool = False
    offloads: bool = False
    rank: int = 0
    adapter_parameters: int = 0

    @property
    def size(self) -> int:
        """e, bytes of a weight."""
        return 2 if self.is_bf16 else 4

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer holds float32 copies of what it trains: DeepSpeed of bfloat16 weights, and
        ZeRO of float32 weights too.
        """
        return self.zero_stage is not None and (self.is_bf16 or self.zero_stage >= 1)

    def parts(self, from_stage: int) -> int:
        """Into how many parts the ZeRO stage cuts what it shards from `from_stage` on."""
        return self.world_size if (self.zero_stage or 0) >= from_stage else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """Bytes of one kind of thing on one GPU, and the formula with its numbers' names."""

    name: str
    num_bytes: int
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Terms that torch allocates (`terms`) and that others do (`outside`), at the peak."""

    terms: tuple[Term, ...]
    outside: tuple[Term, ...]

    @property
    def peak_allocated(self) -> int:
        """Compare with torch.cuda.max_memory_allocated()."""
        return sum(term.num_bytes for term in self.terms)

    @property
    def device_bytes(self) -> int:
        """What the GPU must have."""
        return self.peak_allocated + sum(term.num_bytes for term in self.outside)


def shape_of(model: PreTrainedModel) -> ModelShape | None:
    """The shape of a transformers decoder, wherever its weights lie, its adapter left out; None for one that
    is not dense, or whose configuration or layers go by other names.
    """
    config = model.config.get_text_config()
    sizes = ("intermediate_size", "hidden_size", "num_attention_heads", "num_hidden_layers")
    layers = [list(module) for name, module in model.named_modules() if name.endswith("layers")]
    head = model.get_output_embeddings()
    if not all(isinstance(getattr(config, name, None), int) for name in sizes) or head is None or not layers:
        return None
    if any(len(whole_shape(value)) > 2 for value in model.parameters()):
        return None
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ModelShape(
        width=config.hidden_size,
        ffn=config.intermediate_size,
        queries=heads * head_dim,
        keys=(getattr(config, "num_key_value_heads", None) or heads) * head_dim,
        layers=config.num_hidden_layers,
        vocabulary=whole_shape(model.get_input_embeddings().weight)[0],
        has_qk_norm=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        is_tied=model.get_input_embeddings().weight is head.weight,
        num_parameters=_num_own(model),
        layer_parameters=_num_own(layers[0][0]),
    )


def _num_own(module: nn.Module) -> int:
    """Parameters without those of an adapter."""
    return sum(num_elements(value) for name, value in module.named_parameters() if not is_trained(name))


def memory_plan(shape: ModelShape, run: RunSetup) -> MemoryPlan:
    """The peak of one GPU, term by term."""
    trained = run.adapter_parameters if run.rank else shape.num_parameters
    frozen = shape.num_parameters if run.rank else 0
    terms = [
        *state_terms(run, trained, frozen),
        *_activation_terms(shape, run),
        *_loss_terms(shape, run),
        *_buffer_terms(shape, run, trained),
    ]
    outside = [Term(name="CUDA context", num_bytes=CONTEXT_BYTES, formula="assumed, outside of torch")]
    if run.world_size > 1:
        outside.append(
            Term(name="NCCL buffers", num_bytes=COMMUNICATION_BYTES, formula="assumed, outside of torch")
        )
    return MemoryPlan(terms=tuple(term for term in terms if term.num_bytes), outside=tuple(outside))


def state_terms(run: RunSetup, trained: int, frozen: int) -> list[Term]:
    """Weights, gradients that outlive a micro-batch, optimizer.

    Offloading moves the optimizer to the host, and from ZeRO-2 on the sums of the gradients too. ZeRO-1 sums
    the gradients of all weights on the GPU before it hands a part to the host.
    """
    weights, gradients, optimizer = run.parts(SHARDS_WEIGHTS), run.parts(2), run.parts(1)
    # Without DeepSpeed an adapter stays float32 beside a bfloat16 base.
    trained_size = run.size if run.has_masters or not run.rank else 4
    on_gpu = 0 if run.offloads else 1
    sums_on_gpu = 0 if run.offloads and (run.zero_stage or 0) >= 2 else 1
    return [
        Term(
            name="weights",
            num_bytes=(trained_size * trained + run.size * frozen) // weights,
            formula=f"({trained_size} P{f' + {run.size} Z' if frozen else ''}) / {weights}",
        ),
        Term(
            name="gradients, float32 sums",
            num_bytes=sums_on_gpu * 4 * trained // gradients,
            formula=f"4 P / {gradients}",
        ),
        Term(
            name="float32 masters",
            num_bytes=on_gpu * run.has_masters * 4 * trained // optimizer,
            formula=f"4 P / {optimizer}",
        ),
        Term(
            name="AdamW moments",
            num_bytes=on_gpu * 8 * trained // optimizer,
            formula=f"8 P / {optimizer}",
        ),
    ]


def kept_per_row(shape: ModelShape, run: RunSetup) -> tuple[int, str]:
    """(bytes, formula) that one layer keeps of one row for its backward pass.

    Eager, e bytes per element: of a norm its input in float32 and what its weight multiplies and its output;
    the same of the norms of queries and keys; what attention takes and gives; gate, up, silu(gate) and the
    product. Compiled, element-wise steps are done again: outputs of products, inputs of products and of
    attention are kept. Under autocast the residual stream is float32 and each product has a narrow input of
    its own. A frozen layer keeps no input of a product.
    """
    d, f, q, k = shape.width, shape.ffn, shape.queries, shape.keys
    e, norm = run.size, int(shape.has_qk_norm)
    if run.autocast:
        if run.is_compiled:
            return _sum((12, d, "D"), (10 + 2 * norm, q, "Q"), (6 + 2 * norm, k, "K"), (6, f, "F"))
        return _sum((28, d, "D"), (8 + 8 * norm, q, "Q"), (6 + 6 * norm, k, "K"), (8, f, "F"))
    if run.is_compiled:
        wide, gated = (2 * e, 2 * e) if run.rank else (4 * e, 3 * e)
        return _sum((wide, d, "D"), ((2 + norm) * e, q, "Q"), ((2 + norm) * e, k, "K"), (gated, f, "F"))
    scaled = 0 if run.rank else e
    heads = norm * (4 + scaled)
    gated = 3 * e if run.rank else 4 * e
    return _sum((8 + 4 * scaled, d, "D"), (2 * e + heads, q, "Q"), (2 * e + heads, k, "K"), (gated, f, "F"))


def kept_per_mask_row(shape: ModelShape, run: RunSetup) -> tuple[int, str]:
    """(bytes, formula) that the adapter of one layer keeps of one MASK row: inputs of A, and A's outputs."""
    if not run.rank:
        return 0, ""
    a = run.size if run.has_masters else 4
    inputs = 2 if run.is_compiled else 5
    return _sum(
        (inputs * a, shape.width, "D"), (a, shape.queries, "Q"), (a, shape.ffn, "F"), (7 * a, run.rank, "r")
    )


def _activation_terms(shape: ModelShape, run: RunSetup) -> list[Term]:
    per_row, formula = kept_per_row(shape, run)
    per_mask_row, mask_formula = kept_per_mask_row(shape, run)
    per_layer = run.rows * per_row + run.mask_rows * per_mask_row
    if mask_formula:
        formula = f"R ({formula}) + M ({mask_formula})"
    else:
        formula = f"R ({formula})"
    stream = 4 if run.autocast else run.size
    terms = []
    if run.is_checkpointed:
        terms.append(
            Term(
                name="activations kept, inputs of layers",
                num_bytes=shape.layers * run.rows * stream * shape.width,
                formula=f"L R {stream}D",
            )
        )
        terms.append(Term(name="activations of one layer, again", num_bytes=per_layer, formula=formula))
    else:
        terms.append(
            Term(
                name=f"activations, {'compiled' if run.is_compiled else 'eager'} layers",
                num_bytes=shape.layers * per_layer,
                formula=f"L ({formula})",
            )
        )
    terms.append(
        Term(
            name="last norm and hidden states",
            num_bytes=run.rows * (4 + 2 * stream) * shape.width,
            formula=f"R {4 + 2 * stream}D",
        )
    )
    return terms


def _loss_terms(shape: ModelShape, run: RunSetup) -> list[Term]:
    stream, narrow = (4, 2) if run.autocast else (run.size, run.size)
    head = 0 if run.rank else run.size * shape.vocabulary * shape.width
    terms = [
        Term(
            name="head: chunk of logits",
            num_bytes=min(MAX_LOGITS_BYTES, run.targets * narrow * shape.vocabulary),
            formula=f"min(200 MB, targets {narrow}V)",
        ),
        Term(
            name="head: rows with a target, their gradient, that of all rows",
            num_bytes=(2 * run.targets + run.rows) * stream * shape.width,
            formula=f"(2 targets + R) {stream}D",
        ),
        Term(name="head: gradient of its weight", num_bytes=head, formula=f"{run.size} V D"),
    ]
    if run.autocast:
        copies = 2 * (shape.layers * shape.layer_parameters + shape.vocabulary * shape.width)
        terms.append(Term(name="autocast: narrow weights", num_bytes=copies, formula="2 (layers + V D)"))
    return terms


def _buffer_terms(shape: ModelShape, run: RunSetup, trained: int) -> list[Term]:
    e, stream = run.size, 4 if run.autocast else run.size
    layer = run.adapter_parameters // shape.layers if run.rank else shape.layer_parameters
    terms = [
        Term(
            name="backward pass of one layer: gradients of activations",
            num_bytes=run.rows * (3 * (2 if run.autocast else e) * shape.ffn + 2 * stream * shape.width),
            formula="R (3 e F + 2 e D)",
        ),
        Term(
            name="backward pass of one layer: gradients of weights",
            num_bytes=e * layer * (1 if run.has_masters else 0),
            formula="e x weights of a layer",
        ),
    ]
    if run.zero_stage is None:
        if run.world_size > 1:
            terms.append(Term(name="DDP buckets", num_bytes=4 * trained, formula="4 P"))
        return terms
    if run.zero_stage in (1, 2):
        bucket = min(BUCKET_ELEMENTS, trained)
        terms.append(
            Term(
                name="ZeRO buckets", num_bytes=2 * e * bucket, formula=f"2 e x min({BUCKET_ELEMENTS:.0e}, P)"
            )
        )
    if run.zero_stage >= SHARDS_WEIGHTS:
        bucket = min(BUCKET_ELEMENTS, trained)
        live = min(LIVE_ELEMENTS, shape.num_parameters)
        terms.append(Term(name="ZeRO-3 bucket", num_bytes=e * bucket, formula="e x min(2e8, P)"))
        terms.append(Term(name="ZeRO-3 gathered weights", num_bytes=e * live, formula="e x min(1e9, P + Z)"))
    return terms


def _sum(*parts: tuple[int, int, str]) -> tuple[int, str]:
    """(value, text) of sum(factor * size)."""
    return sum(factor * size for factor, size, _ in parts), " + ".join(
        f"{factor}{name}" for factor, _, name in parts
    )
