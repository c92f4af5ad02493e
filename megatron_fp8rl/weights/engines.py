"""The engines as an exporter sees them: all replicas at once, with one deadline for a publication.

Runs on trainer rank 0.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from megatron_fp8rl.weights.transport import TransportError

if TYPE_CHECKING:
    from megatron_fp8rl.rollout.fleet import Fleet


class Engines:
    """All replicas of a fleet, driven together from a blocking thread. Every call has what is left of one deadline."""

    def __init__(self, fleet: Fleet, rollout_tensor: int, deadline_s: float):
        self.num_replicas = len(fleet.clients)
        self.workers_per_replica = rollout_tensor
        self._fleet = fleet
        self._deadline_s = deadline_s
        self._end = time.monotonic() + deadline_s

    def start_clock(self) -> None:
        """Begin a publication: from now on ``deadline_s`` for all calls in all."""
        self._end = time.monotonic() + self._deadline_s

    def call(self, what: str, method: Callable[[int, Any], Awaitable[Any]]) -> list[Any]:
        """``method(i, client)`` on all replicas at once; results in their order.

        Raises TransportError with the replica and ``what`` as soon as one fails or the deadline passes.
        """

        async def one(index: int, client: Any) -> Any:
            try:
                return await method(index, client)
            except Exception as error:  # of any layer of the client; the cause says which
                raise TransportError(f"{what}: replica {index}: {error}") from error

        async def everywhere() -> list[Any]:
            return await asyncio.gather(*(one(i, client) for i, client in enumerate(self._fleet.clients)))

        left_s = self._end - time.monotonic()
        try:
            return self._fleet.sync(everywhere(), max(left_s, 0.1))
        except TimeoutError as error:
            raise TransportError(
                f"{what}: not all engines answered; the publication had {self._deadline_s:.0f} s "
                "(rollout.update_deadline_s). Look at the engines' logs for one that hangs"
            ) from error

    def init_transfer(self, infos: Sequence[dict[str, Any]]) -> None:
        """See :class:`megatron_fp8rl.weights.transport.Receivers`."""
        self.call("init_weight_transfer_engine", lambda i, client: client.init_transfer(infos[i]))

    def update_weights(self, info: dict[str, Any]) -> None:
        """See :class:`megatron_fp8rl.weights.transport.Receivers`."""
        what = f"policy version {info['version']} ({info['mode']})"
        if "bucket" in info:
            what = f"bucket {info['bucket'] + 1} of {info['num_buckets']} ({info['names'][0]} to {info['names'][-1]})"
        self.call(what, lambda _, client: client.update_weights(info))
