"""The training forward on packed `[x_t | x_0]` rows against the engine's step on the same layout, in fp32.

Training: noisy row s of a block that starts at b is a mask at position s, sees the clean tokens before b and
its block's masks up to itself, and predicts token s + 1. Engine: that is mask s - b of a group which hangs on
the chain row of token b - 1. Clean row s is the chain row of token s. The engine is driven as in decoding,
through `IsdDecoder.plan`, `Runner.forward` and a paged cache in which rejected drafts and masks leave stale
slots, with drafts that are the document's own tokens, so that every chain row has a clean counterpart.

V vocabulary, X wanted rows, J drafts."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from idlm.contracts import SamplingParams
from idlm.infer.decoders.rejection import RowLayout, layouts
from idlm.infer.engine import Engine
from idlm.infer.request import Request
from idlm.infer.state.batch import Batch
from idlm.lora import AdapterSpec, base_identity
from idlm.semantics import Semantics
from idlm.train.checkpoint.base_files import BaseFiles
from idlm.train.checkpoint.export import export_adapter
from idlm.train.data.layout import Sample
from idlm.train.model.gated_lora import add_adapter
from tests.tiny_training import (
    FAMILIES,
    MASK,
    HiddenStates,
    batch_of,
    random_sample,
    stage_of,
    tiny_model,
    tiny_objective,
)

TOLERANCE = 1e-5
STRIDES = (2, 3, 4)
ADAPTER = AdapterSpec(rank=3, alpha=6.0)
PROMPT = 5
LENGTHS = (23, 16)
MAX_WALKS = 30
DOCUMENTS = [random_sample(i, prompt=PROMPT, response=n - PROMPT).token_ids for i, n in enumerate(LENGTHS)]

MaskKey = tuple[int, int, int]
"""Document, start of the block, position in the block."""
CleanKey = tuple[int, int]
"""Document, position."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Logits [V] of training rows."""

    masks: dict[MaskKey, Tensor]
    clean: dict[CleanKey, Tensor]


def adapted_model(family: str, *, mask_row: bool) -> Any:
    """A tiny model with a gated LoRA that changes every mask row a lot."""
    model, generator = tiny_model(family, "idlm_documents"), torch.Generator().manual_seed(9)
    row_D = torch.randn(model.config.hidden_size, generator=generator) if mask_row else None
    add_adapter(model, ADAPTER, mask_row_D=row_D)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter.normal_(std=0.3, generator=generator)
    return model


