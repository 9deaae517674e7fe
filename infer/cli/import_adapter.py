"""`idlm-import`: makes a LoRA of others, a PEFT folder, one that decoder `isd` runs on its base.

PEFT's config has no word on whether the LoRA changes MASK rows alone, what these are fed, and its stride in
training: options have, or the file that idlm writes next to its own adapters. Modules that import torch are
imported inside functions, as in `generate.py`."""

from __future__ import annotations

import re
import shlex
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from idlm.checkpoint import ADAPTER_CONFIG, LICENSE, MANIFEST, own_files, read_json
from idlm.cli import command
from idlm.cli.help import CommandHelp
from idlm.config.compose import compose
from idlm.config.schema import changed, option
from idlm.config.suggest import did_you_mean
from idlm.errors import UserError, naming, some_of
from idlm.files.paths import refuse_pointer
from idlm.files.tensors import INDEX_FILE, SINGLE_FILE, headers, stored_tensors
from idlm.infer.cli.plain_lora import adapted_modules, peft_names, plain_lora
from idlm.lora import WEIGHTS_FILE, AdapterSpec, base_identity
from idlm.publish import publish
from idlm.semantics import Semantics
from idlm.text.tokenizer import load_tokenizer, num_token_ids, read_tokenizer_files

if TYPE_CHECKING:
    from torch import Tensor

    from idlm.infer.models.loader import Outline

PRESETS: dict[str, dict[str, Any]] = {
    "uno_qwen3_8b": {"gated": True, "stride": 16, "noise_range": [1, 151_669], "acceptance": [0.78] * 15},
    "uno_k2_horizon_7b": {"gated": True, "stride": 4, "noise_range": [1, 250_624]},
    "uno_k2_horizon_0_9b": {"gated": True, "stride": 8, "noise_range": [1, 64_256]},
    "idlm_qwen3_8b": {"gated": True, "stride": 4, "mask_token_id": 151_669},
}
"""What the authors' code does with s-sahoo/uno-qwen3-8B, IFM/K2-Horizon-7B-Uno and IFM/K2-Horizon-0.9B-Uno,
and with yifanyu/I-DLM-8B-lora-r128."""
FED = ("mask_token_id", "noise_range")
SAFETENSORS, PICKLES = "adapter_model*.safetensors", "adapter_model*.bin"


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    model: str | None = option("folder with adapter_config.json, there or below", None, is_path=True)
    base: str | None = option(
        "directory of the base model; null: model itself, or the path in adapter_config.json",
        None,
        is_path=True,
    )
    output_dir: str | None = option("folder of the adapter that idlm runs", None, is_path=True)
    preset: str | None = option(f"values of the keys below: {', '.join(PRESETS)}; null: none", None)
    gated: bool | None = option("true: the adapter was trained to change MASK rows alone", None)
    stride: int | None = option("largest stride that it was trained for", None)
    mask_token_id: int | None = option("the token that MASK rows are fed", None)
    noise_range: list[int] = option("[low, high) of the random ids that they are fed in its place", [])
    acceptance: list[float] = option(
        "first guess of how often the draft at each position is accepted once those before it were", []
    )


HELP = CommandHelp.of("idlm-import", ImportConfig)


def main() -> int:
    return command.run(import_adapter)


def import_adapter(arguments: list[str]) -> int:
    if command.has_help_flag(arguments):
        return HELP.print(arguments)
    config = compose("import", ImportConfig, arguments)
    print(import_to(_complete(config, _own_values(config.model))))
    return 0


def _own_values(model: str | None) -> dict[str, Any]:
    """What a gated adapter of idlm states of itself; nothing for those of others."""
    own = Semantics() if model is None else Semantics.load(find_adapter(Path(model)))
    names = ("gated", "stride", "mask_token_id", "noise_range", "acceptance") if own.gated else ()
    return {name: value for name in names if (value := getattr(own, name)) not in (None, ())}


