"""Lists of the slots that a block attends to most; contract in README.md."""

from idlm.kernels.prefix_ranking.op import (
    RankingPass,
    attention_share,
    rank_prefix,
    select_largest,
    workspace_bytes,
)
