"""Publishes a trained model, also one with a merged adapter, as a stock checkpoint of its base architecture,
or a gated adapter as a stock PEFT directory, plus `idlm_config.json`: at the end of every stage.

Any tool that loads the base architecture loads the result. Files that do not read back bitwise equal to the
weights in memory are not published. A stage goes to `<output_dir>/stages/<number>-stride-<stride>`, the last
one to `output_dir` itself, before the checkpoint of the same step. So a run that resumes from a checkpoint
has all stages that ended before it; a stage whose end is trained again is replaced by an equal one."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback, TrainerState

from idlm.checkpoint import LICENSE, MODEL_CARD, foreign_files, read_json
from idlm.files.tensors import stored_tensors
from idlm.lora import WEIGHTS_FILE, AdapterSpec
from idlm.publish import publish
from idlm.semantics import Semantics
from idlm.text.tokenizer import stop_token_ids
from idlm.train.checkpoint.base_files import BaseFiles, model_config, write_tokenizer_files
from idlm.train.checkpoint.model_card import model_card
from idlm.train.checkpoint.resume import STAGE_FOLDER
from idlm.train.distributed.collectives import from_rank_zero
from idlm.train.distributed.deepspeed import whole_weights
from idlm.train.model.gated_lora import is_trained, merged, peft_tensors
from idlm.train.model.stored import export_dtype
from idlm.train.objectives.curriculum import Curriculum, Stage

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from idlm.train.config.schema import TrainConfig
    from idlm.train.prepare import Prepared

log = logging.getLogger(__name__)
PROBES = (
    "Hello world, it's 1234567 o'clock.",
    "  two  spaces,\n\n\ta tab\r\n",
    "na\u00efve cafe\u0301 \u65e5\u672c\u8a9e \U0001f44d",
    "x_1 = 3*(y+0.5);  // WE'LL <b>see</b>",
)


def stage_directory(output_dir: str, stage: Stage) -> Path:
    return Path(output_dir) / STAGE_FOLDER / f"{stage.index + 1}-stride-{stage.stride}"


def publish_weights(config: TrainConfig, prepared: Prepared, *, stride: int, target: Path) -> None:
    """Publish the weights as they are now, for decoding with `stride`. Collective: rank 0 writes."""
    adapter, model, tokenizer = prepared.adapter, prepared.model, prepared.tokenizer
    weights = whole_weights(model, wanted=is_trained if config.is_gated else lambda name: True)
    semantics = dataclasses.replace(
        prepared.objective.semantics(stride),
        gated=config.is_gated,
        base_identity=prepared.base_identity if config.is_gated else None,
        stop_token_ids=stop_token_ids(tokenizer, model.generation_config.to_dict()),
    )
    if adapter is not None and not config.is_gated and weights is not None:
        weights = merged(weights, scaling=adapter.scaling, mask_token_id=prepared.mask_token_id)

    def write() -> None:
        card = model_card(config, prepared, stride=stride, target=target)
        files: Any = {"dtype": getattr(torch, export_dtype(config)), "base": prepared.base, "card": card}
        if adapter is None or not config.is_gated:
            export(model, tokenizer, semantics, target, weights=weights, **files)
        else:
            export_adapter(weights or {}, tokenizer, semantics, adapter, target, **files)

    from_rank_zero(write)


class StageExports(TrainerCallback):
    """Calls `publish_stage` on every rank after the last step of each stage but the last."""

    def __init__(self, curriculum: Curriculum, publish_stage: Callable[[Stage], None]) -> None:
        self.curriculum, self.publish_stage = curriculum, publish_stage

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        step, curriculum = state.global_step, self.curriculum
        if step < curriculum.num_steps and curriculum.ends_stage(step):
            self.publish_stage(curriculum.stage_of_step(step - 1))


def export(
    model: PreTrainedModel,
    tokenizer: Any,
    semantics: Semantics,
    target: Path,
    *,
    dtype: torch.dtype | None,
    weights: dict[str, torch.Tensor] | None = None,
    base: BaseFiles,
    card: str | None = None,
) -> None:
    """Publish `target` atomically: config, safetensors, tokenizer, generation config, semantics and the model
    card `card`.

    `weights` is the whole state dict where the model holds only parts of it (ZeRO-3). `dtype` is that of the
    files; None keeps the training dtype. `base` has the files that `tokenizer` was loaded from. The model
    does not change. Errors as in `idlm.publish.publish`."""
    weights = _converted(model.state_dict() if weights is None else weights, dtype)
    model.generation_config.eos_token_id = list(semantics.stop_token_ids) or None
    # Else transformers 4 takes the fields of config.json in its place.
    model.generation_config._from_model_config = False
    for name in ("bos_token_id", "pad_token_id"):
        setattr(model.generation_config, name, getattr(tokenizer, name, None))
    with publish(target) as staging:
        model.save_pretrained(staging, state_dict=dict(weights))
        _complete_config(staging / "config.json", dtype, base.config)
        if tokenizer is not None:
            write_tokenizer_files(staging, base.tokenizer, tokenizer)
            _warn_of_stock_rules(tokenizer, staging)
        if semantics.draft_input is not None:
            semantics.save(staging)
        _write_texts(staging, target, base, card)
        _require_bitwise(weights, staging, type(model))
    log.info("published %s", target)


def _write_texts(staging: Path, target: Path, base: BaseFiles, card: str | None) -> None:
    """Write the model card and the licence of the base, unless `target` has one that somebody else wrote."""
    texts = {MODEL_CARD: None if card is None else card.encode(), LICENSE: base.license_text}
    foreign = foreign_files(target, texts)
    for name, content in texts.items():
        if name in foreign:
            log.warning("%s stays as it is: idlm did not write it", target / name)
        elif content is not None:
            (staging / name).write_bytes(content)


def _warn_of_stock_rules(tokenizer: Any, directory: Path) -> None:
    """Warn when transformers' AutoTokenizer encodes with the files in `directory` otherwise than `tokenizer`.

    For some values of `model_type` (qwen2) it applies that family's rules to files of a generic class."""
    from transformers import AutoTokenizer

    try:
        stock = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        differing = [text for text in PROBES if stock(text)["input_ids"] != tokenizer(text)["input_ids"]]
    # For files that it cannot read it raises OSError, ValueError, KeyError or, in Rust, a bare Exception.
    except Exception as error:
        log.warning("transformers' AutoTokenizer cannot load the published tokenizer: %s", error)
        return
    if differing:
        log.warning(
            "transformers' AutoTokenizer (%s) gives other token ids than training used, for example for %r; "
            "load the tokenizer with PreTrainedTokenizerFast.from_pretrained there, as idlm does",
            type(stock).__name__,
            differing[0],
        )


