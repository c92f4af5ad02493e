"""What is recorded reads back equal; damage is named; old steps go when the space is used up."""

import errno
import math
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_fp8rl.observe import recording
from megatron_fp8rl.observe.recording import RolloutWriter, lacks, read_steps, steps_of
from megatron_fp8rl.types import Completion, Context, RolloutGroup, Trajectory, single_turn
from tests.helpers.rollouts import make_group


def write(folder: Path, *steps: int, **options) -> None:
    with closing(RolloutWriter(folder, **options)) as writer:
        for step in steps:
            writer.write(step, [make_group(step)])


def test_groups_read_back_equal_step_by_step(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "_ROWS_TOKENS", 12)  # a table holds one group of two sequences of five tokens
    messages = ({"role": "user", "content": "1 + 1"},)
    asked = replace(make_group(1).prompt, messages=messages)
    rewarded = replace(make_group(1).rollouts[0], prompt=asked, reward_parts={"format": 1.0, "answer": -0.25})
    groups = (make_group(0), RolloutGroup(prompt=asked, rollouts=(rewarded,)), RolloutGroup(prompt=asked, rollouts=()))
    with closing(RolloutWriter(tmp_path)) as writer:
        writer.write(1, groups)
        writer.write(2, [make_group(2)])
    assert list(read_steps(tmp_path)) == [(1, groups), (2, (make_group(2),))]


def test_sessions_of_several_turns_and_branches_read_back_equal(tmp_path):
    whole = make_group(3, experts=True).rollouts[0]
    first, prompt = whole.completions[0], whole.prompt
    second = replace(
        first, token_ids=(9,), rollout_logprobs=(-0.25,), routed_experts=first.routed_experts[:2], text="9"
    )
    asked, told = Context(token_ids=(5, 6, 7), role="prompt", text=prompt.text), Context(token_ids=(4,), role="tool")
    turns = Trajectory(segments=(asked, first, told, second, replace(told, text="unread “€”")))
    bare = replace(second, routed_experts=None, num_prompt_tokens=11, num_cached_tokens=8)
    rewritten = Trajectory(segments=(replace(asked, token_ids=(5, 1)), bare))
    session = replace(
        whole,
        branches=(turns, rewritten),
        turn_rewards=(0.5, 0.0, 0.25),
        turn_order=(0, 2, 1),
        seconds={"model": 0.5, "tools": 1.25},
    )
    lost = replace(whole, index=1, branches=(), status="score_failed", detail="a tool ended")
    group = RolloutGroup(prompt=prompt, rollouts=(session, lost, replace(whole, index=2)))
    with closing(RolloutWriter(tmp_path)) as writer:
        writer.write(1, [group])
    ((_, (actual,)),) = read_steps(tmp_path)
    for read, written in zip(actual.rollouts, group.rollouts, strict=True):
        for ours, theirs in zip(read.completions, written.completions, strict=True):
            np.testing.assert_array_equal(ours.routed_experts, theirs.routed_experts)
    assert _without_experts(actual) == _without_experts(group)


def _without_experts(group: RolloutGroup) -> list:
    """All fields, with the completions' arrays of experts taken out, which have no truth value."""
    segments = [segment for rollout in group.rollouts for branch in rollout.branches for segment in branch.segments]
    bare = [replace(s, routed_experts=None) if isinstance(s, Completion) else s for s in segments]
    return [group.prompt, *bare, *(replace(rollout, branches=()) for rollout in group.rollouts)]


def test_other_programs_read_a_row_for_each_completion(tmp_path):
    import pandas

    write(tmp_path, 1, 2, 3)
    write(tmp_path, first=3)
    table = pandas.read_parquet(tmp_path)  # without what was moved aside
    assert table["reward"].tolist() == [0.1 + 0.2] * 4 and table["step"].tolist() == [1, 1, 2, 2]
    assert table["prompt_id"].tolist()[:2] == ["chain_sum/1"] * 2
    assert [ids.tolist() for ids in table["token_ids"]] == [[8, 2]] * 4


