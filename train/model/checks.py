"""Vocabulary rows of a base model, the row of its mask token, and checks that the model must pass.

Any causal language model of transformers is accepted. `check_model` runs a few tokens instead of trusting a
list of families: the model must follow our mask, attend as it does by itself, and return the output of its
head as its logits.

Shape letters: B packed rows, T rows of one packed row, D width, V vocabulary."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from idlm.errors import UserError, naming, some_of
from idlm.masks import RowMeta
from idlm.text.tokenizer import num_token_ids, special_token_ids
from idlm.train.distributed.deepspeed import gathered, whole_shape
from idlm.train.model.attention import mask_arguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
FIX = "use a causal model of transformers with standard attention layers and a plain output head"
WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Types of layers that see some positions only, and the keys of their size."""
SPARE_POSITIONS = 8
"""Tables of learned positions may have a few rows more (OPT: 2)."""
ROW_MULTIPLE = 64
"""A vocabulary grows to a multiple of it: the head's products are slow at odd sizes."""
TOLERANCE, ROUGH_TOLERANCE = 1e-3, 0.1
"""Of the largest logit: in float32 on a CPU; where attention or its products round to 16 bits."""
RESERVED = re.compile(
    r"reserved|unused|placeholder|place.holder|dummy|extra_?(id)?_?\d|control_\d|special_\d|reg\d",
    re.IGNORECASE,
)
"""Names of tokens for later use: of Llama 3, Gemma, Phi 3, Mistral, Falcon, Qwen 1."""
CODE_FILE_TOKENS = (
    *("<repo_name>", "<reponame>", "<file_sep>", "<filename>", "<gh_stars>"),
    *("<issue_start>", "<issue_comment>", "<issue_closed>"),
    *("<commit_before>", "<commit_msg>", "<commit_after>"),
    *("<jupyter_start>", "<jupyter_text>", "<jupyter_code>", "<jupyter_output>", "<jupyter_script>"),
    "<empty_output>",
)
"""Tokens of pretraining on code, which chats do not contain: StarCoder, SmolLM, Granite."""


def logit_divisor(model: PreTrainedModel) -> float:
    """Return what a model divides the output of its head by, as Granite does."""
    return float(getattr(model.config.get_text_config(), "logits_scaling", 1.0))


def num_vocabulary_rows(model: PreTrainedModel) -> int:
    """Rows of the whole embedding, also where ZeRO-3 has partitioned it."""
    return whole_shape(model.get_input_embeddings().weight)[0]


class MaskToken(NamedTuple):
    """`has_row`: the embedding has a row for it; `text`: which token it is, and why."""

    token_id: int
    has_row: bool
    text: str


def mask_token(
    tokenizer: Any, num_rows: int, explicit: int | None, *, has_adapter: bool = False
) -> MaskToken:
    """Return the mask token for an embedding of `num_rows` rows: `explicit`, else the tokenizer's own, else
    the first spare row, else the first of `unused_token_ids`, else that of the first row to add. UserError
    IDLM-0211 (id outside the embedding) or IDLM-0212 (id of a token in text)."""
    own, spare = tokenizer.mask_token_id, num_token_ids(tokenizer)
    given = own if explicit is None else explicit
    if given is not None:
        source = "the tokenizer's mask token" if explicit is None else "the given mask_token_id"
        _check_mask_token_id(tokenizer, num_rows, given, source=source)
        token = tokenizer.convert_ids_to_tokens(given)
        why = f"the tokenizer's mask token {token!r}"
        if explicit is not None:
            why = f"model.mask_token_id, {'a spare row' if token is None else repr(token)}"
        return MaskToken(int(given), True, f"mask token {given}: {why}")
    if spare < num_rows:
        return MaskToken(spare, True, f"mask token {spare}: the first spare row after the tokenizer's ids")
    unused = [token_id for token_id in unused_token_ids(tokenizer) if token_id < num_rows]
    if unused:
        token = tokenizer.convert_ids_to_tokens(unused[0])
        why = f"no row is spare, so the unused special token {token!r} becomes the mask; "
        return MaskToken(unused[0], True, f"mask token {unused[0]}: {why}model.mask_token_id chooses another")
    how = f"{num_padded_rows(spare) - num_rows} rows are added, which start"
    how = "the adapter gets an embedding, which starts" if has_adapter else how
    why = f"no row is spare and no special token unused, so {how} at the mean"
    return MaskToken(spare, False, f"mask token {spare}: {why}")


