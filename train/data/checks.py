"""What the training data looks like and what is wrong with it, before a GPU is used.

For the announcement and the dry run.

`inspect_data` reads figures that were counted while the cache was built; of an endless source it looks at the
first samples. Checks of a single record are in `base.Encoder`, where the record still has a name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from idlm.tokens import Detokenizer

if TYPE_CHECKING:
    from idlm.train.layout import Sample


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
        shapes = ", ".join(f"{num:,} of {name}" for name, num in self.shapes) or "generated"
        template = (
            f"chat template, {self.turns} assistant turns" if self.uses_template else "no chat template"
        )
        median, ninth, last = self.length_percentiles
        lines = [
            f"data: {self.source}, {len(self.files)} files, {self.num_records:,} records ({shapes})",
            f"{template}, thinking={self.thinking}",
            f"{self.num_seen:,} samples, {self.num_tokens:,} tokens, {self.supervised_share:.1%} supervised",
            f"length {self.mean_length:.0f} on average, 50/90/99 %: {median}/{ninth}/{last}, "
            f"longest {self.longest} ({self.longest_origin})",
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


def labelled_pieces(tokenizer: Any, sample: Sample) -> list[tuple[str, bool]]:
    """(text, supervised?) of every token, special tokens included; the texts join to the decoded whole.

    A token that ends inside a character has an empty text, the one that completes it has the character.
    """
    stream = Detokenizer(tokenizer, keep_special=True)
    pieces = [
        (stream.push([int(token_id)]), bool(flag))
        for token_id, flag in zip(sample.token_ids, sample.supervised, strict=True)
    ]
    rest = stream.flush()
    return [*pieces[:-1], (pieces[-1][0] + rest, pieces[-1][1])] if rest else pieces
