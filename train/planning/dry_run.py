"""`dry_run=true`: plans and checks a run without a GPU and without reading weights.

The model is built on the meta device. Of weight files the headers are read, and of those of a manifest the
hashes. All problems are collected, and with any the command ends with status 2. Only the data cache is
written, which the run itself would build."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.text import Text

from idlm.config.compose import FROZEN, RECIPE, compose
from idlm.errors import UserError
from idlm.text.tokenizer import num_token_ids, stop_token_ids
from idlm.train.check import check_config
from idlm.train.checkpoint.resume import config_text, named_checkpoint
from idlm.train.checkpoint.writer import host_memory
from idlm.train.config.schema import TrainConfig, with_accumulation
from idlm.train.data.checks import held_out_text, inspect_data, run_warnings
from idlm.train.data.dataset import PackedDataset
from idlm.train.data.layout import IGNORE_LABEL
from idlm.train.model.attention import choose_attention
from idlm.train.model.checks import mask_token, noise_range, noise_text, num_vocabulary_rows
from idlm.train.model.load import (
    base_config,
    check_fit,
    load_base,
    needed_attention,
    random_model,
    require_row,
)
from idlm.train.model.stand_in import check_architecture
from idlm.train.model.stored import embedding_norm, read_generation_config
from idlm.train.objectives.base import OBJECTIVES
from idlm.train.planning.estimate import Estimate, estimate_run, gpu_name, num_gpus, remedies
from idlm.train.planning.flops import span
from idlm.train.planning.memory import DEVICE_BYTES
from idlm.train.planning.state import DISK_FIX, GIB, DiskPlan, plan_disk, size_text
from idlm.train.prepare import make_objective, prepare_adapter, prepare_data, prepare_model, prepare_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
HEAD_TOKENS, TAIL_TOKENS = 160, 40
FILES = (f"{RECIPE}=", f"+{RECIPE}=", f"{FROZEN}=")
"""How arguments that name a recipe or a whole configuration begin."""
LEGEND = "context, [[targets]], | before the first target of a masked block"


@dataclass(slots=True)
class Findings:
    """Sections in order of printing, whose lines are text or rich's Text; and the problems.

    `is_sound`: no value of the configuration was refused."""

    sections: list[tuple[str, list[Any]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    is_sound: bool = False

    def add(self, title: str, *lines: Any) -> None:
        self.sections.append((title, list(lines)))

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Inside, a UserError becomes a problem, unless it is one already.

        Refused values may break the plan anywhere: the rest of the plan is then left out."""
        try:
            yield
        except UserError as error:
            if not any(error.message in problem for problem in self.problems):
                message = error.message.replace("\n", "\n  ")
                self.problems.append(f"{error.code}: {message}\n    fix: {error.fix}")
        except Exception:
            if self.is_sound:
                raise
            log.debug("the plan ends here, with values that were refused", exc_info=True)


def dry_run(config: TrainConfig, *, console: Any, arguments: Sequence[str] = (), check: Any = None) -> None:
    """Print the plan; raises UserError IDLM-0550 with every problem, also that of `check(config)`."""
    found = Findings()
    with found.guarding():
        check_config(config)
        config = with_accumulation(config, world_size=num_gpus(config))
        found.is_sound = True
    if config.resume not in ("auto", "never"):
        with found.guarding():
            named_checkpoint(config)
    if check is not None:
        with found.guarding():
            check(config)
    tokenizer: Any = None
    # A missing checkpoint is a problem of the configuration already.
    if found.is_sound or config.model.tokenizer or (Path(config.model.path or "") / "config.json").is_file():
        with found.guarding():
            tokenizer = prepare_tokenizer(config)
    if tokenizer is not None:
        with found.guarding():
            _plan(config, planned_model(config, tokenizer, found), tokenizer, found)
    found.add("Launch", launch_command(num_gpus(config), arguments))
    found.add("Configuration", *config_lines(config, arguments))
    _print(found, console)
    if found.problems:
        listed = "".join(f"\n  - {problem}" for problem in found.problems)
        plural = "s" if len(found.problems) > 1 else ""
        raise UserError(
            "IDLM-0550",
            f"the dry run found {len(found.problems)} problem{plural}:{listed}",
            fix="correct them and run it again; nothing was trained",
        )


