"""The remaining rows of a pass, packed again; contract in README.md."""

from idlm.kernels.row_compaction.op import compact_rows, find_index, gather_rows, retain_wanted, spread_index
from idlm.kernels.row_compaction.plain import allot, by_row, flagged
from idlm.kernels.row_compaction.types import Compacted, Drop, PackedRows, RetainedWanted, RowCapacity
