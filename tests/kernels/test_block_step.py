"""Block-diffusion passes against the reference; the kernels compiled."""

from __future__ import annotations

import pytest
import torch

from idlm.kernels.block_step import decide_reference, pack_reference
from tests.kernels.cases.block_step import Case


@pytest.mark.parametrize("seed", range(80))
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
    assert plan.num_feed_B.tolist() == [num_feed for _, num_feed, *_ in expected]
    assert plan.samples_B.tolist() == [samples for *_, samples, _ in expected]
    assert [torch.nonzero(row)[:, 0].tolist() for row in plan.active.is_maskable_BW] == [
        row[-1] for row in expected
    ]

    emitted_BW, num_emitted_B = case.decoder._decide(case.table, plan, proposed)
    has_logits = plan.has_logits_BW
    assert proposed.entropy_BW is not None
    for b, (sequence, _, _) in enumerate(sequences):
        _, num_feed, samples, places = expected[b]
        emitted = decide_reference(
            sequence,
            shape,
            config.strategy,
            num_feed=num_feed,
            samples=samples,
            places=places,
            has_logits=[True] * case.size if has_logits is None else has_logits[b].tolist(),
            proposed=proposed.token_ids_BW[b].tolist(),
            confidence=proposed.confidence_BW[b].tolist(),
            entropy=proposed.entropy_BW[b].tolist(),
            max_clean_passes=config.max_edit_passes if case.decoder._edits else None,
        )
        assert emitted_BW[b, : num_emitted_B[b]].tolist() == emitted
        after = case.sequence(case.sequences[b][0])
        for name in ("num_computed", "num_passes", "num_clean_passes", "whole_part", "places"):
            assert getattr(after, name) == getattr(sequence, name), name
        most = case.table.max_length
        assert after.tokens[:most] == sequence.tokens[:most]


@pytest.mark.parametrize("has_all", [False, True])
def test_the_kernels_compile_for_hopper_without_spills(has_all: bool) -> None:
    """Blocks of 32 as in SDAR, then all options of Fast-dLLM v2 and LLaDA2.1 at once."""
    pytest.importorskip("triton")
    from idlm.kernels.block_step.kernel import decide_kernel, pack_blocks_kernel
    from tests.kernels.hopper_compiler import compile_for_hopper

    types = {name: "*i64" for kernel in (pack_blocks_kernel, decide_kernel) for name in kernel.arg_names}
    bools = ("samples_B", "decided_ZW", "bools_IB", "is_mask_R", "is_maskable_BW", "has_logits_BW")
    floats = ("threshold_Z", "bound_Z", "edit_threshold_Z", "confidence_BW", "entropy_BW")
    numbers = ("B", "R", "L", "mask_token_id", "entropy_stride", "max_clean_passes")
    types |= dict.fromkeys(bools, "*i1") | dict.fromkeys(floats, "*fp64") | dict.fromkeys(numbers, "i32")
    shape = {"SIZE": 32, "PART": 8 if has_all else 32, "BLOCK_W": 32, "SHIFTED": has_all, "REUSES": has_all}
    pack = {"FUSES": not has_all, "HAS_ROOM": True, "PASSES_BITS": 16, "BLOCK_B": 256, "BLOCK": 32}
    decide = {"RULE": 3 if has_all else 2, "EDITS": has_all, "HAS_LOGITS": has_all, "HAS_QUOTA": False}
    for kernel, constants in ((pack_blocks_kernel, pack), (decide_kernel, decide)):
        assert compile_for_hopper(kernel, types, {**shape, **constants}, num_warps=4).spilled_bytes == 0
