"""How much memory one GPU needs at the peak of a training step: every term with its formula, without a GPU.

The peak is the first layer of the backward pass, when everything that the forward pass saves is there. What a
layer saves was read off autograd's saved tensors, eager and compiled
(tests/unit/planning/test_memory_plan.py does it again). Masks of `idlm_documents` are left out.

D width, F ffn, Q and K elements of all query and KV heads, V vocabulary, L layers, R rows fed at once, M of
them MASK rows, r rank; P trained and Z frozen parameters; e bytes of a parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from idlm.kernels.linear_cross_entropy.op import MAX_LOGITS_BYTES
from idlm.train.distributed.deepspeed import SHARDS_WEIGHTS, whole_shape
from idlm.train.distributed.deepspeed_settings import BUCKET_ELEMENTS, LIVE_ELEMENTS
from idlm.train.model.gated_lora import num_base_parameters
from idlm.train.planning.flops import head_dim_of
from idlm.train.planning.state import GIB, RunSetup, Term, state_terms

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONTEXT_BYTES = 600 * 2**20
COMMUNICATION_BYTES = 1400 * 2**20
"""Outside of torch's allocator: a CUDA context with loaded kernels, and NCCL's buffers with several GPUs."""
DEVICE_BYTES = {"B200": 178 * GIB, "H200": 139 * GIB, "H100": 79 * GIB, "A100": 79 * GIB}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes that the memory of a decoder depends on; `queries` and `keys` are elements of all heads."""

    width: int
    ffn: int
    queries: int
    keys: int
    layers: int
    vocabulary: int
    has_qk_norm: bool
    num_parameters: int
    layer_parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Terms that torch allocates (`terms`) and that others do (`outside`), at the peak."""

    terms: tuple[Term, ...]
    outside: tuple[Term, ...]

    @property
    def peak_allocated(self) -> int:
        """Compare with torch.cuda.max_memory_allocated()."""
        return sum(term.num_bytes for term in self.terms)

    @property
    def device_bytes(self) -> int:
        return self.peak_allocated + sum(term.num_bytes for term in self.outside)


def shape_of(model: PreTrainedModel) -> ModelShape | None:
    """The shape of a transformers decoder, wherever its weights lie, its adapter left out; None for one that
    is not dense, or whose configuration or layers go by other names."""
    config = model.config.get_text_config()
    sizes = ("intermediate_size", "hidden_size", "num_attention_heads", "num_hidden_layers")
    layers = [list(module) for name, module in model.named_modules() if name.endswith("layers")]
    head = model.get_output_embeddings()
    if not all(isinstance(getattr(config, name, None), int) for name in sizes) or head is None or not layers:
        return None
    if any(len(whole_shape(value)) > 2 for value in model.parameters()):
        return None
    heads, head_dim = config.num_attention_heads, head_dim_of(config)
    if head_dim is None:
        return None
    return ModelShape(
        width=config.hidden_size,
        ffn=config.intermediate_size,
        queries=heads * head_dim,
        keys=(getattr(config, "num_key_value_heads", None) or heads) * head_dim,
        layers=config.num_hidden_layers,
        vocabulary=whole_shape(model.get_input_embeddings().weight)[0],
        has_qk_norm=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        num_parameters=num_base_parameters(model),
        layer_parameters=num_base_parameters(layers[0][0]),
    )


def memory_plan(shape: ModelShape, run: RunSetup) -> MemoryEstimate:
    trained = run.adapter_parameters if run.rank else shape.num_parameters
    frozen = shape.num_parameters if run.rank else 0
    terms = [
        *state_terms(run, trained, frozen),
        *_activation_terms(shape, run),
        *_loss_terms(shape, run),
        *_buffer_terms(shape, run, trained),
    ]
    outside = [Term("CUDA context", CONTEXT_BYTES, "assumed, outside of torch")]
    if run.world_size > 1:
        outside.append(Term("NCCL buffers", COMMUNICATION_BYTES, "assumed, outside of torch"))
    return MemoryEstimate(terms=tuple(term for term in terms if term.num_bytes), outside=tuple(outside))


def saved_per_row(shape: ModelShape, run: RunSetup) -> tuple[int, str]:
    """(bytes, formula) that one layer saves of one row for its backward pass.

    Eager, e bytes per element: of a norm its input in float32 and what its weight multiplies and its output;
    the same of the norms of queries and keys; what attention takes and gives; gate, up, silu(gate) and the
    product. Compiled, element-wise steps are done again: outputs of products, inputs of products and of
    attention are saved. Under autocast the residual stream is float32 and each product has a narrow input of
    its own. A frozen layer saves no input of a product."""
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


def saved_per_mask_row(shape: ModelShape, run: RunSetup) -> tuple[int, str]:
    """(bytes, formula) that the adapter of one layer saves of one MASK row: inputs of A, and A's outputs."""
    if not run.rank:
        return 0, ""
    # A bfloat16 base with a float32 adapter casts the inputs of A, one by one where nothing is compiled.
    a = run.size if run.has_masters else 4
    casts = not run.has_masters and (run.is_bf16 or run.autocast)
    inputs = 5 if casts and not run.is_compiled else 2
    parts = [(inputs * a, shape.width, "D"), (a, shape.ffn, "F"), (7 * a, run.rank, "r")]
    return _sum(*parts, *([(a, shape.queries, "Q")] if casts else []))


