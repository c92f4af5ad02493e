"""Ends a run whose completions get no scores: a reward, an agent or a server of a judge fails nearly always. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_fp8rl.types import Rollout, RolloutGroup

_MAX_SHARE = 0.95  # "nearly all" of the completions of a batch
_MIN_COMPLETIONS = 64  # fewer failures could be those of one difficult prompt
_MIN_BATCHES = 3  # in succession, if earlier completions were scored: a server may be away for a moment


class TooManyFailedError(RuntimeError):
    """Nearly no completion gets a score, so that the run learns nothing."""


@dataclass
class _Counts:
    """Of one source of prompts: what was scored so far, and the batches since in which nearly nothing was."""

    num_scored: int = 0
    num_failed: int = 0
    num_batches: int = 0


class FailedScores:
    """Counts completions without a score, by source of prompts."""

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}
        self._reason = ""  # of the last failure

    def add(self, groups: Sequence[RolloutGroup]) -> None:
        """Count the groups of a step or an evaluation. Raises TooManyFailedError if nearly all completions of a source
        fail: from its first completion on, or in several batches in succession."""
        by_source: dict[str, list[Rollout]] = {}
        for group in groups:
            by_source.setdefault(group.prompt.environment, []).extend(group.rollouts)
        for source, rollouts in by_source.items():
            if rollouts:
                self._add(source, rollouts)

    def _add(self, source: str, rollouts: Sequence[Rollout]) -> None:
        counts = self._counts.setdefault(source, _Counts())
        failed = [rollout for rollout in rollouts if rollout.status == "score_failed"]
        if len(failed) <= _MAX_SHARE * len(rollouts):
            self._counts[source] = _Counts(num_scored=counts.num_scored + len(rollouts) - len(failed))
            return
        self._reason = failed[-1].detail
        counts.num_failed += len(failed)
        counts.num_batches += 1
        is_lasting = not counts.num_scored or counts.num_batches >= _MIN_BATCHES
        if is_lasting and counts.num_failed >= _MIN_COMPLETIONS:
            self._raise(f"the last {counts.num_failed} completions of {source} got no score")

    def require_scores(self) -> None:
        """Raise TooManyFailedError if there were completions, but none got a score."""
        num_failed = sum(counts.num_failed for counts in self._counts.values())
        if num_failed and not any(counts.num_scored for counts in self._counts.values()):
            self._raise(f"none of the {num_failed} completions got a score")

    def _raise(self, problem: str) -> None:
        raise TooManyFailedError(
            f"{problem}, the last because {self._reason}. "
            "Correct the reward or the agent, then start the run again: it continues from its last checkpoint"
        )
