"""The report's table of the highest and lowest rewarded completions."""

import re
from dataclasses import replace

import pytest

from megatron_fp8rl.evaluate import summarize
from megatron_fp8rl.observe.records import write_json
from megatron_fp8rl.report.run_data import RunData
from megatron_fp8rl.report.run_report import _evaluations, _samples_of
from megatron_fp8rl.types import RolloutGroup, single_turn
from tests.helpers.rollouts import make_group


def _group(number: int, text: str) -> RolloutGroup:
    group = make_group(1)
    prompt = replace(group.prompt, prompt_id=f"p/{number}", text=f"question {number}?", answer=f"reference {number}")
    branches = single_turn(prompt, replace(group.rollouts[0].completions[0], text=text))
    rollout = replace(group.rollouts[1], prompt=prompt, branches=branches, reward=number / 100)
    return RolloutGroup(prompt=prompt, rollouts=(rollout,))


def test_twenty_highest_and_twenty_lowest_rewards_with_the_extracted_answers():
    groups = [_group(i, rf"So it is \boxed{{answer {i}}}." if i % 2 else f"plain {i}") for i in range(60)]
    page = _samples_of(7, groups)
    shown = [int(number) for number in re.findall(r"question (\d+)\?", page)]
    assert shown == [*range(59, 39, -1), *range(19, -1, -1)]
    rows = page.split("<tr>")[2:]
    for number, row in zip(shown, rows, strict=True):
        cells = re.findall(r"<code>(.*?)</code>", row)
        assert cells[2] == (f"answer {number}" if number % 2 else "&nbsp;")  # where it is not the whole completion
        assert cells[3] == f"reference {number}"
        assert f">{number / 100:.2f}</td>" in row


@pytest.mark.parametrize(("parts", "kind"), [({"mine": 0.5, "form": 0.5}, ""), ({"math": 0.0}, "bad")])
def test_completions_are_colored_where_the_reward_says_what_is_right(parts, kind):
    group = _group(99, "plain")
    (rollout,) = group.rollouts
    page = _samples_of(7, [replace(group, rollouts=(replace(rollout, reward=1.0, reward_parts=parts),))])
    assert f'<td class="n {kind}">1.00</td>' in page


def test_evaluations_without_a_pass_rate_show_the_reward(tmp_path):
    group = _group(25, "plain")
    (rollout,) = group.rollouts
    group = replace(group, rollouts=(replace(rollout, reward_parts={"mine": 0.2, "form": 0.05}),))
    folder = tmp_path / "evaluations" / "step_3"
    folder.mkdir(parents=True)
    write_json(folder / "eval.json", {"name": "step_3", "step": 3, **summarize([group], [1])})
    page = _evaluations(RunData(tmp_path))
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page)
    assert cells == ["step_3", "chain_sum", "1", "1", "–", "0.250"] and "<img" not in page
