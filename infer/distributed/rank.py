"""The process of a rank other than rank 0: builds its part of an engine, then runs every pass that rank 0
sends.

`TensorParallelGroup` starts it with the file descriptor of its connection and the process id of rank 0. It
ends as soon as that connection is closed or that process is gone, wherever it is, so no rank outlives rank 0.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import traceback
from functools import partial
from multiprocessing.connection import Connection

from idlm.errors import UserError
from idlm.infer.distributed.messages import Message, receive, send

POLL_SECONDS = 1.0
ENDED, FAILED = 0, 1


def main(descriptor: str, parent: str) -> None:
    """Never returns."""
    connection = Connection(int(descriptor))
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, inbox, int(parent)), daemon=True).start()
    try:
        hello = inbox.get()
        # These imports take seconds, so the connection is watched first.
        from idlm.infer.distributed.launcher import join
        from idlm.infer.distributed.worker_loop import worker_loop

        send(connection, {"state": "here"})
        inbox.get()
        worker_loop(inbox.get, partial(send, connection), join(**hello))
    except BaseException as error:
        failure = describe(error)
        if "code" not in failure:
            traceback.print_exc()
        with contextlib.suppress(OSError):
            send(connection, {"failed": failure})
    # Without running destructors: some of them wait for other ranks.
    os._exit(FAILED)


def describe(error: BaseException) -> Message:
    """A failure as JSON data; of a UserError its code, message and fix."""
    if isinstance(error, UserError):
        return {"code": error.code, "message": error.message, "fix": error.fix}
    return {"message": f"{type(error).__name__}: {error}"}


def _listen(connection: Connection, inbox: queue.SimpleQueue[Message], parent: int) -> None:
    """Put messages into `inbox`; end the process when rank 0 is gone. The parent's id is checked as well,
    because a child that rank 0 forked may hold a copy of the connection's other end."""
    while os.getppid() == parent:
        if connection.poll(POLL_SECONDS):
            message = receive(connection)
            if message is None:
                break
            inbox.put(message)
    os._exit(ENDED)


if __name__ == "__main__":
    main(*sys.argv[1:])
