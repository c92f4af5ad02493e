"""The window of groups that are sampled ahead of the trainer.

Runs on trainer rank 0. Groups are sampled on the fleet's event loop; all else runs on the thread of the training loop.

The window contains ``sampling.max_staleness`` + 1 steps, and a step takes the first groups: training follows the order
of the prompts. With ``sampling.window_groups`` it contains at most that many groups, and a step takes the oldest
complete ones: a long completion delays only its group.

Completions continue across publications. In order, groups are trained at most ``max_staleness`` versions after their
start. With ``window_groups`` a long completion can have older tokens, which are context and not trained
(algo/samples.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_fp8rl.algo.samples import has_signal, version_runs
from megatron_fp8rl.config import AlgoConfig, SamplingConfig
from megatron_fp8rl.types import Prompt, RolloutGroup

if TYPE_CHECKING:
    from megatron_fp8rl.data.prompts import PromptStream
    from megatron_fp8rl.rollout.fleet import Fleet

MAX_REFILLS = 3  # limit of prompts per step with algo.zero_variance "refill", as a multiple of prompts_per_step
_START_S = 60.0  # time for the fleet's event loop to start coroutines


@dataclass(eq=False)
class _Ahead:
    prompt: Prompt
    sampling: Future[RolloutGroup]
    has_signal: bool | None = None  # None until the group is complete


class Window:
    """Groups ahead, in the order of their prompts. ``sample`` returns the scored group of a prompt."""

    def __init__(
        self,
        algo: AlgoConfig,
        sampling: SamplingConfig,
        num_steps: int,
        fleet: Fleet,
        prompts: PromptStream,
        sample: Callable[[Prompt], Coroutine[Any, Any, RolloutGroup]],
    ) -> None:
        self._algo, self._sampling, self._num_steps = algo, sampling, num_steps
        self._fleet, self._prompts, self._sample = fleet, prompts, sample
        self._ahead: list[_Ahead] = []
        self._replaced: list[RolloutGroup] = []  # with zero_variance "refill", since the last step
        self._stale_tokens = 0.0  # fraction of the last step
        self._sampled_lengths: list[float] = []  # mean lengths of complete groups and of those taken
        self._taken_lengths: list[float] = []

    @property
    def position(self) -> Any:
        return position_before(self._prompts.position, [ahead.prompt for ahead in self._ahead])

    def fill(self, version: int, num_steps_taken: int) -> None:
        """Start groups under policy ``version`` until the window is full or contains all remaining steps."""
        sampling = self._sampling
        # A group that starts now is in time for the step that policy version + max_staleness trains.
        last = min(version + 1 + sampling.max_staleness, self._num_steps)
        size = (last - num_steps_taken) * sampling.prompts_per_step
        self._start(min(size, sampling.window_groups or size) - len(self._ahead))

    def take(self, version: int, timeout_s: float) -> tuple[RolloutGroup, ...] | None:
        """Remove and return the groups of a step that policy ``version`` trains; None if they are not complete. Waits
        at most ``timeout_s`` for the next group. Raises the error of a group that could not be sampled."""
        complete = {ahead for ahead in self._ahead if ahead.sampling.done()}
        self._replace_useless(complete)
        count = self._sampling.prompts_per_step
        candidates = self._ahead if self._sampling.window_groups else self._ahead[:count]
        chosen = [ahead for ahead in candidates if ahead in complete][:count]
        groups = tuple(ahead.sampling.result() for ahead in chosen)
        if len(groups) < count:
            self._fleet.wait_for_any([ahead.sampling for ahead in candidates if ahead not in complete], timeout_s)
            return None
        self._ahead = [ahead for ahead in self._ahead if ahead not in chosen]
        self._replaced.clear()
        self._taken_lengths += map(_length, groups)
        runs = [run for g in groups for r in g.rollouts for c in r.completions for run in version_runs(c)]
        oldest = version - self._sampling.max_staleness
        num_stale = sum(length for sampled_by, length in runs if sampled_by < oldest)
        self._stale_tokens = num_stale / max(1, sum(length for _, length in runs))
        return groups

    def abandon(self) -> list[RolloutGroup]:
        """Cancel the groups that are being sampled and empty the window; return the complete ones."""
        complete, self._replaced = self._replaced, []
        for ahead in self._ahead:
            if not ahead.sampling.cancel() and ahead.sampling.exception() is None:
                complete.append(ahead.sampling.result())
        self._ahead = []
        return complete

    def take_metrics(self) -> dict[str, float]:
        """Return the number of waiting groups, the last step's stale tokens, and the length bias since the start."""
        metrics = {
            "rollout/window_complete/sum": sum(ahead.sampling.done() for ahead in self._ahead),
            "rollout/window_stale_tokens/mean": self._stale_tokens,
        }
        if self._taken_lengths and any(self._sampled_lengths):
            bias = statistics.fmean(self._taken_lengths) / statistics.fmean(self._sampled_lengths)
            metrics["rollout/window_length_bias/mean"] = bias
        return metrics

    def _start(self, count: int) -> None:
        prompts = self._prompts.next_prompts(max(0, count))

        async def start() -> list[Future[RolloutGroup]]:  # in one turn of the loop, so that no request ends meanwhile
            return [self._fleet.submit(self._sample(prompt)) for prompt in prompts]

        for prompt, sampling in zip(prompts, self._fleet.submit(start()).result(_START_S), strict=True):
            sampling.add_done_callback(self._note_length)
            self._ahead.append(_Ahead(prompt, sampling))

    def _note_length(self, sampling: Future[RolloutGroup]) -> None:
        if not sampling.cancelled() and sampling.exception() is None:
            self._sampled_lengths.append(_length(sampling.result()))

    def _replace_useless(self, complete: set[_Ahead]) -> None:
        """With ``algo.zero_variance`` "refill", replace complete groups without signal by new groups."""
        if self._algo.zero_variance != "refill":
            return
        for ahead in complete:
            if ahead.has_signal is None:
                ahead.has_signal = has_signal(ahead.sampling.result(), self._algo, self._sampling)
        left = MAX_REFILLS * self._sampling.prompts_per_step - len(self._replaced)
        useless = [ahead for ahead in self._ahead if ahead.has_signal is False][:left]
        self._ahead = [ahead for ahead in self._ahead if ahead not in useless]
        self._replaced += [ahead.sampling.result() for ahead in useless]
        self._start(len(useless))


def _length(group: RolloutGroup) -> float:
    return statistics.fmean([rollout.num_sampled_tokens for rollout in group.rollouts] or [0])


def position_before(position: Any, prompts: Sequence[Prompt]) -> Any:
    """Return the position from which a prompt stream returns ``prompts`` again before it continues at ``position``. A
    position is the number of the next prompt, or {"next": that number, "pending": earlier numbers}. A prompt's id ends
    with its number."""
    if not isinstance(position, dict):
        position = {"next": position, "pending": []}
    numbers = (int(prompt.prompt_id.rpartition("/")[2]) for prompt in prompts)
    following, pending = position["next"], sorted({*position["pending"], *numbers})
    while pending and pending[-1] == following - 1:
        following = pending.pop()
    return {"next": following, "pending": pending} if pending else following
