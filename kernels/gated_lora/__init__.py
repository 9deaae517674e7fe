"""Low-rank addition to MASK rows only; contract in README.md."""

from idlm.kernels.gated_lora.op import GatedLora, add_low_rank, expand_add, expand_swiglu
from idlm.kernels.gated_lora.types import MAX_ADAPTERS, Gate, HostGroups, gate_of, group_rows, num_adapters_of
