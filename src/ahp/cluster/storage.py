"""What a folder is stored on: kind of disk or file system, and the space left."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

NETWORK_FILE_SYSTEMS = frozenset(
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "lustre",
        "ceph",
        "gpfs",
        "beegfs",
        "glusterfs",
        "9p",
        "virtiofs",
        "afs",
        "orangefs",
        "pvfs2",
        "wekafs",
        "panfs",
    ]
)


@dataclass(frozen=True)
class Storage:
    """``kind``: nvme, ssd, rotational, virtual, overlay, network, memory, or unknown."""

    path: str
    kind: str
    file_system: str
    free_bytes: int


def storage(path: str | Path, root: Path = Path("/")) -> Storage:
    """The storage of a folder, which need not exist yet; reads ``/proc/mounts`` and ``/sys`` below ``root``."""
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    folder = folder.resolve()
    device, file_system = _mount(str(folder), root)
    return Storage(str(folder), _kind(device, file_system, root), file_system, shutil.disk_usage(folder).free)


def _mount(folder: str, root: Path) -> tuple[str, str]:
    """(device, file system) of the mount with the longest mount point above the folder; the last mount there wins."""
    best, answer = -1, ("", "unknown")
    try:
        mounts = (root / "proc/mounts").read_text()
    except OSError:
        return answer
    for line in mounts.splitlines():
        device, point, file_system = (_unescape(word) for word in line.split()[:3])
        inside = folder == point or folder.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, answer = len(point), (device, file_system)
    return answer


def _unescape(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), word)


def _kind(device: str, file_system: str, root: Path) -> str:
    if file_system in NETWORK_FILE_SYSTEMS or file_system.startswith("fuse."):
        return "network"
    if file_system in ("tmpfs", "ramfs"):
        return "memory"
    if file_system == "overlay":
        return "overlay"
    if not device.startswith("/dev/"):
        return "unknown"
    disk = _whole_disk(root / "sys/class/block" / os.path.basename(device))
    if disk.name.startswith("nvme"):
        return "nvme"
    if re.match(r"(vd|xvd)[a-z]", disk.name):
        return "virtual"
    try:
        rotational = (disk / "queue/rotational").read_text().strip()
    except OSError:
        return "unknown"
    return "rotational" if rotational == "1" else "ssd"


def _whole_disk(block: Path) -> Path:
    """The disk below a partition or a mapped volume."""
    for _ in range(8):  # volumes on volumes end somewhere
        block = block.resolve()
        slaves = sorted((block / "slaves").glob("*"))
        if slaves:
            block = slaves[0]
        elif (block / "partition").exists():
            block = block.parent
        else:
            break
    return block
