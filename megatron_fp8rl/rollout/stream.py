"""Scored groups for the training loop, from engines or from a recording.

In: prompts, engines and a scorer on trainer rank 0. Out: the groups of a step on rank 0, and an empty tuple on all
other trainer ranks. Runs on every trainer rank.

With ``sampling.max_staleness`` = 0, a step samples its groups when it starts. With k, the engines also sample the
groups of the next k steps while the trainer works (rollout/window.py).

With ``max_staleness`` = 0 the rollouts of a run depend only on its configuration. Prompts come in order, and the seed
of a completion depends only on the run's seed and its prompt. If a replica dies, its requests go to other replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from megatron_fp8rl.algo.samples import require_experts, require_kept
from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.data.prompts import position_after
from megatron_fp8rl.envs.failed_scores import FailedScores
from megatron_fp8rl.envs.scoring import Score
from megatron_fp8rl.observe.recording import read_step, steps_of
from megatron_fp8rl.observe.spans import add_seconds, span
from megatron_fp8rl.rollout import unfinished
from megatron_fp8rl.rollout.agents.requests import Requests, seed_of
from megatron_fp8rl.rollout.errors import RequestLostError
from megatron_fp8rl.rollout.window import MAX_REFILLS, Window
from megatron_fp8rl.types import Completion, Prompt, Rollout, RolloutGroup, single_turn

if TYPE_CHECKING:
    from megatron_fp8rl.data.prompts import PromptStream
    from megatron_fp8rl.envs.scoring import CompletionScorer
    from megatron_fp8rl.rollout.fleet import Fleet
    from megatron_fp8rl.trainer.parallel import Parallel

_log = logging.getLogger(__name__)

Groups = tuple[RolloutGroup, ...]

_LOOK_S = 0.2  # interval of the check whether replicas wait for weights


class RolloutError(RuntimeError):
    """Rollouts cannot be produced, or they exceed ``sampling.max_staleness``."""


class RolloutStream:
    """Source of scored groups. Only rank 0 uses ``fleet``, ``prompts`` and ``score_pool``; a replay uses none."""

    def __init__(
        self,
        cfg: RunConfig,
        fleet: Fleet | None,
        prompts: PromptStream | None,
        score_pool: CompletionScorer | None,
        parallel: Parallel,
    ) -> None:
        self.cfg = cfg
        self.version = 0  # policy version of the engines
        # Collective: publish the current version again, to replicas that joined after all others had died.
        self.republish: Callable[[], None] | None = None
        self._fleet = fleet
        self._prompts = prompts
        self._scorer = score_pool
        self._parallel = parallel
        self._position = None if prompts is None or parallel.rank else prompts.position
        self._recording: dict[int, Path] | None = None
        self._window: Window | None = None
        self._has_begun = False
        self._complete: dict[str, RolloutGroup] = {}  # by prompt, saved by an earlier start of the run
        self._sampled_s = self._scored_s = 0.0  # times of the step's last completion and last score
        self._is_asked: Callable[[], bool] = lambda: False
        self._agents: AgentPool | None = None
        self._requests: Requests | None = None
        self._failed = FailedScores()
        if parallel.rank == 0:
            if cfg.sampling.replay is not None:
                self._recording = steps_of(cfg.sampling.replay)
            elif fleet is None or prompts is None or score_pool is None:
                raise ValueError("trainer rank 0 needs a fleet, prompts and a score pool, or sampling.replay")
            else:
                self._requests = Requests(fleet)
                self._window = Window(cfg.algo, cfg.sampling, cfg.num_steps, fleet, prompts, self._training_group)
                if any(environment.agent for environment in cfg.data.environments):
                    from megatron_fp8rl.rollout.agents.agent_pool import AgentPool  # imports a web server

                    self._agents = AgentPool(cfg, self._requests, score_pool, prompts.chat_format)

    @property
    def position(self) -> Any:
        """Position of the prompt stream after the groups returned so far. None on ranks other than 0."""
        return self._position

    def next_groups(self, is_asked: Callable[[], bool] = lambda: False) -> Groups | None:
        """Collective: return the scored groups of the next step on rank 0, and () on others.

        Call once per publication. Returns None on every rank if ``is_asked`` returns True on rank 0: the run should
        stop. Other ranks get only the samples that they train, later, from ``Parallel.scatter_over_data``. Every rank
        raises the error of rank 0, such as a dead engine, a missed deadline, or the end of a recording.
        """
        self._is_asked = is_asked
        try:
            with span("rollouts"):
                return self._sampled(self._next_trainable)
        finally:
            self._is_asked = lambda: False

    def sample(self, prompts: Sequence[Prompt], *, num_completions: int, temperature: float | None = None) -> Groups:
        """Collective: sample and score completions of ``prompts`` for evaluation; return () on ranks other than 0.

        Only rank 0 uses ``prompts``. ``temperature`` None means that of training. Seeds depend only on the prompts, so
        two evaluations differ only by the policy.
        """
        asked: list[Future[Groups]] = []

        def produce() -> Groups | None:
            if self._fleet is None:
                raise RolloutError(
                    "evaluation needs engines, but this run replays sampling.replay; set observe.eval_prompts to 0"
                )
            if not asked:
                asked.append(self._fleet.submit(self._groups(prompts, num_completions, temperature)))
            deadline_s = self._deadline_s(num_rounds=1, num_scores=len(prompts) * num_completions)
            groups = self._until(lambda: self._result(asked[0]), deadline_s)
            self._failed.add(groups or ())
            return groups

        with span("evaluate"):
            return self._sampled(produce) or ()

    def require_scores(self) -> None:
        """Collective, at the end: raise an error on every rank if no completion got a score."""

        def check() -> Groups:
            self._failed.require_scores()
            return ()

        self._sampled(check)

    def before_update(self) -> None:
        """Call before a publication. Raises RolloutError if a synchronous run still samples."""
        running = sum(client.num_running for client in self._fleet.clients) if self._fleet else 0
        if running and self.cfg.sampling.max_staleness == 0:
            raise RolloutError(
                f"{running} completions are running at the start of an update; wait for next_groups first"
            )

    def after_update(self, version: int) -> None:
        """Call after the engines loaded policy ``version``; starts the groups that this version may sample."""
        self.version = version
        if self._has_begun:
            self._window.fill(version, num_steps_taken=version)

    def resume_unfinished(self) -> int:
        """On rank 0, before the first step: load saved groups of this version; return their number."""
        if self._parallel.rank == 0:
            self._complete = unfinished.load(self.cfg, self.version)
        return len(self._complete)

    def abandon(self) -> int:
        """On rank 0: cancel groups in progress and save the complete ones to disk; return the number saved. Engines may
        then sleep, and :attr:`position` is before all of these groups."""
        if self._window is None:
            return 0
        complete = {group.prompt.prompt_id: group for group in self._window.abandon()}
        self._complete |= complete
        self._prompts.position = self._position
        end = time.monotonic() + self.cfg.engine.update_s
        while any(client.num_running for client in self._fleet.clients) and time.monotonic() < end:
            time.sleep(_LOOK_S / 10)
        return unfinished.save(self.cfg, self.version, list(self._complete.values()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._agents is not None:  # on rank 0; needs a running fleet
            self._fleet.sync(self._agents.close(), self.cfg.engine.update_s)

    def take_metrics(self) -> dict[str, float]:
        """On rank 0: engine events since the last call, and prompts skipped since the start."""
        if self._fleet is None:
            return {}
        metrics = {**self._fleet.take_metrics(), "data/dropped/sum": self._prompts.num_dropped}
        return metrics | self._window.take_metrics() if self.cfg.sampling.window_groups else metrics

    # ---- every rank

    def _sampled(self, produce: Callable[[], Groups | None]) -> Groups | None:
        """Collective: call ``produce`` on rank 0; return its groups there and () on others, or None on all for ().
        Publishes and calls again whenever ``produce`` returns None. Raises its error on every rank."""
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

    def _until(self, poll: Callable[[], Groups | None], deadline_s: float) -> Groups | None:
        """Poll until groups are complete. Returns () if the run should stop, None if replicas wait for weights."""
        end = time.monotonic() + deadline_s
        while (groups := poll()) is None:
            if self._is_asked():
                return ()
            if self.republish is not None and self._fleet.wants_publication:
                return None
            if time.monotonic() > end:
                raise RolloutError("rollouts were not ready in time; see the engines' logs")
        return groups

    def _result(self, sampling: Future[Groups]) -> Groups | None:
        self._fleet.wait_for_any([sampling], _LOOK_S)
        return sampling.result() if sampling.done() else None

    def _next_trainable(self) -> Groups | None:
        groups = self._next_groups()
        self._failed.add(groups or ())
        if groups and self.cfg.algo.router_replay == "rollout":
            require_experts(groups, self.cfg.model)
        require_kept(groups or (), self.cfg.sampling, self.cfg.model)
        return groups

    def _next_groups(self) -> Groups | None:
        if self._recording is not None:
            return self._next_recorded(self._recording)
        self._has_begun = True
        self._window.fill(self.version, num_steps_taken=self.version)
        deadline_s = self._deadline_s(num_rounds=1 + MAX_REFILLS)
        groups = self._until(lambda: self._window.take(self.version, _LOOK_S), deadline_s)
        if not groups:
            return groups
        self._window.fill(self.version, num_steps_taken=self.version + 1)
        self._position = self._window.position
        # Scoring overlaps with sampling; the metric is the time from the last completion to the last score.
        add_seconds("score", max(0.0, self._scored_s - self._sampled_s))
        self._sampled_s = self._scored_s = 0.0
        if not self.cfg.sampling.window_groups:
            self._check_staleness(groups)
        return groups

    def _check_staleness(self, groups: Groups) -> None:
        for group in groups:
            for rollout in group.rollouts:
                oldest = min((c.min_version for c in rollout.completions), default=self.version)
                staleness = self.version - oldest
                if staleness > self.cfg.sampling.max_staleness:
                    raise RolloutError(
                        f"rollout {rollout.name} was sampled {staleness} policy versions ago; at most "
                        f"sampling.max_staleness = {self.cfg.sampling.max_staleness} is allowed. Call next_groups once "
                        "per publication"
                    )

    def _next_recorded(self, recording: dict[int, Path]) -> Groups:
        """Return the recorded groups of the step after the current version, so that replays can resume."""
        if (path := recording.get(self.version + 1)) is None:
            remedy = "Lower num_steps, or record a longer run with more observe.rollouts_gib"
            raise RolloutError(f"{self.cfg.sampling.replay} contains no step {self.version + 1}. {remedy}")
        groups = read_step(path)
        self._position = position_after(group.prompt for group in groups)
        return groups

    # ---- on the fleet's event loop

    async def _training_group(self, prompt: Prompt) -> RolloutGroup:
        """Return the group that an earlier start of the run completed, or sample it."""
        num_completions = self.cfg.sampling.completions_per_prompt
        group = self._complete.pop(prompt.prompt_id, None)
        if group and group.prompt.token_ids == prompt.token_ids and len(group.rollouts) == num_completions:
            return replace(group, prompt=prompt)
        return await self._group(prompt, num_completions, None, timed=True)

    async def _groups(self, prompts: Sequence[Prompt], num_completions: int, temperature: float | None) -> Groups:
        """Sample all groups concurrently; the engines limit the number of running sequences."""
        return tuple(await asyncio.gather(*(self._group(prompt, num_completions, temperature) for prompt in prompts)))

    async def _group(
        self, prompt: Prompt, num_completions: int, temperature: float | None, *, timed: bool = False
    ) -> RolloutGroup:
        seed = seed_of(self.cfg.seed, prompt)
        if self._agents is not None and self._agents.has_agent(prompt):
            rollouts = await asyncio.gather(
                *(
                    self._agents.run_session(prompt, i, seed + i, temperature=temperature)
                    for i in range(num_completions)
                )
            )
            return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))
        with self._requests.timed() if timed else contextlib.nullcontext():
            try:
                completions = await self._requests.ask(prompt.token_ids, num_completions, seed, temperature=temperature)
            except RequestLostError as error:
                return _lost_group(prompt, num_completions, seed, error.summary)
        sampled_s = time.monotonic()
        rollouts = await asyncio.gather(
            *(self._rollout(prompt, i, completion, seed + i) for i, completion in enumerate(completions))
        )
        if timed:
            self._sampled_s, self._scored_s = max(self._sampled_s, sampled_s), time.monotonic()
        return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))

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
        """Limit for all rounds, beyond the deadlines of single calls: each may sample, wait for an update, and score.
        Includes the time to replace one replica that dies and to sample its prompts again."""
        engine, sampling, scoring = self.cfg.engine, self.cfg.sampling, self.cfg.scoring
        num_scores = num_scores or sampling.prompts_per_step * sampling.completions_per_prompt
        score_s = scoring.deadline_s * (1 + num_scores / scoring.num_workers)
        replaced_s = engine.start_s + engine.request_s
        if self._agents is not None:  # rounds of concurrent sessions
            replaced_s += -(-num_scores // self.cfg.session.max_running) * self.cfg.session.deadline_s
        return num_rounds * (engine.request_s + engine.update_s + score_s) + replaced_s


def _lost_group(prompt: Prompt, num_completions: int, seed: int, why: str) -> RolloutGroup:
    """The group of a prompt that cannot be sampled."""
    _log.warning("prompt %s is lost: %s", prompt.prompt_id, why)
    score = Score.failed(why)
    rollouts = [
        Rollout(
            prompt=prompt, index=i, branches=(), reward=0.0, status=score.status, detail=score.detail, seed=seed + i
        )
        for i in range(num_completions)
    ]
    return RolloutGroup(prompt=prompt, rollouts=tuple(rollouts))
