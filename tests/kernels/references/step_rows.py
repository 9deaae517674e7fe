"""The definition of a pass's rows, sequence by sequence in plain Python. Formula in README.md."""

from __future__ import annotations

from idlm.kernels.step_rows.op import MASK, Lanes, RowTable

Row = tuple[int, int, int, int, int, bool]
"""token id, position, slot, limit, branch start, whether it is a MASK"""


def pack_rows_reference(
    lanes: Lanes, table: RowTable, sequences: list[tuple[int, int, bool]], *, mask_token_id: int
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
                token = mask_token_id if source == MASK or drafts is None else int(drafts[lane, source - 1])
                position, limit, branch = (
                    pending + int(column[draft_buffer, row])
                    for column in (table.position_YW, table.limit_YW, table.branch_YW)
                )
                rows.append((token, position, pending + row, limit, branch, source == MASK))
        packed.append(rows)
    return packed
