"""The memory of a worker process, and errors that say that user code has used it up. Imports only the standard library.

A function that leaks makes every later call in its process fail. The workers of rewards and agents report this, and are
restarted.
"""

import errno
import os
import resource

RESERVE_BYTES = 16 << 20  # a worker frees so much to be able to answer
_EXHAUSTED = (errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN)
_FULL = 0.75  # of the memory limit: a worker that has grown so far is restarted before a call fails
_GROWN = 0.25  # of the memory limit, since its first call: a large model that user code loads is no leak


def is_exhausted(error: BaseException | None) -> bool:
    """Whether an error, or one that it followed, says that the process has no memory, threads or files left."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _EXHAUSTED):
            return True
        if isinstance(error, RuntimeError) and "start new thread" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_nearly_full(first_bytes: int, last_bytes: int, limit_bytes: int | None) -> bool:
    """Whether calls have filled most of ``limit_bytes``: from ``first_bytes``, after the first, to ``last_bytes``."""
    limit = limit_bytes or float("inf")
    return last_bytes > _FULL * limit and last_bytes - first_bytes > _GROWN * limit


class AddressSpace:
    """The size of this process's address space. Opens a file at once, because user code may leave no descriptors."""

    def __init__(self) -> None:
        self._sizes = os.open("/proc/self/statm", os.O_RDONLY)

    def limit(self, num_bytes: int | None) -> None:
        """Limit it to ``num_bytes``; None does nothing."""
        if num_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))

    def num_bytes(self) -> int:
        return int(os.pread(self._sizes, 64, 0).split()[0]) * resource.getpagesize()
