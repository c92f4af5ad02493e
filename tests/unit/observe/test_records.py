"""What is recorded reads back equal, and damage is named."""

import logging
import math

import numpy as np
import pytest

from megatron_fp8rl.observe.records import RolloutWriter, last_step, read_json_lines, read_steps, truncate_from
from megatron_fp8rl.types import Completion, Prompt, Rollout, RolloutGroup


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
    return RolloutGroup(
        prompt=prompt,
        rollouts=tuple(
            Rollout(
                prompt=prompt,
                index=index,
                completion=Completion(
                    token_ids=(8, 2),
                    rollout_logprobs=(-math.pi * 10.0**-position, float(np.float32(-0.1))),
                    finish_reason="stop",
                    min_version=position,
                    max_version=position + 1,
                    version_spans=((0, position), (1, position + 1)),
                    routed_experts=routed,
                    text="2",
                ),
                reward=0.1 + 0.2,
                status="scored" if index else "score_failed",
                detail="" if index else "timed out",
                seed=2**40 + index,
            )
            for index in range(2)
        ),
    )


def test_groups_read_back_equal_step_by_step(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    writer = RolloutWriter(path)
    writer.write(1, [make_group(0), make_group(1)])
    writer.write(2, [make_group(2)])
    writer.close()
    assert list(read_steps(path)) == [(1, (make_group(0), make_group(1))), (2, (make_group(2),))]


def test_routed_experts_read_back_with_their_type_and_values(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    RolloutWriter(path).write(1, [make_group(3, experts=True)])
    ((_, (group,)),) = read_steps(path)
    want = make_group(3, experts=True).rollouts[0].completion.routed_experts
    got = group.rollouts[0].completion.routed_experts
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


def test_a_cut_off_last_line_is_skipped_and_named(tmp_path, caplog):
    path = tmp_path / "rollouts.jsonl"
    RolloutWriter(path).write(1, [make_group(0), make_group(1)])
    path.write_bytes(path.read_bytes()[:-40])
    with caplog.at_level(logging.WARNING):
        assert list(read_steps(path)) == [(1, (make_group(0),))]
    assert f"{path}, line 2 is truncated" in caplog.text


def test_a_damaged_line_is_named(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    RolloutWriter(path).write(1, [make_group(0)])
    path.write_bytes(path.read_bytes() + b'{"step": 2, "prompt": {}}\n')
    with pytest.raises(ValueError, match=r"rollouts\.jsonl, line 2 is not a recorded group"):
        list(read_steps(path))


def test_truncation_keeps_earlier_steps_only_and_drops_a_cut_off_line(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    writer = RolloutWriter(path)
    for step in (1, 2, 3):
        writer.write(step, [make_group(step), make_group(step + 10)])
    writer.close()
    whole = path.read_bytes()
    assert truncate_from(path, 4) == 0
    path.write_bytes(whole + b'{"step": 3, "prom')
    assert truncate_from(path, 4) == len(b'{"step": 3, "prom')
    assert path.read_bytes() == whole
    assert truncate_from(path, 3) > 0
    assert [step for step, _ in read_steps(path)] == [1, 2]
    assert truncate_from(path, 0) > 0
    assert path.read_bytes() == b""
    aside = path.with_suffix(".cut.jsonl").read_bytes()  # nothing is lost
    assert aside.startswith(b'{"step": 3, "prom{"step": 3') and aside.count(b"\n") == whole.count(b"\n")


def test_the_last_step_is_that_of_the_last_whole_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("")
    assert last_step(path) == -1
    path.write_text('{"step": 1}\n{"step": 12, "x": 1}\n{"step": 13, "x"')
    assert last_step(path) == 12


def test_json_lines_name_the_bad_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_json_lines(path)
