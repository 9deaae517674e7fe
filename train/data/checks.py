"""What the training data looks like and what is wrong with it, before a GPU is used.

For the announcement and the dry run.

`inspect_data` reads figures that were counted while the cache was built; of an endless source it looks at the
first samples. Checks of a single record are in `base.Encoder`, where the record still has a name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from idlm.errors import UserError
from idlm.train.data.base import Source
from idlm.train.data.cache import CachedSource
from idlm.train.data.finite_source import measure

if TYPE_CHECKING:
    from idlm.train.config.schema import TrainConfig
    from idlm.train.data.dataset import PackedDataset
    from idlm.train.data.layout import Sample

NUM_SEEN = 64
"""Samples of an endless source that are looked at."""
MIN_SUPERVISED = 0.02
MAX_LOST = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """Figures over all samples, or over the first `num_seen` of an endless source (`num_samples` None).

    Tokens and lengths are before `train.overlong` is applied; `num_dropped`, `num_truncated` and `num_split`
    count samples that it changes. `shapes`: (name, records) in order of frequency. `length_percentiles`: 50,
    90 and 99 %. `num_open`: samples whose last supervised token does not stop a model, `open_example` names
    one. `padding_share`: rows of a packed epoch that hold nothing. `warnings` are sentences for the user.
    """

    source: str
    files: tuple[str, ...]
    shapes: tuple[tuple[str, int], ...]
    thinking: str
    turns: str
    uses_template: bool
    num_records: int
    num_skipped: int
    skipped_examples: tuple[str, ...]
    num_samples: int | None
    num_seen: int
    num_tokens: int
    num_supervised: int
    longest: int
    longest_origin: str
    length_percentiles: tuple[int, int, int]
    num_dropped: int
    num_truncated: int
    num_split: int
    num_open: int
    open_example: str
    rows_per_epoch: int | None
    padding_share: float
    cache: str | None
    warnings: tuple[str, ...]

    @property
    def supervised_share(self) -> float:
        """Supervised tokens per token."""
        return self.num_supervised / max(1, self.num_tokens)

    @property
    def mean_length(self) -> float:
        """Tokens per sample."""
        return self.num_tokens / max(1, self.num_seen)

    def lines(self) -> list[str]:
        """The report as lines of text, warnings last."""
        shapes = ", ".join(f"{num:,} of {name}" for name, num in self.shapes)
        records = f"{len(self.files)} files, {self.num_records:,} records ({shapes})" if self.files else ""
        rendered = (
            f"chat template, {self.turns} assistant turns" if self.uses_template else "no chat template"
        )
        median, ninth, last = self.length_percentiles
        seen = (
            f"{self.num_seen:,} samples" if self.num_samples is not None else f"first {self.num_seen} samples"
        )
        lines = [
            f"data: {self.source}, {records or 'generated'}; {rendered}, thinking={self.thinking}",
            f"{seen}: {self.num_tokens:,} tokens, {self.supervised_share:.1%} supervised; length "
            f"{self.mean_length:.0f} on average, 50/90/99 %: {median}/{ninth}/{last}, longest {self.longest} "
            f"({self.longest_origin})",
        ]
        if self.rows_per_epoch is not None:
            lines.append(f"{self.rows_per_epoch:,} packed rows per epoch, {self.padding_share:.1%} padding")
        changed = [
            f"{num:,} {what}"
            for num, what in (
                (self.num_dropped, "dropped"),
                (self.num_truncated, "truncated"),
                (self.num_split, "split"),
            )
            if num
        ]
        if changed:
            lines.append(f"samples that are too long: {', '.join(changed)}")
        if self.num_skipped:
            lines.append(f"{self.num_skipped:,} bad records skipped, such as {self.skipped_examples[0]}")
        return [*lines, *(f"warning: {text}" for text in self.warnings)]


def inspect_data(
    config: TrainConfig, dataset: PackedDataset, tokenizer: Any, *, stop_token_ids: Sequence[int] = ()
) -> DataReport:
    """Look at the data of a prepared run; `stop_token_ids` of the model stop it beside the tokenizer's eos.

    Raises UserError IDLM-0234 when not a single sample ends in a token that stops the model.
    """
    file = dataset.file
    source = dataset.source if dataset.source.num_samples is not None else _First(dataset.source)
    header: dict[str, Any] = source.header if isinstance(source, CachedSource) else {}
    if file is not None:
        lengths, num_targets = file.lengths, file.num_targets
    else:
        lengths, num_targets = measure(source)
    longest = int(lengths.argmax())
    median, ninth, last = (int(value) for value in np.percentile(lengths, (50, 90, 99)))
    stops = {int(tokenizer.eos_token_id), *stop_token_ids}
    open_ends = _open_ends(source, header, stops, num_seen=len(lengths))
    is_chat = tuple(header.get("shapes", ())) != ("text",)
    uses_template = is_chat and config.data.chat_template and bool(tokenizer.chat_template)
    report = DataReport(
        source=config.data.source,
        files=tuple(header.get("names", ())),
        shapes=tuple(header.get("shapes", {}).items()),
        thinking=config.data.thinking,
        turns=config.data.turns,
        uses_template=uses_template,
        num_records=header.get("num_records", 0),
        num_skipped=header.get("num_skipped", 0),
        skipped_examples=tuple(header.get("skipped_examples", ())),
        num_samples=dataset.source.num_samples,
        num_seen=len(lengths),
        num_tokens=int(lengths.sum()),
        num_supervised=header.get("num_supervised", int(num_targets.sum())),
        longest=int(lengths[longest]),
        longest_origin=source.sample(longest).origin,
        length_percentiles=(median, ninth, last),
        num_dropped=dataset.num_dropped,
        num_truncated=file.num_kept_overlong if file is not None and dataset.overlong == "truncate" else 0,
        num_split=file.num_kept_overlong if file is not None and dataset.overlong == "split" else 0,
        num_open=sum(num for num, _ in open_ends.values()),
        open_example=next((example for _, example in open_ends.values()), ""),
        rows_per_epoch=dataset.rows_per_epoch(),
        padding_share=0.0 if file is None else file.padding_share,
        cache=str(source.directory) if isinstance(source, CachedSource) else None,
        warnings=(),
    )
    return dataclasses.replace(report, warnings=tuple(_warnings(report, tokenizer, open_ends)))


class _First:
    """The first samples of an endless source, made once."""

    def __init__(self, source: Source) -> None:
        self.num_samples: int | None = NUM_SEEN
        self._samples = [source.sample(index) for index in range(NUM_SEEN)]

    def sample(self, index: int) -> Sample:
        return self._samples[index]


def _open_ends(
    source: Source, header: dict[str, Any], stops: set[int], *, num_seen: int
) -> dict[int, tuple[int, str]]:
    """(count, example) of the last supervised tokens that do not stop the model, by token id."""
    endings: dict[int, tuple[int, str]] = {}
    if header:
        endings = {int(token_id): tuple(ending) for token_id, ending in header["endings"].items()}
    else:
        for index in range(min(num_seen, NUM_SEEN)):
            sample = source.sample(index)
            last = int(sample.token_ids[np.flatnonzero(sample.supervised)[-1]])
            count, example = endings.get(last, (0, sample.origin))
            endings[last] = (count + 1, example)
    found = {token_id: ending for token_id, ending in endings.items() if token_id not in stops}
    # Answers that a limit cut off are the model's own and unlearn nothing; a warning is enough.
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


def _warnings(report: DataReport, tokenizer: Any, open_ends: Mapping[int, tuple[int, str]]) -> Iterator[str]:
    if report.num_open:
        token_id = max(open_ends, key=lambda found: open_ends[found][0])
        yield (
            f"{report.num_open:,} of {report.num_seen:,} samples do not end in a token that stops the model: "
            f"{report.open_example} ({tokenizer.convert_ids_to_tokens(token_id)!r} most often)"
        )
    if report.uses_template and report.thinking == "off" and "enable_thinking" not in tokenizer.chat_template:
        yield "data.thinking=off renders like strip: this chat template has no enable_thinking"
    if report.supervised_share < MIN_SUPERVISED:
        yield f"only {report.supervised_share:.1%} of the tokens are supervised"
    lost = (report.num_dropped + report.num_truncated) / max(1, report.num_seen)
    if lost > MAX_LOST:
        yield f"{lost:.1%} of the samples are dropped or truncated: raise train.max_length"
