"""Tasksets of the library ``verifiers`` play through the endpoint of a session."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("verifiers", reason="the extra verifiers is not installed")

from megatron_fp8rl.envs.verifiers_door import Tasks
from megatron_fp8rl.types import Completion
from tests.helpers.sessions import TOKENIZER, Engine, config, play, prompt

FILE = str(Path(__file__).parents[2] / "helpers" / "verifiers_tasks.py")


def test_tasks_are_problems():
    problem = Tasks(taskset=FILE).make_problem(81 + 10)
    assert (problem.question, problem.answer, problem.metadata) == ("1+1=", "2", {"task": 10})


@pytest.mark.skipif(shutil.which("uv") is None, reason="the library runs its chat programs by uv")
def test_a_single_turn_task_gives_its_reward():
    cfg = config("megatron_fp8rl.envs.verifiers_door:rollout", deadline_s=250.0)
    (source,) = cfg.data.environments
    source = replace(source, agent_options={"taskset": FILE})
    cfg = replace(cfg, data=replace(cfg.data, environments=(source,), score_variables=("UV_CACHE_DIR", "UV_DEFAULT_INDEX")))
    rollouts = play(cfg, prompt(0, task=10), prompt(1, task=11), engines=[Engine(lambda text: "2")])
    assert [one.reward for one in rollouts] == [1.0, 0.0], [one.detail for one in rollouts]
    assert [one.reward_parts for one in rollouts] == [{"right": 1.0}, {"right": 0.0}]
    for one in rollouts:
        (branch,) = one.branches
        assert isinstance(branch.segments[1], Completion) and branch.segments[1].text == "2"
    assert TOKENIZER.decode(rollouts[0].branches[0].token_ids) == "<bos>1+1=2<eos>"
