"""The engines of a publication: the protocol of a replica, and concurrent calls to all replicas from rank 0.

:meth:`Engines.begin_update` fixes the set of replicas. If a replica dies, the publication is repeated without it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from megatron_fp8rl.types import KVScales


class TransportError(RuntimeError):
    """Weights were not delivered; the engines stay paused, with incomplete weights."""


class NoReplicaError(TransportError):
    """No replica is left and none comes back; the message quotes the first failure."""


class Receiver(Protocol):
    """One replica. Methods raise an error with its name if it fails, has died or does not answer in time."""

    async def proof_layers(self) -> list[dict[str, Any]]:
        """Return {"layers": layers that a first publication sends through vLLM's loaders} for each worker."""

    async def init_transfer(self, info: Mapping[str, Any]) -> None:
        """Connect every worker to the trainer."""

    async def pause(self, mode: str) -> None:
        """Stop sampling and drop the KV cache; with ``keep``, running requests continue after :meth:`resume`."""

    async def start_update(self) -> None:
        """Prepare to receive weights."""

    async def update_weights(self, info: Mapping[str, Any]) -> None:
        """Receive and load a whole publication."""

    async def stage_weights(self, info: Mapping[str, Any]) -> None:
        """Receive a whole publication in spare memory while sampling."""

    async def finish_update(self, version: int) -> None:
        """Complete the update to policy ``version``."""

    async def abandon_update(self) -> None:
        """Cancel an update in progress, so that another can begin."""

    async def set_kv_scales(self, scales: KVScales) -> list[dict[str, Any]]:
        """Set the scales of the FP8 KV cache; return the scales that each worker then uses."""

    async def weight_digests(self, *, names: bool = True) -> list[dict[str, Any]]:
        """Return the digests of each worker."""

    async def load_adapter(self, path: str, version: int) -> list[dict[str, Any]]:
        """Load the adapter of policy ``version`` from a folder; return its digests on each worker."""

    async def resume(self) -> None:
        """Resume sampling."""


class Receivers(Protocol):
    """The current set of replicas, as kept by ``rollout.fleet.Fleet``."""

    clients: Sequence[Receiver]

    def begin_update(self) -> Sequence[Receiver]:
        """Wait for at least one replica; return those of the next publication. Raises NoReplicaError if none comes."""

    def has_lost_replica(self, clients: Sequence[Receiver]) -> bool:
        """After a failure: whether one of ``clients`` has died. Removes dead replicas."""

    def sync(self, coroutine: Coroutine[Any, Any, Any], deadline_s: float) -> Any:
        """Run a coroutine on the clients' event loop and return its result. Raises TimeoutError after the deadline."""


class Engines:
    """Calls all replicas from a synchronous thread. The calls of a publication share one deadline."""

    def __init__(self, fleet: Receivers, deadline_s: float):
        self._fleet = fleet
        self._clients: tuple[Receiver, ...] = tuple(fleet.clients)
        self._proven: tuple[Receiver, ...] = ()  # replicas that completed a whole publication
        self._is_settled = True  # no failure since the last success
        self._deadline_s = deadline_s
        self._end = time.monotonic() + deadline_s

    def begin_update(self) -> tuple[bool, bool, int]:
        """Begin a publication and its deadline. Waits for a replica; raises NoReplicaError if none comes back.

        Returns (whether to connect again, because the replicas changed or the last attempt failed; whether a replica is
        new; the number of replicas).
        """
        clients = tuple(self._fleet.begin_update())
        must_connect = clients != self._clients or not self._is_settled
        survivors = () if self._is_settled else [client for client in clients if client in self._clients]
        self._clients = clients
        self._end = time.monotonic() + self._deadline_s
        if survivors:
            self._call("abandon an update", lambda _, client: client.abandon_update(), survivors)
        self._is_settled = True
        return must_connect, any(client not in self._proven for client in clients), len(clients)

    def note_success(self) -> None:
        self._proven = self._clients

    def has_lost_replica(self) -> bool:
        self._is_settled = False
        self._proven = ()  # the failure may have interrupted vLLM's loaders
        return bool(self._fleet.has_lost_replica(self._clients))

    def call(self, what: str, method: Callable[[int, Receiver], Awaitable[Any]]) -> list[Any]:
        """Run ``method(i, client)`` on all replicas concurrently; return the results in their order. Raises
        TransportError with the replica and ``what`` as soon as one fails or the deadline passes."""
        return self._call(what, method, self._clients)

    def _call(
        self, what: str, method: Callable[[int, Receiver], Awaitable[Any]], clients: Sequence[Receiver]
    ) -> list[Any]:

        async def one(index: int, client: Receiver) -> Any:
            try:
                return await method(index, client)
            except Exception as error:  # of any layer of the client
                raise TransportError(f"{what}: replica {index}: {error}") from error

        async def everywhere() -> list[Any]:
            return await asyncio.gather(*(one(i, client) for i, client in enumerate(clients)))

        left_s = self._end - time.monotonic()
        try:
            return self._fleet.sync(everywhere(), max(left_s, 0.1))
        except TimeoutError as error:
            raise TransportError(
                f"{what}: not all engines answered; the publication had {self._deadline_s:.0f} s "
                "(engine.deadline_scale multiplies it). Check the engines' logs for a hang"
            ) from error

    def proof_layers(self) -> list[int]:
        """Return the layers for vLLM's loaders: one of each kind in any worker."""
        by_replica = self.call("proof_layers", lambda _, client: client.proof_layers())
        return sorted({layer for workers in by_replica for worker in workers for layer in worker["layers"]})

    def init_transfer(self, infos: Sequence[dict[str, Any]]) -> None:
        self.call("init_weight_transfer_engine", lambda i, client: client.init_transfer(infos[i]))

    def update_weights(self, info: dict[str, Any]) -> None:
        """Make all replicas receive a publication and, unless its mode is ``stage``, load it."""
        what = f"policy version {info['version']} ({info['mode']})"
        stage = info["mode"] == "stage"
        self.call(what, lambda _, client: client.stage_weights(info) if stage else client.update_weights(info))
