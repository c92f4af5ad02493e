"""Scored groups for the training loop, one batch per step, from engines or from a recording.

In: prompts, engines and a scorer on trainer rank 0. Out: a tuple of groups there, and an empty one on all other trainer
ranks, which learn only that there are groups, or why not. Runs on every trainer rank.

Synchronous and asynchronous training are one code path. Batches are numbered; batch b is trained on after b
publications, and its sampling may start up to ``max_staleness`` publications earlier. With ``max_staleness = 0`` a
batch is sampled when it is requested; with k, up to k further batches are sampled while the trainer works, and no token
of a returned batch is older than k versions. Batches are returned in order regardless of their lengths, so there is no
bias towards short answers. With ``rollout.window_groups`` groups are returned as they are complete (rollout/window.py).

With ``max_staleness = 0`` the rollouts of a run depend only on its configuration: prompts come in order, and the seed
of a completion follows from the run's and its prompt. The unfinished requests of a replica that dies go to the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from megatron_fp8rl.algo.samples import has_signal, require_experts
from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.data.prompts import position_after
from megatron_fp8rl.envs.scoring import Score
from megatron_fp8rl.observe.recording import read_step, steps_of
from megatron_fp8rl.observe.spans import add_seconds, span
from megatron_fp8rl.rollout.agents.agent_pool import AgentPool
from megatron_fp8rl.rollout.agents.requests import Requests, seed_of
from megatron_fp8rl.rollout.needs import Broadcaster, PromptSource, Scorer
from megatron_fp8rl.rollout.unfinished import UnfinishedGroups
from megatron_fp8rl.rollout.window import Window, positions_of
from megatron_fp8rl.types import Completion, Prompt, Rollout, RolloutGroup, single_turn

if TYPE_CHECKING:
    from megatron_fp8rl.rollout.fleet import Fleet

_log = logging.getLogger(__name__)
Groups = tuple[RolloutGroup, ...]

_MAX_REFILLS = 3  # extra rounds of prompts for algo.zero_variance "refill"
_LOOK_S = 0.2  # between checks whether replicas wait for weights


class RolloutError(RuntimeError):
    """Rollouts could not be produced, or they violate the staleness bound."""


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """A batch in progress."""

    start_position: Any  # of the prompt stream, before this batch
    groups: Future[Groups]


class RolloutStream:
    """``fleet``, ``prompts`` and ``score_pool`` are used on rank 0 only, and not at all in a replay."""

    def __init__(
        self,
        cfg: RunConfig,
        fleet: Fleet | None,
        prompts: PromptSource | None,
        score_pool: Scorer | None,
        parallel: Broadcaster,
    ) -> None:
        self.cfg = cfg
        self.version = 0  # of the policy that the engines hold
        # Collective: publish the current version again, after every replica was lost and others have come back.
        self.republish: Callable[[], None] | None = None
        self._fleet = fleet
        self._prompts = prompts
        self._scorer = score_pool
        self._parallel = parallel
        self._lock = threading.Lock()  # prompts are taken on the caller's thread and, for refills, on the fleet's
        self._batches: deque[_Batch] = deque()
        self._num_started = 0
        self._first_version: int | None = None
        self._position = None if prompts is None or parallel.rank else prompts.position
        self._recording: dict[int, Path] | None = None
        self._unfinished = UnfinishedGroups(cfg)
        self._is_asked: Callable[[], bool] = lambda: False
        self._agents: AgentPool | None = None
        self._window: Window | None = None
        self._requests: Requests | None = None
        if parallel.rank == 0:
            if cfg.rollout.replay is not None:
                self._recording = steps_of(cfg.rollout.replay)
            elif fleet is None or prompts is None or score_pool is None:
                raise ValueError("trainer rank 0 needs a fleet, prompts and a score pool, or rollout.replay")
            else:
                self._requests = Requests(fleet)
                if cfg.rollout.window_groups:
                    self._window = Window(cfg, fleet, self._take, self._collect_one, self._unfinished.forget)
                if any(one.agent for one in cfg.data.environments):
                    self._agents = AgentPool(cfg, self._requests, score_pool, prompts.chat_format)

    @property
    def position(self) -> Any:
        """Where the prompt stream continues after the batches returned so far. None on ranks other than 0."""
        return self._position

    def next_groups(self, is_asked: Callable[[], bool] = lambda: False) -> Groups | None:
        """Collective: the next batch of scored groups, on rank 0; none on others, which get only the samples that they
        train (``Parallel.scatter_over_data``). None, on every rank, as soon as ``is_asked`` says on rank 0 that the run
        is to end.

        Call once per publication. Raises, on every rank, the error of rank 0: an engine's death, a passed deadline, a
        scorer that cannot start, the end of a recording.
        """
        self._is_asked = is_asked
        try:
            with span("rollouts"):
                return self._sampled(self._next_trainable)
        finally:
            self._is_asked = lambda: False

    def sample(self, prompts: Sequence[Prompt], *, num_completions: int, temperature: float | None = None) -> Groups:
        """Collective: scored completions of given prompts, for evaluation, sampled by the engines in their current
        state; on rank 0, and none on others.

        ``prompts`` are used on rank 0 only. ``temperature`` None means that of training. Seeds depend only on the
        prompts, so two evaluations differ only by the policy.
        """
        asked: list[Future[Groups]] = []

        def produce() -> Groups | None:
            if self._fleet is None:
                raise RolloutError("evaluation samples from engines, but this run replays rollout.replay")
            if not asked:
                asked.append(self._fleet.submit(self._gather_groups(prompts, num_completions, temperature)))
            num_scores = len(prompts) * num_completions
            return self._result(asked[0], self._deadline_s(num_rounds=1, num_scores=num_scores))

        with span("evaluate"):
            return self._sampled(produce) or ()

    def before_update(self) -> None:
        """Call before a publication. Raises RolloutError if completions of a synchronous run are still being sampled."""
        running = sum(client.num_running for client in self._fleet.clients) if self._fleet else 0
        if running and self.cfg.rollout.max_staleness == 0:
            raise RolloutError(f"{running} completions are being sampled during an update; wait for next_groups first")

    def after_update(self, version: int) -> None:
        """Call when the engines hold policy ``version``; starts the batches that this version allows."""
        self.version = version
        if self._first_version is not None and self._recording is None and self._parallel.rank == 0:
            if self._window is not None:
                return self._window.publish(version, self.cfg.num_steps - version)
            self._start_batches()

    def resume_unfinished(self) -> int:
        """On rank 0, before the first batch: take up the groups that the run left at this version; how many."""
        return self._unfinished.load(self.version) if self._parallel.rank == 0 else 0

    def abandon(self) -> int:
        """On rank 0: give up the batches in progress, so that engines may sleep; :attr:`position` stays before them.
        Their finished groups are kept on disk for the run that goes on; returns how many."""
        if self._parallel.rank:
            return 0
        if self._window is not None:
            self._window.abandon()
        while self._batches:
            self._batches.popleft().groups.cancel()
        end = time.monotonic() + self.cfg.rollout.update_deadline_s
        while self._fleet and any(c.num_running for c in self._fleet.clients) and time.monotonic() < end:
            time.sleep(_LOOK_S / 10)
        return self._unfinished.save(self.version)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._agents is not None:  # on rank 0: while the fleet still runs
            self._fleet.sync(self._agents.close(), self.cfg.rollout.update_deadline_s)

    def take_metrics(self) -> dict[str, float]:
        """On rank 0: engine events since the last call, and the prompts left out since the start."""
        if self._fleet is None:
            return {}
        found = {**self._fleet.take_metrics(), "data/dropped/sum": self._prompts.num_dropped}
        return found if self._window is None else found | self._window.take_metrics()

    # ---- every rank

    def _sampled(self, produce: Callable[[], Groups | None]) -> Groups | None:
        """Collective: the groups that ``produce`` returns on rank 0, there, and () on others; None, on all, if it returns
        no groups. Publishes again whenever it returns None. Raises its error on every rank."""
        while True:
            error: Exception | None = None
            groups, failure = None, None
            if self._parallel.rank == 0:
                try:
                    groups = produce()
                except Exception as exception:
                    error, failure = exception, f"{type(exception).__name__}: {exception}"
            num_groups, failure = self._parallel.broadcast_object((None if groups is None else len(groups), failure))
            if error is not None:
                raise error
            if failure is not None:
                raise RolloutError(f"on trainer rank 0: {failure}")
            if num_groups is not None:
                return (groups or ()) if num_groups else None
            assert self.republish is not None
            self.republish()

    # ---- rank 0

    def _result(self, sampling: Future[Groups], deadline_s: float) -> Groups | None:
        """The result of sampling in progress; None if the replicas that should sample wait for weights."""
        end = time.monotonic() + deadline_s
        while True:
            try:
                return sampling.result(timeout=_LOOK_S)
            except TimeoutError:
                if sampling.done():  # a TimeoutError of its own
                    raise
            if self._is_asked():
                return ()
            if self.republish is not None and self._fleet.wants_publication:
                return None
            if time.monotonic() > end:
                sampling.cancel()
                raise RolloutError("rollouts were not ready in time; look into the engines' logs")

    def _next_trainable(self) -> Groups | None:
        groups = self._next_groups()
        if groups and self.cfg.algo.router_replay == "rollout":
            require_experts(groups, self.cfg)
        return groups

    def _next_groups(self) -> Groups | None:
        if self._recording is not None:
            return self._next_recorded(self._recording)
        if self._first_version is None:
            self._first_version = self.version
        if self._window is not None:
            return self._next_of_window(self._window)
        self._start_batches(at_least_one=True)
        deadline_s = self._deadline_s(num_rounds=1 + _MAX_REFILLS)
        groups = self._result(self._batches[0].groups, deadline_s)
        if not groups:
            return groups
        self._batches.popleft()
        self._unfinished.forget(groups)
        self._position = self._batches[0].start_position if self._batches else self._prompts.position
        self._check_staleness(groups)
        return groups

    def _next_of_window(self, window: Window) -> Groups | None:
        """The first groups that are complete; None if the replicas that should sample wait for weights."""
        end = time.monotonic() + self._deadline_s(num_rounds=1 + _MAX_REFILLS)
        window.fill(self.version, self.cfg.num_steps - self.version)
        while (groups := window.collect(self.version, _LOOK_S)) is None:
            if self._is_asked():
                return ()
            if self.republish is not None and self._fleet.wants_publication:
                return None
            if time.monotonic() > end:
                raise RolloutError("rollouts were not ready in time; look into the engines' logs")
        window.fill(self.version, self.cfg.num_steps - self.version - 1)
        self._unfinished.forget(groups)
        self._position = positions_of(self._prompts.position, window.pending)
        return groups

    def _start_batches(self, *, at_least_one: bool = False) -> None:
        """Start every batch that the current version may sample and that a step will train on.

        After the last step the engines stay idle: they may have to sleep while the policy is written.
        """
        num_allowed = self.version - self._first_version + 1 + self.cfg.rollout.max_staleness
        num_allowed = min(num_allowed, self.cfg.num_steps - self._first_version)
        while self._num_started < num_allowed or (at_least_one and not self._batches):
            start_position = self._prompts.position
            prompts = self._take(self.cfg.rollout.prompts_per_step)
            self._batches.append(
                _Batch(start_position=start_position, groups=self._fleet.submit(self._collect(prompts)))
            )
            self._num_started += 1

    def _take(self, count: int) -> list[Prompt]:
        with self._lock:
            return self._prompts.next_prompts(count)

    def _check_staleness(self, groups: Groups) -> None:
        for group in groups:
            for rollout in group.rollouts:
                oldest = min((c.min_version for c in rollout.completions), default=self.version)
                staleness = self.version - oldest
                if staleness > self.cfg.rollout.max_staleness:
                    raise RolloutError(
                        f"rollout {rollout.name} was sampled {staleness} policy versions ago; at most "
                        f"rollout.max_staleness = {self.cfg.rollout.max_staleness} is allowed. Call next_groups once "
                        "per publication"
                    )

    def _next_recorded(self, recording: dict[int, Path]) -> Groups:
        """Groups of the recorded step after the current version, so that a resumed replay continues where it was."""
        if (path := recording.get(self.version + 1)) is None:
            remedy = "Lower num_steps, or record a longer run with more observe.rollouts_gib"
            raise RolloutError(f"{self.cfg.rollout.replay} holds no step {self.version + 1}. {remedy}")
        groups = read_step(path)
        self._position = position_after(group.prompt for group in groups)
        return groups

    # ---- on the fleet's event loop

    async def _collect(self, prompts: list[Prompt]) -> Groups:
        """One batch. With "refill", groups whose rewards are all equal are replaced by groups of further prompts."""
        wanted = len(prompts)
        groups = await self._gather_groups(prompts, self.cfg.rollout.completions_per_prompt, None, timed=True)
        if self.cfg.algo.zero_variance != "refill":
            return groups
        useful = [group for group in groups if has_signal(group, self.cfg)]
        for _ in range(_MAX_REFILLS):
            if len(useful) >= wanted:
                break
            more = self._take(wanted - len(useful))
            groups = await self._gather_groups(more, self.cfg.rollout.completions_per_prompt, None, timed=True)
            useful += [group for group in groups if has_signal(group, self.cfg)]
        if len(useful) < wanted:
            _log.info("%d of %d groups differ in reward after %d refills", len(useful), wanted, _MAX_REFILLS)
        return tuple(useful) or groups

    async def _collect_one(self, prompt: Prompt) -> RolloutGroup:
        return (await self._gather_groups([prompt], self.cfg.rollout.completions_per_prompt, None, timed=True))[0]

    async def _gather_groups(
        self, prompts: Sequence[Prompt], num_completions: int, temperature: float | None, *, timed: bool = False
    ) -> Groups:
        """All groups concurrently; the engines bound how many sequences run at a time."""
        sampled_s = [time.monotonic()] * len(prompts)

        async def group(index: int, prompt: Prompt) -> RolloutGroup:
            if timed and (kept := self._unfinished.of(prompt, num_completions)) is not None:
                return kept
            seed = seed_of(self.cfg.seed, prompt)
            if self._agents is not None and self._agents.plays(prompt):
                rollouts = await asyncio.gather(
                    *(self._agents.play(prompt, i, seed + i, temperature=temperature) for i in range(num_completions))
                )
                sampled_s[index] = time.monotonic()
                return self._unfinished.add(RolloutGroup(prompt=prompt, rollouts=tuple(rollouts)), timed)
            with self._requests.timed() if timed else contextlib.nullcontext():
                completions = await self._requests.ask(prompt.token_ids, num_completions, seed, temperature=temperature)
            sampled_s[index] = time.monotonic()
            rollouts = await asyncio.gather(
                *(self._rollout(prompt, i, completion, seed + i) for i, completion in enumerate(completions))
            )
            return self._unfinished.add(RolloutGroup(prompt=prompt, rollouts=tuple(rollouts)), timed)

        groups = tuple(await asyncio.gather(*(group(i, prompt) for i, prompt in enumerate(prompts))))
        # Scoring overlaps with sampling; the metric is how long the last scores take after the last completion.
        if timed:
            add_seconds("score", time.monotonic() - max(sampled_s))
        return groups

    async def _rollout(self, prompt: Prompt, index: int, completion: Completion, seed: int) -> Rollout:
        if completion.finish_reason == "abort":
            score = Score.failed("the engine ended the completion early")
        else:
            score = await self._scorer.score(prompt, completion.text)
        status = score.status
        if status == "scored" and completion.finish_reason == "length":
            status = "truncated"
        return Rollout(
            prompt=prompt,
            index=index,
            branches=single_turn(prompt, completion),
            reward=score.reward,
            status=status,
            detail=score.detail,
            reward_parts=score.parts,
            seed=seed,
        )

    def _deadline_s(self, *, num_rounds: int, num_scores: int | None = None) -> float:
        """A last resort beyond the deadlines of single calls: every round may sample, wait for an update, and score.

        In addition, one replica may die, be waited for, and have its prompts sampled again.
        """
        rollout, data = self.cfg.rollout, self.cfg.data
        num_scores = num_scores or rollout.prompts_per_step * rollout.completions_per_prompt
        score_s = data.score_deadline_s * (1 + num_scores / data.num_score_workers)
        replaced_s = rollout.start_deadline_s + rollout.request_deadline_s
        if self._agents is not None:  # as many rounds of sessions as run at a time
            replaced_s += -(-num_scores // self.cfg.session.max_running) * self.cfg.session.deadline_s
        return num_rounds * (rollout.request_deadline_s + rollout.update_deadline_s + score_s) + replaced_s
