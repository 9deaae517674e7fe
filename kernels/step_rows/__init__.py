"""Rows and commits of a pass, as tensors by lane; contract in README.md."""

from idlm.kernels.step_rows.op import commit, map_slots, pack_rows
from idlm.kernels.step_rows.types import MASK, Lanes, Noise, RowTable, StepRows
