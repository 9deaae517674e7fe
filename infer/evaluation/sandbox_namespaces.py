"""A place without network, host files and privileges, made of Linux namespaces, mounts, resource limits and a
filter of system calls, without root or a daemon. `sandbox_child.py` imports this file, which imports nothing
of ours. Every function raises OSError, with the name of the step, where the system refuses a step."""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys
from collections.abc import Mapping, Sequence

SANDBOX_ID = 65534
"""User and group inside, which own no file."""
NEW_NAMESPACES = 0x10000000 | 0x00020000 | 0x40000000 | 0x20000000 | 0x08000000 | 0x04000000 | 0x02000000
"""User, mount, network, process, IPC, host name and cgroup: CLONE_NEW*."""
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 2, -100, 0x8000, 1, 2
SYS_PIVOT_ROOT, SYS_CAPSET, SYS_MOUNT_SETATTR, SYS_CLONE, SYS_CLONE3 = 155, 126, 442, 56, 435
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
EPERM, ENOSYS, SIGKILL = 1, 38, 9
# System calls of x86-64 that fail with EPERM.
DENIED = (
    *(101, 310, 311, 312, 438, 434),  # ptrace, process_vm_{readv,writev}, kcmp, pidfd_{getfd,open}
    *(165, 166, 155, 161, 272, 308),  # mount, umount2, pivot_root, chroot, unshare, setns
    *(428, 429, 430, 431, 432, 433, 442),  # the new mount interface
    *(321, 323, 298, 425, 426, 427),  # bpf, userfaultfd, perf_event_open, io_uring_{setup,enter,register}
    *(248, 249, 250, 303, 304),  # add_key, request_key, keyctl, name_to_handle_at, open_by_handle_at
    *(175, 313, 176, 246, 320),  # init_module, finit_module, delete_module, kexec_load, kexec_file_load
    *(169, 167, 168, 163, 103),  # reboot, swapon, swapoff, acct, syslog
    *(29, 30, 31, 64, 65, 68, 69, 71, 240),  # SysV and POSIX IPC, whose memory no limit of a process counts
    *(319, 447, 41, 135, 172, 173),  # memfd_create, memfd_secret, socket, personality, iopl, ioperm
)

_libc = ctypes.CDLL(None, use_errno=True)


def _call(step: str, result: int) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{step}: {os.strerror(ctypes.get_errno())}")


def _mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    given = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _call(f"mount {target}", _libc.mount(*given, ctypes.c_ulong(flags), options.encode()))


def die_with_parent() -> None:
    _call("prctl", _libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0))


def enter_namespaces() -> None:
    """Leave the host's namespaces; children are in a process namespace of their own."""
    _call("unshare (user and other namespaces)", _libc.unshare(NEW_NAMESPACES))


def map_ids(pid: int) -> None:
    """Give the user namespace of child `pid` its users; from root, also root, for the mounts alone."""
    if os.geteuid() == 0:
        maps = dict.fromkeys(("uid_map", "gid_map"), f"0 0 1\n{SANDBOX_ID} {SANDBOX_ID} 1\n")
    else:
        ids = {"uid_map": os.geteuid(), "gid_map": os.getegid()}
        maps = {"setgroups": "deny", **{name: f"{SANDBOX_ID} {own} 1\n" for name, own in ids.items()}}
    for name, text in maps.items():
        try:
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(text)
        except OSError as error:
            raise OSError(error.errno, f"{name}: {error.strerror}") from error


def enter_root(shown: Sequence[str], *, scratch_bytes: int) -> None:
    """Make a root that holds the `shown` paths, read-only, devices, and an empty /tmp, and no /proc."""
    _mount(None, "/", None, MS_REC | MS_PRIVATE)
    devices = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
    paths = [path for path in (*shown, *devices) if not os.path.islink(path)]
    links = {path: os.readlink(path) for path in shown if os.path.islink(path)}
    opened = {path: os.open(path, os.O_PATH) for path in paths if os.path.exists(path)}
    root = "/tmp"
    _mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=512,mode=755")
    for path, fd in opened.items():
        target = root + path
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            os.makedirs(target, exist_ok=True)
        else:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        _mount(f"/proc/self/fd/{fd}", target, None, MS_BIND | MS_REC)
        os.close(fd)
    for path, to in links.items():
        os.symlink(to, root + path)
    os.makedirs(f"{root}/tmp", exist_ok=True)
    os.chdir(root)
    _call("pivot_root", _libc.syscall(SYS_PIVOT_ROOT, b".", b"."))
    _call("umount", _libc.umount2(b".", MNT_DETACH))
    os.chdir("/")
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    size = ctypes.c_size_t(len(attributes))
    done = _libc.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, size)
    _call("mount_setattr (needs Linux 5.12)", done)
    _mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={scratch_bytes},nr_inodes=1024,mode=1777")
    os.chdir("/tmp")


def drop_privileges(limits: Mapping[str, int]) -> None:
    """Become a user without privileges, under `limits` by name (`AS`, ...) and the filter of system calls."""
    if os.geteuid() != SANDBOX_ID:
        os.setgroups([])
        os.setresgid(SANDBOX_ID, SANDBOX_ID, SANDBOX_ID)
        os.setresuid(SANDBOX_ID, SANDBOX_ID, SANDBOX_ID)
    # After the change of users, which resets it.
    die_with_parent()
    for name, maximum in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (maximum, maximum))
    header, none = struct.pack("II", 0x20080522, 0), bytes(24)
    _call("capset", _libc.syscall(SYS_CAPSET, header, none))
    _call("no_new_privs", _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _filter_system_calls()


def _filter_system_calls() -> None:
    """Seccomp: `DENIED` calls, another instruction set, and clone with new namespaces fail."""

    def statement(code: int, k: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("HBBI", code, if_true, if_false, k)

    load, equal, at_least, any_bit, end = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, error, kill, x86_64, x32 = 0x7FFF0000, 0x00050000, 0x80000000, 0xC000003E, 0x40000000
    program = [
        *(statement(load, 4), statement(equal, x86_64, 1, 0), statement(end, kill)),
        *(statement(load, 0), statement(at_least, x32, 0, 1), statement(end, kill)),
        # Its flags are in memory, which a filter cannot read; libraries fall back to clone.
        *(statement(equal, SYS_CLONE3, 0, 1), statement(end, error | ENOSYS)),
    ]
    for number in DENIED:
        program += [statement(equal, number, 0, 1), statement(end, error | EPERM)]
    flags = 16
    program += [
        *(statement(equal, SYS_CLONE, 0, 3), statement(load, flags)),
        *(statement(any_bit, NEW_NAMESPACES, 0, 1), statement(end, error | EPERM)),
        statement(end, allow),
    ]
    text = ctypes.create_string_buffer(b"".join(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(text)))
    _call("seccomp", _libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(header), 0, 0))


def shown_paths() -> list[str]:
    """What a Python program needs of the host: the interpreter, its library, shared libraries."""
    system = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache"]
    prefix = os.path.realpath(sys.base_prefix)
    return system if prefix.startswith("/usr") else [*system, prefix]
