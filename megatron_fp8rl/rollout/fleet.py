"""Starts or finds the rollout replicas of a run, monitors, replaces and stops them.

In: the run's configuration and the folder of the Hugging Face model. Out: one :class:`EngineClient` per replica. Runs
on trainer rank 0. Each replica is a process group with a log file under ``<run>/logs``. Clients run on an event loop in
a thread of the fleet; the synchronous training loop calls :meth:`Fleet.sync`.

**When a replica dies**, the fleet sends its requests to the others. It starts a successor or, in a launched job, waits
for one (``rollout/replicas.py``). The successor joins the next publication and samples after its weights are verified.
If no replica is left and none comes back, the run ends with the first failure.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.net.endpoint import replica_name
from megatron_fp8rl.precision.hardware import local_hardware
from megatron_fp8rl.precision.kernel_choice import choose
from megatron_fp8rl.rollout import placement, vllm_args
from megatron_fp8rl.rollout.client import EngineClient, Tag
from megatron_fp8rl.rollout.completions import Sampling
from megatron_fp8rl.rollout.errors import EngineDeadError, EngineDeadlineError, EngineError, Exit, summary_of
from megatron_fp8rl.rollout.replicas import LocalReplicas, RemoteReplicas, Replica, Replicas, ping
from megatron_fp8rl.rollout.server_process import TERM_GRACE_S
from megatron_fp8rl.weight_sync.engines import NoReplicaError

_log = logging.getLogger(__name__)
T = TypeVar("T")

_HEALTH_POLL_S = 0.25
_PROGRESS_S = 60.0
_ASKED_S = 1.0  # between two questions whether the run should stop
_MEMBER_POLL_S = 0.1
_PROBE_S = 5.0  # interval of health checks
_NEWS_S = 3.0  # after a failed call, time until the end of a replica is detected


class Fleet:
    """A run's replicas. Create with :meth:`start`; the context manager shuts down on exit. ``clients`` are the replicas
    that accept requests, in order; they may change between two calls."""

    def __init__(self, cfg: RunConfig, hf_dir: Path | str, replicas: Replicas) -> None:
        self.cfg = cfg
        self.clients: tuple[EngineClient, ...] = ()
        self._hf_dir = Path(hf_dir)
        self._replicas = replicas
        self._joining: list[EngineClient] = []  # healthy; they wait for the next publication
        self._is_ready = False
        self._ready: dict[int, asyncio.Future[EngineClient]] = {}  # the first incarnations
        self._given_up: set[int] = set()
        self._first_failure: str | None = None
        self._fewest = cfg.engine.num_replicas  # since take_metrics, like the next attributes
        self._num_lost = self._num_joined = self._num_asked_again = 0
        self._keepers: list[asyncio.Task[None]] = []
        self._started_s = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-fleet", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, cfg: RunConfig, hf_dir: Path | str, run_dir: Path | str, *, wait: bool = True) -> Fleet:
        """Start ``cfg.engine.num_replicas`` engines on the model in ``hf_dir`` (config.json and tokenizer).

        With ``engine.placement`` remote, finds replicas through the files in ``<run_dir>/replicas`` instead. Without
        ``wait``, returns at once; call :meth:`wait_until_ready` before the first use. Raises EngineDeadError or
        EngineDeadlineError, with the end of the log, if a replica fails; all stop. Raises ConfigError before any start
        if this host has too few GPUs or lacks a configured kernel.
        """
        run_dir = Path(run_dir)
        if cfg.engine.placement == "remote":
            fleet = cls(cfg, hf_dir, RemoteReplicas(run_dir))
        else:
            kernels = choose(cfg, local_hardware(), "engine")
            gpus: list[str] = []
            if kernels.hardware.is_gpu:
                local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", cfg.parallel.world_size))
                gpus = placement.assign(
                    cfg.engine, placement.visible_gpus(), local_ranks=local_ranks, world_size=cfg.parallel.world_size
                )
            arguments = vllm_args.engine_arguments(cfg, hf_dir, kernels)
            environment = vllm_args.engine_environment(cfg, kernels)
            replicas = LocalReplicas(cfg.engine, arguments, environment, run_dir / "logs", gpus)
            fleet = cls(cfg, hf_dir, replicas)
        atexit.register(fleet.shutdown)
        try:
            fleet._keep_all()
            if wait:
                fleet.wait_until_ready()
        except BaseException:
            fleet.shutdown()
            raise
        return fleet

    def wait_until_ready(self, is_asked: Callable[[], bool] = lambda: False) -> bool:
        """Wait until every replica answers, at most ``engine.start_s`` after the start; False if ``is_asked`` says so
        before: the run should stop."""
        if not self._is_ready:
            ready = self.submit(self._all_ready())
            end = time.monotonic() + self.cfg.engine.start_s + 2 * _PROGRESS_S
            while not self.wait_for_any([ready], _ASKED_S).done:
                if is_asked():
                    ready.cancel()
                    return False
                if time.monotonic() > end:
                    ready.cancel()
                    raise TimeoutError(f"the start of the replicas took longer than {self.cfg.engine.start_s:g} s")
            ready.result()
            _log.info("engines ready: %d, started %.0f s ago", len(self.clients), time.monotonic() - self._started_s)
        return True

    def kernels(self) -> dict[str, list[str]]:
        """vLLM's names of the engines' kernels: {"linears": ..., "experts": ..., "attention": ...}; several if replicas
        differ, empty without replicas. Raises EngineError or a subclass."""
        answers = self._everywhere(lambda client: client.collective_rpc("kernels_in_use"))
        workers = [worker for answer in answers for worker in answer]
        roles = dict.fromkeys(role for worker in workers for role in worker)
        return {role: sorted({name for worker in workers for name in worker.get(role, ())}) for role in roles}

    def sleep(self) -> None:
        """Free the GPU memory of all replicas at ``engine.sleep_level``; level 0 does nothing. Call only while nothing
        is sampled. Raises EngineError or a subclass."""
        if self.cfg.engine.sleep_level:
            self._everywhere(lambda client: client.sleep(self.cfg.engine.sleep_level))

    def wake(self, *tags: Tag) -> None:
        """Restore memory of all replicas: "weights", "kv_cache", or both without tags. After sleep level 2, weights are
        undefined until the next publication."""
        self._everywhere(lambda client: client.wake_up(*tags))

    def _everywhere(self, call: Callable[[EngineClient], Coroutine[Any, Any, T]]) -> list[T]:
        async def answer_of(client: EngineClient) -> list[T]:
            try:
                return [await call(client)]
            except EngineDeadError as error:
                self.remove(client, str(error))
                return []

        async def all_clients() -> list[T]:
            answers = await asyncio.gather(*(answer_of(client) for client in self.clients))
            return [answer for some in answers for answer in some]

        return self.sync(all_clients(), 3 * self.cfg.engine.update_s)  # a client makes up to three calls

    def sync(self, coroutine: Coroutine[Any, Any, T], deadline_s: float) -> T:
        """Run ``coroutine`` on the fleet's event loop and return its result; call from another thread. After
        ``deadline_s``, cancels it and raises TimeoutError with its name."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout=deadline_s)
        except TimeoutError:
            if future.done():  # the coroutine's own TimeoutError
                raise
            future.cancel()
            raise TimeoutError(f"{coroutine.__qualname__} took longer than {deadline_s:g} s") from None
        except BaseException:
            future.cancel()
            raise

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    wait_for_any = staticmethod(partial(wait, return_when=FIRST_COMPLETED))  # (submitted, timeout_s)

    # ---- lost and new replicas

    def remove(self, client: EngineClient, reason: str, *, num_retried: int = 0) -> None:
        """Remove a replica that has ended; ``num_retried`` prompts go to others. Runs on the loop."""
        self._num_asked_again += num_retried
        if self._first_failure is None:
            self._first_failure = reason
        if client in self.clients:
            self._num_lost += 1
            left = f"{len(self.clients) - 1} of {self.cfg.engine.num_replicas} replicas left"
            _log.warning("%s: %s", left, summary_of(reason))
        self.clients = tuple(other for other in self.clients if other is not client)
        self._joining = [other for other in self._joining if other is not client]
        self._fewest = min(self._fewest, len(self.clients))

    @property
    def wants_publication(self) -> bool:
        """Whether all replicas wait for weights, so that nothing can be sampled."""
        return bool(self._joining) and not self.clients

    async def wait_for_members(self, *, or_joining: bool = False) -> None:
        """Wait until a replica accepts requests or, with ``or_joining``, waits to join. Runs on the loop. Raises
        EngineDeadError with the run's first failure if none is left and none comes back within ``engine.start_s``."""
        since = time.monotonic()
        while not self.clients and not (or_joining and self._joining):
            waited_s = time.monotonic() - since
            is_hopeless = len(self._given_up) == self.cfg.engine.num_replicas
            if not self._joining and (is_hopeless or waited_s > self.cfg.engine.start_s):
                why = "engine.max_replica_restarts is used up" if is_hopeless else f"none came back in {waited_s:.0f} s"
                raise EngineDeadError(
                    f"no rollout replica is left, and {why}. The first failure: {self._first_failure}"
                )
            await asyncio.sleep(_MEMBER_POLL_S)

    def begin_update(self) -> tuple[EngineClient, ...]:
        """Return the replicas that take part in the next publication: those that sample, and new ones. Waits like
        :meth:`wait_for_members` while there is none. Raises NoReplicaError if none comes back."""

        async def join() -> tuple[EngineClient, ...]:
            while True:
                await self.wait_for_members(or_joining=True)
                joining, self._joining = self._joining, []
                self._num_joined += len(joining)
                alive = [client for client in (*self.clients, *joining) if client.is_alive]
                self.clients = tuple(sorted(alive, key=lambda client: client.name))
                if alive:
                    return self.clients

        try:
            return self.sync(join(), self.cfg.engine.start_s + 2 * _PROGRESS_S)
        except EngineDeadError as error:
            raise NoReplicaError(str(error)) from error

    def has_lost_replica(self, clients: Sequence[EngineClient]) -> bool:
        """Whether one of ``clients`` has ended, which may explain a failed call. Removes those that have."""

        async def look() -> bool:
            await asyncio.wait(
                [c.replica.exited for c in clients], timeout=_NEWS_S, return_when=asyncio.FIRST_COMPLETED
            )
            dead = [client for client in clients if not client.is_alive]
            for client in dead:
                self.remove(client, client.replica.exit_message())
            return bool(dead)

        return self.sync(look(), 2 * _NEWS_S)

    def take_metrics(self) -> dict[str, float]:
        metrics = {
            "rollout/replicas/min": self._fewest,
            "rollout/replicas_lost/sum": self._num_lost,
            "rollout/replicas_joined/sum": self._num_joined,
            "rollout/num_retried/sum": self._num_asked_again,
        }
        self._fewest = len(self.clients)
        self._num_lost = self._num_joined = self._num_asked_again = 0
        return metrics

    def _keep_all(self) -> None:
        """Start :meth:`_keep` for each replica, and read the tokenizer while the engines import."""
        tokenizer: asyncio.Future[Any] = self._loop.create_future()

        async def begin() -> None:
            for index in range(self.cfg.engine.num_replicas):
                self._ready[index] = self._loop.create_future()
                self._keepers.append(self._loop.create_task(self._keep(index, tokenizer)))

        self.sync(begin(), 10.0)
        from megatron_fp8rl.data.tokenizer import load_tokenizer

        self._loop.call_soon_threadsafe(tokenizer.set_result, load_tokenizer(str(self._hf_dir)))

    async def _keep(self, index: int, tokenizer: asyncio.Future[Any]) -> None:
        """Keep one replica running for the lifetime of the fleet: start a successor after each end."""
        first, failure = self._ready[index], None
        try:
            while (replica := await self._replicas.next(index)) is not None:
                client = self._client(replica, await tokenizer)
                try:
                    await self._wait_healthy(client)
                except EngineError as error:
                    was_killed, failure = replica.was_killed, error
                    if self._replicas.starts_here and not first.done() and not was_killed:
                        raise  # it would fail again
                    self.remove(client, str(error))
                    await client.close()
                    continue
                self._replicas.note_ready(replica)
                if first.done():
                    client.suspend()
                    self._joining.append(client)
                    _log.info("%s is back and joins at the next publication", replica.name)
                else:
                    first.set_result(client)
                watch = self._loop.create_task(self._kill_if_hung(client))
                await replica.exited
                watch.cancel()
                self.remove(client, replica.exit_message())
                await client.close()
            self._given_up.add(index)
            if failure is not None and not first.done():
                raise failure
        except Exception as error:  # a bug or a configuration mistake, for callers that wait for the replica
            self._given_up.add(index)
            if first.done():
                _log.exception("%s failed and is not started again", replica_name(index))
            else:
                first.set_exception(error)

    def _client(self, replica: Replica, tokenizer: Any) -> EngineClient:
        from megatron_fp8rl.data.tokenizer import decode, dropped_ids, end_ids

        dropped = dropped_ids(tokenizer, self.cfg.sampling.stop_token_ids)
        return EngineClient(
            replica,
            sampling=Sampling.of(self.cfg.sampling, end_ids(tokenizer), dropped),
            decode=lambda token_ids: decode(tokenizer, token_ids, dropped),
            request_deadline_s=self.cfg.engine.request_s,
            update_deadline_s=self.cfg.engine.update_s,
        )

    async def _kill_if_hung(self, client: EngineClient) -> None:
        """Kill a replica that does not answer for ``engine.hang_s``; its requests then go to others."""
        limit_s = self.cfg.engine.hang_s
        while client.is_alive:
            await asyncio.sleep(_PROBE_S)
            if await client.is_silent(max(1.0, limit_s - _PROBE_S)):
                _log.warning("%s did not answer for %g s: killed", client.name, limit_s)
                return self._replicas.end(client.replica, Exit(reason=f"hung for {limit_s:g} s and was killed"))

    async def _all_ready(self) -> None:
        """Wait for the first incarnations of all replicas, and make them ``clients``."""
        limit_s = self.cfg.engine.start_s
        left_s = max(0.0, limit_s - (time.monotonic() - self._started_s))
        waiting = list(self._ready.values())
        done, _ = await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_EXCEPTION)
        for future in done:
            future.result()
        missing = [index for index, future in self._ready.items() if not future.done()]
        if missing:
            reasons = [f"{replica_name(index)}: {self._replicas.missing(index)}" for index in missing]
            noun = "replica" if len(missing) == 1 else "replicas"
            raise EngineDeadlineError(
                f"rollout {noun} {', '.join(map(replica_name, missing))} did not start within {limit_s:g} s; raise "
                "engine.deadline_scale or see why:\n" + "\n".join(reasons)
            )
        self.clients = tuple(future.result() for future in waiting if future.result().is_alive)
        self._is_ready = True

    async def _wait_healthy(self, client: EngineClient) -> None:
        """Wait until the replica answers. Raises EngineDeadError or EngineDeadlineError with the end of its log."""
        started_s, limit_s = time.monotonic(), self.cfg.engine.start_s
        next_report_s = _PROGRESS_S
        while (waited_s := time.monotonic() - started_s) < limit_s:
            if await _answers(client):
                return
            if waited_s >= next_report_s:
                next_report_s += _PROGRESS_S
                last_line = client.replica.last_log_lines(1).strip()
                text = "%s is starting (%.0f of at most %g s); its log ends with: %s"
                _log.info(text, client.name, waited_s, limit_s, last_line)
            await asyncio.sleep(_HEALTH_POLL_S)
        replica = client.replica
        raise EngineDeadlineError(
            f"rollout replica {replica.name} did not start within {limit_s:g} s; raise engine.deadline_scale or "
            f"see {replica.log_path}, which ends with\n{replica.last_log_lines()}"
        )

    # ---- shutdown

    def shutdown(self) -> None:
        """Stop all replicas and the event loop. Later calls do nothing."""
        atexit.unregister(self.shutdown)
        if not self._thread.is_alive():
            return
        with contextlib.suppress(Exception):
            self.sync(self._cancel_all(), TERM_GRACE_S)
        self._replicas.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TERM_GRACE_S)
        self._loop.close()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def _cancel_all(self) -> None:
        for client in (*self.clients, *self._joining):
            await client.close()
        for task in (tasks := asyncio.all_tasks() - {asyncio.current_task()}):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _answers(client: EngineClient) -> bool:
    if not client.is_alive:
        raise EngineDeadError(client.replica.exit_message(" while it started"))
    if listens := await ping(client.replica.url) is None:  # a server that still starts is bound but does not listen
        await client.health()
    return listens
