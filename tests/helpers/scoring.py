"""Scores of many completions at once."""

from collections.abc import Iterable

from megatron_fp8rl.envs.scoring import Score, ScorePool
from megatron_fp8rl.types import Prompt


def score_all(scorer: ScorePool, pairs: Iterable[tuple[Prompt, str]]) -> list[Score]:
    return [future.result() for future in [scorer.submit(prompt, text) for prompt, text in pairs]]
