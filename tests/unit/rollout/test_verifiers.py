"""Tasksets of the library ``verifiers`` play through the endpoint of a session."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("verifiers", reason="the extra verifiers is not installed")

from megatron_fp8rl.config import RunConfig, ScoringConfig
from megatron_fp8rl.envs.libraries.verifiers import Tasks
from megatron_fp8rl.rollout.agents.agent_process import load_problem
from megatron_fp8rl.types import Completion
from tests.helpers.chat_templates import format_of
from tests.helpers.sessions import TOKENIZER, Engine, config, play, prompt

HELPERS = Path(__file__).parents[2] / "helpers"
FILE, COUNTER = str(HELPERS / "verifiers_tasks.py"), str(HELPERS / "verifiers_counter.py")
QWEN = format_of("qwen3")


def of_taskset(file: str, **more) -> RunConfig:
    """Sessions of 4,000 tokens, with Qwen3's template and its tool calls."""
    cfg = config(
        "megatron_fp8rl.envs.libraries.verifiers:rollout", deadline_s=250.0, max_tokens=4000, tool_parser="hermes"
    )
    (source,) = cfg.data.environments
    source = replace(source, agent_options={"taskset": file, **more})
    data = replace(cfg.data, environments=(source,))
    return replace(cfg, data=data, model=replace(cfg.model, max_position_embeddings=4000))


def test_tasks_are_problems():
    problem = Tasks(taskset=FILE).make_problem(81 + 10)
    assert (problem.question, problem.answer, problem.metadata) == ("1+1=", "2", {"task": 10})


def test_a_single_turn_task_gives_its_reward():
    cfg = config("megatron_fp8rl.envs.libraries.verifiers:rollout", deadline_s=250.0)
    (source,) = cfg.data.environments
    source = replace(source, agent_options={"taskset": FILE})
    cfg = replace(cfg, data=replace(cfg.data, environments=(source,)))
    rollouts = play(cfg, prompt(0, task=10), prompt(1, task=11), engines=[Engine(lambda text: "2")])
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0], [rollout.detail for rollout in rollouts]
    assert [rollout.reward_parts for rollout in rollouts] == [{"right": 1.0}, {"right": 0.0}]
    for rollout in rollouts:
        (branch,) = rollout.branches
        assert isinstance(branch.segments[1], Completion) and branch.segments[1].text == "2"
    assert TOKENIZER.decode(rollouts[0].branches[0].token_ids) == "<bos>1+1=2<eos>"


def test_a_tool_that_keeps_a_state_is_called_over_several_turns():
    def answer(told: str) -> str:
        if "the counter shows 5" in told:
            return "done"
        number = 3 if "the counter shows 2" in told else 2
        return f'<tool_call>\n{{"name": "counter_add", "arguments": {{"number": {number}}}}}\n</tool_call>'

    (rollout,) = play(of_taskset(COUNTER), prompt(0, task=3), engines=[Engine(answer, chat=QWEN)], chat=QWEN)
    assert rollout.reward == 1.0 and rollout.reward_parts == {"reached": 1.0}, rollout.detail
    (branch,) = rollout.branches
    assert [segment.text for segment in branch.segments if isinstance(segment, Completion)] == [
        answer(""),
        answer("the counter shows 2"),
        "done",
    ]
    assert "the counter shows 5" in QWEN.tokenizer.decode(branch.token_ids)


def test_a_task_that_reaches_a_limit_of_the_session_is_truncated():
    call = '<tool_call>\n{"name": "counter_add", "arguments": {"number": 1}}\n</tool_call>'
    cfg = of_taskset(COUNTER)
    cfg = replace(cfg, session=replace(cfg.session, max_turns=2))
    (rollout,) = play(cfg, prompt(0, task=3), engines=[Engine(lambda told: call, chat=QWEN)], chat=QWEN)
    assert (rollout.status, rollout.reward, len(rollout.completions)) == ("truncated", 0.0, 2), rollout.detail
    assert "it has taken 2 turns (--session.max_turns)" in rollout.detail


def test_of_a_simulated_user_nothing_is_trained():
    def answer(told: str) -> str:
        if "role-playing a USER" in told:
            return "###DONE###" if "That is 2." in told else "What is 1+1?"
        return "That is 2."

    told = {"persona": "You are role-playing a USER who wants to know: {scenario} Say {done} at the end."}
    cfg = of_taskset(FILE, env="user-sim", env_options=told)
    (rollout,) = play(cfg, prompt(0, task=10), engines=[Engine(answer, chat=QWEN)], chat=QWEN)
    assert rollout.status == "scored", rollout.detail
    (branch,) = rollout.branches
    assert [segment.text for segment in branch.segments if isinstance(segment, Completion)] == ["That is 2."]
    assert "role-playing a USER" not in QWEN.tokenizer.decode(branch.token_ids)


NESTED = """
import verifiers.v1 as vf


class NestedConfig(vf.TasksetConfig):
    numbers: dict[str, list[int]] = {"first": [1], "second": [1]}


class NestedData(vf.TaskData):
    answer: str = ""


class NestedTask(vf.Task[NestedData]):
    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)


class Nested(vf.Taskset[NestedTask, NestedConfig]):
    def load(self):
        first, second = self.config.numbers["first"], self.config.numbers["second"]
        return [
            NestedTask(NestedData(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task)
            for a in first
            for b in second
        ]


__all__ = ["Nested"]
"""


def test_options_of_a_taskset_may_be_nested(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))  # removed after the test, with what the taskset adds
    file = tmp_path / "nested_sums.py"
    file.write_text(NESTED)
    options = {"numbers": {"first": [2, 3], "second": [5]}}
    problems = [Tasks(taskset=str(file), options=options).make_problem(index) for index in range(2)]
    assert [(problem.question, problem.answer) for problem in problems] == [("2+5=", "7"), ("3+5=", "8")]
    assert Tasks(taskset=str(file)).make_problem(0).question == "1+1="
    cfg = of_taskset(str(file), options=options)
    (rollout,) = play(cfg, prompt(0, task=1), engines=[Engine(lambda told: "8", chat=QWEN)], chat=QWEN)
    assert rollout.reward == 1.0 and rollout.reward_parts == {"right": 1.0}, rollout.detail


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("math.py", "math is also the name of another module, which Python imports: rename"),
        ("harbor.py", "harbor is also the name of another module"),
        ("My-Sums.py", r"the library looks for my_sums.py instead of My-Sums.py: rename the file"),
        ("missing.py", "missing.py of the taskset does not exist"),
    ],
)
def test_a_file_that_the_library_would_not_import_is_refused(tmp_path, monkeypatch, name, expected):
    monkeypatch.syspath_prepend(str(tmp_path))
    if name != "missing.py":
        (tmp_path / name).write_text(NESTED)
    with pytest.raises(ValueError, match=expected):
        Tasks(taskset=str(tmp_path / name))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, ""),
        ({"env": "user-sim"}, ""),
        ({"env_options": {"agent": {"harness": {"id": "bash"}}}}, ""),
        ({"env": "user-simm"}, "environment 'user-simm' not found"),
        ({"env_options": {"agents": {}}}, "agents"),
        ({"options": {"numbers": 3}}, "numbers"),
    ],
)
def test_a_worker_refuses_environments_and_fields_that_the_library_does_not_have(more, expected):
    fields = {"agent": "megatron_fp8rl.envs.libraries.verifiers:rollout", "options": {"taskset": FILE, **more}}
    actual = load_problem({"tasks": fields}, ScoringConfig())
    assert expected in actual and bool(actual) == bool(expected) and "\n" not in actual