def test_log_probabilities_take_four_bytes_only_where_that_loses_nothing(tmp_path):
    import pyarrow.parquet

    rollout = make_group(0).rollouts[0]
    engine = replace(rollout.completions[0], rollout_logprobs=(float(np.float32(-0.1)), -math.inf))
    group = RolloutGroup(
        prompt=rollout.prompt, rollouts=(replace(rollout, branches=single_turn(rollout.prompt, engine)),)
    )
    with closing(RolloutWriter(tmp_path)) as writer:
        writer.write(1, [group])
        writer.write(2, [make_group(0)])
    types = [pyarrow.parquet.read_schema(path).field("rollout_logprobs").type for path in steps_of(tmp_path).values()]
    assert [str(type_.value_type) for type_ in types] == ["float", "double"]
    assert list(read_steps(tmp_path)) == [(1, (group,)), (2, (make_group(0),))]


def test_routed_experts_read_back_with_their_type_and_values(tmp_path):
    with closing(RolloutWriter(tmp_path)) as writer:
        writer.write(1, [make_group(3, experts=True)])
    ((_, (group,)),) = read_steps(tmp_path)
    want = make_group(3, experts=True).rollouts[0].completions[0].routed_experts
    got = group.rollouts[0].completions[0].routed_experts
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)
    assert not lacks(tmp_path, "routed_experts_layout")
    write(tmp_path, 0)
    assert lacks(tmp_path, "routed_experts_layout")


def test_text_that_has_no_utf_8_is_recorded_as_far_as_it_has(tmp_path):
    rollout = make_group(0).rollouts[0]
    completion = replace(rollout.completions[0], text="a\ud800b\0")
    broken = replace(rollout, branches=single_turn(rollout.prompt, completion))
    with closing(RolloutWriter(tmp_path)) as writer:
        writer.write(1, [RolloutGroup(prompt=rollout.prompt, rollouts=(broken,))])
    ((_, (group,)),) = read_steps(tmp_path)
    assert group.rollouts[0].completions[0].text == "a?b\0"


def test_a_damaged_file_is_named(tmp_path):
    write(tmp_path, 1, 2)
    path = tmp_path / "step_00000002.parquet"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"step_00000002\.parquet does not contain a step's rollouts .*; remove it"):
        list(read_steps(tmp_path))
    with pytest.raises(FileNotFoundError, match="nowhere contains no recorded rollouts"):
        list(read_steps(tmp_path / "nowhere"))


def test_later_steps_of_an_earlier_run_move_aside_and_replace_nothing(tmp_path):
    write(tmp_path, 1, 2, 3)
    (tmp_path / ".step_00000004.parquet.tmp").write_bytes(b"of a run that was killed")
    before = (tmp_path / "step_00000003.parquet").read_bytes()
    write(tmp_path, 3, first=3)
    assert list(steps_of(tmp_path)) == [1, 2, 3]
    write(tmp_path, first=2)
    assert list(steps_of(tmp_path)) == [1]
    kept = ["step_00000002.parquet", "step_00000003.1.parquet", "step_00000003.parquet"]
    assert sorted(path.name for path in (tmp_path / "_cut").iterdir()) == kept
    assert (tmp_path / "_cut" / "step_00000003.parquet").read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def test_the_oldest_steps_but_the_first_are_removed_when_the_space_is_used_up(tmp_path):
    write(tmp_path, 1, 2, 3)
    size = sum(path.stat().st_size for path in steps_of(tmp_path).values()) / 3
    write(tmp_path, 3, 4, first=3, max_gib=3.5 * size / 2**30)
    assert list(steps_of(tmp_path)) == [1, 3, 4] and not list((tmp_path / "_cut").iterdir())
    write(tmp_path, 5, first=5, max_gib=size / 2**30)
    assert list(steps_of(tmp_path)) == [1, 5]  # the newest stays, whatever it takes


def test_a_full_disk_is_named_by_the_next_call(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    writer = RolloutWriter(tmp_path)
    monkeypatch.setattr(recording.os, "fsync", full)
    writer.write(7, [make_group(0)])
    with pytest.raises(OSError, match=r"No space left .*: cannot record the rollouts of step 7.*step_00000007.parquet"):
        writer.close()
    assert not steps_of(tmp_path)
