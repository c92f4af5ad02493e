"""The address under which other hosts reach this one. Imports nothing heavy.

In: this host's routes, names and interfaces. Out: an IPv4 address. Runs in the trainer, in engine workers, and where a
rollout replica listens.
"""

from __future__ import annotations

import os
import socket

import psutil

ADDRESS_VARIABLE = "LAUNCH_ADDRESS"  # under which the agents of a launched job know each other's nodes
LOOPBACK = "127.0.0.1"


def local_address() -> str:
    """The address in ``LAUNCH_ADDRESS``, else that of the outward route, else that of the first interface.

    Loopback on a machine without a network. Cluster nodes often have no outward route, so interfaces are checked too.
    """
    given = os.environ.get(ADDRESS_VARIABLE)
    return given or _outward() or _of_interfaces() or LOOPBACK


def _outward() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # documentation address (RFC 5737); a datagram socket sends nothing here
        except OSError:
            return None
        return probe.getsockname()[0]


def _of_interfaces() -> str | None:
    entries = [entry for of_name in psutil.net_if_addrs().values() for entry in of_name]
    addresses = [entry.address for entry in entries if entry.family == socket.AF_INET]
    return next((address for address in addresses if not address.startswith("127.")), None)
