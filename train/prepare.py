"""Loads what a run needs, base model, tokenizer and data, and checks that they fit together."""

from __future__ import annotations

import datetime
import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from idlm.checkpoint import read_json
from idlm.errors import UserError
from idlm.files.disk import replace_text
from idlm.lora import AdapterSpec, base_identity
from idlm.text.tokenizer import load_tokenizer, num_token_ids, stop_token_ids
from idlm.train.base_kl import FrozenBase, NearBase
from idlm.train.checkpoint.base_files import BaseFiles, read_base_files
from idlm.train.checkpoint.resume import RUN_FOLDER
from idlm.train.config.data import held_out_config
from idlm.train.config.schema import TASK_TOKENIZER, TrainConfig, make_curriculum
from idlm.train.data.base import Source, has, make_encoder, open_source
from idlm.train.data.cache import CountedSource
from idlm.train.data.checks import DataReport, inspect_data
from idlm.train.data.dataset import PackedDataset, open_source_on_all_ranks
from idlm.train.data.packing import held_out_flags
from idlm.train.distributed.collectives import from_rank_zero, is_distributed
from idlm.train.distributed.deepspeed import SHARDS_WEIGHTS, gathering_forward, zero_stage
from idlm.train.model.attention import choose_attention
from idlm.train.model.checks import (
    check_model,
    grow_vocabulary,
    mask_token,
    noise_range,
    noise_text,
    num_padded_rows,
    num_vocabulary_rows,
    prepare_mask_row,
)
from idlm.train.model.gated_lora import add_adapter, trained_row
from idlm.train.model.load import (
    base_config,
    check_fit,
    compile_model,
    compiles,
    load_base,
    needed_attention,
    new_config,
    random_model,
    recompute_layers,
    require_row,
)
from idlm.train.model.stand_in import MAX_ELEMENTS, check_architecture
from idlm.train.model.stored import readable_tensors
from idlm.train.objectives.base import OBJECTIVES, Losses, Objective
from idlm.train.objectives.curriculum import Curriculum

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from idlm.train.config.data import DataConfig

DATA_FILE, BASE_FILE = "data.json", "base.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """What a run trains on and is evaluated on; `held_out` is None without `eval.every`. `date`: the day that
    the chat template writes, None where it writes none."""

    dataset: PackedDataset
    curriculum: Curriculum
    held_out: PackedDataset | None
    date: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(RunData):
    model: PreTrainedModel
    tokenizer: Any
    mask_token_id: int | None
    objective: Objective
    attention: str
    adapter: AdapterSpec | None = None
    base_identity: str | None = None
    mask_text: str | None = None
    base: BaseFiles = BaseFiles()
    losses: Losses

    @property
    def draft_input(self) -> str:
        """What mask rows are fed."""
        noise = self.objective.noise_range
        return noise_text(noise) if noise else f"mask token id {self.mask_token_id}"


def prepare(config: TrainConfig, *, world_size: int, device: torch.device) -> Prepared:
    """Load and check everything. Raises UserError where something is missing or does not fit."""
    is_16_bit = config.train.bf16 or config.model.dtype == "bfloat16"
    attention = choose_attention(config.model.attention, device, is_16_bit=is_16_bit)
    tokenizer = prepare_tokenizer(config)
    model = prepare_model(config, tokenizer, attention, device).to(device)
    mask_token_id, mask_row_D, mask_text = prepare_mask(config, model, tokenizer)
    with gathering_forward(model) if zero_stage(config.train) == SHARDS_WEIGHTS else nullcontext():
        check_model(model, attention=attention, trains=stands_for_itself(config))
    check_fit(config, model, tokenizer, device, num_rows=num_vocabulary_rows(model))
    frozen_base = None
    if config.train.base_kl:
        frozen_base = FrozenBase(model, torch.bfloat16 if is_16_bit else model.dtype, attention)
    adapter = prepare_adapter(config, model, mask_row_D)
    if config.model.gradient_checkpointing:
        recompute_layers(model, config.model.recomputed_layers)
    objective = make_objective(config, model, tokenizer, mask_token_id)
    losses: Losses = objective
    if frozen_base is not None:
        losses = NearBase(objective, frozen_base, config.train.base_kl)
    data = prepare_data(config, tokenizer, objective, mask_token_id, world_size)
    if compiles(config, device):
        compile_model(config, model, device, row_length=data.dataset.row_length, world_size=world_size)
    path = None if config.model.path is None else Path(config.model.path)
    with _tokenizer_folder(config) as directory:
        base = read_base_files(path, directory)
    return Prepared(
        model=model,
        tokenizer=tokenizer,
        mask_token_id=mask_token_id,
        objective=objective,
        **{field.name: getattr(data, field.name) for field in fields(data)},
        attention=attention,
        adapter=adapter,
        mask_text=mask_text,
        base=base,
        losses=losses,
        base_identity=base_identity(path) if path and (adapter or config.train.base_kl) else None,
    )


@contextmanager
def _tokenizer_folder(config: TrainConfig) -> Iterator[Path]:
    """The folder of the base's tokenizer, or of `model.tokenizer`, where `task` is that of the tasks."""
    if config.model.tokenizer != TASK_TOKENIZER:
        yield Path(config.model.tokenizer or config.model.path or "")
        return
    from idlm.tasks.tokenizer import save_tokenizer

    with tempfile.TemporaryDirectory() as temporary:
        save_tokenizer(Path(temporary), config.data.task)
        yield Path(temporary)