def planned_model(config: TrainConfig, tokenizer: Any, found: Findings) -> PreTrainedModel:
    """The model of the run without any weights; what the run would refuse of a base becomes a problem."""
    path, attention = config.model.path, planned_attention(config, found)
    if path is not None:
        base = base_config(path)
        with found.guarding():
            check_architecture(base, attention=needed_attention(config, attention))
        with found.guarding():
            dtype = getattr(torch, config.model.dtype)
            return load_base(path, attention="eager", dtype=dtype, is_planned=True)
    return meta_model(config, tokenizer, attention)


def meta_model(config: TrainConfig, tokenizer: Any, attention: str = "idlm_documents") -> PreTrainedModel:
    """The model of config.json without any weights, which need not be there."""
    meta, dtype = torch.device("meta"), getattr(torch, config.model.dtype)
    if config.model.path is None:
        return prepare_model(config, tokenizer, attention, meta)
    model = random_model(base_config(config.model.path), attention="eager", dtype=dtype, device=meta)
    read = read_generation_config(Path(config.model.path))
    model.generation_config = model.generation_config if read is None else read
    return model


def planned_attention(config: TrainConfig, found: Findings) -> str:
    device, requested = _planned_on(config), config.model.attention
    is_16_bit = config.train.bf16 or config.model.dtype == "bfloat16"
    # What is installed here may differ from a machine with GPUs.
    is_elsewhere = device.type == "cuda" and not torch.cuda.is_available()
    with found.guarding():
        return choose_attention(requested, device, is_16_bit=is_16_bit, is_elsewhere=is_elsewhere)
    return choose_attention("auto", device, is_16_bit=is_16_bit)


def _planned_on(config: TrainConfig) -> torch.device:
    return torch.device("cpu" if gpu_name(config) is None else "cuda")


def _plan(config: TrainConfig, model: PreTrainedModel, tokenizer: Any, found: Findings) -> None:
    num_base, num_rows = sum(value.numel() for value in model.parameters()), num_vocabulary_rows(model)
    name = type(model).__name__
    mask_token_id, mask_row_D, is_chosen = None, None, False
    with found.guarding():
        mask_token_id, mask_row_D, lines = mask_choice(config, model, tokenizer)
        is_chosen = True
        found.add("Model", f"{name}, {num_base:,} parameters, {config.model.dtype}", *lines)
        if mask_token_id is not None:
            require_row(config, mask_token_id, num_rows)
            num_rows = max(num_rows, mask_token_id + 1) if config.adapter is None else num_rows
    if not is_chosen:
        return
    with found.guarding():
        check_fit(config, model, tokenizer, _planned_on(config), num_rows=num_rows)
    prepare_adapter(config, model, mask_row_D)
    objective = make_objective(config, model, tokenizer, mask_token_id)
    gpus = num_gpus(config)
    data = prepare_data(config, tokenizer, objective, mask_token_id, gpus)
    dataset, curriculum = data.dataset, data.curriculum
    stops = stop_token_ids(tokenizer, model.generation_config.to_dict() if model.generation_config else None)
    with found.guarding():
        report = inspect_data(config.data, dataset, tokenizer, stop_token_ids=stops)
        warnings = run_warnings(config, model.config.get_text_config(), report.lengths)
        found.add("Data", *report.lines(), *held_out_text(dataset, data.held_out), *warnings)
    found.add(f"Samples: {LEGEND}", *_samples(dataset, tokenizer))
    stages = [
        f"{stage.index + 1}. {stage.name}" if stage.stride > 1 else f"{stage.num_steps} steps"
        for stage in curriculum.stages
    ]
    rows = f"{curriculum.global_batch} rows of {dataset.row_length} per step, {curriculum.num_steps} steps"
    found.add("Stages", *stages, rows)
    estimate = estimate_run(config, model, dataset, curriculum, gpus=gpus, measures=True)
    if estimate is None:
        found.add("Memory", "no estimate: the architecture's shape is not that of a dense decoder")
        return
    device, how_to_change = planned_device(config)
    found.add(f"Plan for {device}", how_to_change)
    share = "the CPU" if gpu_name(config) is None else f"one of {gpus} GPUs"
    found.add(f"Memory of {share}, at the peak", *_memory_lines(estimate, config, found))
    found.add(f"Time on {device}", *_time_lines(estimate, config))
    _add_disk(plan_disk(config, model, curriculum), found)


def planned_device(config: TrainConfig) -> tuple[str, str]:
    """(the device that memory and time are planned for, how to plan for another)."""
    gpu = gpu_name(config)
    if gpu is None:
        why = "" if torch.cuda.is_available() else "this machine has no GPU; "
        return "the CPU of this machine", f"{why}plan.gpu=H100 and plan.num_gpus=... plan for GPUs"
    device, other = f"{num_gpus(config)} x {gpu}", "plan.gpu=... and plan.num_gpus=... plan for others"
    if config.plan.gpu is None and not torch.cuda.is_available():
        return f"{device}, assumed", f"this machine has no GPU. {other}, train.device=cpu for this CPU"
    return device, other


