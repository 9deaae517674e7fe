"""Short texts that all ranks read and write without collective calls, in torch's TCPStore on rank 0."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os

from torch.distributed import TCPStore

from idlm.train.distributed.collectives import from_rank_zero, gather_objects

log = logging.getLogger(__name__)
STORE_SECONDS = 10.0
"""How long a call waits for rank 0."""


def open_store() -> TCPStore | None:
    """Open this rank's client of the store; None on all ranks if one cannot reach rank 0. Collective."""
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    timeout = datetime.timedelta(seconds=STORE_SECONDS)
    held: list[TCPStore] = []

    def hold() -> int:
        held.append(TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout))
        return held[0].port

    port = from_rank_zero(hold)
    store = held[0] if held else None
    with contextlib.suppress(RuntimeError):
        store = store or TCPStore(host, port, is_master=False, timeout=timeout)
    unreachable = [rank for rank, reached in enumerate(gather_objects(store is not None)) if not reached]
    if unreachable:
        log.warning(
            "ranks %s cannot reach %s:%d: a rank that dies or hangs is not named", unreachable, host, port
        )
    return None if unreachable else store