def prepare_tokenizer(config: TrainConfig) -> Any:
    """The tokenizer of a run. Raises UserError IDLM-0510 where there is none."""
    with _tokenizer_folder(config) as directory:
        tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        raise UserError(
            "IDLM-0510",
            f"{directory} has no tokenizer files, and training data is text",
            fix="copy the tokenizer files into the checkpoint directory, or set model.tokenizer",
        )
    return tokenizer


def data_report(config: TrainConfig, prepared: Prepared) -> DataReport:
    generation = prepared.model.generation_config.to_dict()
    stops = stop_token_ids(prepared.tokenizer, generation)
    return inspect_data(config.data, prepared.dataset, prepared.tokenizer, stop_token_ids=stops)


def prepare_model(
    config: TrainConfig, tokenizer: Any, attention: str, device: torch.device
) -> PreTrainedModel:
    """The base: loaded from `model.path`, or new with a spare row of the vocabulary for the mask token."""
    dtype = getattr(torch, config.model.dtype)
    if config.model.path is not None:
        if not stands_for_itself(config):
            attention_needed = needed_attention(config, attention)
            check_architecture(base_config(config.model.path), attention=attention_needed)
        return load_base(config.model.path, attention=attention, dtype=dtype)
    values = dict(config.model.config)
    values.setdefault("vocab_size", num_padded_rows(num_token_ids(tokenizer)))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values.setdefault(name, getattr(tokenizer, name))
    check_architecture(new_config(values), attention=needed_attention(config, attention))
    return random_model(values, attention=attention, dtype=dtype, seed=config.train.seed, device=device)


def stands_for_itself(config: TrainConfig) -> bool:
    """Whether a base is so small that the loaded one is checked, with its backward pass, and no smaller model
    before. Partitioned weights have none then, and a gated adapter needs more of the architecture."""
    path, is_partitioned = config.model.path, zero_stage(config.train) == SHARDS_WEIGHTS
    if path is None or is_partitioned or config.is_gated:
        return False
    return sum(math.prod(one.shape) for one in readable_tensors(Path(path)).values()) <= MAX_ELEMENTS


def prepare_mask(
    config: TrainConfig, model: PreTrainedModel, tokenizer: Any
) -> tuple[int | None, torch.Tensor | None, str | None]:
    """(mask token id, whose embedding row is usable afterwards; start [D] of an embedding that an adapter
    trains, since it does not change the base; which token it is and why). None for what there is not."""
    if not OBJECTIVES.get(config.objective).places_masks:
        return None, None, None
    num_rows, explicit = num_vocabulary_rows(model), config.model.mask_token_id
    if config.train.draft_input == "uniform":
        return None, None, noise_text(noise_range(tokenizer, num_rows, config.train.noise_range))
    mask = mask_token(tokenizer, num_rows, explicit, has_adapter=config.adapter is not None)
    if config.adapter is not None:
        require_row(config, mask.token_id, num_rows)
        return mask.token_id, trained_row(model, mask), mask.text
    if not mask.has_row:
        grow_vocabulary(model, mask.token_id)
    prepare_mask_row(model, mask.token_id)
    return mask.token_id, None, mask.text


def prepare_adapter(
    config: TrainConfig, model: PreTrainedModel, mask_row_D: torch.Tensor | None
) -> AdapterSpec | None:
    """Freeze the base and add the adapter, if one is configured."""
    if config.adapter is None:
        return None
    spec = AdapterSpec(
        rank=config.adapter.rank,
        alpha=config.adapter.alpha,
        targets=tuple(config.adapter.targets),
        base_path=None if config.model.path is None else str(Path(config.model.path).resolve()),
    )
    add_adapter(model, spec, mask_row_D=mask_row_D, seed=config.train.seed, is_gated=config.adapter.gated)
    return spec


def make_objective(
    config: TrainConfig, model: PreTrainedModel, tokenizer: Any, mask_token_id: int | None
) -> Objective:
    """Return the objective of a run; `mask_token_id` is None where it places no masks."""
    generation, loop = model.generation_config, config.train
    noise: tuple[int, ...] = ()
    if loop.draft_input == "uniform":
        noise = noise_range(tokenizer, num_vocabulary_rows(model), loop.noise_range)
    return OBJECTIVES.get(config.objective)(
        mask_token_id=mask_token_id,
        mask_region=config.mask_region,
        max_stride=max((stage.stride for stage in loop.stages), default=1),
        stop_token_ids=stop_token_ids(tokenizer, generation.to_dict() if generation else None),
        max_padding=loop.max_padding,
        max_clean_weight=loop.max_clean_weight,
        noise_range=noise,
        phase=loop.phase,
        distill=loop.distill,
        distill_share=loop.distill_share,
    )