def mask_choice(
    config: TrainConfig, model: PreTrainedModel, tokenizer: Any
) -> tuple[int | None, torch.Tensor | None, list[str]]:
    """(mask token id, start [D] of a trained embedding or None, lines about it) as `prepare_mask`."""
    if not OBJECTIVES.get(config.objective).places_masks:
        return None, None, ["no mask token: objective=ar"]
    rows_VD = model.get_input_embeddings().weight
    num_rows, spare, explicit = rows_VD.shape[0], num_token_ids(tokenizer), config.model.mask_token_id
    if config.train.draft_input == "uniform":
        return None, None, [noise_text(noise_range(tokenizer, num_rows, config.train.noise_range))]
    mask = mask_token(tokenizer, num_rows, explicit, has_adapter=config.adapter is not None)
    lines = [f"the tokenizer has {spare:,} ids, the embedding {num_rows:,} rows", mask.text]
    norm, is_usable = None, mask.has_row
    if mask.has_row and config.model.path is not None:
        name = next(name for name, value in model.named_parameters() if value is rows_VD)
        norm = embedding_norm(Path(config.model.path), name, mask.token_id)
    if norm is not None:
        is_usable = 0 < norm < float("inf")
        use = "kept" if is_usable else "replaced by the mean embedding"
        lines.append(f"norm of its embedding {norm:.3g}: {use}")
    trains = config.adapter is not None and not is_usable
    return mask.token_id, torch.empty(rows_VD.shape[1], device="meta") if trains else None, lines


def _samples(dataset: PackedDataset, tokenizer: Any) -> list[Any]:
    """The first sample of the run and the first of its last stage."""
    shown: list[Any] = []
    last = dataset.curriculum.stages[-1]
    shift = int(dataset.objective.semantics(last.stride).logit_shift)
    for item in (0, len(dataset) - last.num_steps * dataset.curriculum.global_batch):
        row = dataset[item]
        stride = dataset.curriculum.stages[row["stage"]].stride
        alone = "next token:" if dataset.objective.predicts_next else "canvas:"
        shown.append(f"stride {stride}:" if stride > 1 else alone)
        shown.append(sample_text(row, tokenizer, shift=shift))
    return shown


def sample_text(row: dict[str, Any], tokenizer: Any, *, shift: int) -> Text:
    """The first document of a packed row with the marks of `LEGEND`, by the labels that training really sees;
    noisy rows predict the token `shift` places on."""
    is_shown = row["doc_ids"] == 0
    clean, noisy = is_shown & ~row["is_noisy"], is_shown & row["is_noisy"]
    token_ids, positions = row["input_ids"][clean].tolist(), row["position_ids"][noisy]
    if not token_ids:
        # An objective without clean rows has the tokens under its masks in the labels alone.
        unmasked = np.where(row["labels"] != IGNORE_LABEL, row["labels"], row["input_ids"])
        token_ids = unmasked[noisy].tolist()
    opening = set((positions[positions == row["block_starts"][noisy]] + shift).tolist())
    targets = set((np.flatnonzero(row["labels"][clean] != IGNORE_LABEL) + 1).tolist())
    targets |= set((positions[row["labels"][noisy] != IGNORE_LABEL] + shift).tolist())
    head, tail = HEAD_TOKENS, max(HEAD_TOKENS, len(token_ids) - TAIL_TOKENS)
    text, was_target = Text(), False
    for location, token_id in enumerate(token_ids):
        is_target = location in targets
        if head <= location < tail:
            if location == head:
                text.append(f" ... {tail - head} tokens ... ", style="dim")
            continue
        if is_target != was_target:
            text.append("[[" if is_target else "]]", style="dim")
        token = ("|" if location in opening else "") + _readable(tokenizer, token_id)
        text.append(token, style="green" if is_target else "dim")
        was_target = is_target
    return text.append("]]", style="dim") if was_target else text


