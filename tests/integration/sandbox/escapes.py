"""Programs that try to leave the sandbox. The text of this file runs inside it, and some of it outside, where
it must succeed: an attempt that fails everywhere shows nothing.

Every function `try_...` is one attempt and returns what it reached; nothing, or an exception, is containment.
`WORLD` holds what the host put up for it: paths, ports, process numbers."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
from typing import Any

WORLD: dict[str, Any] = {}
libc = ctypes.CDLL(None, use_errno=True)


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read(100)


def _connect(family: int, address: Any, kind: int = socket.SOCK_STREAM) -> bool:
    with socket.socket(family, kind) as made:
        made.settimeout(0.5)
        made.connect(address)
        made.send(b"escaped")
        return True


# Network: these succeed outside.


def try_tcp() -> Any:
    return _connect(socket.AF_INET, ("127.0.0.1", WORLD["port"]))


def try_udp() -> Any:
    return _connect(socket.AF_INET, ("127.0.0.1", 9), socket.SOCK_DGRAM)


def try_unix_socket() -> Any:
    return _connect(socket.AF_UNIX, WORLD["unix"])


def try_abstract_unix_socket() -> Any:
    return _connect(socket.AF_UNIX, WORLD["abstract"])


def try_netlink() -> Any:
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()
    return True


def try_listen() -> Any:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        made.listen()
        return True


# Host files and processes: these succeed outside.


def try_open_secret() -> Any:
    return _read(WORLD["secret"])


def try_symlink_to_secret() -> Any:
    link = f"/tmp/link_{os.getpid()}"
    os.symlink(WORLD["far_secret"], link)
    try:
        return _read(link)
    finally:
        os.unlink(link)


def try_descriptor_traversal() -> Any:
    root = os.open("/", os.O_RDONLY)
    up = os.open("..", os.O_RDONLY, dir_fd=root)
    try:
        found = os.open(os.path.dirname(WORLD["far_secret"]).lstrip("/"), os.O_RDONLY, dir_fd=up)
        return os.listdir(found)
    finally:
        os.close(root)
        os.close(up)


def try_shell() -> Any:
    return subprocess.run(
        ["/usr/bin/sh", "-c", f"cat {WORLD['far_secret']}"], capture_output=True, check=True
    ).stdout


def try_password_file() -> Any:
    return _read("/etc/passwd")


def try_environment() -> Any:
    return os.environ.get("LMEVAL_SECRET")


def try_process_list() -> Any:
    return [name for name in os.listdir("/proc") if name.isdigit()]


def try_write_outside() -> Any:
    with open(WORLD["target"], "w", encoding="utf-8") as file:
        return file.write("escaped")


def try_hard_link() -> Any:
    os.link(WORLD["secret"], WORLD["secret"] + ".link")
    os.unlink(WORLD["secret"] + ".link")
    return True


def try_remove_outside() -> Any:
    os.unlink(WORLD["victim"])
    return True


def try_signal_host() -> Any:
    os.kill(WORLD["pid"], 0)
    return True


def try_handle_of_host_process() -> Any:
    return os.pidfd_open(WORLD["pid"]) >= 0


def try_inherited_folder() -> Any:
    return [fd for fd in range(3, 1024) if _is_folder(fd)] or WORLD.get("is_outside")


def _is_folder(fd: int) -> bool:
    try:
        return os.path.isdir(f"/proc/self/fd/{fd}") or bool(os.listdir(fd))
    except OSError:
        return False


def try_memory_file() -> Any:
    return os.memfd_create("hidden") >= 0


def try_shared_memory() -> Any:
    return libc.shmget(0, 4096, 0o1600) >= 0


def try_shared_memory_folder() -> Any:
    with open(f"/dev/shm/lmeval_{os.getpid()}", "w") as file:
        os.unlink(file.name)
    return True


OUTSIDE = sorted(name for name in globals() if name.startswith("try_"))
"""Attempts that are harmless on the host, where they succeed."""