def _converted(weights: dict[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """`weights` in `dtype`, copied to the host where that changes them; tied ones still share one tensor."""
    if dtype is None or all(value.dtype == dtype for value in weights.values() if value.is_floating_point()):
        return weights
    copies: dict[tuple[int, torch.Size], torch.Tensor] = {}
    converted = {}
    for name, value in weights.items():
        key = (value.data_ptr(), value.shape)
        if key not in copies:
            copies[key] = value.to("cpu", dtype) if value.is_floating_point() else value
        converted[name] = copies[key]
    return converted


def _complete_config(path: Path, dtype: torch.dtype | None, base_config: Mapping[str, Any]) -> None:
    config = read_json(path)
    # The Trainer switches the cache off for training; a stock checkpoint generates with it.
    config["use_cache"] = True
    if dtype is not None:
        config["dtype"] = str(dtype).removeprefix("torch.")
    config = model_config(config, base_config)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _require_bitwise(
    weights: dict[str, torch.Tensor], directory: Path, model_class: type[PreTrainedModel]
) -> None:
    """Assert that the files hold `weights`, by their names or as their family loads other names."""
    names: set[str] = set()
    for name, value in _read_back(directory, weights.keys(), model_class):
        names.add(name)
        expected = weights[name].detach().cpu()
        assert value.dtype == expected.dtype, f"{name=} {value.dtype=} {expected.dtype=}"
        assert _bits(value).equal(_bits(expected)), f"{name} was not written as it is in memory"
    tied = {weights[name].data_ptr() for name in names}
    missing = [name for name in weights if name not in names and weights[name].data_ptr() not in tied]
    assert names and not missing, f"the export lacks {missing=}"


def _read_back(
    directory: Path, names: Collection[str], model_class: type[PreTrainedModel]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and value of every tensor, one at a time where the files have the model's own names."""
    stored = stored_tensors(directory)
    if stored.keys() <= set(names):
        for path in {one.path for one in stored.values()}:
            with safe_open(path, framework="pt") as file:
                yield from ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 (no mapping)
        return
    loaded = model_class.from_pretrained(directory, dtype="auto", local_files_only=True)
    yield from loaded.state_dict().items()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def export_adapter(
    weights: dict[str, torch.Tensor],
    tokenizer: Any,
    semantics: Semantics,
    spec: AdapterSpec,
    target: Path,
    *,
    dtype: torch.dtype | None,
    base: BaseFiles,
    card: str | None = None,
) -> None:
    """Publish a gated adapter as `target`, atomically: a stock PEFT directory, tokenizer files, semantics and
    the model card `card`.

    `weights`: the adapter's weights by their names in the model. Errors as in `idlm.publish.publish`."""
    tensors = _converted(peft_tensors(weights), dtype)
    with publish(target) as staging:
        save_file(tensors, staging / WEIGHTS_FILE, metadata={"format": "pt"})
        spec.save(staging)
        if tokenizer is not None:
            write_tokenizer_files(staging, base.tokenizer, tokenizer)
        semantics.save(staging)
        _write_texts(staging, target, base, card)
        stored = load_file(staging / WEIGHTS_FILE)
        wrong = [name for name, value in tensors.items() if not _bits(stored[name]).equal(_bits(value))]
        assert not wrong and stored.keys() == tensors.keys(), f"{wrong=}"
    log.info("published adapter %s", target)