def noise_range(tokenizer: Any, num_rows: int, given: Sequence[int]) -> tuple[int, int]:
    """Return [low, high), the ids in place of masks: `given`, else all of the tokenizer. Raises UserError
    IDLM-0211 where they are not a range inside the embedding of `num_rows` rows."""
    ids = tuple(given) or (0, min(num_rows, num_token_ids(tokenizer)))
    if len(ids) != 2 or not 0 <= ids[0] < ids[1] <= num_rows:
        raise UserError(
            "IDLM-0211",
            f"train.noise_range={[*ids]} is not [low, high] with 0 <= low < high <= {num_rows}, the rows of "
            "the embedding",
            fix="give two such ids, or leave it out for all ids of the tokenizer",
        )
    return ids


def noise_text(noise: Sequence[int]) -> str:
    return f"random ids in [{noise[0]}, {noise[1]}) in place of a mask token"


def unused_token_ids(tokenizer: Any) -> list[int]:
    """Return the ids of added tokens that are reserved or of code files by their name, in this order; without
    those that begin, end, pad or separate texts, or that occur in a chat template."""
    named = {getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad", "unk", "sep", "cls")}
    templates = str(getattr(tokenizer, "chat_template", None) or "")
    texts = {
        str(token): token_id
        for token_id, token in sorted(tokenizer.added_tokens_decoder.items())
        if token_id not in named and str(token) not in templates
    }
    reserved = [token_id for text, token_id in texts.items() if RESERVED.search(text)]
    return reserved + [texts[text] for text in CODE_FILE_TOKENS if text in texts]


def _check_mask_token_id(tokenizer: Any, num_rows: int, mask_token_id: int, *, source: str) -> None:
    if not 0 <= mask_token_id < num_rows:
        raise UserError(
            "IDLM-0211",
            f"{source} is {mask_token_id}, but the embedding has rows 0 to {num_rows - 1}",
            fix="give an id inside this range",
        )
    token = tokenizer.convert_ids_to_tokens(mask_token_id)
    if token is None:
        return
    is_boundary = mask_token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id)
    is_text = mask_token_id not in (*special_token_ids(tokenizer), *unused_token_ids(tokenizer))
    if is_boundary or is_text:
        what = "begins or ends every text" if is_boundary else "is an ordinary token"
        raise UserError(
            "IDLM-0212",
            f"{source} is {mask_token_id}, the id of {token!r}, which {what}",
            fix="give the id of an unused special token or of a row after the tokenizer's last id",
        )