def _complete(config: ImportConfig, own: Mapping[str, Any]) -> ImportConfig:
    """With the values of the preset, or else the adapter's `own`, where none are given. UserError IDLM-0620
    for what is missing."""
    if config.preset is not None and config.preset not in PRESETS:
        hint = did_you_mean(config.preset, PRESETS)
        raise UserError(
            "IDLM-0620",
            f"preset={config.preset!r} is not one of {', '.join(PRESETS)}{hint}",
            fix="give one of them, or the keys themselves",
        )
    values: dict[str, Any] = {}
    for layer in (own, PRESETS.get(config.preset or "", {}), changed(config, ImportConfig())):
        # What is fed takes the place of the other kind too.
        replaced = FED if layer.keys() & {*FED} else ()
        values = {key: value for key, value in values.items() if key not in replaced} | {**layer}
    config = replace(config, **values)
    missing = [name for name in ("model", "output_dir", "gated", "stride") if getattr(config, name) is None]
    if config.mask_token_id is None and not config.noise_range:
        missing.append("mask_token_id or noise_range")
    if missing:
        raise UserError(
            "IDLM-0620",
            f"PEFT's config does not have everything: {', '.join(missing)} is missing",
            fix=f"give {', '.join(f'{name}=...' for name in missing)}, or preset={' or '.join(PRESETS)}",
        )
    if not config.gated:
        raise UserError(
            "IDLM-0620",
            "gated=false: the adapter changes every row, and idlm runs adapters on MASK rows alone",
            fix="merge it into its base with peft's merge_and_unload, and decode the result",
        )
    return config


def import_to(config: ImportConfig) -> str:
    """Check the adapter against its base and publish a copy; return what was imported. UserError IDLM-0607,
    0610, 0611, 0613, 0620, and those of the base."""
    from safetensors.torch import save_file

    from idlm.infer.models.adapter import DIVERGED, base_directory
    from idlm.infer.models.loader import read_outline
    from idlm.infer.models.weights import require_finite

    assert config.model and config.output_dir and config.stride is not None
    found, target = find_adapter(Path(config.model)), Path(config.output_dir)
    tensors = peft_names(_tensors(found), origin=found)
    content = read_json(found / ADAPTER_CONFIG)
    named = content.get("base_model_name_or_path")
    # The base may be the whole model that the adapter is in.
    base = base_directory(found, *([config.base] if config.base else [config.model, named]))
    tensors = _without_copies(tensors, found, base)
    what = f"{found / ADAPTER_CONFIG} has a pattern that is none"
    with naming("IDLM-0610", what, fix="copy the adapter again from its source", of=re.error):
        content, tensors = plain_lora(content, tensors, base=read_json(base / "config.json"))
    require_finite("IDLM-0613", tensors, found, fix=DIVERGED)
    targets = sorted({module.rpartition(".")[2] for module in adapted_modules(tensors)})
    spec = AdapterSpec.read(content, origin=found / ADAPTER_CONFIG, targets=targets)
    semantics = replace(
        Semantics.load(found),
        gated=True,
        base_identity=base_identity(base),
        stride=config.stride,
        mask_token_id=config.mask_token_id,
        noise_range=tuple(config.noise_range),
        acceptance=tuple(config.acceptance),
    )
    with publish(target) as staging:
        save_file(tensors, staging / WEIGHTS_FILE, metadata={"format": "pt"})
        replace(spec, base_path=str(base.resolve())).save(staging)
        semantics.save(staging)
        try:
            outline = read_outline(staging, base=base)
        except UserError as error:
            message = error.message.replace(str(staging), str(found))
            raise UserError(error.code, message, fix=error.fix) from error
        _copy_beside(found, staging, outline)
        _refuse_removal(target, staging)
    _warn_of_another_base(Path(config.model), base, semantics)
    size = sum(tensor.numel() for tensor in tensors.values())
    ids = ", ".join(map(str, config.noise_range))
    fed = f"random ids in [{ids})" if ids else f"token {config.mask_token_id}"
    return (
        f"imported {found} as {config.output_dir}: rank {spec.rank}, alpha {spec.alpha:g}, {size:,} "
        f"parameters\nMASK rows are fed {fed}, stride {config.stride}\n"
        f"base {base}: every tensor fits. The adapter names {spec.base_path or 'no base'}. On another base "
        "of the same shapes few drafts are accepted; answers are still those of that base\n"
        + shlex.join(["idlm-generate", f"model={target}", f"base={base}", "decoder=isd"])
    )


def _refuse_removal(target: Path, staging: Path) -> None:
    """Raise UserError IDLM-0620 for a folder of a whole model, or of a checkpoint with files that `staging`
    lacks: publishing would add to the one, and remove them from the other."""
    held = [path for path in (*own_files(target), target / "config.json") if path.exists()]
    names = {str(path.relative_to(target)) for path in held} - {MANIFEST}
    others = sorted(name for name in names if not (staging / name).exists())
    if others:
        raise UserError(
            "IDLM-0620",
            f"output_dir={target} holds another checkpoint: it has {some_of(others)}",
            fix="give a folder of its own",
        )


