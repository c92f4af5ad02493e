"""Client of one rollout replica: sampling, pausing and weight updates, with a deadline on every call.

In: token ids of a prompt. Out: :class:`~megatron_fp8rl.types.Completion` objects that record which policy version
sampled each token. Runs on trainer rank 0, on the fleet's event loop.

**Version of a token.** vLLM does not report which weights sampled a token; the client determines it exactly.
``pause("keep")`` makes the engine end every running request and return its tokens; nothing is sampled until ``resume``.
The client then requests the rest under the new weights, with the tokens so far appended to the prompt. Each request
thus runs under one version, known when it is submitted. The prefix would be recomputed anyway, because a new version
needs a new KV cache. Requests that reach the engine after it paused would wait inside it and run under weights unknown
to the client; ``pause`` withdraws them before it returns.

**Seeds.** Completion i of a request with seed s is sampled with seed s + i from its own generator, so its tokens do not
depend on other requests. The rest of an interrupted completion has its own seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import aiohttp

from megatron_fp8rl.net import auth
from megatron_fp8rl.rollout.completions import (
    GENERATE_PATH,
    Answer,
    PartialCompletion,
    Sampling,
    Segment,
    read_answer,
    read_prompt_logprobs,
    write_request,
)
from megatron_fp8rl.rollout.errors import EngineDeadError, EngineDeadlineError, EngineError
from megatron_fp8rl.rollout.replicas import Replica
from megatron_fp8rl.types import Completion, KVScales

PauseMode = Literal["keep", "wait", "abort"]
Tag = Literal["weights", "kv_cache"]  # parts of an engine's GPU memory that can sleep

_SETTLE_S = 1.0  # for results that the engine returned on pausing and that are still in transit
_STAGING_POLL_S = 0.05  # between questions whether weights have arrived; each comes between two steps of the engine
_EXIT_GRACE_S = 2.0  # vLLM's server exits after its engine core has died; when to ask whether that is the case
_EXIT_DEADLINE_S = 60.0  # for a server that says so


class EngineClient:
    """Use from one event loop, the fleet's. ``version`` is the policy version of the weights that the engine holds."""

    def __init__(
        self,
        replica: Replica,
        *,
        sampling: Sampling,
        decode: Callable[[Sequence[int]], str],
        request_deadline_s: float,
        update_deadline_s: float,
    ) -> None:
        self.replica = replica
        self.name = replica.name
        self.sampling = sampling
        self.version = 0
        self.num_running = 0  # completions requested and not yet returned
        self._decode = decode
        self._request_deadline_s = request_deadline_s
        self._update_deadline_s = update_deadline_s
        self._session: aiohttp.ClientSession | None = None
        self._open = asyncio.Event()  # cleared from pause to resume
        self._open.set()
        self._pause_mode: PauseMode = "keep"
        self._num_pauses = 0
        self._asleep: set[Tag] = set()
        self._kv_scales: KVScales | None = None
        self._in_flight: set[asyncio.Task[Any]] = set()

    @property
    def is_alive(self) -> bool:
        """False once the process is known to have ended."""
        return not self.replica.exited.done()

    def hold(self) -> None:
        """Make requests wait until :meth:`resume`: an engine that has just started holds weights of no policy."""
        self._open.clear()

    # ---- sampling

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        num_completions: int,
        seed: int,
        *,
        sampling: Sampling | None = None,
    ) -> list[Completion]:
        """Sample ``num_completions`` continuations; the i-th with seed ``seed + i``.

        Waits while the engine is paused. Raises EngineDeadError, EngineDeadlineError or EngineError.
        """
        sampling = sampling or self.sampling
        parts = [PartialCompletion(seed=seed + i) for i in range(num_completions)]
        self.num_running += num_completions
        try:
            if sampling.temperature > 0:  # vLLM refuses several greedy completions in one request
                await self._advance(prompt_token_ids, parts, sampling)
            while unfinished := [part for part in parts if part.finish_reason is None]:
                await asyncio.gather(*(self._advance(prompt_token_ids, [part], sampling) for part in unfinished))
        finally:
            self.num_running -= num_completions
        return [part.complete(self._decode, sampling.stop_strings) for part in parts]

    async def _advance(self, prompt: Sequence[int], parts: list[PartialCompletion], sampling: Sampling) -> None:
        """Send one request. Several parts share it only while they have no tokens."""
        await self._until_open()
        version, num_pauses = self.version, self._num_pauses
        done = parts[0].token_ids
        body = write_request(prompt, parts, sampling)
        task = asyncio.ensure_future(
            self._within(partial(self._sampled, body), GENERATE_PATH, self._request_deadline_s)
        )
        self._in_flight.add(task)
        try:
            answer = await task
            segments: Sequence[Segment | None] = answer.segments
            if len(parts) == 1:  # vLLM counts the prefix of several that share a request in no defined way
                parts[0].num_prompt_tokens += len(prompt) + len(done)
                parts[0].num_cached_tokens += answer.num_cached_tokens
        except asyncio.CancelledError:
            if not task.cancelled() or asyncio.current_task().cancelling():
                raise
            segments = [None] * len(parts)  # withdrawn by pause
        finally:
            self._in_flight.discard(task)
            task.cancel()
        paused = self._num_pauses != num_pauses
        for part, segment in zip(parts, segments, strict=True):
            if segment is not None and segment.finish_reason == "abort" and not paused:
                raise EngineError(self._message("ended a request on its own", GENERATE_PATH))
            part.extend(segment, version, give_up=paused and self._pause_mode == "abort")

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """The engine's log-probability of each token but the first, [T - 1], computed by prefill at temperature 1.
        There must be room for one new token. Reads no cached prefix. Raises as every call does."""
        await self._until_open()
        sampling = {"max_tokens": 1, "temperature": 1.0, "seed": 0, "detokenize": False}
        sampling |= {"prompt_logprobs": 0, "logprobs": 0}  # of the tokens themselves, and no alternatives
        body = {"token_ids": list(token_ids), "num_prompt_tokens": len(token_ids), "sampling_params": sampling}
        answer = await self._within(partial(self._sampled, body), GENERATE_PATH, self._request_deadline_s)
        return read_prompt_logprobs(answer, len(token_ids))

    async def _sampled(self, body: Any) -> Answer:
        """The answer to one sampling request."""
        return await self._request("POST", GENERATE_PATH, body, read_answer)

    async def _until_open(self) -> None:
        """Return when the engine samples, or has ended; the call that follows then reports it."""
        if not self._open.is_set():
            opened = asyncio.ensure_future(self._open.wait())
            await asyncio.wait({opened, self.replica.exited}, return_when=asyncio.FIRST_COMPLETED)
            opened.cancel()

    # ---- pausing and weights

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling until :meth:`resume`, and drop the KV cache, which belongs to the old weights.

        ``keep``: running completions stop here and continue after ``resume``, under the weights loaded then.
        ``wait``: running completions finish first. ``abort``: running completions are returned as they are.
        """
        self._open.clear()
        self._pause_mode = mode
        self._num_pauses += 1
        engine_mode = "wait" if mode == "wait" else "abort"
        await self._call(f"/pause?mode={engine_mode}", deadline_s=self._pause_deadline_s(mode))
        if self._in_flight:
            _, late = await asyncio.wait(self._in_flight, timeout=_SETTLE_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    async def resume(self) -> None:
        """Sample again, under the weights that the engine holds now. A sleeping engine resumes when it is awake."""
        if self._asleep:
            return  # vLLM resumes by itself when the last part wakes; a second resume could overtake the first
        await self._call("/resume", deadline_s=self._update_deadline_s)
        self._open.set()

    # ---- sleeping

    async def sleep(self, level: int) -> None:
        """Free the engine's GPU memory: weights move to host memory (level 1) or are dropped (2); the KV cache is lost.

        The engine samples again after :meth:`wake_up` has restored every part. Does nothing if it already sleeps.
        Raises EngineError while completions are running.
        """
        if self._asleep:
            return
        if self.num_running:
            raise EngineError(
                f"rollout replica {self.name} has {self.num_running} completions to finish before sleeping"
            )
        await self.pause("abort")
        self._asleep = {"weights", "kv_cache"}
        await self._call(f"/sleep?level={level}&mode=abort", deadline_s=self._update_deadline_s)

    async def wake_up(self, *tags: Tag) -> None:
        """Restore ``tags``, or everything if there are none; parts that are awake stay unchanged.

        Weights come first, so that they can be updated before the KV cache takes its memory. Sampling continues when
        both are awake.
        """
        wanted = [tag for tag in ("weights", "kv_cache") if tag in self._asleep and (not tags or tag in tags)]
        if not wanted:
            return
        query = "&".join(f"tags={tag}" for tag in wanted)
        await self._call(f"/wake_up?{query}", deadline_s=self._update_deadline_s)
        self._asleep -= set(wanted)
        if "kv_cache" in wanted and self._kv_scales is not None:
            await self.set_kv_scales(self._kv_scales)  # vLLM resets them to 1 when the cache wakes up
        if not self._asleep:
            self._open.set()

    async def proof_layers(self) -> list[dict[str, Any]]:
        """Of each worker: see ``WorkerExtension.proof_layers`` in rollout/vllm_plugin/worker.py."""
        return await self.collective_rpc("proof_layers")

    async def init_transfer(self, info: Mapping[str, Any]) -> None:
        """Send ``info`` to the weight transfer engine of every worker, which may wait for the trainer to connect."""
        body = {"init_info": dict(info)}
        await self._call("/init_weight_transfer_engine", body=body, deadline_s=self._update_deadline_s)

    async def start_update(self) -> None:
        """Prepare to receive weights. Call between :meth:`pause` and :meth:`resume`."""
        await self._call("/start_weight_update", deadline_s=self._update_deadline_s)

    async def update_weights(self, info: Mapping[str, Any]) -> None:
        """Receive the publication described by ``info``; returns when every worker has loaded it."""
        await self._call("/update_weights", body={"update_info": dict(info)}, deadline_s=self._update_deadline_s)

    async def stage_weights(self, info: Mapping[str, Any]) -> None:
        """Receive a publication in spare memory, while the engine samples; returns when every worker has all of it."""
        await self.collective_rpc("stage_weights", version=info["version"], attempt=info["attempt"])
        while not all(worker["staged"] for worker in await self.collective_rpc("staging")):
            await asyncio.sleep(_STAGING_POLL_S)

    async def finish_update(self, version: int) -> None:
        """Complete the update; tokens sampled from now on are of ``version``."""
        await self._call("/finish_weight_update", deadline_s=self._update_deadline_s)
        self.set_version(version)

    def set_version(self, version: int) -> None:
        """Declare which policy version the engine holds, for instance after a resumed run has published it."""
        self.version = version

    async def abandon_update(self) -> None:
        """Abandon an update in progress, so that another can begin."""
        await self.collective_rpc("abandon_update")

    async def weight_digests(self, *, names: bool = True) -> list[dict[str, Any]]:
        """Each worker's digests: see ``WorkerExtension.weight_digests`` in rollout/vllm_plugin/worker.py."""
        return await self.collective_rpc("weight_digests", names=names)

    async def set_kv_scales(self, scales: KVScales) -> list[dict[str, Any]]:
        """Set the scales of the FP8 KV cache, before :meth:`resume`: see ``WorkerExtension.set_kv_scales``."""
        self._kv_scales = scales
        return await self.collective_rpc("set_kv_scales", scales={str(layer): row for layer, row in scales.items()})

    async def collective_rpc(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a method of every worker; one result per worker."""
        answer = await self._call(
            "/collective_rpc", body={"method": method, "kwargs": kwargs}, deadline_s=self._update_deadline_s
        )
        return [] if answer is None else answer["results"]

    async def reset_cache(self) -> None:  # pause does so itself
        await self._call("/reset_prefix_cache", deadline_s=self._update_deadline_s)

    async def world_size(self) -> int:
        """Number of workers of this replica."""
        answer = await self._call("/get_world_size", verb="GET", deadline_s=self._update_deadline_s)
        return answer["world_size"]

    async def health(self, deadline_s: float = 10.0) -> None:
        """Return if the engine answers."""
        await self._call("/health", verb="GET", deadline_s=deadline_s)

    async def is_silent(self, deadline_s: float) -> bool:
        """Whether nothing answers for ``deadline_s``: the server or, while it samples, the engine between two steps.
        Asks twice, since the first question of a trainer that was suspended is late."""
        path = "/is_sleeping" if self.num_running and self._open.is_set() else "/health"
        for share in (0.8, 0.2):
            try:
                await self._call(path, verb="GET", deadline_s=share * deadline_s)
            except EngineDeadlineError:
                continue
            except EngineError:
                return False  # its end is seen elsewhere
            return False
        return True

    async def close(self) -> None:
        """Close the connections. The engine keeps running."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    # ---- a single call

    def _pause_deadline_s(self, mode: PauseMode) -> float:
        return self._request_deadline_s if mode == "wait" else self._update_deadline_s

    async def _call(self, path: str, *, body: Any = None, verb: str = "POST", deadline_s: float) -> Any:
        """The answer, which is JSON; None if it is empty."""
        return await self._within(partial(self._request, verb, path, body, json.loads), path, deadline_s)

    async def _within(self, ask: Callable[[], Coroutine[Any, Any, Any]], path: str, deadline_s: float) -> Any:
        """What a request returns, while the replica is alive and within a deadline."""
        if not self.is_alive:
            raise EngineDeadError(self._message(f"{self.replica.exited.result()}", path))
        request = asyncio.ensure_future(ask())
        try:
            await asyncio.wait({request, self.replica.exited}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if request.done():
                try:
                    return request.result()
                except (aiohttp.ClientError, OSError, EngineError) as error:
                    await self._raise_failure(path, error)
            if self.replica.exited.done():
                raise EngineDeadError(self._message(f"{self.replica.exited.result()}", path))
            raise EngineDeadlineError(
                self._message(
                    f"did not answer within {deadline_s:g} s", path, "raise the deadline in rollout.*_deadline_s or "
                )
            )
        finally:
            request.cancel()

    async def _request(self, verb: str, path: str, body: Any, read: Callable[[bytes], Any]) -> Any:
        if self._session is None:
            # We enforce the deadlines, and bound the number of concurrent requests.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                headers=auth.headers(self.replica.token),
            )
        async with self._session.request(verb, self.replica.url + path, json=body) as response:
            content = await response.read()
            if response.status != 200:
                reason = content.decode(errors="replace")[:1000]
                raise EngineError(f"status {response.status}: {reason}", status=response.status)
            return read(content) if content else None

    async def _raise_failure(self, path: str, error: Exception) -> None:
        """Raise the meaning of a failed request: the replica died, or it refused the request."""
        status = error.status if isinstance(error, EngineError) else None
        if status is None or status >= 500:
            await self._until_exited_or_healthy()
        if self.replica.exited.done():
            raise EngineDeadError(self._message(f"{self.replica.exited.result()}", path)) from error
        message = self._message(f"failed ({type(error).__name__}: {error})", path)
        raise EngineError(message, status=status) from error

    async def _until_exited_or_healthy(self) -> None:
        """A server without an engine takes a while to exit on a busy host; one that has an engine says so."""
        end = time.monotonic() + _EXIT_DEADLINE_S
        while time.monotonic() < end:
            await asyncio.wait({self.replica.exited}, timeout=_EXIT_GRACE_S)
            if self.replica.exited.done():
                return
            with contextlib.suppress(aiohttp.ClientError, OSError, EngineError):
                async with asyncio.timeout(_EXIT_GRACE_S):
                    return await self._request("GET", "/health", None, json.loads)

    def _message(self, problem: str, path: str, remedy: str = "") -> str:
        replica = self.replica
        return (
            f"rollout replica {replica.name} {problem}, during {path}; {remedy}look into {replica.log_path}, "
            f"which ends with\n{replica.last_log_lines()}"
        )
