"""Ranges against the dense mask, interpreted kernels against the reference, flex masks against eager ones.

tests/gpu/kernels/test_split_attention_gpu.py runs the kernels on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from idlm.kernels.split_attention import split_attention_ranges
from idlm.kernels.split_attention.op import visible
from idlm.kernels.split_attention.visibility import TILE_ROWS, from_tensors
from idlm.masks import RowMeta, dense_mask
from idlm.train.model.attention import choose_attention, flex_block_mask, flex_predicate
from tests.kernels.cases.split_attention import inputs, random_case, ranges_of, row_meta, row_meta_of_one
from tests.kernels.hopper_compiler import compiled_launches

ROOT = Path(__file__).resolve().parents[2]
SEEDS = range(10)


def seen_pairs(meta: RowMeta) -> torch.Tensor:
    """The dense mask without the self-visibility of padding, which only keeps a dense softmax finite."""
    return dense_mask(meta) & (meta.doc_ids >= 0)[..., None]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_ranges_are_the_dense_mask_from_both_sides(seed: int) -> None:
    meta = row_meta(random_case(seed, longest=60))
    see = ranges_of(meta)
    dense = seen_pairs(meta)
    assert torch.equal(visible(see), dense)
    queries_T = torch.arange(dense.shape[1])
    seen_by = (queries_T >= see.seen_start_BT[..., None]) & (queries_T < see.seen_end_BT[..., None])
    seen_by |= (queries_T >= see.own_from_BT[..., None]) & (queries_T < see.own_end_BT[..., None])
    assert torch.equal(seen_by, dense.transpose(1, 2))
    assert torch.equal(see.num_rows_B.long(), (meta.doc_ids >= 0).sum(dim=1))


@pytest.mark.parametrize("seed", SEEDS)
def test_clean_rows_can_be_keys_alone(seed: int) -> None:
    meta, num_queries = row_meta_of_one(random_case(seed, longest=120))
    see, dense = ranges_of(meta, num_queries=num_queries), seen_pairs(meta)[:, :num_queries]
    assert torch.equal(visible(see, dense.shape[2]), dense)
    queries_T = torch.arange(num_queries)
    assert not (see.seen_start_BT < see.seen_end_BT).any()
    seen_by = (queries_T >= see.own_from_BT[..., None]) & (queries_T < see.own_end_BT[..., None])
    assert torch.equal(seen_by, dense[:, :, :num_queries].transpose(1, 2)), "no gradient of clean keys"
    assert see.num_queries_B.tolist() == [num_queries]
    assert see.num_rows_B.tolist() == [int((meta.doc_ids >= 0).sum())]
    assert see.query_order.numel() == see.key_order.numel() == -(-num_queries // TILE_ROWS)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_tile_walks_over_all_that_its_rows_see_and_masks_all_that_one_of_them_does_not(seed: int) -> None:
    meta = row_meta(random_case(seed, longest=120))
    see = ranges_of(meta)
    dense = seen_pairs(meta)
    for tiles, pairs in ((see.query_tiles_BI8, dense), (see.key_tiles_BI8, dense.transpose(1, 2))):
        for b, tiles_I8 in enumerate(tiles.tolist()):
            for i, limits in enumerate(tiles_I8):
                rows = pairs[b, i * TILE_ROWS : (i + 1) * TILE_ROWS]
                real = rows[meta.doc_ids[b, i * TILE_ROWS : (i + 1) * TILE_ROWS] >= 0]
                outside = torch.ones(dense.shape[1], dtype=torch.bool)
                for low, high, common_low, common_high in (limits[:4], limits[4:]):
                    assert 0 <= low <= high <= dense.shape[1]
                    outside[low:high] = False
                    assert real[:, max(low, common_low) : min(high, common_high)].all()
                assert not rows[:, outside].any()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("block_rows", [16, 128])
def test_the_flex_mask_is_the_eager_one_block_for_block(seed: int, block_rows: int) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    meta = row_meta(random_case(seed, longest=90))
    see = ranges_of(meta)
    batch, num_rows = meta.doc_ids.shape
    predicate = flex_predicate(see)
    eager = create_block_mask(predicate, batch, None, num_rows, num_rows, device="cpu", BLOCK_SIZE=block_rows)
    ours = flex_block_mask(see, block_rows=block_rows)
    rows = torch.arange(num_rows)
    pairs = predicate(torch.arange(batch)[:, None, None], rows[0], rows[None, :, None], rows[None, None, :])
    assert torch.equal(pairs, seen_pairs(meta))
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, expected = getattr(ours, f"{name}_num_blocks"), getattr(eager, f"{name}_num_blocks")
        assert torch.equal(counts, expected), name
        lists, truth = getattr(ours, f"{name}_indices"), getattr(eager, f"{name}_indices")
        used = torch.arange(lists.shape[-1]) < counts[..., None]
        assert torch.equal(lists[used], truth[used]), name
    assert ours.seq_lengths == eager.seq_lengths


@pytest.mark.sweep_but(1)
@pytest.mark.parametrize("cases", [("full", "0"), ("1", "2")], ids=" ".join)
def test_interpreted_kernels_equal_the_reference(cases: tuple[str, ...]) -> None:
    """Forward and backward, several packed rows, ragged, NaN in the padding, small and full tiles."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted.split_attention", *cases],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == str(len(cases))


