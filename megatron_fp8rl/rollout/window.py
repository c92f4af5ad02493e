"""A window of groups that are sampled ahead: trained when they are complete, whatever the others need.

In: prompts. Out: the groups of a step, the first that are complete. Runs on trainer rank 0; groups are sampled on the
fleet's event loop.

``rollout.window_groups`` groups are sampled or wait to be trained at a time. A step takes the oldest complete ones, so
that one long answer holds nothing but its own group. No token is older than ``rollout.max_staleness`` policy versions
when it is trained: answers in progress go on over publications, and their tokens that are too old by the end are given,
not trained (algo/samples.py). With ``rollout.partials`` drop they start again instead, and are left out when that has
happened too often: what is trained is then shorter than what was sampled. The metrics say by how much.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_fp8rl.algo.samples import has_signal, version_runs
from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.types import Prompt, RolloutGroup

if TYPE_CHECKING:
    from megatron_fp8rl.rollout.fleet import Fleet

_log = logging.getLogger(__name__)

_MAX_RESTARTS = 3  # of a group, before it is left out


@dataclass(kw_only=True)
class _Ahead:
    """A group that is being sampled, or is complete."""

    prompt: Prompt
    began: int  # policy version when it was asked for; its tokens are not older
    sampling: Future[RolloutGroup]
    num_restarts: int = 0


class Window:
    """``sample`` gives the scored group of a prompt; ``take`` the next prompts."""

    def __init__(
        self,
        cfg: RunConfig,
        fleet: Fleet,
        take: Callable[[int], list[Prompt]],
        sample: Callable[[Prompt], Coroutine[Any, Any, RolloutGroup]],
        forget: Callable[[Iterable[RolloutGroup]], None],
    ) -> None:
        """``forget`` hears of finished groups that are not to be used."""
        self._forget = forget
        self._cfg, self._fleet, self._take, self._sample = cfg, fleet, take, sample
        self._ahead: list[_Ahead] = []
        self._num_restarted = self._num_left_out = 0  # since take_metrics
        self._stale_tokens = 0.0  # of the last step
        self._sampled: list[float] = []  # mean lengths of complete groups since the start, and of trained ones
        self._trained: list[float] = []

    @property
    def pending(self) -> list[Prompt]:
        """Prompts whose groups have not been trained."""
        return [one.prompt for one in self._ahead]

    def fill(self, version: int, num_steps_left: int) -> None:
        """Ask for groups until the window is full, or holds what the steps that are left can train."""
        wanted = min(self._cfg.rollout.window_groups, num_steps_left * self._cfg.rollout.prompts_per_step)
        for prompt in self._take(max(0, wanted - len(self._ahead))):
            self._ahead.append(self._start(prompt, version))

    def publish(self, version: int, num_steps_left: int) -> None:
        """The engines hold a new policy: what cannot be trained any more starts again, and the window is filled."""
        kept: list[_Ahead] = []
        for one in self._ahead:
            if not self._is_lost(one, version):
                kept.append(one)
                continue
            if not one.sampling.cancel() and one.sampling.exception() is None:
                self._forget([one.sampling.result()])
            if one.num_restarts < _MAX_RESTARTS:
                self._num_restarted += 1
                kept.append(self._start(one.prompt, version, one.num_restarts + 1))
                continue
            self._num_left_out += 1
            _log.warning("%s is left out: its group is too late for the %d. time", one.prompt.prompt_id, _MAX_RESTARTS)
        self._ahead = kept
        self.fill(version, num_steps_left)

    def collect(self, version: int, timeout_s: float) -> tuple[RolloutGroup, ...] | None:
        """The groups of a step, if enough are complete within ``timeout_s``; None otherwise. Raises what sampling raised."""
        wanted = self._cfg.rollout.prompts_per_step
        self._refill(version)
        if len(self._ready()) < wanted:
            running = [one.sampling for one in self._ahead if not one.sampling.done()]
            self._fleet.wait_for_any(running, timeout_s)
            self._refill(version)
        if len(ready := self._ready()) < wanted:
            return None
        chosen = ready[:wanted]
        self._ahead = [one for one in self._ahead if one not in chosen]
        groups = tuple(one.sampling.result() for one in chosen)
        runs = [run for g in groups for r in g.rollouts for c in r.completions for run in version_runs(c)]
        oldest = version - self._cfg.rollout.max_staleness
        num_stale = sum(length for sampled_by, length in runs if sampled_by < oldest)
        self._stale_tokens = num_stale / max(1, sum(length for _, length in runs))
        self._trained += map(_length, groups)
        return groups

    def abandon(self) -> None:
        """Withdraw everything; :attr:`pending` stays."""
        for one in self._ahead:
            one.sampling.cancel()

    def take_metrics(self) -> dict[str, float]:
        """What became of groups since the last call, and the bias in length since the start."""
        found = {
            "rollout/window_restarted/sum": self._num_restarted,
            "rollout/window_left_out/sum": self._num_left_out,
            "rollout/window_complete/sum": len(self._ready()),
            "rollout/window_stale_tokens/mean": self._stale_tokens,
        }
        if self._sampled and self._trained:
            sampled = statistics.fmean(self._sampled)
            found["rollout/window_length_bias/mean"] = statistics.fmean(self._trained) / sampled if sampled else 1.0
        self._num_restarted = self._num_left_out = 0
        return found

    def _ready(self) -> list[_Ahead]:
        """Complete groups, oldest first. Raises what sampling one of them raised."""
        ready = [one for one in self._ahead if one.sampling.done() and not one.sampling.cancelled()]
        for one in ready:
            one.sampling.result()
        return sorted(ready, key=lambda one: one.began)

    def _refill(self, version: int) -> None:
        """With ``algo.zero_variance`` refill, replace complete groups that teach nothing."""
        if self._cfg.algo.zero_variance != "refill":
            return
        useless = [one for one in self._ready() if not has_signal(one.sampling.result(), self._cfg)]
        self._forget(one.sampling.result() for one in useless)
        self._ahead = [one for one in self._ahead if one not in useless]
        self._ahead += [self._start(prompt, version) for prompt in self._take(len(useless))]

    def _is_lost(self, one: _Ahead, version: int) -> bool:
        """Whether a group has nothing that may be trained: it is dropped in mid-answer, or has waited too long."""
        if not one.sampling.done():
            return self._cfg.rollout.partials == "drop"
        if one.sampling.exception() is not None:
            return False  # collect raises it
        versions = [c.max_version for r in one.sampling.result().rollouts for c in r.completions]
        return version - max(versions, default=version) > self._cfg.rollout.max_staleness

    def _start(self, prompt: Prompt, version: int, num_restarts: int = 0) -> _Ahead:
        sampling = self._fleet.submit(self._sample(prompt))
        sampling.add_done_callback(self._note_length)
        return _Ahead(prompt=prompt, began=version, sampling=sampling, num_restarts=num_restarts)

    def _note_length(self, sampling: Future[RolloutGroup]) -> None:
        if not sampling.cancelled() and sampling.exception() is None:
            self._sampled.append(_length(sampling.result()))


def _length(group: RolloutGroup) -> float:
    """Mean number of sampled tokens of a group's rollouts."""
    return statistics.fmean([rollout.num_sampled_tokens for rollout in group.rollouts] or [0])


def positions_of(position: Any, pending: Sequence[Prompt]) -> dict[str, Any]:
    """The position of a prompt stream from which these prompts were taken and not trained; the ids tell theirs."""
    before = position if isinstance(position, dict) else {"next": position, "pending": []}
    taken = [int(prompt.prompt_id.rpartition("/")[2]) for prompt in pending]
    return {"next": before["next"], "pending": sorted({*before["pending"], *taken})}
