"""The data of the Linux kernel about the memory of this process."""

from __future__ import annotations

from pathlib import Path


def flags_at(address: int) -> set[str]:
    """The kernel's flags of the mapping that holds an address; see proc_pid_smaps(5)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            first, _, last = name.partition("-")
            inside = int(first, 16) <= address < int(last, 16)
        elif inside and name == "VmFlags:":
            return set(rest.split())
    raise OSError(f"no mapping holds {address:#x}")