@torch.no_grad()
def training_rows(family: str, stride: int, attention: str, model: Any = None) -> Rows:
    """One packed row with each document once per block phase, so that blocks start at every position."""
    phases = [(doc, PROMPT + shift) for doc in range(len(DOCUMENTS)) for shift in range(stride - 1)]
    samples = [
        Sample.from_pair(DOCUMENTS[doc][:prompt].tolist(), DOCUMENTS[doc][prompt:].tolist())
        for doc, prompt in phases
    ]
    batch = batch_of(samples, tiny_objective(), stage_of(stride), padding=3)
    model = tiny_model(family, attention) if model is None else model
    runner = HiddenStates(model)
    logits_TV = runner.head(runner.hidden(model, batch, attention)[0])
    rows = Rows(masks={}, clean={})
    fields = (batch[name][0].tolist() for name in ("doc_ids", "position_ids", "block_starts", "is_noisy"))
    for t, (phase, position, start, is_noisy) in enumerate(zip(*fields, strict=True)):
        if phase < 0:
            continue
        doc = phases[phase][0]
        if is_noisy:
            rows.masks[doc, start, position - start] = logits_TV[t]
        else:
            rows.clean[doc, position] = logits_TV[t]
    return rows


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models of `training_rows`, saved as the engine loads them."""
    paths = {}
    for family in FAMILIES:
        paths[family] = tmp_path_factory.mktemp(family)
        tiny_model(family).save_pretrained(paths[family])
        Semantics(mask_token_id=MASK, stride=max(STRIDES)).save(paths[family])
    return paths


class Replay:
    """Runs the documents through an engine, one per lane, and compares every wanted row of all steps."""

    def __init__(self, path: Path, strategy: str, stride: int, rows: Rows) -> None:
        self.engine = Engine.from_pretrained(
            path,
            "isd",
            device="cpu",
            dtype="float32",
            stride=stride,
            rejection_strategy=strategy,
            max_num_seqs=len(DOCUMENTS),
            max_length=48,
            page_size=4,
        )
        self.rows = rows
        self.layouts = layouts(strategy, num_masks=stride - 1, max_drafts=stride - 1)
        self.seen_masks: set[MaskKey] = set()
        self.seen_clean: set[CleanKey] = set()
        self.used_layouts: set[int] = set()

    def _admit(self) -> None:
        lanes = list(range(len(DOCUMENTS)))
        for lane in lanes:
            self.engine.pool.release(lane)
        for num_slots in (9, 30, 47):
            assert all(self.engine.pool.reserve(lane, num_slots) for lane in lanes)
        params = SamplingParams(seed=0)
        requests = [
            Request(
                request_id="r",
                index=lane,
                lane=lane,
                prompt_ids=tokens.tolist(),
                params=params,
                stop_ids=frozenset(),
                max_length=48,
            )
            for lane, tokens in enumerate(DOCUMENTS)
        ]
        self.engine.table.admit(requests)
        self.engine.decoder.admit(lanes, [params] * len(lanes))

    def run(self, walk: int) -> None:
        """Prompts in chunks, then any layout at any pass, with any number of its drafts accepted."""
        self._admit()
        computed = [0] * len(DOCUMENTS)
        self._forward(computed, {0: 2}, samples=False)
        self._forward(computed, {0: 1, 1: 3}, samples=False)
        choose = random.Random(walk)
        while running := [lane for lane, done in enumerate(computed) if done < LENGTHS[lane]]:
            feed = {lane: max(1, PROMPT - 1 + walk % 3 - computed[lane]) for lane in running}
            chosen = {}
            for lane in running:
                index = choose.randrange(len(self.layouts))
                last = computed[lane] + feed[lane] - 1 + self.layouts[index].num_drafts
                chosen[lane] = index if last < LENGTHS[lane] else 0
            self._load_drafts(computed, feed, chosen)
            self._forward(computed, feed, samples=True, chosen=chosen)
            for lane, index in chosen.items():
                num_accepted = choose.randint(0, self.layouts[index].num_drafts)
                computed[lane] += num_accepted
                self.engine.table.num_computed_Z[lane] += num_accepted

    def _load_drafts(self, computed: list[int], feed: dict[int, int], chosen: dict[int, int]) -> None:
        decoder = self.engine.decoder
        for lane, index in chosen.items():
            layout = self.layouts[index]
            first = computed[lane] + feed[lane]
            decoder.draft_buffer_Z[lane] = index
            drafts_J = torch.from_numpy(DOCUMENTS[lane][first : first + layout.num_drafts])
            decoder.drafts_ZJ[lane, : layout.num_drafts] = drafts_J

    def _forward(
        self,
        computed: list[int],
        feed: dict[int, int],
        *,
        samples: bool,
        chosen: dict[int, int] | None = None,
    ) -> None:
        lanes = list(feed)
        batch = Batch(
            lanes_B=torch.tensor(lanes),
            num_feed_B=torch.tensor([feed[lane] for lane in lanes]),
            samples_B=torch.tensor([samples] * len(lanes)),
            max_feed=max(feed.values()),
            max_known=max(computed[lane] + feed[lane] for lane in lanes),
            max_rows=self.engine.decoder.num_rows(0, 0),
            num_rows=None,
            filters=False,
        )
        plan = self.engine.decoder.plan(self.engine.table, batch)
        logits_XV = self.engine._parts.runner.forward(plan).logits()
        for lane in lanes:
            computed[lane] += feed[lane]
            self.engine.table.num_computed_Z[lane] += feed[lane]
        if chosen is None:
            return
        for lane, first in zip(lanes, plan.first_logit_B.tolist(), strict=True):
            layout = self.layouts[chosen[lane]]
            self.used_layouts.add(chosen[lane])
            self._compare(lane, computed[lane] - 1, layout, logits_XV[first : first + layout.width])

    def _compare(self, doc: int, pending: int, layout: RowLayout, logits_XV: Tensor) -> None:
        """All rows of one sequence that a training row matches: chain rows, then the groups in order."""
        for depth in range(layout.num_drafts + 1):
            key = (doc, pending + depth)
            torch.testing.assert_close(logits_XV[depth], self.rows.clean[key], atol=TOLERANCE, rtol=0)
            self.seen_clean.add(key)
        row = layout.num_drafts
        for parent in layout.mask_parents:
            for index in range(layout.num_masks):
                row += 1
                start = pending + parent + 1
                # The last token has no successor, so training puts no mask on it.
                if start + index < LENGTHS[doc] - 1:
                    expected = self.rows.masks[doc, start, index]
                    torch.testing.assert_close(logits_XV[row], expected, atol=TOLERANCE, rtol=0)
                    self.seen_masks.add((doc, start, index))
        assert row == layout.width - 1 == len(logits_XV) - 1


@pytest.mark.sweep_but("qwen2-branch-3", "qwen3-branch-2")
@pytest.mark.parametrize(
    ("family", "strategy", "stride"),
    [
        ("qwen2", "branch", 3),
        ("qwen3", "branch", 2),
        ("llama", "branch", 4),
        ("qwen3", "tree", 4),
        ("qwen2", "tree", 2),
        ("llama", "cold", 3),
        ("qwen3", "alternate", 4),
    ],
)
def test_training_and_engine_compute_the_same_rows(
    checkpoints: dict[str, Path], family: str, strategy: str, stride: int
) -> None:
    """Every clean row from the last prompt tokens on, every mask row of every block, under every layout."""
    assert_the_same_rows(
        checkpoints[family], strategy, stride, training_rows(family, stride, "idlm_documents")
    )


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize(
    ("family", "strategy", "stride"), [("qwen2", "branch", 4), ("qwen3", "tree", 3), ("llama", "cold", 2)]
)
def test_training_and_engine_compute_the_same_rows_with_an_adapter(
    checkpoints: dict[str, Path], family: str, strategy: str, stride: int, tmp_path: Path
) -> None:
    """From the training model through an export to the engine; at stride 4 masks have their own embedding, at
    stride 3 a range of one id gives theirs. Clean rows are those of the base."""
    mask_row = stride == 4
    meaning: dict[str, Any] = {"noise_range": (MASK, MASK + 1)} if stride == 3 else {"mask_token_id": MASK}
    model, base = adapted_model(family, mask_row=mask_row), checkpoints[family]
    semantics = Semantics(stride=stride, gated=True, base_identity=base_identity(base), **meaning)
    spec = replace(ADAPTER, base_path=str(base))
    target = tmp_path / "adapter"
    export_adapter(model.state_dict(), None, semantics, spec, target, dtype=None, base=BaseFiles())
    rows = training_rows(family, stride, "idlm_documents", model)
    plain = training_rows(family, stride, "idlm_documents")
    # Clean rows run by themselves here and next to noisy ones there, which rounds otherwise.
    for key, logits_V in rows.clean.items():
        torch.testing.assert_close(logits_V, plain.clean[key], atol=1e-5, rtol=1e-5)
    for key, logits_V in rows.masks.items():
        assert (logits_V - plain.masks[key]).abs().max() > 100 * TOLERANCE
    assert_the_same_rows(tmp_path / "adapter", strategy, stride, rows)


def assert_the_same_rows(path: Path, strategy: str, stride: int, rows: Rows) -> None:
    """Runs the engine until every training row was compared."""
    replay = Replay(path, strategy, stride, rows)
    wanted = (
        set(range(len(replay.layouts))),
        {key for key in rows.clean if key[1] >= PROMPT - 2},
        set(rows.masks),
    )
    seen = (replay.used_layouts, replay.seen_clean, replay.seen_masks)
    walk = 0
    while seen != wanted and walk < MAX_WALKS:
        replay.run(walk)
        walk += 1
    assert seen == wanted


@pytest.mark.parametrize(
    ("family", "attention"), [("qwen3", "idlm_sdpa"), ("qwen2", "idlm_split"), ("llama", "idlm_flex")]
)
def test_the_training_attentions_agree(family: str, attention: str) -> None:
    """The rows above therefore cover every attention implementation of the trainer."""
    by_document, other = (training_rows(family, 3, name) for name in ("idlm_documents", attention))
    assert by_document.masks.keys() == other.masks.keys()
    for mine, theirs in ((by_document.masks, other.masks), (by_document.clean, other.clean)):
        for key, logits_V in mine.items():
            torch.testing.assert_close(logits_V, theirs[key], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["qwen2"])
def test_the_comparison_distinguishes_layouts(family: str) -> None:
    """A mask that sees one token less, or is off by one position, is far outside the tolerance."""
    rows = training_rows(family, 4, "idlm_documents")
    for (doc, start, index), logits_V in rows.masks.items():
        for other in ((doc, start - 1, index + 1), (doc, start, index + 1), (doc, start + 1, index)):
            if other in rows.masks:
                assert (logits_V - rows.masks[other]).abs().max() > 100 * TOLERANCE
