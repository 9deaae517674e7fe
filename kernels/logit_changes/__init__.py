"""Logits changed by the tokens before them; contract in README.md."""

from idlm.kernels.logit_changes.op import change_logits
from idlm.kernels.logit_changes.types import ABSENT, ChangedRows, ChangeLanes, KnownTokens
