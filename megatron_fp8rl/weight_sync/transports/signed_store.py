"""The store through which trainer and engines find each other: what it holds is data, signed by the job.

Trainer rank 0 hosts PyTorch's TCPStore on the one address that the others use. Anyone who reaches that address may read
and write the store, so that no value is unpickled, and each carries a MAC with a secret that the engines get through
their token-protected HTTP. Another program can make a publication fail, which is noticed; it cannot choose what a process
opens.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

_BACKLOG = 4096  # processes that connect at the same time


class UnsignedError(RuntimeError):
    """A value in the store was not written by a process of this job."""


class SignedStore:
    """Text by key, with the MAC of key and value before it. ``plain`` is the store itself, for process groups."""

    def __init__(self, plain: dist.TCPStore, secret: str) -> None:
        self.plain = plain
        self._secret = secret.encode()

    @property
    def port(self) -> int:
        return self.plain.port

    def set(self, key: str, value: str) -> None:
        self.plain.set(key, self._mac(key, value) + value)

    def get(self, key: str) -> str:
        """Raises UnsignedError if another program wrote the value."""
        found = self.plain.get(key).decode(errors="replace")
        length = hashlib.sha256().digest_size * 2
        mac, value = found[:length], found[length:]
        if not hmac.compare_digest(mac.encode(), self._mac(key, value).encode()):
            raise UnsignedError(f"{key} in the store of trainer rank 0 was not written by this job")
        return value

    def check(self, keys: Sequence[str]) -> bool:
        return self.plain.check(list(keys))

    def add(self, key: str, number: int) -> int:
        """Unsigned: a counter, which nothing but a wait depends on."""
        return self.plain.add(key, number)

    def _mac(self, key: str, value: str) -> str:
        return hmac.new(self._secret, f"{key}\0{value}".encode(), hashlib.sha256).hexdigest()


def open_store(host: str, port: int, timeout_s: float, *, is_master: bool, secret: str) -> SignedStore:
    """The store: trainer rank 0 hosts it (port 0 picks a free port: see ``port``), all others connect.

    The host listens on the address ``host`` alone; by itself a TCPStore listens on all.
    """
    timeout, listening = timedelta(seconds=timeout_s), None
    if is_master:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as bound:
            bound.bind((host, port))
            bound.listen(_BACKLOG)
            port, listening = bound.getsockname()[1], bound.detach()
    store = dist.TCPStore(host, port, None, is_master, timeout, wait_for_workers=False, master_listen_fd=listening)
    return SignedStore(store, secret)
