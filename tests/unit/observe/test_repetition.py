"""Two runs are equal, or the first step, record and field that differ are named."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fp8rl import cli
from megatron_fp8rl.commands import report
from megatron_fp8rl.observe.recording import RolloutWriter
from megatron_fp8rl.report.repetition import compare_results
from megatron_fp8rl.types import Context, RolloutGroup, Trajectory, single_turn
from tests.helpers.rollouts import make_group


def row(step: int, **values: float) -> dict[str, float]:
    times = {"time/step/s": step / 7, "memory/train_allocated/max": 1.0, "rollout/tokens_per_s/mean": 5.0}
    return {"step": step, "reward/score/mean": step / 3, "train/loss/mean": float("nan"), **times, **values}


def group_of(step: int, **changes) -> RolloutGroup:
    """A group whose second rollout has a completion with ``changes``."""
    group = make_group(step, experts=True)
    first, second = group.rollouts
    completion = replace(second.completions[0], **changes)
    return RolloutGroup(
        prompt=group.prompt, rollouts=(first, replace(second, branches=single_turn(group.prompt, completion)))
    )


def write_run(folder: Path, rows, groups=None, config=None, versions=None) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    for name, content in (("config.json", config), ("versions.json", versions)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    if groups:
        with closing(RolloutWriter(folder / "rollouts")) as writer:
            for step, recorded in groups.items():
                writer.write(step, recorded)
    return folder


def difference(tmp_path, a: dict, b: dict) -> list[str]:
    """The lines about two runs that differ, with A and B for their folders."""
    folders = write_run(tmp_path / "a", **a), write_run(tmp_path / "b", **b)
    comparison = compare_results(*folders)
    assert not comparison.is_equal
    return [line.replace(str(folders[0]), "A").replace(str(folders[1]), "B") for line in comparison.lines]


def test_runs_with_other_times_memory_and_speed_are_equal(tmp_path):
    slow = {
        "time/step/s": 9.0,
        "memory/train_allocated/max": 2.0,
        "rollout/tokens_per_s/mean": 1.0,
        "publish/total/s": 3,
    }
    slow |= {"rollout/prefill_saved/sum": 4.0, "rollout/replicas_lost/sum": 1.0, "session/tools/s": 0.5}
    a = write_run(tmp_path / "a", [row(0), row(1)], {1: [group_of(1)]})
    b = write_run(tmp_path / "b", [row(0, **slow), row(1, **slow)], {1: [group_of(1, num_cached_tokens=7)]})
    comparison = compare_results(a, b)
    # Step, reward and loss of two steps; a prompt with 4 texts, 3 tokens and 3 values of metadata; two rollouts with 5
    # values of the rollout, 5 of its prompt, and 29 of its completion: 2 tokens, 2 log-probabilities, 4 of spans, 16
    # experts, 2 versions, no kept entries, the text and the reason of its end.
    assert comparison.is_equal and comparison.lines == (f"equal: {2 * 3 + 10 + 2 * (5 + 5 + 29)} values of 2 steps",)


def test_metrics_alone_are_counted_exactly(tmp_path):
    a, b = (write_run(tmp_path / name, [row(step) for step in range(5)]) for name in "ab")
    assert compare_results(a, b).lines == ("equal: 15 values of 5 steps",)  # step, reward and loss


def test_the_smallest_difference_of_a_metric_is_named_with_its_step_and_both_values(tmp_path):
    rows = [row(0), row(1), row(2, **{"train/grad_norm/max": 0.30000000000000004}), row(3, **{"train/lr/mean": 1.0})]
    others = [row(0), row(1), row(2, **{"train/grad_norm/max": 0.3}), row(3)]
    assert difference(tmp_path, {"rows": rows}, {"rows": others}) == [
        "differs: step 2, metric train/grad_norm/max",
        "  0.30000000000000004 in A",
        "  0.3 in B",
    ]


@pytest.mark.parametrize("other", [{}, {"eval/score/mean": float("nan")}])
def test_a_value_that_only_one_run_has_differs(tmp_path, other):
    lines = difference(tmp_path, {"rows": [row(1, **{"eval/score/mean": 0.5})]}, {"rows": [row(1, **other)]})
    assert lines == ["differs: step 1, metric eval/score/mean", "  0.5 in A", f"  {'nan' if other else 'absent'} in B"]


@pytest.mark.parametrize(
    ("changes", "field", "values"),
    [
        ({"token_ids": (8, 3)}, "token_ids[1]", ("2", "3")),
        ({"token_ids": (8,), "rollout_logprobs": (-0.5,)}, "token_ids, length", ("2", "1")),
        ({"rollout_logprobs": (-0.5, -0.1)}, "rollout_logprobs[0]", ("-0.3141592653589793", "-0.5")),
        ({"finish_reason": "length"}, "finish_reason", ("'stop'", "'length'")),
        ({"text": "3"}, "text", ("'2'", "'3'")),
        ({"max_version": 3}, "max_version", ("2", "3")),
        ({"routed_experts": make_group(2, experts=True).rollouts[0].completions[0].routed_experts},
         "routed_experts[0, 0, 0]", ("1", "2")),
    ],
)  # fmt: skip
def test_a_difference_in_a_rollout_names_the_rollout_and_the_field(tmp_path, changes, field, values):
    recorded = {"rows": [row(1)], "groups": {1: [make_group(0), group_of(1)]}}
    # The metric follows from the rollout, which is named first.
    other = {"rows": [row(1, **{"reward/score/mean": 0.0})], "groups": {1: [make_group(0), group_of(1, **changes)]}}
    first, *both = difference(tmp_path, recorded, other)
    path = f"rollout chain_sum/1#1, branches[0].segments[1].{field}"
    assert (first, both) == (f"differs: step 1, {path}", [f"  {values[0]} in A", f"  {values[1]} in B"])


def test_the_earliest_step_is_named_even_if_its_file_is_read_later(tmp_path):
    groups = {1: [make_group(1)], 2: [make_group(3)], 3: [make_group(3)]}
    rows = [row(step) for step in (1, 2, 3)]
    first, *_ = difference(tmp_path, {"rows": rows, "groups": {**groups, 2: [make_group(2)]}},
                           {"rows": rows, "groups": {**groups, 1: [make_group(1)]}})  # fmt: skip
    assert first.startswith("differs: step 2, recorded prompt 0, prompt_id")


def test_a_session_of_another_number_of_turns_differs_and_its_seconds_do_not(tmp_path):
    group = make_group(1)
    rollout, prompt = group.rollouts[1], group.prompt
    asked = Context(token_ids=prompt.token_ids, role="prompt", text=prompt.text)
    completion = rollout.completions[0]
    told = Context(token_ids=(4,), role="tool", text="4")

    def session(segments, seconds):
        played = replace(rollout, branches=(Trajectory(segments=segments),), seconds={"model": seconds})
        return {"rows": [row(1)], "groups": {1: [RolloutGroup(prompt=prompt, rollouts=(played,))]}}

    one, two = (asked, completion, told), (asked, completion, told, completion)
    assert compare_results(
        write_run(tmp_path / "c", **session(two, 0.5)), write_run(tmp_path / "d", **session(two, 2.5))
    ).is_equal
    first, *_ = difference(tmp_path, session(one, 0.5), session(two, 0.5))
    assert first == "differs: step 1, rollout chain_sum/1#1, branches[0].segments[3]"


def test_a_lost_rollout_and_a_lost_prompt_are_named(tmp_path):
    groups, rows = [make_group(1), make_group(2)], [row(1)]
    whole = {"rows": rows, "groups": {1: groups}}
    lines = difference(tmp_path / "prompts", whole, {"rows": rows, "groups": {1: groups[:1]}})
    assert lines == ["differs: step 1, number of recorded prompts", "  2 in A", "  1 in B"]
    shorter = replace(groups[1], rollouts=groups[1].rollouts[:1])
    lines = difference(tmp_path / "rollouts", whole, {"rows": rows, "groups": {1: [groups[0], shorter]}})
    assert lines == ["differs: step 1, number of recorded rollouts of chain_sum/2", "  2 in A", "  1 in B"]


def test_steps_and_rollouts_of_one_run_alone_are_told_and_are_not_equal(tmp_path):
    rows = [row(step) for step in range(4)]
    lines = difference(tmp_path, {"rows": rows, "groups": {2: [make_group(2)]}}, {"rows": rows[:2]})
    assert lines == [
        "no difference in 6 values of 2 steps, but:",
        "  only A has metrics of 2 steps from 2 to 3",
        "  only A has rollouts of step 2",
    ]


def test_the_warm_start_comes_first(tmp_path):
    a, b = (write_run(tmp_path / name, [row(1, **{"train/lr/mean": lr})]) for name, lr in (("a", 1.0), ("b", 2.0)))
    for folder, loss in ((a, 3.0), (b, 4.0)):
        write_run(folder / "warm_start", [row(1), row(2, **{"train/loss/mean": loss})])
    assert compare_results(a, b).lines[0] == "differs: warm start, step 2, metric train/loss/mean"


def test_what_can_explain_a_difference_is_listed(tmp_path):
    config = {"seed": 1, "name": "one", "output_dir": "x", "num_steps": 4, "precision": {"exact": True}}
    config |= {"sampling": {"max_staleness": 0}, "parallel": {"tensor": 1}, "checkpoint": {"keep": 1}}
    others = {**config, "seed": 2, "name": "other", "output_dir": "y", "num_steps": 8, "checkpoint": {"keep": 2}}
    others |= {"precision": {"exact": False}, "sampling": {"max_staleness": 2}, "parallel": {"tensor": 2}}
    versions = {"packages": {"torch": "2.11.0"}, "gpus": [], "started_unix_s": 1.0, "engine kernel, linears": "A"}
    newer = {**versions, "packages": {"torch": "2.12.0"}, "started_unix_s": 2.0, "engine kernel, linears": "B"}
    a = {"rows": [row(1)], "config": config, "versions": versions}
    b = {"rows": [row(1, **{"train/lr/mean": 1.0})], "config": others, "versions": newer}
    assert difference(tmp_path, a, b)[3:] == [
        "settings and versions that differ:",
        "  seed: 1, 2",
        "  precision.exact: True, False",
        "  sampling.max_staleness: 0, 2",
        "  parallel.tensor: 1, 2",
        "  packages.torch: '2.11.0', '2.12.0'",
        "  engine kernel, linears: 'A', 'B'",
        "sampling.max_staleness is above 0: rollouts are trained in order of arrival, which no run repeats",
        "precision.exact is False: only exact runs repeat on other batches of requests",
    ]


def command(*words) -> int:
    return cli.main([report.COMMAND], ["report", *map(str, words)])


def test_the_command_prints_the_result_and_its_status_tells_it(tmp_path, capsys):
    a, b = (write_run(tmp_path / name, [row(0), row(1)]) for name in "ab")
    other = write_run(tmp_path / "other", [row(0), row(1, **{"train/lr/mean": 1.0})])
    assert (command(a, b), capsys.readouterr().out) == (0, "equal: 6 values of 2 steps\n")
    assert command(a, other) == 1 and "differs: step 1, metric train/lr/mean" in capsys.readouterr().out
    assert not (a / "report.html").exists()


def test_runs_that_cannot_be_compared_are_refused_with_the_folder(tmp_path, capsys):
    a, later = write_run(tmp_path / "a", [row(0)]), write_run(tmp_path / "later", [row(7)])
    for other, text in ((tmp_path / "nothing", "nothing has no metrics.jsonl"), (later, "have no step in common")):
        assert command(a, other) == 2
        told = capsys.readouterr().err
        assert text in told and "report RUN_DIR OTHER_DIR" in told and told.count("\n") == 1
