"""Memory that another process can map: anonymous where the system allows it, so that nothing is ever left behind.

On Linux a segment is a memory file without a name; other processes of the same user open it through `/proc`. It goes
when the last process that maps it ends, however it ends. Elsewhere it is a temporary file.
"""

from __future__ import annotations

import json
import mmap
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from transfer.errors import MediumUnusable


@dataclass(frozen=True, slots=True)
class SegmentReach:
    """What another process needs to open a segment. Device and inode tell it from a later file of the same path."""

    path: str
    device: int
    inode: int
    nbytes: int

    def to_json(self) -> str:
        """As text for a message."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SegmentReach:
        """Read what `to_json` wrote. Raises MediumUnusable when it is anything else."""
        try:
            fields = json.loads(text)
            return cls(str(fields["path"]), int(fields["device"]), int(fields["inode"]), int(fields["nbytes"]))
        except (ValueError, KeyError, TypeError) as error:
            raise MediumUnusable(f"the peer's shared memory is described by {text[:200]!r}") from error


class Segment:
    """A mapped stretch of shared memory: `memory` is a writable buffer of `nbytes` bytes (at least one page)."""

    def __init__(self, descriptor: int, nbytes: int, path: str) -> None:
        status = os.fstat(descriptor)
        self._descriptor = descriptor
        self.memory = mmap.mmap(descriptor, max(nbytes, 1))
        self.reach = SegmentReach(path, status.st_dev, status.st_ino, nbytes)

    @classmethod
    def create(cls, name: str, nbytes: int) -> Segment:
        """A new segment of zeros. Raises MediumUnusable when the system has no room for it."""
        try:
            if hasattr(os, "memfd_create"):
                descriptor = os.memfd_create(f"tandem-{name}", os.MFD_CLOEXEC)
                path = f"/proc/{os.getpid()}/fd/{descriptor}"
            else:
                descriptor, path = tempfile.mkstemp(prefix=f"tandem-{name}-")
            os.ftruncate(descriptor, max(nbytes, 1))
            return cls(descriptor, nbytes, path)
        except OSError as error:
            raise MediumUnusable(f"cannot make {nbytes} bytes of shared memory: {error}") from error

    @classmethod
    def attach(cls, reach: SegmentReach) -> Segment:
        """Map another process's segment. Raises MediumUnusable when it is not (or no longer) there."""
        try:
            descriptor = os.open(reach.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise MediumUnusable(f"cannot open the peer's shared memory {reach.path}: {error}") from error
        status = os.fstat(descriptor)
        if (status.st_dev, status.st_ino) != (reach.device, reach.inode) or status.st_size < reach.nbytes:
            os.close(descriptor)
            raise MediumUnusable(f"{reach.path} is not the peer's shared memory any more")
        return cls(descriptor, reach.nbytes, reach.path)

    def close(self) -> None:
        """Give up the file; the mapping itself goes with the last view of it."""
        os.close(self._descriptor)
        if not self.reach.path.startswith("/proc/"):
            Path(self.reach.path).unlink(missing_ok=True)
