"""The remaining rows of a pass, packed again; contract in README.md."""

from idlm.kernels.row_compaction.op import (
    allot,
    by_row,
    compact_rows,
    find_index,
    flagged,
    gather_rows,
    ranks,
    retain_wanted,
    spread_index,
)
from idlm.kernels.row_compaction.types import Compacted, Drop, PackedRows, RetainedWanted, RowCapacity
