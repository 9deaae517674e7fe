"""The definition of a pass's rows, sequence by sequence in plain Python. Formula in README.md."""

from __future__ import annotations

from idlm.kernels.step_rows import MASK, Lanes, Noise, RowTable

Row = tuple[int, int, int, int, int, bool]
"""token id, position, slot, limit, branch start, whether it is a MASK"""


def pack_rows_reference(
    lanes: Lanes, table: RowTable, sequences: list[tuple[int, int, bool]], *, mask_token_id: int | Noise
) -> list[list[Row]]:
    """Rows of every sequence, given as (lane, known tokens to compute, whether it wants to decode)."""
    packed = []
    for lane, num_feed, wants in sequences:
        computed = int(lanes.num_computed_Z[lane])
        rows: list[Row] = []
        for slot in range(computed, computed + num_feed):
            rows.append((int(lanes.tokens_ZL[lane, slot]), slot, slot, slot + 1, slot + 1, False))
        if wants and lanes.num_known_Z[lane] < lanes.ends_Z[lane]:
            draft_buffer = 0 if lanes.draft_buffer_Z is None else int(lanes.draft_buffer_Z[lane])
            pending = computed + num_feed - 1
            for row in range(1, int(table.width_Y[draft_buffer])):
                source = int(table.source_YW[draft_buffer, row])
                drafts = lanes.drafts_ZJ
                mask = mask_token_id
                if isinstance(mask, Noise):
                    mask = _noise_id(mask, lane, *_group_and_depth(table, draft_buffer, row))
                token = mask if source == MASK or drafts is None else int(drafts[lane, source - 1])
                position, limit, branch = (
                    pending + int(column[draft_buffer, row])
                    for column in (table.position_YW, table.limit_YW, table.branch_YW)
                )
                rows.append((token, position, pending + row, limit, branch, source == MASK))
        packed.append(rows)
    return packed


def _group_and_depth(table: RowTable, draft_buffer: int, row: int) -> tuple[int, int]:
    """The number of chain rows that a row of MASKs sees, and its depth in its group."""
    return int(table.limit_YW[draft_buffer, row]), row - int(table.branch_YW[draft_buffer, row])


def _noise_id(noise: Noise, lane: int, group: int, depth: int) -> int:
    seed, sample, step = (int(numbers_Z[lane]) for numbers_Z in noise[:3])
    counter = [(1 << 31) + 256 * group + depth, step % 2**32, step >> 32, sample]
    return noise.low + (_philox(counter, [seed % 2**32, seed >> 32]) * (noise.high - noise.low) >> 32)


def _philox(counter: list[int], key: list[int]) -> int:
    """The first word of Philox4x32-10 (Salmon et al., SC 2011)."""
    for _ in range(10):
        left, right = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (right >> 32) ^ counter[1] ^ key[0],
            right % 2**32,
            (left >> 32) ^ counter[3] ^ key[1],
            left % 2**32,
        ]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter[0]
