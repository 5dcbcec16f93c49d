"""One anonymous shared file mapping: memory that several processes see and no name leads to.

The mapping has no name in any file system, so nothing can be left behind however a process ends,
and the 64 MB /dev/shm of a container does not limit it.
"""

import mmap
import os
import tempfile
import weakref

ALIGNMENT = 64
"""Bytes; every leaf starts on a cache line of its own."""


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to the next cache line."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("sf_torchrl", os.MFD_CLOEXEC)
    fd, path = tempfile.mkstemp(prefix="sf_torchrl_")
    os.unlink(path)
    return fd


class Arena:
    """A zero-filled block of shared memory, known by its file descriptor.

    Pages are backed by memory only once they are touched.

    Args:
        nbytes: size in bytes.
        fd: descriptor of an arena made by another process; None makes a new one.
    """

    def __init__(self, nbytes: int, fd: int | None = None) -> None:
        self.nbytes = max(aligned(nbytes), ALIGNMENT)
        self.fd = _anonymous_file() if fd is None else fd
        if fd is None:
            os.ftruncate(self.fd, self.nbytes)
        self.buffer = mmap.mmap(self.fd, self.nbytes)
        # Ours to close when forgotten; one that was given has its own owner.
        self._close = weakref.finalize(self, os.close, self.fd) if fd is None else None

    def close(self) -> None:
        """Close the descriptor; the memory lives on until the last view of it is gone."""
        if self._close is not None:
            self._close()
        self.fd = -1
