"""The system calls that a program in the sandbox cannot make, as a seccomp filter.

Namespaces hide the host and limits bound what is counted. What is left is refused here: memory that no limit counts
(System V and memfd memory, message queues), address families that no network namespace covers (vsock reaches the host
of a virtual machine), the parts of the kernel that ordinary programs do not use and attackers do, and new namespaces.
"""

from __future__ import annotations

import errno
import platform
import struct
from typing import NamedTuple

from cadenza.sandbox.errors import SandboxUnavailable

# name: (number on x86_64, number on aarch64); -1 where it does not exist.
DENIED = {
    "shmget": (29, 194), "shmat": (30, 196), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "inotify_init": (253, -1), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "syslog": (103, 116), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "acct": (163, 89), "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142),
    "mbind": (237, 235), "set_mempolicy": (238, 237), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "vmsplice": (278, 75), "lookup_dcookie": (212, 18), "modify_ldt": (154, -1), "iopl": (172, -1), "ioperm": (173, -1),
}  # fmt: skip
FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET and AF_INET6: the network namespace holds them."""
NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
PR_SET_PDEATHSIG = 1
"""With it a program that took over process 1 could outlive the launcher."""
X32_BIT = 0x40000000

LOAD, JUMP_EQUAL, JUMP_ABOVE_OR_EQUAL, JUMP_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
"""Offsets in `struct seccomp_data`; both machines are little-endian, so the low half of an argument comes first."""
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000, 0x80000000


class Machine(NamedTuple):
    """What differs between processors."""

    audit: int
    column: int
    clone: int
    clone3: int
    prctl: int
    socket: int


MACHINES = {
    "x86_64": Machine(audit=0xC000003E, column=0, clone=56, clone3=435, prctl=157, socket=41),
    "aarch64": Machine(audit=0xC00000B7, column=1, clone=220, clone3=435, prctl=167, socket=198),
}


def seccomp_filter(machine: str | None = None) -> bytes:
    """The filter for `bwrap --seccomp`, for this machine unless another is named; raises `SandboxUnavailable` where its
    system calls are not known."""
    machine = machine or platform.machine()
    if machine not in MACHINES:
        raise SandboxUnavailable(f"the sandbox knows the system calls of {', '.join(MACHINES)}, not of {machine}")
    kind = MACHINES[machine]
    code = [
        _step(LOAD, ARCHITECTURE), _step(JUMP_EQUAL, kind.audit, 1, 0), _step(RETURN, KILL),
        _step(LOAD, NUMBER), _step(JUMP_ABOVE_OR_EQUAL, X32_BIT, 0, 1), _step(RETURN, REFUSE | errno.ENOSYS),
    ]  # fmt: skip
    for numbers in DENIED.values():
        if numbers[kind.column] >= 0:
            code += [_step(JUMP_EQUAL, numbers[kind.column], 0, 1), _step(RETURN, REFUSE | errno.EPERM)]
    # The C library falls back from clone3, whose flags are in memory that a filter cannot read, to clone.
    code += [_step(JUMP_EQUAL, kind.clone3, 0, 1), _step(RETURN, REFUSE | errno.ENOSYS)]
    code += [
        _step(JUMP_EQUAL, kind.clone, 0, 4), _step(LOAD, FIRST_ARGUMENT), _step(JUMP_BITS, NEW_NAMESPACES, 0, 1),
        _step(RETURN, REFUSE | errno.EPERM), _step(RETURN, ALLOW),
        _step(JUMP_EQUAL, kind.prctl, 0, 4), _step(LOAD, FIRST_ARGUMENT), _step(JUMP_EQUAL, PR_SET_PDEATHSIG, 0, 1),
        _step(RETURN, REFUSE | errno.EPERM), _step(RETURN, ALLOW),
        _step(JUMP_EQUAL, kind.socket, 1, 0), _step(RETURN, ALLOW), _step(LOAD, FIRST_ARGUMENT),
    ]  # fmt: skip
    for family in FAMILIES:
        code += [_step(JUMP_EQUAL, family, 0, 1), _step(RETURN, ALLOW)]
    return b"".join([*code, _step(RETURN, REFUSE | errno.EAFNOSUPPORT)])


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One `struct sock_filter`; the jumps count the steps that are left out."""
    return struct.pack("<HBBI", code, if_true, if_false, value)
