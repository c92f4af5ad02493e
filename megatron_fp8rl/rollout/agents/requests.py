"""Sends sampling requests to replicas, and again if a replica dies. Runs on the fleet's event loop.

In: token ids and seeds. Out: completions. Requests of a session go to the replica that has cached its prefix; others to
the replica with the fewest running requests. If a replica dies, its requests go to another, with the same seeds.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatron_fp8rl.net import open_files
from megatron_fp8rl.observe.spans import add_seconds
from megatron_fp8rl.rollout.client import EngineClient
from megatron_fp8rl.rollout.completions import Sampling
from megatron_fp8rl.rollout.errors import EngineDeadError
from megatron_fp8rl.types import Completion, Prompt

if TYPE_CHECKING:
    from megatron_fp8rl.rollout.fleet import Fleet


class Requests:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        open_files.raise_limit()
        self._replica_of: weakref.WeakKeyDictionary[Any, EngineClient] = weakref.WeakKeyDictionary()
        self._num_sampling = 0  # active requests, and since when there are any
        self._sampling_since_s = 0.0

    async def ask(
        self,
        token_ids: Sequence[int],
        num_completions: int,
        seed: int,
        *,
        temperature: float | None = None,
        session: Any = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> list[Completion]:
        """Sample completions of a prompt; completion i has seed ``seed + i``. None stands for the run's value. Raises
        EngineDeadError if no replica is left and none comes back, or another error of the request."""
        while True:
            if not self._fleet.clients:
                await self._fleet.wait_for_members()
            client = self._choose(session)
            sampling: Sampling = client.sampling
            changes = {"temperature": temperature, "max_tokens": max_tokens}
            sampling = replace(sampling, **{name: value for name, value in changes.items() if value is not None})
            if stop:
                sampling = replace(sampling, stop_strings=(*sampling.stop_strings, *stop))
            try:
                return await client.generate(token_ids, num_completions, seed, sampling=sampling)
            except EngineDeadError as error:
                self._fleet.remove(client, str(error), num_retried=1)

    def _choose(self, session: Any) -> EngineClient:
        client = None if session is None else self._replica_of.get(session)
        if client is None or client not in self._fleet.clients:
            client = min(self._fleet.clients, key=self._load)
            if session is not None:
                self._replica_of[session] = client
        return client

    def _load(self, client: EngineClient) -> tuple[int, int]:
        """Return (running requests, sessions assigned to this replica)."""
        return client.num_running, sum(other is client for other in self._replica_of.values())

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count as "generate" the time during which at least one request runs; overlapping requests count once."""
        if self._num_sampling == 0:
            self._sampling_since_s = time.monotonic()
        self._num_sampling += 1
        try:
            yield
        finally:
            self._num_sampling -= 1
            if self._num_sampling == 0:
                add_seconds("generate", time.monotonic() - self._sampling_since_s)


def seed_of(run_seed: int, prompt: Prompt) -> int:
    """Return the seed of a prompt's first completion, 0 <= seed < 2**40; completion i uses this plus i."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{prompt.prompt_id}".encode(), digest_size=5).digest(), "big")