def num_padded_rows(mask_token_id: int) -> int:
    """Rows of a vocabulary that is made or grown so that it holds the mask token."""
    return -(-(mask_token_id + 1) // ROW_MULTIPLE) * ROW_MULTIPLE


def grow_vocabulary(model: PreTrainedModel, mask_token_id: int) -> None:
    """Add rows, to a multiple of 64, up to that of the mask token; they start at the mean embedding."""
    before = num_vocabulary_rows(model)
    model.resize_token_embeddings(num_padded_rows(mask_token_id), mean_resizing=True)
    after = num_vocabulary_rows(model)
    log.info("no spare vocabulary row for mask id %d: grew %d rows to %d", mask_token_id, before, after)


def is_usable(row_D: Tensor) -> bool:
    """Whether an embedding is finite and not zero. Waits for the device."""
    return 0.0 < float(row_D.float().norm()) < float("inf")


@torch.no_grad()
def prepare_mask_row(model: PreTrainedModel, mask_token_id: int) -> bool:
    """Set the mask row to the mean embedding where it is zero or not finite; returns whether it did so."""
    rows_VD = model.get_input_embeddings().weight
    with gathered([rows_VD], writes=True):
        if is_usable(rows_VD[mask_token_id]):
            log.debug("mask row %d is that of the base", mask_token_id)
            return False
        rows_VD[mask_token_id] = mean_of_others(rows_VD, mask_token_id).to(rows_VD.dtype)
    log.info("mask row %d was zero or not finite: set to the mean embedding", mask_token_id)
    return True


def mean_of_others(rows_VD: Tensor, row: int) -> Tensor:
    """Mean [D], float32, of all rows but one."""
    others = torch.ones(len(rows_VD), dtype=torch.bool, device=rows_VD.device)
    if row < len(rows_VD):
        others[row] = False
    return rows_VD[others].float().mean(dim=0)


def window_of(config: Any) -> tuple[str, int] | None:
    """(key, positions) of the shortest window that rows of some layers see; None where they see all."""
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    found = []
    for kind, name in WINDOWS.items():
        # So transformers answers for a value that layers have of their own.
        with suppress(RuntimeError):
            window = getattr(config, name, None) if kind in kinds else None
            found += [(name, window)] if window else []
    return min(found, key=lambda one: one[1], default=None)


def check_window(config: Any, max_length: int) -> None:
    """Refuse positions up to `max_length` under a model whose rows see a window of them: UserError IDLM-0509.
    A prepared mask replaces that of the window."""
    window = window_of(config)
    if window is not None and max_length > window[1]:
        raise UserError(
            "IDLM-0509",
            f"train.max_length={max_length} exceeds the window of the model's attention, "
            f"{window[0]}={window[1]}",
            fix=f"set train.max_length={window[1]}",
        )


def num_positions(config: Any) -> int | None:
    """Positions for which a model was made, those that scaled rotations add included; None where it
    is not set."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    stated = next((value for name in names if isinstance(value := getattr(config, name, None), int)), 0)
    if stated < 1:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    # Types of layers may have rotations of their own.
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    scaled = [
        part["factor"] * (part.get("original_max_position_embeddings") or stated)
        for part in parts
        if isinstance(part.get("factor"), int | float)
    ]
    return max([stated, *map(int, scaled)])


def check_positions(model: PreTrainedModel, max_length: int) -> None:
    """Raise UserError IDLM-0509 for more positions than a model has learned embeddings of."""
    limit, rows = num_positions(model.config.get_text_config()), model.get_input_embeddings()
    if limit is None or max_length <= limit:
        return
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding) and module is not rows]
    if any(limit <= module.num_embeddings < limit + SPARE_POSITIONS for module in tables):
        raise UserError(
            "IDLM-0509",
            f"train.max_length={max_length} exceeds the {limit} positions that the model has learned",
            fix=f"set train.max_length={limit}",
        )


def check_model(model: PreTrainedModel, *, attention: str, trains: bool = False) -> None:
    """Refuse a model that ignores our mask, has attention of another kind or changes logits after its head.
    Compares a tiny packed forward pass with the model's own pass; with `trains` one in training mode and its
    backward pass have to end too. Raises UserError IDLM-0505."""
    head, name = model.get_output_embeddings(), type(model).__name__
    if not isinstance(head, nn.Linear):
        raise UserError(
            "IDLM-0505",
            f"the output head of {name} is a {type(head).__name__}, not a linear layer",
            fix="use a causal model of transformers with a plain output head",
        )
    device = model.get_input_embeddings().weight.device
    generator, num_tokens = torch.Generator().manual_seed(0), 5
    ids_BT = torch.randint(0, min(64, num_vocabulary_rows(model)), (2, num_tokens), generator=generator)
    ids_BT = ids_BT.to(device)
    was_training = model.training
    model.eval()
    try:
        alone = f"{name} does not run by itself: config.json may be wrong for it"
        with torch.no_grad(), naming("IDLM-0505", alone, fix=FIX):
            own = _own_logits(model, ids_BT)
        if not bool(own.isfinite().all()):
            bad = [each for each, one in model.named_parameters() if not bool(one.isfinite().all())]
            why = f"the logits of {name} are not finite" + f", nor is {some_of(bad)}" * bool(bad)
            raise UserError("IDLM-0505", why, fix="restore the base's weights")
        masked = f"{name} does not run under a prepared attention mask"
        with torch.no_grad(), naming("IDLM-0505", masked, fix=FIX):
            packed = _packed_logits(model, head, ids_BT, attention)
        is_exact = model.dtype == torch.float32 and device.type == "cpu"
        allowed = float(own.abs().max().clamp_min(1.0)) * (TOLERANCE if is_exact else ROUGH_TOLERANCE)
        gap = float((packed - own).abs().max())
        if not gap <= allowed:
            why = _difference(model, head, ids_BT, own, attention, allowed)
            problem = f"{name} {why} (two packed documents differ by {gap:.3g} from the same documents alone)"
            raise UserError("IDLM-0505", problem, fix=FIX)
        if trains:
            model.train()
            # Dropout draws numbers, and those of the run are not to change.
            devices = [device] if device.type == "cuda" else []
            training = f"{name} does not run in training mode"
            with torch.random.fork_rng(devices), naming("IDLM-0505", training, fix=FIX):
                _packed_logits(model, head, ids_BT, attention).sum().backward()
            model.zero_grad()
    finally:
        model.train(was_training)


@torch.no_grad()
def _difference(
    model: PreTrainedModel, head: nn.Linear, ids_BT: Tensor, own: Tensor, attention: str, allowed: float
) -> str:
    """Why the logits of packed documents are not the `own` ones [B * T, V] of a model."""
    changed_BT = ids_BT.clone()
    changed_BT[:, -1] = (ids_BT[:, -1] + 1) % min(64, num_vocabulary_rows(model))
    before = (own - _own_logits(model, changed_BT)).unflatten(0, ids_BT.shape)[:, :-1]
    if float(before.abs().max()) > allowed:
        return "is not causal: a row sees later tokens"
    alone = torch.cat([_packed_logits(model, head, ids_BT[i : i + 1], attention) for i in range(len(ids_BT))])
    if float((alone - own).abs().max()) <= allowed:
        return (
            "carries something from one packed document into the next, as layers with a state or a "
            "convolution do, or does not honour a prepared attention mask"
        )
    return "has attention that idlm does not compute, or changes its logits after the head"


def _packed_logits(model: PreTrainedModel, head: nn.Linear, ids_BT: Tensor, attention: str) -> Tensor:
    """Logits [B * T, V], float32, with all rows of `ids_BT` as documents of one packed row."""
    num_docs, num_tokens = ids_BT.shape
    positions = torch.arange(num_tokens, device=ids_BT.device).repeat(num_docs)[None]
    meta = RowMeta(
        doc_ids=torch.arange(num_docs, device=ids_BT.device).repeat_interleave(num_tokens)[None],
        positions=positions,
        block_starts=torch.zeros_like(positions),
        is_noisy=torch.zeros_like(positions, dtype=torch.bool),
    )
    outputs: list[Tensor] = []
    hook = head.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    try:
        model(
            input_ids=ids_BT.flatten()[None],
            position_ids=positions,
            use_cache=False,
            **mask_arguments(meta, attention),
        )
    finally:
        hook.remove()
    if len(outputs) != 1:
        raise RuntimeError(f"the output head ran {len(outputs)} times in one forward pass")
    return outputs[0].flatten(0, 1).float() / logit_divisor(model)


def _own_logits(model: PreTrainedModel, ids_BT: Tensor) -> Tensor:
    """Logits [B * T, V] of rows of plain causal text by the model's own attention."""
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        logits_BTV: Tensor = model(input_ids=ids_BT, use_cache=False).logits
    finally:
        model.set_attn_implementation(ours)
    return logits_BTV.flatten(0, 1).float()
