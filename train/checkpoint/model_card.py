"""The model card (README.md) of an export, in the form that the hub shows: what was trained on what, how
often drafts were accepted, how to load it, and what it cannot do. Every figure is one of the run."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import yaml

from idlm.checkpoint import LICENSE
from idlm.text.markdown import table
from idlm.train.checkpoint.resume import RUN_FOLDER
from idlm.train.data.checks import DataReport
from idlm.train.distributed.deepspeed import num_parameters, num_trained_parameters
from idlm.train.loop.progress import EVALUATION, read_metrics, training_records
from idlm.train.prepare import Prepared, data_report

if TYPE_CHECKING:
    from idlm.train.config.schema import TrainConfig

Records = Sequence[dict[str, Any]]
NAME_ON_THE_HUB = re.compile(r"[\w.-]+(/[\w.-]+)?")
MAX_NAMES = 8
"""Names of data files that a card lists."""
TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def model_card(config: TrainConfig, prepared: Prepared, *, stride: int, target: Path) -> str:
    output, folder = Path(config.output_dir).resolve().name, target.resolve().name
    records = read_metrics(Path(config.output_dir) / RUN_FOLDER / "metrics.jsonl")
    parts = [
        f"---\n{_front_matter(config, prepared)}---",
        f"# {output}" + (f": {folder}" if folder != output else ""),
        TEXTS["kinds"].get(config.objective, f"A language model of the objective `{config.objective}`."),
        table(("", ""), _facts(config, prepared, records, stride)),
        "## Data",
        table(("", ""), _data_facts(data_report(config, prepared), records)),
        *_acceptance(records),
        "## How to load",
        *_loading(config, prepared, folder),
        "## Limits",
        "\n".join(f"- {line}" for line in _limits(config, prepared)),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(config: TrainConfig, prepared: Prepared) -> str:
    base = prepared.base
    values: dict[str, Any] = {}
    if base.name is not None and NAME_ON_THE_HUB.fullmatch(base.name):
        relation = "adapter" if config.is_gated else "finetune"
        values |= {"base_model": base.name, "base_model_relation": relation}
    values |= base.license
    values["library_name"] = "idlm" if config.is_gated else "transformers"
    values["pipeline_tag"] = "text-generation"
    values["tags"] = ["idlm", f"objective-{config.objective}"]
    if config.objective != "ar":
        values["tags"].append("diffusion-language-model")
    if config.adapter is not None:
        values["tags"].append("lora")
    return str(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def run_facts(config: TrainConfig, prepared: Prepared) -> list[tuple[str, str]]:
    """What is trained: (name, text) of base, architecture, objective, adapter and stages."""
    model, adapter = prepared.model, prepared.adapter
    trained = num_trained_parameters(model)
    num_base = num_parameters(model) - (0 if adapter is None else trained)
    rows = [
        ("base", "new weights" if prepared.base.name is None else prepared.base.name),
        ("architecture", f"`{type(model).__name__}`, {num_base:,} parameters"),
        ("objective", f"`{config.objective}`, supervised: {config.mask_region}"),
    ]
    if adapter is not None:
        kind = "gated LoRA, of MASK rows only" if config.is_gated else "LoRA, merged into the weights"
        size = f"rank {adapter.rank}, alpha {adapter.alpha:g}, on {', '.join(adapter.targets)}"
        rows.append(("adapter", f"{kind}: {size}; {trained:,} parameters"))
    stages = prepared.curriculum.stages
    return rows + [(f"stage {stage.index + 1}", stage.name) for stage in stages if stage.stride > 1]


def _facts(config: TrainConfig, prepared: Prepared, records: Records, stride: int) -> list[tuple[str, str]]:
    loop, curriculum, training = config.train, prepared.curriculum, training_records(records)
    rows = run_facts(config, prepared)
    if stride > 1:
        rows.append(("stride", f"{stride} tokens per pass at most, {prepared.draft_input}"))
    if training:
        rows.append(("steps", f"{training[-1]['step']:,} of {curriculum.num_steps:,}"))
    if loop.distill != "none":
        rows.append(("loss of mask rows", f"{loop.distill} to the base, share {loop.distill_share:g}"))
    if loop.base_kl:
        rows.append(("loss of clean rows", f"clean weight, and {loop.base_kl:g} x KL from the base"))
    optimizer = (
        f"AdamW, peak learning rate {loop.learning_rate:g}, schedule {loop.schedule}, "
        f"warmup {loop.warmup:g}, weight decay {loop.weight_decay:g}, seed {loop.seed}"
    )
    length = prepared.dataset.row_length
    return [
        *rows,
        ("rows per step", f"{curriculum.global_batch:,} of {length:,} positions"),
        ("optimizer", optimizer),
    ]


def _data_facts(report: DataReport, records: Records) -> list[tuple[str, str]]:
    header = report.header
    rows = [
        ("source", f"`{report.config.source}`" + ("" if header else f", generated: {report.config.task}"))
    ]
    if header:
        names = list(dict.fromkeys(PurePath(str(name)).name for name in header["names"]))
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        rows.append(("files", f"{', '.join(f'`{name}`' for name in names[:MAX_NAMES])}{more}"))
        rows.append(("records", f"{header['num_records']:,}"))
    if report.num_samples is not None:
        rows += [
            ("samples", f"{report.num_samples:,}"),
            ("tokens", f"{int(report.lengths.sum()):,}"),
            ("supervised tokens", f"{report.num_supervised:,}"),
        ]
    if report.num_held_out:
        rows.append(("of these held out", f"{report.num_held_out:,} samples, never trained"))
    lost = {**report.num_overlong, "bad records skipped": header.get("num_skipped", 0)}
    rows += [
        (f"samples {what}" if what in report.num_overlong else what, f"{num:,}")
        for what, num in lost.items()
        if num
    ]
    if training := training_records(records):
        num_tokens = sum(record["num_tokens"] for record in training)
        rows.append(("tokens trained", f"{num_tokens:,}, repeated ones counted each time"))
    return rows


def _acceptance(records: Records) -> list[str]:
    """How often drafts are accepted, by stage and position, where the run has measured it."""
    last = {
        (record["stage"], "held-out text" if EVALUATION in record else "training text"): record
        for record in records
    }
    rows = [([text], record) for (_, text), record in sorted(last.items()) if record["acceptance"]]
    if not rows:
        return []
    return [
        "## Acceptance of drafts",
        drafts_table(["measured on"], rows),
        "At the last measured step of each stage: the expected overlap of the probabilities of draft and "
        "verification, given the true text before. It is no measurement of generated answers.",
    ]


def _loading(config: TrainConfig, prepared: Prepared, folder: str) -> list[str]:
    parts = [TEXTS["how_to_load"].format(folder=folder)]
    if config.is_gated:
        parts.append(
            f"The base (`{prepared.base.name}`) is loaded from the path in `adapter_config.json`, or from "
            "`base=PATH`. It answers with the distribution of the base. peft and transformers load the files "
            "too, but without a gate: they apply the adapter to every row, which is another model."
        )
    elif prepared.objective.predicts_next or config.objective == "ar":
        parts.append(TEXTS["stock"].format(folder=folder, architecture=type(prepared.model).__name__))
    else:
        parts.append(
            "transformers, vLLM and SGLang load the weights, but let each token see only those before it: "
            "that is not how this model was trained, and their answers are not its own."
        )
    return parts


def _limits(config: TrainConfig, prepared: Prepared) -> list[str]:
    lines = ["The figures are those of training; how good its answers are is not measured here."]
    if config.objective != "ar" and not config.is_gated:
        lines.append("Several tokens per pass need idlm; other programs decode without its MASK rows.")
    lines.append(f"Samples had at most {config.train.max_length:,} tokens: longer texts were not trained.")
    base = prepared.base
    if base.license_text is not None:
        lines.append(f"The licence of the base holds for this model too; its text is in `{LICENSE}`.")
    elif base.name is not None and not base.license:
        lines.append("The folder of the base names no licence: see where the base comes from.")
    return lines


def drafts_table(header: Sequence[str], rows: Sequence[tuple[Sequence[str], Mapping[str, Any]]]) -> str:
    """Return a table of records of the metrics: the stage, stride and step of each, its own cells, which
    `header` names, and its acceptance by draft position."""
    num_drafts = max(len(record["acceptance"]) for _, record in rows)
    lines = []
    for cells, record in rows:
        drafts = [f"{value:.3f}" for value in record["acceptance"]]
        key = (record["stage"] + 1, record["stride"], record["step"])
        lines.append([*map(str, key), *cells, *drafts, *["-"] * (num_drafts - len(drafts))])
    drafts = [f"draft {index + 1}" for index in range(num_drafts)]
    return table(["stage", "stride", "step", *header, *drafts], lines)