def prepare_data(
    config: TrainConfig, tokenizer: Any, objective: Objective, mask_token_id: int | None, world_size: int
) -> RunData:
    """The packed datasets, and the curriculum, whose steps follow from the rows with `epochs`. Collective."""
    loop = config.train
    date = from_rank_zero(lambda: run_date(config))
    encoder = make_encoder(config.data, tokenizer, mask_token_id, date=date)
    opened = open_source_on_all_ranks if is_distributed() else open_source
    source = opened(config.data, encoder, output_dir=config.output_dir)
    is_held_out = held_out_flags(config.eval, source, seed=config.data.seed)

    def packed(source: Source, left_out: np.ndarray | None) -> PackedDataset:
        pad_token_id = tokenizer.pad_token_id
        return PackedDataset(
            source,
            objective,
            max_length=loop.max_length,
            row_length=loop.row_length or objective.default_row_length(loop.max_length),
            overlong=loop.overlong,
            pad_token_id=tokenizer.eos_token_id if pad_token_id is None else pad_token_id,
            seed=config.data.seed,
            left_out=left_out,
        )

    dataset = packed(source, is_held_out)
    curriculum = make_curriculum(config, world_size=world_size, rows_per_epoch=dataset.rows_per_epoch())
    dataset.curriculum = curriculum
    held_out = None
    if config.eval.every is not None and is_held_out is not None:
        held_out = packed(source, ~is_held_out)
    elif config.eval.every is not None:
        separate = separate_data(config)
        if separate is None:
            raise UserError(
                "IDLM-0552",
                "the data has no samples to hold out: it is endless, has one prompt, or eval.holdout=0",
                fix="give eval.path with held-out data, or eval.every=null",
            )
        held_out = packed(opened(separate, encoder, output_dir=config.output_dir), None)
    return RunData(dataset=dataset, curriculum=curriculum, held_out=held_out, date=encoder.date)


def separate_data(config: TrainConfig) -> DataConfig | None:
    """Held-out data apart from that of training: by `eval`, or a task's validation split; else None."""
    if (config.eval.path, config.eval.split) == (None, None) and not has(config.data.source, "has_splits"):
        return None
    return held_out_config(config.data, config.eval.path, config.eval.split, config.eval.subset)


def run_date(config: TrainConfig) -> datetime.date:
    """Return the day that a chat template writes: `data.date`, else the day on which the run began."""
    stored = Path(config.output_dir) / RUN_FOLDER / DATA_FILE
    known = read_json(stored).get("date") if stored.is_file() else None
    given = config.data.date or known
    return datetime.date.today() if given is None else datetime.date.fromisoformat(str(given))


def remember_data(run: Path, source: Source, *, date: str | None = None, is_continued: bool) -> None:
    """Store which data a run has in its folder, and the date that its chat template writes; UserError
    IDLM-0235 where a resumed run has other data, with which it would see some samples twice and others
    never."""
    now: dict[str, Any] = {} if date is None else {"date": date}
    if isinstance(source, CountedSource):
        now |= {"digest": source.digest(), "num_samples": source.num_samples}
    before = _remembered(run / DATA_FILE, now, is_continued=is_continued) if now else now
    day = before.get("date")
    if day != date:
        raise UserError(
            "IDLM-0235",
            f"the chat template writes the date, which is {date} now and was {day or 'another'} when the run "
            f"in {run} began, so its data would be other data",
            fix=f"set data.date={day or 'YYYY-MM-DD'}, the day on which the run began",
        )
    if before != now:
        raise UserError(
            "IDLM-0235",
            f"the run in {run} was started on {before.get('num_samples')} samples that are not the "
            f"{now.get('num_samples')} of its data now",
            fix="restore the data files, or start a new run: another output_dir, or resume=never",
        )


def remember_base(run: Path, identity: str, *, is_continued: bool) -> None:
    """Store which base a run has, for an adapter or as a teacher, in its folder; UserError IDLM-0518 where a
    resumed run has another: checkpoints do not hold it, and it is read again from model.path."""
    now = {"base_identity": identity}
    if _remembered(run / BASE_FILE, now, is_continued=is_continued) != now:
        raise UserError(
            "IDLM-0518",
            f"the weights in model.path are not those that the run in {run} was started on",
            fix="restore them, or start a new run: another output_dir, or resume=never",
        )


def _remembered(path: Path, now: dict[str, Any], *, is_continued: bool) -> dict[str, Any]:
    """Return what the run was started with according to `path`; a new run writes `now` there."""
    if is_continued and path.is_file():
        return read_json(path)
    replace_text(path, json.dumps(now))
    return now
