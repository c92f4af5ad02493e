"""The IPv4 address under which other hosts reach this host. Imports nothing heavy."""

import os
import socket

import psutil

ADDRESS_VARIABLE = "LAUNCH_ADDRESS"  # under which the agents of a launched job know each other's nodes
LOOPBACK = "127.0.0.1"


def local_address() -> str:
    """``LAUNCH_ADDRESS``, else the address of the outward route or the first interface; loopback without a network."""
    return os.environ.get(ADDRESS_VARIABLE) or _outward() or _first_interface() or LOOPBACK


def _outward() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # documentation address (RFC 5737); a datagram socket sends nothing here
        except OSError:
            return None
        return probe.getsockname()[0]


def _first_interface() -> str | None:
    entries = [entry for interface in psutil.net_if_addrs().values() for entry in interface]
    addresses = [entry.address for entry in entries if entry.family == socket.AF_INET]
    return next((address for address in addresses if not address.startswith("127.")), None)
