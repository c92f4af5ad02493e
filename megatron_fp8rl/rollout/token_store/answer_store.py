"""Token stores of a run, as the trainer's ranks see them: started on their nodes, and asked through by trainer rank 0.

In: sampling requests. Out: answers whose numbers stay in a store until rank 0 refers to them no more
(stored_numbers.py). So token ids, log-probabilities and routed experts never pass rank 0, and its memory does not grow with
them. A store belongs to a trainer rank and ends with it; a run that lost one goes on from its last checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.net import auth
from megatron_fp8rl.net.address import LOOPBACK, own_address
from megatron_fp8rl.rollout.client import EngineError
from megatron_fp8rl.rollout.completions import Answer, read_answer
from megatron_fp8rl.rollout.server_process import inherited, kill_group
from megatron_fp8rl.rollout.token_store.store_server import ENGINE_FAILED, KEEP_PATH
from megatron_fp8rl.stored_numbers import Entry, Store
from megatron_fp8rl.token_rows import Row

if TYPE_CHECKING:
    from megatron_fp8rl.rollout.replicas import Replica


class AnswerStore:
    """Trainer rank 0's end of a store: asks through it. On the fleet's event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._released: list[int] = []  # keys that nothing here refers to any more
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, replica: Replica, body: dict[str, Any], done: Row) -> Answer:
        """The answer of ``replica`` to a sampling request that goes on after ``done``; its numbers stay in the store.

        Raises EngineError for what the engine refuses, and StoreError.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),  # the caller has a deadline
                headers=auth.headers(self._store.token),
            )
        pieces = [] if done.stored is None else done.stored.pieces
        request = {
            "engine": replica.url,
            "token": replica.token,
            "body": body,
            "before": [(piece.entry.key, piece.first, piece.count * done.stored.item_bytes()) for piece in pieces],
            "released": [self._released.pop() for _ in range(len(self._released))],
        }
        try:
            async with self._session.post(self._store.url + KEEP_PATH, json=request) as response:
                content = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise self._store.error(f"{type(error).__name__}: {error}") from error
        if response.status == ENGINE_FAILED:
            raise EngineError(content.decode(errors="replace"))
        if response.status != 200:  # as another server says that has the port of a store that ended
            raise self._store.error(f"status {response.status}: {content.decode(errors='replace')[:1000]}")
        return read_answer(content, self._entry)

    def _entry(self, key: int) -> Entry:
        entry = Entry(self._store, key)
        weakref.finalize(entry, self._released.append, key).atexit = False
        return entry

    async def close(self) -> None:
        """Close the connections. The store keeps running."""
        if self._session is not None:
            await self._session.close()


class Ranks(Protocol):
    """The trainer ranks, as far as their stores need them."""

    tp_rank: int
    pp_rank: int
    cp_rank: int
    dp_rank: int
    dp_size: int

    def gather_from_all(self, value: Any) -> list[Any]:
        """Collective: the values of all ranks."""


@contextlib.contextmanager
def running(cfg: RunConfig, ranks: Ranks) -> Iterator[tuple[Store, ...]]:
    """Collective: start ``rollout.token_stores`` of them, spread over the data-parallel ranks, and end them after the
    block. Yields all of them, on every rank; none for a replay."""
    if not cfg.rollout.token_stores or cfg.rollout.replay is not None:
        yield ()
        return
    owners = {i * ranks.dp_size // cfg.rollout.token_stores for i in range(cfg.rollout.token_stores)}
    is_owner = ranks.dp_rank in owners and ranks.tp_rank == ranks.pp_rank == ranks.cp_rank == 0
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(_started(cfg, ranks.dp_rank)) if is_owner else None
        yield tuple(store for store in ranks.gather_from_all(own) if store is not None)


@contextlib.contextmanager
def _started(cfg: RunConfig, number: int) -> Iterator[Store]:
    log = Path(cfg.run_dir) / "logs" / f"token-store-{number}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    host, token = own_address() if cfg.parallel.world_size > 1 else LOOPBACK, auth.new_token()
    with socket.create_server((host, 0), backlog=1024) as sock, log.open("ab") as output:
        words = [f"--listen-fd={sock.fileno()}", f"--parent-pid={os.getpid()}"]
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_fp8rl.rollout.token_store.store_server", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            pass_fds=(sock.fileno(),),
            env=inherited() | {auth.TOKEN_VARIABLE: token, "CUDA_VISIBLE_DEVICES": ""},
            start_new_session=True,
        )
        url = f"http://{host}:{sock.getsockname()[1]}"
    try:
        yield Store(url=url, token=token, log=str(log))
    finally:
        kill_group(process.pid)
        process.wait()
