"""The engines as an exporter sees them: all replicas at once, with one deadline for a publication.

Runs on trainer rank 0. Which replicas there are is settled when a publication begins, by :meth:`Engines.meet`; one that
dies meanwhile fails the publication, which is then repeated without it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_fp8rl.rollout.client import EngineDeadError
from megatron_fp8rl.weight_sync.transport import TransportError

if TYPE_CHECKING:
    from megatron_fp8rl.rollout.fleet import Fleet


class NoReplicaError(TransportError):
    """No replica is left to publish to, and none comes back; the text says how the first one failed."""


class Engines:
    """All replicas of a fleet, driven together from a blocking thread. Every call has what is left of one deadline."""

    def __init__(self, fleet: Fleet, rollout_tensor: int, deadline_s: float):
        self.workers_per_replica = rollout_tensor
        self._fleet = fleet
        self._clients: tuple[Any, ...] = tuple(fleet.clients)
        self._proven: tuple[Any, ...] = ()  # those that have been through a whole publication
        self._is_settled = True  # nothing has failed since
        self._deadline_s = deadline_s
        self._end = time.monotonic() + deadline_s

    @property
    def num_replicas(self) -> int:
        return len(self._clients)

    def meet(self) -> tuple[bool, bool, int]:
        """Begin a publication, with ``deadline_s`` for all of its calls.

        Returns whether connections have to be made, since the replicas are others or the last attempt failed; whether
        one of them has not been proven yet; and how many there are. Waits while there is none. Raises NoReplicaError
        when none comes back.
        """
        try:
            clients = tuple(self._fleet.admit())
        except EngineDeadError as error:
            raise NoReplicaError(str(error)) from error
        must_connect = clients != self._clients or not self._is_settled
        survivors = () if self._is_settled else [client for client in clients if client in self._clients]
        self._clients = clients
        self._end = time.monotonic() + self._deadline_s
        if survivors:
            self._call("abandon an update", lambda _, client: client.abandon_update(), survivors)
        self._is_settled = True
        return must_connect, any(client not in self._proven for client in clients), len(clients)

    def note_success(self) -> None:
        """A publication has been proven."""
        self._proven = self._clients

    def lost_one(self) -> bool:
        """After a failure: whether a replica has died, so that the publication may be repeated without it."""
        self._is_settled = False
        self._proven = ()  # their loaders may have been interrupted
        return bool(self._fleet.lost(self._clients))

    def call(self, what: str, method: Callable[[int, Any], Awaitable[Any]]) -> list[Any]:
        """``method(i, client)`` on all replicas at once; results in their order.

        Raises TransportError with the replica and ``what`` as soon as one fails or the deadline passes.
        """
        return self._call(what, method, self._clients)

    def _call(self, what: str, method: Callable[[int, Any], Awaitable[Any]], clients: Sequence[Any]) -> list[Any]:

        async def one(index: int, client: Any) -> Any:
            try:
                return await method(index, client)
            except Exception as error:  # of any layer of the client; the cause says which
                raise TransportError(f"{what}: replica {index}: {error}") from error

        async def everywhere() -> list[Any]:
            return await asyncio.gather(*(one(i, client) for i, client in enumerate(clients)))

        left_s = self._end - time.monotonic()
        try:
            return self._fleet.sync(everywhere(), max(left_s, 0.1))
        except TimeoutError as error:
            raise TransportError(
                f"{what}: not all engines answered; the publication had {self._deadline_s:.0f} s "
                "(rollout.update_deadline_s). Look at the engines' logs for one that hangs"
            ) from error

    def init_transfer(self, infos: Sequence[dict[str, Any]]) -> None:
        """See :class:`megatron_fp8rl.weight_sync.transport.Receivers`."""
        self.call("init_weight_transfer_engine", lambda i, client: client.init_transfer(infos[i]))

    def update_weights(self, info: dict[str, Any]) -> None:
        """See :class:`megatron_fp8rl.weight_sync.transport.Receivers`."""
        what = f"policy version {info['version']} ({info['mode']})"
        if "bucket" in info:
            what = f"bucket {info['bucket'] + 1} of {info['num_buckets']} ({info['names'][0]} to {info['names'][-1]})"
        self.call(what, lambda _, client: client.update_weights(info))
