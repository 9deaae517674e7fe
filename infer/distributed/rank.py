"""A rank other than rank 0: a process that builds its part of an engine and then does what it is told.

Started by `group.Team`, never by hand; its arguments are the socket to rank 0 and the id of that process. It
ends when the socket is closed or the process gone, at once and wherever it is, so that nothing outlives rank
0, however and whenever that ends.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
import traceback

from idlm.infer.distributed.messages import Channel, Message

POLL_SECONDS = 1.0
ENDED, FAILED = 0, 1


def main(connection: str, parent: str) -> None:
    """Never returns."""
    channel = Channel(socket.socket(fileno=int(connection)))
    inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, inbox, int(parent)), daemon=True).start()
    try:
        hello = inbox.get()
        # What takes seconds to load comes after the watch has begun.
        from idlm.infer.distributed.launcher import join
        from idlm.infer.runtime.worker import worker_loop

        channel.send({"state": "here"})
        inbox.get()
        worker_loop(inbox.get, channel.send, join(**hello))
    except BaseException as error:
        failure = describe(error)
        if "code" not in failure:
            traceback.print_exc()
        with contextlib.suppress(OSError):
            channel.send({"failed": failure})
    # Not by way of destructors: some of them wait for other ranks.
    os._exit(FAILED)


def describe(error: BaseException) -> Message:
    """A failure as plain data; of a UserError, all of it."""
    from idlm.errors import UserError

    if isinstance(error, UserError):
        return {"code": error.code, "message": error.message, "fix": error.fix}
    return {"message": f"{type(error).__name__}: {error}"}


def _listen(channel: Channel, inbox: queue.SimpleQueue[Message], parent: int) -> None:
    """Pass messages on; end the process with rank 0, even where a copy of its socket lives on, and even if
    rank 0 was gone before this process could look for it.
    """
    while os.getppid() == parent:
        if channel.has_news(POLL_SECONDS):
            message = channel.receive()
            if message is None:
                break
            inbox.put(message)
    os._exit(ENDED)


if __name__ == "__main__":
    main(*sys.argv[1:])
