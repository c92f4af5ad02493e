"""As many open files as the system allows this process: every request in flight is a connection.

Clusters often start programs with 1,024, and allow a hundred times as many to those that ask.
"""

from __future__ import annotations

import resource


def raise_limit() -> int:
    """The number of files that this process, and what it starts from now on, may have open at a time."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most
