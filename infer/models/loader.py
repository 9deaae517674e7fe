"""Loads a Hugging Face checkpoint directory into a trunk, without transformers.

`config.json` is read as data: its architecture string selects a family of the registry, and code named in the
checkpoint is never imported. Weights come from safetensors only and are stored once, in fused form."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from idlm import checkpoint
from idlm.config.suggest import did_you_mean
from idlm.errors import UserError
from idlm.files.paths import translate_path_errors
from idlm.files.tensors import Stored, other_format, stored_tensors
from idlm.infer.models import fp8, moe, weights
from idlm.infer.models.adapter import Adapter, add_adapters, check_adapters, open_adapter, open_further
from idlm.infer.models.base import ALONE, FAMILIES, Family, ModelSpec, Shards, TensorNames
from idlm.infer.models.config import MUST_BE_NULL, extended
from idlm.infer.models.dense import DenseTrunk, weight_targets
from idlm.lora import MASK_ROW
from idlm.semantics import FILE_NAME as SEMANTICS_FILE
from idlm.semantics import Semantics

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A loaded model. `local` is the spec of this rank's layers. `directory` has the config.json: the
    checkpoint, or the base of an adapter. `kv_scales`: see `fp8.read_kv_scales`."""

    trunk: DenseTrunk
    spec: ModelSpec
    local: ModelSpec
    semantics: Semantics
    architecture: str
    dtype: torch.dtype
    device: torch.device
    directory: Path
    kv_scales: torch.Tensor | None = None