def saved_per_clean_row(shape: ModelShape, run: RunSetup, *, is_recomputed: bool) -> tuple[int, str]:
    """(bytes, formula) that one layer saves of one clean row of a gated adapter: keys and values of the pass
    without gradients, and once more next to those of noisy rows. Checkpointed layers make the latter again.
    Other attention than `idlm_split` has a query of it too, and its result."""
    if is_recomputed:
        return _sum((2 * run.size, shape.keys, "K"))
    is_padded = run.attention not in ("auto", "idlm_split") or not (run.is_bf16 or run.autocast)
    return _sum((4 * run.size, shape.keys, "K"), *([(2 * run.size, shape.queries, "Q")] if is_padded else []))


def _activation_terms(shape: ModelShape, run: RunSetup) -> list[Term]:
    per_row, formula = saved_per_row(shape, run)
    per_mask_row, mask_formula = saved_per_mask_row(shape, run)
    trained = run.mask_rows if run.rank else run.rows
    name, clean_rows = "M" if run.rank else "R", run.rows - trained
    formula = f"{name} ({' + '.join(filter(None, (formula, mask_formula)))})"
    stream, kind = 4 if run.autocast else run.size, "compiled" if run.is_compiled else "eager"
    recomputed = min(run.recomputed_layers or shape.layers, shape.layers) if run.is_checkpointed else 0
    whole, terms = shape.layers - recomputed, list[Term]()
    for is_recomputed, layers in ((True, recomputed), (False, whole)):
        per_clean_row, clean_formula = saved_per_clean_row(shape, run, is_recomputed=is_recomputed)
        more = f" + (R - M) ({clean_formula})" if clean_rows else ""
        per_layer = trained * (per_row + per_mask_row) + clean_rows * per_clean_row
        count = "L" if layers == shape.layers else str(layers)
        if is_recomputed:
            inputs = layers * (trained * stream * shape.width + clean_rows * per_clean_row)
            text = f"{count} ({name} {stream}D{more})"
            terms.append(Term("activations saved, inputs of layers", inputs, text))
            # The first layers are computed again when what the others save is free.
            again = 0 if whole else per_layer
            terms.append(Term("activations of one layer, again", again, formula + more))
        else:
            text = f"{count} ({formula}{more})"
            terms.append(Term(f"activations, {kind} layers", layers * per_layer, text))
    if run.attention == "idlm_sdpa":
        # A mask of bytes, and in every layer one in the dtype of queries.
        copies = max(1, whole)
        num_pairs, width = run.rows**2 // run.batch_size, 2 if run.autocast else run.size
        masks = num_pairs * (1 + width * copies)
        terms.append(Term("activations, dense masks", masks, f"R^2 / B (1 + {width} x {copies})"))
    last = run.rows * (4 + 2 * stream) * shape.width
    return [*terms, Term("last norm and hidden states", last, f"R {4 + 2 * stream}D")]


def _loss_terms(shape: ModelShape, run: RunSetup) -> list[Term]:
    stream, narrow = (4, 2) if run.autocast else (run.size, run.size)
    head = shape.vocabulary * shape.width
    logits = min(MAX_LOGITS_BYTES, run.targets * narrow * shape.vocabulary)
    rows = (2 * run.targets + run.rows) * stream * shape.width
    terms = [
        Term("head: chunk of logits", logits, f"min(200 MB, targets {narrow}V)"),
        Term(
            "head: rows with a target, their gradient, that of all rows", rows, f"(2 targets + R) {stream}D"
        ),
        Term("head: gradient of its weight", 0 if run.rank else run.size * head, f"{run.size} V D"),
    ]
    if run.autocast:
        copies = 2 * (shape.layers * shape.layer_parameters + head)
        terms.append(Term("autocast: narrow weights", copies, "2 (layers + V D)"))
    return terms


def _buffer_terms(shape: ModelShape, run: RunSetup, trained: int) -> list[Term]:
    e, stream = run.size, 4 if run.autocast else run.size
    layer = run.adapter_parameters // shape.layers if run.rank else shape.layer_parameters
    rows, name = (run.mask_rows, "M") if run.rank else (run.rows, "R")
    activations = rows * (3 * (2 if run.autocast else e) * shape.ffn + 2 * stream * shape.width)
    of_one_layer = "backward pass of one layer: gradients of"
    terms = [
        Term(f"{of_one_layer} activations", activations, f"{name} (3 e F + 2 e D)"),
        Term(f"{of_one_layer} weights", e * layer * run.has_masters, "e x weights of a layer"),
    ]
    if run.zero_stage is None:
        return [*terms, Term("DDP buckets", 4 * trained, "4 P")] if run.world_size > 1 else terms
    bucket = min(BUCKET_ELEMENTS, trained)
    if run.zero_stage in (1, 2):
        # `hold_gradients`: the head is the largest weight that trains, if it does.
        head = 0 if run.rank else shape.vocabulary * shape.width
        limit = f"{BUCKET_ELEMENTS:.0e}" if run.rank else f"max({BUCKET_ELEMENTS:.0e}, V D)"
        whole = min(max(BUCKET_ELEMENTS, head), trained)
        terms.append(Term("ZeRO buckets", 2 * e * whole, f"2 e x min({limit}, P)"))
    if run.zero_stage >= SHARDS_WEIGHTS:
        live = min(LIVE_ELEMENTS, shape.num_parameters)
        terms.append(Term("ZeRO-3 bucket", e * bucket, "e x min(2e8, P)"))
        terms.append(Term("ZeRO-3 gathered weights", e * live, "e x min(1e9, P + Z)"))
    return terms


def _sum(*parts: tuple[int, int, str]) -> tuple[int, str]:
    """(value, text) of sum(factor * size)."""
    value = sum(factor * size for factor, size, _ in parts)
    return value, " + ".join(f"{factor}{name}" for factor, _, name in parts)
