"""Client of one rollout replica: sampling, pausing and weight updates, with a deadline on every call.

In: token ids of a prompt. Out: :class:`~megatron_fp8rl.types.Completion` objects that record which policy version
sampled each token. Runs on trainer rank 0, on the fleet's event loop.

**Version of a token.** vLLM does not report which weights sampled a token, so every request runs under one version.
``pause("keep")`` makes the engine end every running request and return its tokens. After ``resume`` the client requests
the remaining tokens, with the tokens so far appended to the prompt: a new version needs a new KV cache anyway.
``pause`` cancels requests that reach the engine late, because they would run under unknown weights.

**Seeds.** Completion i of a request with seed s has a generator with seed s + i, so its tokens do not depend on other
requests. The rest of an interrupted completion has another seed.
"""

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

_SETTLE_S = 1.0  # time for results that are in transit when the engine has paused
_STAGING_POLL_S = 0.05  # the engine answers a poll between two of its steps
OUTLAST_S = 1.0  # in which a request that ends engines does so
_EXIT_GRACE_S = 2.0  # between checks whether vLLM's server exits, as it does after its engine core has died
_EXIT_DEADLINE_S = 60.0  # limit of these checks


class EngineClient:
    """Calls one replica from the fleet's event loop. ``version`` is the policy version of the engine's weights."""

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
        self._adapter: int | None = None  # version of the loaded adapter; None if weights are merged
        self._in_flight: set[asyncio.Task[Any]] = set()

    @property
    def is_alive(self) -> bool:
        """False after the end of the process was detected."""
        return not self.replica.exited.done()

    def suspend(self) -> None:
        """Make requests wait until :meth:`resume`. A new engine needs this, because its weights are dummies."""
        self._open.clear()

    # ---- sampling

    async def generate(
        self, prompt_token_ids: Sequence[int], num_completions: int, seed: int, *, sampling: Sampling | None = None
    ) -> list[Completion]:
        """Sample ``num_completions`` continuations; the i-th with seed ``seed + i``. Waits while the engine is paused.
        Raises EngineDeadError, EngineDeadlineError or EngineError."""
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
        """Send one request for the rest of ``parts``. Several parts share a request only before they have tokens."""
        await self._until_open()
        version, num_pauses = self.version, self._num_pauses
        done = parts[0].token_ids
        body = write_request(prompt, parts, sampling) | {"adapter": self._adapter}
        task = asyncio.ensure_future(
            self._within(partial(self._sampled, body), GENERATE_PATH, self._request_deadline_s)
        )
        self._in_flight.add(task)
        try:
            answer = await task
            segments: Sequence[Segment | None] = answer.segments
            if len(parts) == 1:  # vLLM does not define these counts for several completions in one request
                parts[0].num_prompt_tokens += len(prompt) + len(done)
                parts[0].num_cached_tokens += answer.num_cached_tokens
        except asyncio.CancelledError:
            if not task.cancelled() or asyncio.current_task().cancelling():
                raise
            segments = [None] * len(parts)  # pause cancelled the request
        finally:
            self._in_flight.discard(task)
            task.cancel()
        paused = self._num_pauses != num_pauses
        for part, segment in zip(parts, segments, strict=True):
            if segment is not None and segment.finish_reason == "abort" and not paused:
                raise EngineError(self._message("aborted a request although it was not paused", GENERATE_PATH))
            part.extend(segment, version, give_up=paused and self._pause_mode == "abort")

    async def prompt_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Compute log-probabilities of all tokens but the first, [T - 1], by prefill at temperature 1, without cache.
        ``token_ids`` must be shorter than the engine's maximum length by one token. Raises EngineError or a subclass.
        """
        await self._until_open()
        sampling = {"max_tokens": 1, "temperature": 1.0, "seed": 0, "detokenize": False}
        sampling |= {"prompt_logprobs": 0, "logprobs": 0}  # 0: no alternative tokens
        body = {"token_ids": list(token_ids), "num_prompt_tokens": len(token_ids), "dropped_token_ids": []}
        body |= {"sampling_params": sampling, "adapter": self._adapter}
        answer = await self._within(partial(self._sampled, body), GENERATE_PATH, self._request_deadline_s)
        return read_prompt_logprobs(answer, len(token_ids))

    async def _sampled(self, body: Any) -> Answer:
        return await self._request("POST", GENERATE_PATH, body, read_answer)

    async def _until_open(self) -> None:
        """Return when the engine samples or has ended. The next call reports the end."""
        if not self._open.is_set():
            opened = asyncio.ensure_future(self._open.wait())
            await asyncio.wait({opened, self.replica.exited}, return_when=asyncio.FIRST_COMPLETED)
            opened.cancel()

    # ---- pausing and weights

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop sampling until :meth:`resume`, and drop the KV cache of the old weights.

        ``keep``: running completions stop here and continue after ``resume``, under the weights loaded then.
        ``wait``: running completions finish first. ``abort``: running completions are returned as they are.
        """
        self._open.clear()
        self._pause_mode = mode
        self._num_pauses += 1
        engine_mode = "wait" if mode == "wait" else "abort"
        deadline_s = self._request_deadline_s if mode == "wait" else self._update_deadline_s
        await self._call(f"/pause?mode={engine_mode}", deadline_s=deadline_s)
        if self._in_flight:
            _, late = await asyncio.wait(self._in_flight, timeout=_SETTLE_S)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    async def resume(self) -> None:
        """Continue sampling, under the engine's present weights. A sleeping engine continues after :meth:`wake_up`."""
        if self._asleep:
            return  # vLLM resumes by itself when the last part wakes; a second resume could overtake the first
        await self._call("/resume", deadline_s=self._update_deadline_s)
        self._open.set()

    # ---- sleeping

    async def sleep(self, level: int) -> None:
        """Free the engine's GPU memory: move weights to host memory (level 1) or drop them (2); drop the KV cache. Does
        nothing while asleep. Raises EngineError while completions are running."""
        if self._asleep:
            return
        if self.num_running:
            raise EngineError(
                f"rollout replica {self.name} cannot sleep: {self.num_running} completions are running; wait for them"
            )
        await self.pause("abort")
        self._asleep = {"weights", "kv_cache"}
        await self._call(f"/sleep?level={level}&mode=abort", deadline_s=self._update_deadline_s)

    async def wake_up(self, *tags: Tag) -> None:
        """Restore the GPU memory named by ``tags``, or all without tags; parts that are awake stay unchanged. Sampling
        continues when weights and KV cache are awake. Restore weights first, so that they can be updated before the KV
        cache takes its memory."""
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
        return await self.collective_rpc("proof_layers")

    async def init_transfer(self, info: Mapping[str, Any]) -> None:
        """Send ``info`` to every worker's weight transfer engine. The call may wait for the trainer to connect."""
        body = {"init_info": dict(info)}
        await self._call("/init_weight_transfer_engine", body=body, deadline_s=self._update_deadline_s)

    async def start_update(self) -> None:
        """Prepare to receive weights. Call between :meth:`pause` and :meth:`resume`."""
        await self._call("/start_weight_update", deadline_s=self._update_deadline_s)

    async def update_weights(self, info: Mapping[str, Any]) -> None:
        """Make every worker receive and load the publication described by ``info``."""
        await self._call("/update_weights", body={"update_info": dict(info)}, deadline_s=self._update_deadline_s)

    async def stage_weights(self, info: Mapping[str, Any]) -> None:
        """Make every worker receive a publication in spare memory, and wait for it. The engine samples meanwhile."""
        await self.collective_rpc("stage_weights", version=info["version"], attempt=info["attempt"])
        while not all(worker["staged"] for worker in await self.collective_rpc("staging")):
            await asyncio.sleep(_STAGING_POLL_S)

    async def finish_update(self, version: int) -> None:
        """Complete the update; ``version`` applies to all tokens sampled afterwards."""
        await self._call("/finish_weight_update", deadline_s=self._update_deadline_s)
        self.version = version

    async def abandon_update(self) -> None:
        await self.collective_rpc("abandon_update")

    async def load_adapter(self, path: str, version: int) -> list[dict[str, Any]]:
        """Load the adapter in a folder on every worker, in place of the last one, and return its digests. Tokens
        sampled afterwards have this policy version. Call between :meth:`pause` and :meth:`resume`."""
        reports = await self.collective_rpc("load_adapter", path=path, version=version)
        self._adapter = version
        self.version = version
        return reports

    async def weight_digests(self, *, names: bool = True) -> list[dict[str, Any]]:
        return await self.collective_rpc("weight_digests", names=names)

    async def set_kv_scales(self, scales: KVScales) -> list[dict[str, Any]]:
        """Call ``WorkerExtension.set_kv_scales`` on every worker. Call before :meth:`resume`."""
        self._kv_scales = scales
        return await self.collective_rpc("set_kv_scales", scales={str(layer): row for layer, row in scales.items()})

    async def collective_rpc(self, method: str, **kwargs: Any) -> list[Any]:
        """Call a method of every worker; return one result per worker."""
        answer = await self._call(
            "/collective_rpc", body={"method": method, "kwargs": kwargs}, deadline_s=self._update_deadline_s
        )
        return [] if answer is None else answer["results"]

    async def reset_cache(self) -> None:  # pause already does this
        await self._call("/reset_prefix_cache", deadline_s=self._update_deadline_s)

    async def world_size(self) -> int:
        answer = await self._call("/get_world_size", verb="GET", deadline_s=self._update_deadline_s)
        return answer["world_size"]

    async def health(self) -> None:
        await self._call("/health", verb="GET", deadline_s=10.0)

    async def outlast(self) -> None:
        """Return if the engine answers; after a pause, once it has sampled for a second. Raises EngineError."""
        if not self._open.is_set():
            await self._until_open()
            await asyncio.sleep(OUTLAST_S)
        await self._call(self._probe_path(), verb="GET", deadline_s=self._request_deadline_s)

    def _probe_path(self) -> str:
        """A path that the engine answers between two steps; while it does not sample, one that the server answers."""
        return "/is_sleeping" if self.num_running and self._open.is_set() else "/health"

    async def is_silent(self, deadline_s: float) -> bool:
        """Whether the server, or while it samples the engine, does not answer for ``deadline_s``. Asks twice: the first
        timeout may expire because the trainer itself was suspended."""
        path = self._probe_path()
        for share in (0.8, 0.2):
            try:
                await self._call(path, verb="GET", deadline_s=share * deadline_s)
            except EngineDeadlineError:
                continue
            except EngineError:
                return False  # the watcher of the process reports its end
            return False
        return True

    async def close(self) -> None:
        """Close the connections. The engine keeps running."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    # ---- a single call

    async def _call(self, path: str, *, body: Any = None, verb: str = "POST", deadline_s: float) -> Any:
        """Return the decoded JSON answer; None for an empty answer."""
        return await self._within(partial(self._request, verb, path, body, json.loads), path, deadline_s)

    async def _within(self, ask: Callable[[], Coroutine[Any, Any, Any]], path: str, deadline_s: float) -> Any:
        if not self.is_alive:
            raise self._dead(path, reached=False)
        request = asyncio.ensure_future(ask())
        try:
            await asyncio.wait({request, self.replica.exited}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if request.done():
                try:
                    return request.result()
                except (aiohttp.ClientError, OSError, EngineError) as error:
                    await self._raise_failure(path, error)
            if self.replica.exited.done():
                raise self._dead(path)
            raise EngineDeadlineError(
                self._message(f"did not answer within {deadline_s:g} s", path, "raise engine.deadline_scale, or ")
            )
        finally:
            request.cancel()

    async def _request(self, verb: str, path: str, body: Any, read: Callable[[bytes], Any]) -> Any:
        if self._session is None:
            # No limits here: _within enforces deadlines, and the callers limit concurrent requests.
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
        status = error.status if isinstance(error, EngineError) else None
        if status is None or status >= 500:
            await self._until_exited_or_healthy()
        if self.replica.exited.done():
            raise self._dead(path, reached=not isinstance(error, aiohttp.ClientConnectorError)) from error
        message = self._message(f"failed ({type(error).__name__}: {error})", path)
        raise EngineError(message, status=status) from error

    async def _until_exited_or_healthy(self) -> None:
        """Wait until the server exits, which takes a while on a busy host after its engine died, or is healthy."""
        end = time.monotonic() + _EXIT_DEADLINE_S
        while time.monotonic() < end:
            await asyncio.wait({self.replica.exited}, timeout=_EXIT_GRACE_S)
            if self.replica.exited.done():
                return
            with contextlib.suppress(aiohttp.ClientError, OSError, EngineError):
                async with asyncio.timeout(_EXIT_GRACE_S):
                    return await self._request("GET", "/health", None, json.loads)

    def _dead(self, path: str, *, reached: bool = True) -> EngineDeadError:
        """The error of a request to a replica that has ended, which the request may have ``reached``."""
        how = self.replica.exited.result()
        return EngineDeadError(
            self._message(str(how), path), is_innocent=how.was_killed or how.left_no_error or not reached
        )

    def _message(self, problem: str, path: str, remedy: str = "") -> str:
        replica = self.replica
        return (
            f"rollout replica {replica.name} {problem}, during {path}; {remedy}look into {replica.log_path}, "
            f"which ends with\n{replica.last_log_lines()}"
        )
