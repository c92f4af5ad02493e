"""Raise the limit of open files to the system's maximum, because every active request is a connection.

Clusters often start programs with a limit of 1,024 but allow a hundred times as many.
"""

import resource


def raise_limit() -> int:
    """Raise the limit for this process and future child processes; return the new limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most
