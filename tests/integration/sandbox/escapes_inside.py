"""More programs that try to leave the sandbox: privileges, the kernel, resources, the verdict. They run
inside alone; their text follows that of `escapes.py`."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from typing import Any

WORLD: dict[str, Any] = globals().get("WORLD", {})
libc = ctypes.CDLL(None, use_errno=True)


def _system_call(number: int, *arguments: Any) -> bool:
    ctypes.set_errno(0)
    return bool(libc.syscall(number, *arguments) >= 0)


def try_become_root() -> Any:
    return libc.setuid(0) == 0 or libc.setresuid(0, 0, 0) == 0 or libc.seteuid(0) == 0


def try_capabilities() -> Any:
    header, wanted = ctypes.create_string_buffer(b"\x22\x05\x08\x20" + bytes(4)), b"\xff" * 24
    return _system_call(126, header, wanted)


def try_new_user_namespace() -> Any:
    return _system_call(272, 0x10000000)


def try_clone3() -> Any:
    return _system_call(435, ctypes.create_string_buffer(88), 88)


def try_set_namespace() -> Any:
    return _system_call(308, 0, 0)


def try_chroot() -> Any:
    os.makedirs("/tmp/jail", exist_ok=True)
    os.chroot("/tmp/jail")
    return True


def try_mount() -> Any:
    return libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, b"") == 0


def try_remount_writable() -> Any:
    return libc.mount(None, b"/usr", None, 32 | 4096, None) == 0


def try_unmount() -> Any:
    return libc.umount2(b"/usr", 2) == 0 or libc.umount2(b"/tmp", 2) == 0


def try_new_mount_interface() -> Any:
    return any(_system_call(number, 0, 0, 0, 0, 0) for number in (428, 429, 430, 432, 442))


def try_write_library() -> Any:
    return os.open(os.__file__, os.O_WRONLY | os.O_APPEND) >= 0


def try_file_in_root() -> Any:
    return [os.open(f"{folder}/new", os.O_CREAT | os.O_WRONLY) for folder in ("/", "/usr", "/dev", "/etc")]


def try_device() -> Any:
    os.mknod("/tmp/disk", 0o60600, os.makedev(8, 0))
    return True


def try_trace_checker() -> Any:
    return libc.ptrace(16, 1, 0, 0) == 0 or libc.ptrace(0x4206, 1, 0, 0) == 0


def try_read_checker_memory() -> Any:
    return _system_call(310, 1, 0, 0, 0, 0, 0) or _system_call(311, 1, 0, 0, 0, 0, 0)


def try_take_descriptor_of_checker() -> Any:
    return _system_call(438, 3, 1, 0)


def try_kill_checker() -> Any:
    os.kill(1, signal.SIGKILL)
    os.kill(1, signal.SIGSTOP)
    time.sleep(0.05)
    return False


def try_kill_everything() -> Any:
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
        os.kill(-1, number)
    return False


def try_raise_limits() -> Any:
    names = (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU)
    raised = []
    for name in names:
        try:
            resource.setrlimit(name, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            raised.append(name)
        except (ValueError, OSError):
            pass
    return raised


def try_kernel_interfaces() -> Any:
    """bpf, userfaultfd, perf_event_open, io_uring_setup, keyctl, add_key, open_by_handle_at, personality."""
    numbers = (321, 323, 298, 425, 250, 248, 304, 135)
    return [number for number in numbers if _system_call(number, 0, 0, 0, 0, 0)]


def try_load_module() -> Any:
    return [number for number in (175, 313, 176, 246, 169, 167) if _system_call(number, 0, 0, 0, 0)]


def try_clock() -> Any:
    time.clock_settime(time.CLOCK_REALTIME, 0)
    return True


def try_one_large_file() -> Any:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with open("/tmp/large", "wb") as file:
        try:
            file.truncate(1 << 30)
            return True
        finally:
            os.unlink("/tmp/large")


def try_fill_folder() -> Any:
    written, part = 0, bytes(1 << 20)
    try:
        for number in range(300):
            with open(f"/tmp/part{number}", "wb") as file:
                written += file.write(part)
    except OSError:
        return written > WORLD["scratch"]
    finally:
        for name in os.listdir("/tmp"):
            if name.startswith("part"):
                os.unlink(f"/tmp/{name}")
    return written


def try_many_files() -> Any:
    made = 0
    try:
        for made in range(5000):
            os.close(os.open(f"/tmp/empty{made}", os.O_CREAT))
    except OSError:
        return made > 2000
    finally:
        for name in os.listdir("/tmp"):
            if name.startswith("empty"):
                os.unlink(f"/tmp/{name}")
    return made


def try_memory() -> Any:
    return len(bytearray(WORLD["memory"]))


def try_fork_bomb() -> Any:
    started = []
    try:
        for _ in range(200):
            pid = os.fork()
            if pid == 0:
                time.sleep(60)
                os._exit(0)
            started.append(pid)
    except OSError:
        return len(started) >= WORLD["processes"]
    finally:
        for pid in started:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return started


def try_thread_bomb() -> Any:
    stop, started = threading.Event(), []
    try:
        for _ in range(200):
            thread = threading.Thread(target=stop.wait, args=(60,))
            thread.start()
            started.append(thread)
    except RuntimeError:
        return len(started) >= WORLD["processes"]
    finally:
        stop.set()
        for thread in started:
            thread.join()
    return started


def try_outlive() -> Any:
    """Leave a process behind; the test looks for it on the host."""
    if os.fork() == 0:
        os.setsid()
        os.execv("/usr/bin/sleep", ["sleep", WORLD["sleep"]])
    return False


# The verdict.


class _Equal:
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class _EqualInt(int):
    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


def give_equal() -> Any:
    return _Equal()


def give_equal_int() -> Any:
    return _EqualInt(1)


def give_equal_inside() -> Any:
    return [_Equal(), {"a": _EqualInt(3)}]


def give_after_new_builtins() -> Any:
    for name in ("all", "any", "len", "sorted", "isinstance", "AssertionError"):
        setattr(builtins, name, lambda *_: True)
    sys.modules["test"] = sys.modules["candidate"]
    return 0


def give_forged_report() -> Any:
    for fd in range(20):
        with contextlib.suppress(OSError):
            os.write(fd, b'{"passed": true, "reason": ""}\n')
    return 0