def _readable(tokenizer: Any, token_id: int) -> str:
    text: str = tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def _memory_lines(estimate: Estimate, config: TrainConfig, found: Findings) -> list[str]:
    memory = estimate.memory
    lines = [f"{size_text(term.num_bytes):>10}  {term.name} = {term.formula}" for term in memory.terms]
    lines.append(f"{size_text(memory.peak_allocated):>10}  allocated by torch at the peak")
    gpu = gpu_name(config)
    if gpu is None:
        needed, available, owner = memory.peak_allocated, host_memory()[1], "this machine"
        lines.append(f"{size_text(needed):>10}  of the {size_text(available)} of {owner}")
        more = "plan.gpu=H100 (B200, H200, A100) to plan for a GPU"
    else:
        lines += [f"{size_text(term.num_bytes):>10}  {term.name}, {term.formula}" for term in memory.outside]
        if gpu not in DEVICE_BYTES:
            return lines
        needed, available, owner = memory.device_bytes, DEVICE_BYTES[gpu], f"a {gpu}"
        lines.append(f"{size_text(needed):>10}  of the {available / GIB:.0f} GiB of one {gpu}")
        more = "a GPU with more memory"
    if needed > available:
        largest = max(memory.terms, key=lambda term: term.num_bytes)
        ways = remedies(config, estimate)
        found.problems.append(
            f"{owner} has {available / GIB:.0f} GiB, the run needs {needed / GIB:.1f}, of "
            f"which {largest.num_bytes / GIB:.1f} are {largest.name}\n    fix: "
            f"{' or '.join(ways if gpu and ways else [*ways, more])}"
        )
    return lines


def _time_lines(estimate: Estimate, config: TrainConfig) -> list[str]:
    plan, gpu = estimate.time, gpu_name(config)
    if plan is None:
        why = "set plan.tflops" if estimate.is_counted else "this architecture's FLOPs are not counted"
        return [f"no estimate: {why}"]
    extra = f", {plan.extra_flops / 1e12:,.1f} more by these settings" if plan.extra_flops else ""
    return [
        f"{plan.tokens_per_step:,.0f} document tokens, {plan.flops_per_step / 1e12:,.1f} TFLOP a step{extra}",
        plan.how,
        ", ".join(f"{name} {span(seconds)}" for name, seconds in plan.parts.items() if seconds),
        f"{span(plan.seconds_per_step)} per step, {span(plan.seconds)} in all, "
        f"{plan.tokens_per_second_per_gpu:,.0f} document tokens per second{' and GPU' if gpu else ''}",
    ]


def _add_disk(plan: DiskPlan, found: Findings) -> None:
    found.add(
        "Disk",
        f"{plan.num_checkpoints} checkpoints (train.save_total_limit, and one being written) of "
        f"{size_text(plan.checkpoint_bytes)}",
        f"{plan.num_exports} published checkpoints of {size_text(plan.export_bytes)}",
        f"{size_text(plan.needed_bytes)} of {size_text(plan.free_bytes)} free in {plan.location}",
    )
    if plan.problem is not None:
        found.problems.append(f"{plan.problem}\n    fix: {DISK_FIX}")


def launch_command(num_gpus: int, arguments: Sequence[str]) -> str:
    kept = [one for one in arguments if not one.startswith(("dry_run=", "plan."))]
    if num_gpus == 1:
        return shlex.join(["idlm-train", *kept])
    return f"GPUS={num_gpus} " + shlex.join(["recipes/launch/one_node.sh", *kept])


def _print(found: Findings, console: Any) -> None:
    for title, lines in found.sections:
        console.print(Text(f"# {title}" if not console.is_terminal else title, style="bold"))
        for line in lines:
            text = Text("  ").append_text(line) if isinstance(line, Text) else Text(f"  {line}")
            console.print(text, soft_wrap=True)


def config_lines(config: TrainConfig, arguments: Sequence[str]) -> list[str]:
    """What differs from the recipe or the defaults; the whole YAML with plan.full_config."""
    if config.plan.full_config:
        return config_text(config).rstrip().splitlines()
    files = [argument for argument in arguments if argument.startswith(FILES)]
    before = asdict(compose("train", TrainConfig, files))
    changed = [
        f"{key}={value if isinstance(value, str) else json.dumps(_given(value))}"
        for key, value in _changes(before, asdict(config))
        if key != "dry_run"
    ]
    base = " ".join(files).removeprefix("+") or "the defaults"
    return [f"what differs from {base}; plan.full_config=true shows all of it", *(changed or ["nothing"])]


def _changes(before: dict[str, Any], now: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in now.items():
        old = before.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            yield from _changes(old, value, f"{prefix}{name}.")
        elif value != old:
            yield f"{prefix}{name}", value


def _given(value: Any) -> Any:
    """`value` without what is null in items of a list."""
    if isinstance(value, dict):
        return {name: one for name, one in value.items() if one is not None}
    return [_given(one) for one in value] if isinstance(value, list) else value
