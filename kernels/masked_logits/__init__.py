"""The best tokens of wanted rows without stored logits; contract in README.md."""

from idlm.kernels.masked_logits.op import has_fused, masked_logits
from idlm.kernels.masked_logits.types import WORKSPACE_BYTES, WORKSPACE_ROW_BYTES, Proposals