def slot_share(model: LoadedModel, itemsize: int) -> float:
    """Bytes of the keys and values of a token, of `itemsize` each, over the bytes of the weights."""
    local = model.local
    slot_bytes = 2 * local.num_layers * local.num_kv_heads * local.head_dim * itemsize
    weight_bytes = sum(weight.numel() * weight.element_size() for weight in model.trunk.parameters())
    return slot_bytes / max(1, weight_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A checked checkpoint before its weights are loaded. `targets` are on the meta device. The first of the
    `adapters` is the checkpoint itself."""

    directory: Path
    adapters: tuple[Adapter, ...]
    architecture: str
    names: TensorNames
    spec: ModelSpec
    semantics: Semantics
    dtype: torch.dtype
    files: dict[str, Stored]
    targets: dict[str, weights.WeightTarget]
    ignored: tuple[str, ...]


def load_outline(outline: Outline, *, device: str | torch.device, shards: Shards = ALONE) -> LoadedModel:
    """Load the weights of a checkpoint that `read_outline` has checked, or this rank's part of them."""
    spec, names, files = outline.spec, outline.names, outline.files
    kv_scales = None
    if not files.keys().isdisjoint(names.kv_scales(spec.num_layers)):
        kv_scales = fp8.read_kv_scales(files, spec, names, shards, torch.device(device))
    trunk = make_trunk(spec, device=torch.device(device), dtype=outline.dtype, shards=shards)
    targets = weight_targets(trunk, names)
    weights.copy(targets, files)
    # Rows of tokens that are never fed may hold anything.
    loaded = {name: target.view for name, target in targets.items() if name != names.embed}
    weights.require_finite("IDLM-0607", loaded, outline.directory, fix="copy the checkpoint again")
    if outline.adapters:
        add_adapters(trunk, outline.adapters, names, outline.semantics.mask_token_id)
    return LoadedModel(
        trunk=trunk.eval(),
        spec=spec,
        local=shards.local(spec),
        semantics=outline.semantics,
        architecture=outline.architecture,
        dtype=outline.dtype,
        device=torch.device(device),
        directory=outline.directory,
        kv_scales=kv_scales,
    )


def read_outline(
    path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    mask_token_id: int | None = None,
    base: str | Path | None = None,
    adapters: Mapping[str, str] | None = None,
    rope_factor: float | None = None,
    shards: Shards = ALONE,
) -> Outline:
    """Check the directory `path`, a whole model or a gated adapter with its base, before weights are loaded.
    `mask_token_id` overrides that of the checkpoint, and `base` the path of an adapter's base. `adapters`:
    folders of further ones by name. `rope_factor`: see `extended` (None: the checkpoint's own rotation).
    Raises UserError (IDLM-0302, 0303, 0600 to 0619, 0626)."""
    overridden = () if mask_token_id is None else ("mask_token_id",)
    with translate_path_errors("IDLM-0600", path, fix="give another model=, base= or adapters="):
        directory, opened = _open(Path(path), base, adapters or {}, overridden)
    checkpoint.verify(directory, required=False)
    config = checkpoint.read_json(directory / "config.json")
    architecture, family = _family(config)
    files = _prefixed(stored_tensors(directory), family.tensor_names)
    spec = _with_possible_counts(family.spec(config), len(files))
    if spec.moe is not None and opened:
        moe.refuse("an adapter")
    own = opened[0].semantics if opened else _own_semantics(directory, config, family)
    meaning = _semantics(directory, config, family, mask_token_id, own)
    for adapter in opened or (None,):
        _check_meaning(meaning, spec, directory, adapter)
    names = family.tensor_names
    spec = family.refined(spec, files.keys())
    if rope_factor is not None:
        spec = extended(spec, config, rope_factor)
    if spec.tie_embeddings and names.head in files and names.embed in files:
        # Like transformers, prefer the weights to the flag: a separate head that differs is used.
        spec = replace(
            spec,
            tie_embeddings=torch.equal(*(weights.tensor(files, name) for name in (names.head, names.embed))),
        )
    resolved_dtype = _dtype(dtype, config, files, names.embed)
    known = {*names.kv_scales(spec.num_layers), *([names.head] if spec.tie_embeddings else [])}
    ignored = {name for name in files if name in known or name.endswith("rotary_emb.inv_freq")}
    # Check the tensors of all ranks before allocating, so that a wrong config does not run out of memory.
    shards.local(spec)
    empty = make_trunk(spec, device=torch.device("meta"), dtype=resolved_dtype)
    targets = weight_targets(empty, names)
    weights.check(targets, files, ignored)
    if opened:
        check_adapters(empty, opened, names)
    return Outline(
        directory=directory,
        adapters=opened,
        architecture=architecture,
        names=names,
        spec=spec,
        semantics=meaning,
        dtype=resolved_dtype,
        files=files,
        targets=targets,
        ignored=tuple(sorted(ignored)),
    )


def _prefixed(files: dict[str, Stored], names: TensorNames) -> dict[str, Stored]:
    """Tensors by the names of the whole model, also where transformers has saved the part without a head."""
    prefix, _, bare = names.embed.partition(".")
    if names.embed in files or bare not in files:
        return files
    return {name if name == names.head else f"{prefix}.{name}": one for name, one in files.items()}


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """The spec of a config.json alone. Raises UserError IDLM-0601, 0604, 0615 and 0618."""
    return _family(config)[1].spec(config)


def make_trunk(
    spec: ModelSpec, *, device: torch.device, dtype: torch.dtype, shards: Shards = ALONE
) -> DenseTrunk:
    """An empty trunk for the spec. Raises UserError IDLM-0423 if `shards` cannot divide it."""
    kind = DenseTrunk if spec.moe is None else moe.MoeTrunk
    return kind(spec, device=device, dtype=dtype, shards=shards)


def _with_possible_counts(spec: ModelSpec, num_tensors: int) -> ModelSpec:
    """The spec, without `moe` if no layer has experts. Raises UserError IDLM-0603 for impossible counts."""
    checkpoint.refuse_impossible_counts({"num_hidden_layers": spec.num_layers}, num_tensors)
    if spec.moe is None or not any(map(spec.moe.is_in, range(spec.num_layers))):
        return replace(spec, moe=None)
    checkpoint.refuse_impossible_counts({"num_experts": spec.moe.num_experts}, num_tensors)
    return spec


def _open(
    path: Path,
    base: str | Path | None,
    further: Mapping[str, str],
    overridden: tuple[str, ...],
) -> tuple[Path, tuple[Adapter, ...]]:
    """The directory of the whole model, and the adapters. `overridden`: fields of their semantics."""
    directory = checkpoint_directory(path)
    if checkpoint.is_adapter(directory):
        adapter = open_adapter(directory, base=base)
        folders = {name: checkpoint_directory(folder) for name, folder in further.items()}
        return adapter.base, (adapter, *open_further(folders, adapter, ignored=overridden))
    if base is not None:
        problem = f"base={base}, but {directory} is not an adapter"
        raise UserError("IDLM-0611", problem, fix="leave base= out for a whole model")
    if further:
        raise UserError(
            "IDLM-0626",
            f"adapters={[*further]}, and model={directory} is a whole model",
            fix="give one of the adapters as model=, and this model as base=",
        )
    checkpoint.warn_of_adapter(directory)
    return directory, ()


def checkpoint_directory(path: str | Path) -> Path:
    """The directory of a model or adapter, recovered if saving it was interrupted. UserError IDLM-0600."""
    directory = Path(path)
    checkpoint.recover(directory)
    if not (directory / "config.json").is_file() and not checkpoint.is_adapter(directory):
        raise _no_checkpoint(directory)
    return directory


def _no_checkpoint(directory: Path) -> UserError:
    if not directory.exists():
        siblings = [item.name for item in directory.parent.iterdir()] if directory.parent.is_dir() else []
        hint = did_you_mean(directory.name, siblings)
        return UserError(
            "IDLM-0600",
            f"there is no checkpoint at {directory} (looked in {directory.parent.resolve()}){hint}",
            fix="give a local directory; a model on the Hugging Face Hub is fetched first with "
            "`hf download <owner>/<name> --local-dir <directory>`",
        )
    what = "is not a directory" if not directory.is_dir() else "has no config.json"
    format_name = other_format(directory)
    if format_name is not None:
        what = f"{what}: it {'has' if directory.is_dir() else 'is'} {format_name}, which is not read"
    if (directory / "run" / "config.yaml").is_file():
        what = f"{directory} {what}: its run of idlm-train is not finished"
        return UserError("IDLM-0600", what, fix="start the idlm-train command again, which continues it")
    return UserError(
        "IDLM-0600",
        f"{directory} {what}",
        fix="give the directory that holds config.json and weights as safetensors",
    )


def _family(config: dict[str, Any]) -> tuple[str, type[Family]]:
    architectures = config.get("architectures")
    given = architectures[0] if isinstance(architectures, list) and len(architectures) == 1 else architectures
    if given not in FAMILIES.names():
        raise UserError(
            "IDLM-0601",
            f"config.json has architectures={architectures!r}; known are {', '.join(FAMILIES.names())}"
            f"{did_you_mean(str(given), FAMILIES.names())}",
            fix="use a checkpoint of a known architecture, or add one file to infer/models/families",
        )
    family, model_type = FAMILIES.get(given), config.get("model_type")
    if family.model_types and model_type not in family.model_types:
        raise UserError(
            "IDLM-0615",
            f"config.json has architectures={architectures!r} and model_type={model_type!r}; that "
            f"architecture goes with {' or '.join(family.model_types)}",
            fix="restore the config.json that belongs to these weights",
        )
    checkpoint.refuse_unknown_keys(config, {*family.config_keys, *MUST_BE_NULL}, foreign=family.foreign_keys)
    return str(given), family


def _own_semantics(directory: Path, config: dict[str, Any], family: type[Family]) -> Semantics:
    """What a whole model, or else its family, states of itself."""
    if (directory / SEMANTICS_FILE).is_file():
        return Semantics.load(directory)
    if family.unknown_semantics is not None:
        raise UserError(
            "IDLM-0605",
            f"{directory} does not determine how it decodes: {family.unknown_semantics}",
            fix=f"add {SEMANTICS_FILE} next to config.json, for an I-DLM model "
            '{"causality": "causal", "logit_shift": true, "mask_token_id": 151669, "stride": 4}, for an SDAR '
            'model {"causality": "block", "logit_shift": false, "block_size": 4, "mask_token_id": 151669, '
            '"stop_token_ids": [151643, 151645]}',
        )
    return family.semantics(config)


def _semantics(
    directory: Path, config: dict[str, Any], family: type[Family], mask_token_id: int | None, given: Semantics
) -> Semantics:
    """What the checkpoint states of itself, with the mask token of the user and the tokens of its edits."""
    has_own = given.draft_input is not None
    own = given.mask_token_id if has_own else config.get("mask_token_id")
    if None not in (mask_token_id, own) and mask_token_id != own:
        warnings.warn(
            f"mask_token_id={mask_token_id} is used in place of {own}, with which the checkpoint was trained",
            stacklevel=2,
        )
    meaning = replace(
        given,
        mask_token_id=own if mask_token_id is None else mask_token_id,
        edit_token_ids=given.edit_token_ids or family.edit_token_ids(config),
    )
    problems = family.contradictions(meaning)
    if problems:
        raise UserError(
            "IDLM-0616",
            f"{directory} cannot decode as stated: {'; '.join(problems)}",
            fix=f"correct {SEMANTICS_FILE}, or restore config.json",
        )
    return meaning


def _check_meaning(meaning: Semantics, spec: ModelSpec, directory: Path, adapter: Adapter | None) -> None:
    if meaning.gated and adapter is None:
        raise UserError(
            "IDLM-0609",
            f"{directory} has gated=true in {SEMANTICS_FILE}, but is a whole model: a gated adapter cannot "
            "be merged, it applies to MASK rows only",
            fix="give the directory of the adapter (adapter_config.json), or remove gated if it is a mistake",
        )
    if spec.moe is not None:
        moe.check_blocks(spec.moe, block_size=meaning.block_size)
    has_own_row = adapter is not None and adapter.has_mask_row
    mask = [] if has_own_row or meaning.mask_token_id is None else [meaning.mask_token_id]
    for name, token_ids in (("edit_token_ids", meaning.edit_token_ids), ("mask_token_id", mask)):
        if any(token >= spec.vocab_size for token in token_ids):
            raise UserError(
                "IDLM-0606",
                f"{name}={', '.join(map(str, token_ids))} is outside the {spec.vocab_size} embedding rows",
                fix=f"give ids below {spec.vocab_size}",
            )
    if meaning.noise_range and (has_own_row or meaning.noise_range[1] > spec.vocab_size):
        what = f"has the tensor {MASK_ROW} too" if has_own_row else f"has {spec.vocab_size} embedding rows"
        raise UserError(
            "IDLM-0606",
            f"{SEMANTICS_FILE} has noise_range={[*meaning.noise_range]}, and the checkpoint {what}",
            fix="give the noise_range that the checkpoint was trained with, or mask_token_id in its place",
        )


def _dtype(
    dtype: str | torch.dtype, config: dict[str, Any], files: dict[str, Stored], embed: str
) -> torch.dtype:
    given: Any = dtype
    if given == "auto":
        given = config.get("dtype") or config.get("torch_dtype")
        if given in (None, "auto") and embed in files:
            given = weights.tensor(files, embed).dtype
    found = given if given in DTYPES.values() else DTYPES.get(str(given))
    if found is None:
        allowed = f"auto, {', '.join(DTYPES)}"
        raise UserError("IDLM-0608", f"dtype={given!r} is not one of {allowed}", fix="give dtype= explicitly")
    return found