def _copy_beside(found: Path, staging: Path, outline: Outline) -> None:
    """Copy the selector and the licence of an adapter, and its tokenizer, whose chat template the engine
    prefers."""
    from idlm.selector import SELECTOR_FILE

    has_selector, tokenizer = outline.semantics.selector is not None, load_tokenizer(found)
    names = [LICENSE, *([SELECTOR_FILE] if has_selector else [])]
    files = {name: (found / name).read_bytes() for name in names if (found / name).is_file()}
    if tokenizer is not None and num_token_ids(tokenizer) > outline.spec.vocab_size:
        more = f"{num_token_ids(tokenizer)} ids, more than the {outline.spec.vocab_size} rows of the base"
        warnings.warn(f"the tokenizer in {found} has {more}: that of the base is used", stacklevel=2)
    elif tokenizer is not None:
        files |= read_tokenizer_files(found)
    for name, content in files.items():
        (staging / name).parent.mkdir(exist_ok=True)
        (staging / name).write_bytes(content)


def find_adapter(directory: Path) -> Path:
    """The folder of adapter_config.json: `directory`, or the only one below it. UserError IDLM-0620."""
    if (directory / ADAPTER_CONFIG).is_file():
        return directory
    below = sorted(path.parent for path in directory.rglob(ADAPTER_CONFIG)) if directory.is_dir() else []
    if len(below) != 1:
        what = f"is in {len(below)} folders: {', '.join(map(str, below))}" if below else "is not there"
        raise UserError(
            "IDLM-0620",
            f"model={directory}: {ADAPTER_CONFIG} {what}",
            fix="give the folder of one adapter in PEFT's format; one on a hub is fetched first with "
            "`hf download <owner>/<name> --local-dir <directory>`",
        )
    return below[0]


def _tensors(found: Path) -> dict[str, Tensor]:
    """All tensors of an adapter. UserError IDLM-0607 for files that are not there or cannot be read."""
    import torch
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    files = sorted(found.glob(SAFETENSORS)) or sorted(found.glob(PICKLES))
    for path in files:
        if path.suffix == ".safetensors":
            # First, because it reports a broken file.
            headers(path)
            tensors |= load_file(path)
            continue
        refuse_pointer("IDLM-0607", path)
        try:
            # Runs no code of the file: it may hold tensors only.
            content = torch.load(path, map_location="cpu", weights_only=True)
            tensors |= {name: value.contiguous() for name, value in content.items()}
        except Exception as error:
            raise UserError(
                "IDLM-0607",
                f"{path} cannot be read as tensors: it is damaged, or holds objects, which may run code",
                fix="restore the file from its source, or take one of safetensors",
            ) from error
    if not tensors:
        raise UserError(
            "IDLM-0607",
            f"{found} has no tensors: neither {SAFETENSORS} nor {PICKLES}",
            fix="download the missing files",
        )
    return tensors


def _without_copies(tensors: dict[str, Tensor], found: Path, base: Path) -> dict[str, Tensor]:
    """The tensors without the embeddings and the head of the base, which PEFT stores too where their
    vocabulary was resized. UserError IDLM-0613 where those of `base` are others."""
    import torch

    from idlm.infer.models import weights
    from idlm.infer.models.base import TensorNames

    files, names = stored_tensors(base), TensorNames()
    # A tied base stores its embeddings alone.
    sources = {names.embed: names.embed, names.head: names.head if names.head in files else names.embed}
    copies = {f"base_model.model.{name}": source for name, source in sources.items() if source in files}
    for name in copies.keys() & tensors.keys():
        if not torch.equal(weights.tensor(files, copies[name]).to(tensors[name].dtype), tensors[name]):
            raise UserError(
                "IDLM-0613",
                f"{found} has another {name} than base={base}: the vocabulary was resized or trained",
                fix="give base= the model that it was trained on, saved with these embeddings",
            )
    return {name: tensor for name, tensor in tensors.items() if name not in copies}


def _warn_of_another_base(directory: Path, base: Path, semantics: Any) -> None:
    """Warn where the adapter came with a base whose weights are not those of `base`."""
    has_weights = any((directory / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))
    if has_weights and base_identity(directory) != semantics.base_identity:
        warnings.warn(
            f"the weights in {directory} are not those of base={base}: if the adapter was trained on the "
            "former, few drafts will be accepted",
            stacklevel=2,
        )