def test_a_compiled_caller_has_one_graph() -> None:
    """The operator with its fake implementation and its backward pass, traced but not run."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    case = random_case(2, longest=20)
    meta = row_meta(case)
    see = ranges_of(meta)
    with FakeTensorMode(allow_non_fake_inputs=True):
        query, key = (torch.empty(2, n, 40, 64, dtype=torch.bfloat16, requires_grad=True) for n in (8, 2))
        output, lse = torch.ops.idlm.split_attention(query, key, key, list(see.tensors()), 0.1)
        output.sum().backward()
    assert output.shape == (2, 40, 8, 64)
    assert lse.shape == (2, 8, 40)
    assert lse.dtype == torch.float32
    assert query.grad is not None
    assert query.grad.shape == query.shape
    assert key.grad is not None
    assert key.grad.shape == key.shape


def test_float32_is_computed_by_the_definition() -> None:
    case = random_case(4, longest=20)
    meta = row_meta(case)
    query, key, value, _ = inputs(case, meta, torch.float32)
    output = split_attention_ranges(query, key, value, ranges_of(meta).tensors(), scale=0.2)
    assert output.isfinite().all()
    assert not output[meta.doc_ids < 0].any()


@pytest.mark.parametrize(
    ("device", "is_16_bit", "expected"),
    [("cpu", False, "idlm_documents"), ("cpu", True, "idlm_documents"), ("cuda", False, "idlm_flex")],
)
def test_the_automatic_choice(device: str, is_16_bit: bool, expected: str) -> None:
    assert choose_attention("auto", torch.device(device), is_16_bit=is_16_bit) == expected


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "sm", "programs"),
    [(8, 4, 128, 90, 1), (12, 4, 64, 90, 2), (8, 2, 64, 80, 2), (8, 2, 256, 90, 1)],
)
def test_the_kernels_compile_without_a_gpu(
    num_heads: int, num_kv_heads: int, head_dim: int, sm: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward pass of noisy rows that see clean keys. So many programs that compute gradients of queries
    share a multiprocessor, with 227 KB of shared memory on Hopper, 164 KB on an A100."""
    pytest.importorskip("triton.experimental.gluon")
    from idlm.kernels.split_attention import launch

    # Gluon is experimental, so every version of Triton must compile its kernel, known or not.
    has_gluon = sm == 90 and head_dim <= 128
    monkeypatch.setattr(launch, "takes_hopper_kernel", lambda query: has_gluon)
    meta, _ = row_meta_of_one(random_case(0, longest=60))
    see = from_tensors([one.to("meta") for one in ranges_of(meta).tensors()])
    batch, num_rows = see.own_start_BT.shape
    query = torch.empty(batch, num_heads, num_rows, head_dim, dtype=torch.bfloat16, device="meta")
    key = query.new_empty(batch, num_kv_heads, 2 * num_rows, head_dim)
    output, lse = query.transpose(1, 2).contiguous(), query.new_empty(query.shape[:3], dtype=torch.float32)
    made = dict(
        compiled_launches(lambda: launch.run_backward(output, query, key, key, output, lse, see, 0.1), sm=sm)
    )
    assert made.keys() >= {"prepare_kernel", "backward_kernel", "query_gradient_kernel"}
    queries = made["query_gradient_kernel"]
    assert ("wgmma" in queries.ptx) == ("wgmma" in made["backward_kernel"].ptx) == (sm == 90)
    assert queries.spilled_bytes == 0 or sm < 90
    assert queries.shared_bytes <= (227 if sm == 90 else 163) * 1024 // programs
    assert made["backward_kernel"].shared_bytes < 227 * 1024
