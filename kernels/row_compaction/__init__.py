"""The rows that a pass goes on with, packed again; contract in README.md."""

from idlm.kernels.row_compaction.op import compact_rows, find_places, gather_rows, keep_wanted, spread_places
from idlm.kernels.row_compaction.plain import by_row, flagged, take_room
from idlm.kernels.row_compaction.types import Compacted, Drop, KeptWanted, PackedRows, RowCapacity
