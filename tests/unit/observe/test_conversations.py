"""A session in the report: who spoke, what is trained, by which version, and for what reward."""

from dataclasses import replace

from megatron_fp8rl.report.conversations import conversation, is_session
from megatron_fp8rl.types import Context, Trajectory
from tests.helpers.rollouts import make_group


def test_a_session_is_told_turn_by_turn():
    rollout = make_group(1).rollouts[1]
    assert not is_session(rollout)
    first = rollout.completions[0]
    asked = rollout.branches[0].segments[0]
    tool = Context(token_ids=(4,) * 9, role="tool", text="<b>5</b>" + "x" * 9000)
    second = replace(
        first, text="five", min_version=2, num_prompt_tokens=40, num_cached_tokens=32, finish_reason="length"
    )
    talk = Trajectory(segments=(asked, first, tool, second))
    session = replace(
        rollout,
        branches=(talk, talk),
        turn_rewards=(0.5, 0.25, 0.0, 1.0),
        reward_parts={"format": 0.125},
        seconds={"model": 3.0, "tools": 1.0, "queue": 0.0},
    )
    page = conversation(session)
    assert is_session(session)
    for text in (
        "policy, turn 1",
        "policy, turn 2",
        "9 tokens, not trained",
        "2 tokens, trained",
        "version 1 to 2",
        "version 2",
        "32 of 40 prompt tokens cached",
        "reward 0.5",
        "reward 1",
        "format 0.125",
        "branch 2 of 2",
        "length",
        "model 3 s, tools 1 s, queue 0 s",
        "width:75.0%",
        "&lt;b&gt;5",
        "6508 characters",
    ):
        assert text in page, text
    assert page.count('class="turn trained"') == 4 and page.count('class="turn"') == 4
    lost = replace(rollout, branches=(), status="score_failed", detail="the agent raised ValueError: <gone>")
    assert is_session(lost) and "ValueError: &lt;gone&gt;" in conversation(lost)
