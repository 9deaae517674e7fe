"""What a rank other than rank 0 runs, and the checksum by which ranks are compared.

Shapes: Z lanes, L tokens of the longest sequence."""

from __future__ import annotations

from collections.abc import Callable

import torch

from idlm.infer.build import build
from idlm.infer.distributed.messages import Message, schedule_from_message
from idlm.infer.models.base import Shards
from idlm.infer.request import Request
from idlm.infer.runtime.worker import Worker
from idlm.infer.settings import check_options
from idlm.infer.state.sequence_state import SequenceState

DIGEST_PRIME = 1_000_003


@torch.inference_mode()
def digest(table: SequenceState) -> int:
    """A checksum of tokens and pointers of all sequences, equal on all ranks. Waits for all steps.

    It is the sum of known tokens, weighted by position and lane, and of the pointers, modulo 2^64."""
    positions_L = torch.arange(table.max_length, device=table.device)
    tokens_ZL = table.tokens_ZL[:, : table.max_length] * (positions_L < table.num_known_Z[:, None])
    sums_Z = (tokens_ZL * (DIGEST_PRIME * positions_L + 1)).sum(dim=1)
    for column_Z in (table.num_known_Z, table.num_computed_Z, table.steps_Z):
        sums_Z = sums_Z * DIGEST_PRIME + column_Z
    lanes_Z = torch.arange(len(sums_Z), device=table.device)
    return int((sums_Z * (2 * lanes_Z + 1)).sum())


def worker_loop(
    receive: Callable[[], Message | None], send: Callable[[Message], None], shards: Shards
) -> None:
    """The loop of a rank other than 0: execute messages until there are none. A new engine replaces the one
    before it."""
    worker, requests = None, dict[int, Request]()
    while (message := receive()) is not None:
        if message["do"] == "build":
            worker = None
            options = check_options(message["decoder"], message["options"])
            worker = Worker(build(message["path"], options, shards))
            requests.clear()
            send({"state": "built"})
            continue
        assert worker is not None, f"no engine for {message['do']=}"
        if message["do"] == "pass":
            worker.parts.pool.follow(message["pages"])
            worker.launch(schedule_from_message(message, requests))
        else:
            send({"digest": digest(worker.parts.table)})
