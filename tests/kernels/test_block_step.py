"""Block-diffusion passes against the reference; the kernels compiled."""

from __future__ import annotations

import pytest
import torch

from idlm.infer.decoders.block_rows import deciding
from idlm.infer.state.batch import StepPlan
from idlm.kernels.block_step import BlockLanes, BlockShape, decide_blocks, pack_blocks
from idlm.kernels.block_step.types import RULES, PassBlocks, Proposed, Rules
from idlm.kernels.step_rows import Lanes
from tests.kernels.cases.block_step import Case
from tests.kernels.hopper_compiler import assert_unspilled
from tests.kernels.references.block_step import (
    Row,
    Sequence,
    decide_reference,
    pack_reference,
    wanted_reference,
)


@pytest.mark.parametrize("seed", range(30))
def test_a_pass_equals_the_reference(seed: int) -> None:
    case = Case(seed, "cpu")
    shape, config = case.decoder.shape, case.decoder.config
    sequences = [(case.sequence(lane), num_counted, decodes) for lane, num_counted, decodes in case.sequences]
    plan, proposed = case.proposed(case.plan())
    expected = pack_reference(sequences, shape, case.num_rows)
    counts = [len(rows) for rows, *_ in expected]
    assert plan.cu_rows_B1.diff().tolist() == counts
    assert plan.is_mask_R is not None and plan.active is not None
    columns = (plan.token_ids_R, plan.slots_R, plan.limits_R, plan.is_mask_R)
    found = list(zip(*(column.tolist() for column in columns), strict=True))
    assert found[: sum(counts)] == [row for rows, *_ in expected for row in rows]
    assert not any(row[-1] for row in found[sum(counts) :])
    expected = within_limit(case, plan, sequences, expected)
    assert plan.num_feed_B.tolist() == [num_feed for _, num_feed, *_ in expected]
    assert plan.samples_B.tolist() == [samples for *_, samples, _ in expected]
    assert [torch.nonzero(row)[:, 0].tolist() for row in plan.active.is_maskable_BW] == [
        row[-1] for row in expected
    ]

    emitted_BW, num_emitted_B = case.decoder._decide(case.table, plan, proposed)
    has_logits = deciding(plan).has_logits_BW
    assert proposed.entropy_BW is not None
    for b, (sequence, _, _) in enumerate(sequences):
        _, num_feed, samples, indices = expected[b]
        emitted = decide_reference(
            sequence,
            shape,
            config.strategy,
            num_feed=num_feed,
            samples=samples,
            indices=indices,
            has_logits=[True] * case.size if has_logits is None else has_logits[b].tolist(),
            proposed=proposed.token_ids_BW[b].tolist(),
            confidence=proposed.confidence_BW[b].tolist(),
            entropy=proposed.entropy_BW[b].tolist(),
            max_clean_passes=config.max_edit_passes if case.decoder._edits else None,
        )
        assert emitted_BW[b, : num_emitted_B[b]].tolist() == emitted
        after = case.sequence(case.sequences[b][0])
        for name in ("num_computed", "num_passes", "num_clean_passes", "whole_part", "decided"):
            assert getattr(after, name) == getattr(sequence, name), name
        maximum = case.table.max_length
        assert after.tokens[:maximum] == sequence.tokens[:maximum]


Due = list[tuple[list[Row], int, bool, list[int]]]


def within_limit(case: Case, plan: StepPlan, sequences: list[tuple[Sequence, int, bool]], due: Due) -> Due:
    """Check the wanted rows; returns what is due of sequences that do not wait."""
    shape, wanted = case.decoder.shape, deciding(plan).wanted
    opens = [shape.shifted and samples and num_feed > 0 for _, num_feed, samples, _ in due]
    demand = [list(indices) for *_, indices in due]
    if case.decoder._edits:
        for b, (sequence, *_) in enumerate(sequences):
            decided = range(max(len(sequence.tokens) % case.size, int(shape.shifted)), case.size)
            if due[b][2] and not opens[b]:
                demand[b] = sorted({*demand[b], *(w for w in decided if sequence.decided[w] is not None)})
    num_waits = [int(case.decoder.blocks.num_waits_Z[lane]) for lane, *_ in case.sequences]
    rows = wanted_reference(demand, num_waits, opens, len(wanted.rows_X))
    assert wanted.num_B.tolist() == [len(indices) for indices in demand]
    assert wanted.waits_B.tolist() == [of_b is None for of_b in rows]
    numbers = torch.full_like(wanted.number_BW, -1)
    first_rows, found = plan.cu_rows_B1.tolist(), {}
    for b, of_b in enumerate(rows):
        for number, index in of_b or ():
            numbers[b, index] = number
            known, index_of_row = len(sequences[b][0].tokens), index - int(shape.shifted)
            slots = [slot for _, slot, *_ in due[b][0]]
            slot = known // case.size * case.size + index_of_row
            # In a pass that cannot be: a shifted block's first position open after its first pass.
            row = slots.index(slot) if slot in slots else 0
            found[number] = (first_rows[b] + row, b * case.size + index, case.sequences[b][0])
    assert torch.equal(wanted.number_BW, numbers)
    columns = (wanted.rows_X.tolist(), wanted.positions_X.tolist(), wanted.lanes_X.tolist())
    for number, triple in enumerate(zip(*columns, strict=True)):
        assert triple == found.get(number, (0, 0, case.sequences[0][0]))
    return [
        (mine, min(num_feed, num_counted), False, []) if of_b is None else (mine, num_feed, samples, indices)
        for (mine, num_feed, samples, indices), (_, num_counted, _), of_b in zip(
            due, sequences, rows, strict=True
        )
    ]


@pytest.mark.sweep
@pytest.mark.parametrize("has_all", [False, True])
def test_the_kernels_compile_for_hopper_without_spills(has_all: bool) -> None:
    """Blocks of 32 as in SDAR, then all options of Fast-dLLM v2 and LLaDA2.1 at once."""
    lanes, num_lanes, num_sequences = torch.empty(9, dtype=torch.int64, device="meta"), 9, 200
    shape = BlockShape(
        size=32, mask_token_id=5, shifted=has_all, fuses=True, part=8 if has_all else None, reuses=has_all
    )
    table = Lanes(lanes, lanes, lanes, lanes.new_empty(num_lanes, 4096))
    blocks = BlockLanes.empty(num_lanes, 32, lanes.device)
    numbers_B = lanes.new_empty(num_sequences)
    bools_B, positions_BW = numbers_B.bool(), lanes.new_empty(num_sequences, 32)
    floats_BW, floats_Z = positions_BW.double(), lanes.double()

    def run() -> None:
        rows = {"lanes_B": numbers_B, "num_feed_B": numbers_B, "samples_B": bools_B}
        pack_blocks(table, blocks, shape, steps_Z=lanes, **rows, num_rows=9999, num_wanted=99, edits=has_all)
        has_logits_BW = positions_BW.bool() if has_all else None
        given = PassBlocks(
            **rows, waits_B=bools_B, is_maskable_BW=positions_BW.bool(), has_logits_BW=has_logits_BW
        )
        proposed = Proposed(positions_BW, floats_BW, floats_BW if has_all else None)
        limits = Rules(*(floats_Z, floats_Z, floats_Z, lanes), max_clean_passes=3 if has_all else None)
        names = {"rule": RULES[3 if has_all else 2], "choose": lambda masks: masks.is_maskable_BW}
        decide_blocks(table, lanes, blocks, shape, given, proposed, limits=limits, **names)

    assert_unspilled(run, "pack_blocks_kernel", "decide_kernel")
