"""Scored completions without an engine."""

import math

import numpy as np

from megatron_fp8rl.types import Completion, Prompt, Rollout, RolloutGroup, single_turn


def make_group(position: int, *, experts: bool = False) -> RolloutGroup:
    """A group of two rollouts with awkward numbers and text."""
    prompt = Prompt(
        prompt_id=f"chain_sum/{position}",
        environment="chain_sum",
        token_ids=(5, 6, 7),
        text="1 + 1 = “?”\n",
        answer="2",
        metadata={"difficulty": {"num_terms": [2, 3]}, "seed": 7},
    )
    routed = np.arange(4 * 2 * 2, dtype=np.uint8).reshape(4, 2, 2) + position if experts else None
    completion = Completion(
        token_ids=(8, 2),
        rollout_logprobs=(-math.pi * 10.0**-position, float(np.float32(-0.1))),
        finish_reason="stop",
        min_version=position,
        max_version=position + 1,
        version_spans=((0, position), (1, position + 1)),
        routed_experts=routed,
        text="2",
    )
    return RolloutGroup(
        prompt=prompt,
        rollouts=tuple(
            Rollout(
                prompt=prompt,
                index=index,
                branches=single_turn(prompt, completion),
                reward=0.1 + 0.2,
                status="scored" if index else "score_failed",
                detail="" if index else "timed out",
                seed=2**40 + index,
            )
            for index in range(2)
        ),
    )
