"""Make the kernel refuse system calls, as in a container whose seccomp profile does not allow them."""

from __future__ import annotations

import ctypes
import platform
import struct

_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[platform.machine()]
_ON_X86 = platform.machine() == "x86_64"
NUMBERS = {
    "pidfd_open": 434,
    "memfd_create": 319 if _ON_X86 else 279,
    "fallocate": 285 if _ON_X86 else 47,
    "fsync": 74 if _ON_X86 else 82,
    "fdatasync": 75 if _ON_X86 else 83,
    "flock": 73 if _ON_X86 else 32,
    "madvise": 28 if _ON_X86 else 233,
    "sched_getaffinity": 204 if _ON_X86 else 123,
    "sched_setaffinity": 203 if _ON_X86 else 122,
}
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def refuse(error: int, *calls: str) -> bool:
    """Make these calls of this process and its children fail with `error`. Returns False if seccomp is not
    available."""
    numbers = [NUMBERS[call] for call in calls]
    lines = [(0x20, 0, 0, 4), (0x15, 1, 0, _ARCHITECTURE), (0x06, 0, 0, _ALLOW), (0x20, 0, 0, 0)]
    for at, number in enumerate(numbers):
        lines.append((0x15, len(numbers) - at, 0, number))
    lines += [(0x06, 0, 0, _ALLOW), (0x06, 0, 0, _ERRNO | error)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    program = _Program(len(lines), ctypes.addressof(code))
    return not libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0)
