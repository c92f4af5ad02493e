"""A store with signed values, through which trainer and engines exchange addresses and handles.

Trainer rank 0 hosts PyTorch's TCPStore, which any program that reaches its address can read and write. Therefore no
value is unpickled, and each has a MAC with a secret, which the engines get through token-protected HTTP. Another
program can make a publication fail, but cannot choose what a process opens.
"""

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
    """Text by key, preceded by the MAC of key and value. ``plain`` is the TCPStore, for process groups."""

    def __init__(self, plain: dist.TCPStore, secret: str) -> None:
        self.plain = plain
        self._secret = secret.encode()

    @property
    def port(self) -> int:
        return self.plain.port

    def set(self, key: str, value: str) -> None:
        self.plain.set(key, self._mac(key, value) + value)

    def get(self, key: str) -> str:
        """Return a value. Raises UnsignedError if another program wrote it."""
        signed = self.plain.get(key).decode(errors="replace")
        length = hashlib.sha256().digest_size * 2
        mac, value = signed[:length], signed[length:]
        if not hmac.compare_digest(mac.encode(), self._mac(key, value).encode()):
            raise UnsignedError(f"{key} in the store of trainer rank 0 was not written by this job")
        return value

    def check(self, keys: Sequence[str]) -> bool:
        return self.plain.check(list(keys))

    def add(self, key: str, number: int) -> int:
        """Add to a counter, which is unsigned because only waits depend on it."""
        return self.plain.add(key, number)

    def _mac(self, key: str, value: str) -> str:
        return hmac.new(self._secret, f"{key}\0{value}".encode(), hashlib.sha256).hexdigest()


def open_store(host: str, port: int, timeout_s: float, *, is_master: bool, secret: str) -> SignedStore:
    """Host the store on trainer rank 0 (port 0: a free port, see ``port``), or connect to it on others. Listens only on
    ``host``; a TCPStore would listen on all addresses."""
    timeout, listening = timedelta(seconds=timeout_s), None
    if is_master:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as bound:
            bound.bind((host, port))
            bound.listen(_BACKLOG)
            port, listening = bound.getsockname()[1], bound.detach()
    store = dist.TCPStore(host, port, None, is_master, timeout, wait_for_workers=False, master_listen_fd=listening)
    return SignedStore(store, secret)
