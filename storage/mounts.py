"""Detects network file systems, because an index in LMDB would be damaged on a network file system."""

from __future__ import annotations

import os
import re
from pathlib import Path

_NETWORK = {
    "9p", "afs", "beegfs", "ceph", "cifs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "orangefs", "pvfs2",
    "smb3", "smbfs",
}  # fmt: skip
# NAME of the network file systems whose type is fuse.NAME. Other FUSE file systems, for example fuse-overlayfs of
# containers, use local disks.
_NETWORK_FUSE = {
    "3fs", "afs", "alluxio-fuse", "blobfuse", "blobfuse2", "ceph", "ceph-fuse", "cubefs", "curvefs", "davfs", "gcsfuse",
    "glusterfs", "goofys", "hf3fs", "juicefs", "mfs", "moosefs", "mount-s3", "mountpoint-s3", "rclone", "s3fs",
    "seaweedfs", "sshfs", "weed",
}  # fmt: skip


def network_type(path: str | os.PathLike[str], mountinfo: str | os.PathLike[str] = "/proc/self/mountinfo") -> str:
    """Return the type of the network file system at `path`, for example "nfs4". Returns "" if the file system is local,
    or if the kernel does not list the file system. `mountinfo`: a table of mounts in the format of proc(5)."""
    real = os.path.realpath(path)
    try:
        lines = Path(mountinfo).read_text(errors="surrogateescape").splitlines()
    except OSError:
        return ""
    found, longest = "", -1
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.partition(" ")[0].lower()
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[4]) if len(fields) > 4 else ""
        is_above = point and (point in {"/", real} or real.startswith(f"{point}/"))
        if is_above and len(point) >= longest:  # the last mount at a path hides earlier ones
            found, longest = kind, len(point)
    is_network = found in _NETWORK or (found.startswith("fuse.") and found.removeprefix("fuse.") in _NETWORK_FUSE)
    return found if is_network else ""
