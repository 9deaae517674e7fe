"""Figures and warnings about the training data, for the announcement of a run and the dry run.

Most figures were counted while the cache was built; of an endless source the first samples are counted.
Checks of a single record are in `base.Encoder`, where the record's file and line are known."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from idlm.errors import UserError, some_of
from idlm.files.records import SUFFIXES, search
from idlm.text.templates import all_template_text, thinking_switch
from idlm.train.config.data import DataConfig, held_out_config
from idlm.train.config.schema import TrainConfig
from idlm.train.data.cache import CountedSource
from idlm.train.data.dataset import PackedDataset
from idlm.train.data.layout import Sample
from idlm.train.data.packing import FileRows
from idlm.train.model.checks import num_positions

NUM_COUNTED = 64
"""Samples that are counted where no cache counted them."""
MIN_SUPERVISED = 0.02
_FOR_TESTS = re.compile(r"(?:^|[^a-z])(?:test|validation|valid|val|dev|eval)(?:[^a-z]|$)", re.IGNORECASE)
MAX_LOST = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """Figures over all samples, or over the first ones of an endless source (`num_samples` None). `header`:
    what the cache counted, {} without one. `lengths` [samples] in tokens and `num_supervised` are those
    before `train.overlong` is applied, which changes `num_overlong`: (samples, what became of them).
    `lost_share`: targets that are dropped or cut off. `open_ends`: count and example of last supervised
    tokens that do not stop the model. `padding_share`: padding in the rows of an epoch."""

    config: DataConfig
    header: dict[str, Any]
    uses_template: bool
    num_samples: int | None
    lengths: np.ndarray
    num_supervised: int
    longest_origin: str
    open_ends: dict[int, tuple[int, str]]
    rows_per_epoch: int | None
    num_held_out: int
    num_overlong: dict[str, int] = field(default_factory=dict)
    lost_share: float = 0.0
    padding_share: float = 0.0
    warnings: tuple[str, ...] = ()

    @property
    def num_open(self) -> int:
        return sum(num for num, _ in self.open_ends.values())

    @property
    def supervised_share(self) -> float:
        return self.num_supervised / max(1, int(self.lengths.sum()))

    def lines(self) -> list[str]:
        config, header, lengths = self.config, self.header, self.lengths
        shapes = ", ".join(f"{num:,} of {name}" for name, num in header.get("shapes", {}).items())
        content = (
            f"{len(header['names'])} files, {header['num_records']:,} records ({shapes})" if header else ""
        )
        answers = f"{config.turns} assistant turn{'s' if config.turns == 'all' else ''}"
        turns = f"chat template, {answers}" if self.uses_template else "no chat template"
        counted = (
            f"{len(lengths):,} samples" if self.num_samples is not None else f"first {len(lengths)} samples"
        )
        median, ninth, last = np.percentile(lengths, (50, 90, 99)).astype(int)
        lines = [
            f"data: {config.source}, {content or 'generated'}; {turns}, thinking={config.thinking}",
            f"{counted}: {lengths.sum():,} tokens, {self.supervised_share:.1%} supervised; length "
            f"{lengths.mean():.0f} on average, 50/90/99 %: {median}/{ninth}/{last}, longest {lengths.max()} "
            f"({self.longest_origin})",
            *files_text(header),
        ]
        if header.get("ignored"):
            (key, num), *others = header["ignored"].items()
            counts = [f"{key} ({num:,} records)", *(f"{key} ({num:,})" for key, num in others)]
            lines.append(f"ignored keys: {', '.join(counts)}")
        lines += header.get("mixture", [])
        if self.rows_per_epoch is not None:
            lines.append(f"{self.rows_per_epoch:,} packed rows per epoch, {self.padding_share:.1%} padding")
        if self.num_held_out:
            lines.append(
                f"{self.num_held_out:,} of the samples are held out and never trained (eval.holdout)"
            )
        changed = [f"{num:,} {what}" for what, num in self.num_overlong.items() if num]
        if changed:
            lost = f"; {self.lost_share:.1%} of all supervised tokens are lost"
            lines.append(f"samples that are too long: {', '.join(changed)}{lost if self.lost_share else ''}")
        if header.get("num_skipped"):
            example = header["skipped_examples"][0]
            lines.append(f"{header['num_skipped']:,} bad records skipped, such as {example}")
        for note, (num, example) in header.get("notes", {}).items():
            lines.append(f"{num:,} records: {note}, such as {example}")
        return [*lines, *(f"warning: {text}" for text in self.warnings)]


def files_text(header: dict[str, Any]) -> list[str]:
    lines = [f"reads {_named(header['files'])}"] if header.get("files") else []
    if header.get("left_out"):
        lines.append(f"leaves out {_named(header['left_out'])} (hidden, temporary or of another kind)")
    return lines


def held_out_text(dataset: PackedDataset, held_out: PackedDataset | None) -> list[str]:
    """Lines about which files are held out for evaluation; none for a share of the training data."""
    if held_out is None or held_out.source is dataset.source:
        return []
    header = held_out.source.header if isinstance(held_out.source, CountedSource) else {}
    return [f"held out: {line}" for line in files_text(header)]


def _named(names: Sequence[str]) -> str:
    """The names, without the folder that they share; the first ones of many."""
    folders = {os.path.dirname(name.rstrip("/")) for name in names}
    if len(names) == 1 or len({os.path.isabs(folder) for folder in folders}) > 1:
        return some_of(names)
    shared = os.path.commonpath(folders)
    shown = [name.removeprefix(shared).lstrip("/") for name in names]
    return f"{len(names)} files in {shared or '.'}: {some_of(shown)}"


def inspect_data(
    config: DataConfig, dataset: PackedDataset, tokenizer: Any, *, stop_token_ids: Sequence[int] = ()
) -> DataReport:
    """Report on the data of a run; `stop_token_ids` stop the model in addition to the tokenizer's eos.
    UserError IDLM-0234 when no sample ends in a token that stops the model."""
    rows, source = dataset.rows, dataset.source
    header: dict[str, Any] = source.header if isinstance(source, CountedSource) else {}
    num_read = 0 if header else min(source.num_samples or NUM_COUNTED, NUM_COUNTED)
    samples = [source.sample(index) for index in range(num_read)]
    packing: dict[str, Any] = {}
    if isinstance(rows, FileRows):
        lengths, num_supervised = rows.lengths, int(rows.num_targets.sum())
        cut = "split" if rows.limits.overlong == "split" else "truncated"
        packing["num_overlong"] = {"dropped": rows.num_dropped, cut: rows.num_cut}
        packing["lost_share"] = rows.num_lost / max(1, num_supervised)
        packing["padding_share"] = rows.padding_share
    else:
        lengths = np.asarray([len(sample) for sample in samples])
        num_supervised = sum(sample.num_targets for sample in samples)
    is_chat = tuple(header.get("shapes", ())) != ("text",)
    report = DataReport(
        config=config,
        header=header,
        uses_template=is_chat and config.chat_template and bool(tokenizer.chat_template),
        num_samples=dataset.source.num_samples,
        lengths=lengths,
        num_supervised=header.get("num_supervised", num_supervised),
        longest_origin=source.sample(int(lengths.argmax())).origin,
        open_ends=_open_ends(header, samples, {int(tokenizer.eos_token_id), *stop_token_ids}),
        rows_per_epoch=dataset.rows_per_epoch(),
        num_held_out=0 if dataset.left_out is None else int(dataset.left_out.sum()),
        **packing,
    )
    return replace(report, warnings=tuple(_warnings(report, tokenizer)))


def _open_ends(
    header: dict[str, Any], samples: Sequence[Sample], stops: set[int]
) -> dict[int, tuple[int, str]]:
    """(count, example) of the last supervised tokens that do not stop the model, by token id."""
    endings: dict[int, Any] = {int(token): tuple(found) for token, found in header.get("endings", {}).items()}
    for sample in samples:
        last = int(sample.token_ids[sample.supervised][-1])
        num, example = endings.get(last, (0, sample.origin))
        endings[last] = num + 1, example
    found = {token_id: ending for token_id, ending in endings.items() if token_id not in stops}
    # Answers that a limit cut off are the model's own text, which need not be unlearnt: a warning is enough.
    if len(found) == len(endings) and "answers" not in header.get("shapes", ()):
        token_id, (_, example) = max(found.items(), key=lambda item: item[1][0])
        raise UserError(
            "IDLM-0234",
            f"no sample ends in a token that stops the model (ids {sorted(stops)}), so it would never stop; "
            f"{example} ends in token {token_id}",
            fix="let the chat template close a turn with eos, or add the id that closes it to eos_token_id "
            "in the model's generation_config.json",
        )
    return found


def _warnings(report: DataReport, tokenizer: Any) -> Iterator[str]:
    if report.open_ends:
        token_id, (_, example) = max(report.open_ends.items(), key=lambda item: item[1][0])
        yield (
            f"{report.num_open:,} of {len(report.lengths):,} samples end in no token that stops the model, "
            f"such as {example} (most often {tokenizer.convert_ids_to_tokens(token_id)!r})"
        )
    is_off = report.uses_template and report.config.thinking == "off"
    if is_off and thinking_switch(all_template_text(tokenizer)) is None:
        yield "data.thinking=off renders like strip: this chat template has no enable_thinking"
    if report.supervised_share < MIN_SUPERVISED:
        yield f"only {report.supervised_share:.1%} of the tokens are supervised"
    if report.lost_share > MAX_LOST:
        yield (
            f"{report.lost_share:.1%} of the supervised tokens are lost, because their samples are too long: "
            "set train.overlong=split, or raise train.max_length"
        )


def run_warnings(config: TrainConfig, model_config: Any, lengths: np.ndarray) -> list[str]:
    """Sentences about a run whose samples have `lengths` [samples] in tokens."""
    found = [
        _beyond_positions(config, model_config, lengths),
        _trained_and_held_out(config),
        *map(_other_splits, config.data.parts()),
    ]
    return [f"warning: {text}" for text in found if text]


def _beyond_positions(config: TrainConfig, model_config: Any, lengths: np.ndarray) -> str | None:
    """Samples that training feeds at positions for which the model was not made."""
    limit, max_length = num_positions(model_config), config.train.max_length
    if limit is None or max_length <= limit:
        return None
    fed = lengths[lengths <= max_length] if config.train.overlong == "drop" else lengths.clip(max=max_length)
    beyond = int((fed > limit).sum())
    samples = f"{beyond:,} of {len(lengths):,} samples are longer" if beyond else "no sample is longer now"
    cut = " train.overlong=truncate" if beyond and config.train.overlong not in ("truncate", "drop") else ""
    return (
        f"train.max_length={max_length} exceeds the {limit:,} positions that the model is made for: "
        f"{samples}; set train.max_length={limit}{cut}"
    )


def _trained_and_held_out(config: TrainConfig) -> str | None:
    """Files of `eval.path` that are trained on too."""
    if config.eval.path is None:
        return None
    held_out = held_out_config(config.data, config.eval.path, config.eval.split, config.eval.subset)
    trained = {file.resolve() for part in config.data.parts() for file in _files(part)}
    both = sorted(str(file) for file in trained.intersection(map(Path.resolve, _files(held_out))))
    if not both:
        return None
    return (
        f"eval.path={config.eval.path} holds {len(both)} of the files that are trained on ({some_of(both)}): "
        "their losses do not hold for other data; move them out of data.path, or leave eval.path "
        "out, so that eval.holdout holds out a share"
    )


def _other_splits(data: DataConfig) -> str | None:
    """Files of a folder that its clone from a hub has for tests."""
    folder = Path(data.path or "")
    files = _files(data) if folder.is_dir() else ()
    # A cache of a hub links to files without names.
    others = [str(file) for file in files if _FOR_TESTS.search(str(file.relative_to(folder)))]
    if not others or len(others) == len(files):
        return None
    return (
        f"data.path={data.path} holds files that have the names of splits for tests ({some_of(others)}), and "
        "they are trained on: give the files for training, such as data.path='FOLDER/*train*'"
    )


def _files(data: DataConfig) -> tuple[Path, ...]:
    """The files of one source; none where it is no source of files or has none."""
    if data.source not in SUFFIXES or not data.path:
        return ()
    try:
        return search(data.path, SUFFIXES[data.source]).paths
    except UserError:
        return ()
