"""Sessions of several turns: a row of a run whose steps are known."""

import json

from benchmarks import agent_turns
from megatron_fp8rl.report.run_data import RunData

BENCHMARK = agent_turns.AgentTurns()


def steps(tmp_path, *actual, skip=1):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(item) + "\n" for item in actual))
    return agent_turns.row_of(RunData(tmp_path), skip)


def step(number: int, update: float, *turns: float):
    of_turns = {
        f"mismatch/abs_logprob_diff_turn_{i}/{kind}": value
        for i, value in enumerate(turns, 1)
        for kind in ("mean", "max")
    }
    more = {"session/tools/s": 2.0, "session/model/s": 5.0, "session/turns/mean": 2.0, "rollout/num_tokens/sum": 100.0}
    times = {"time/update/s": update, "time/step/s": 2 * update, "time/rollouts/s": 1.0}
    return {"step": number, **times, **more, **of_turns}


def test_a_row_has_the_largest_difference_of_each_turn_and_medians_without_the_first_step(tmp_path):
    row = steps(tmp_path, {"step": 0}, step(1, 30.0, 0.1, 0.2), step(2, 4.0, 0.3), step(3, 6.0, 0.0, 0.1))
    assert row["difference_by_turn"] == [[0.3, 0.3], [0.2, 0.2]]
    assert row["phases_s"] == {"rollouts": 1.0, "update": 5.0} and row["first_update_s"] == 30.0
    assert row["session_s"] == {"tools": 2.0, "model": 5.0}
    assert steps(tmp_path, {"step": 0}, step(1, 30.0)) is None


def test_throughput_is_of_all_counted_steps_together_and_of_trained_tokens_alone(tmp_path):
    sampled = {"rollout/num_completions/sum": 8.0, "rollout/staleness/mean": 3.0}
    actual = [step(1, 30.0), step(2, 30.0), step(3, 1.0) | sampled, step(4, 9.0) | sampled]
    actual[2]["rollout/window_stale_tokens/mean"] = 0.5
    row = steps(tmp_path, {"step": 0}, *actual, skip=2)
    assert row["num_counted"] == 2 and row["median_step_s"] == 10.0 and row["staleness"] == 3.0
    assert row["trained_tokens_per_s"] == (50 + 100) / 20 and row["trainer_waits"] == 2 / 20
    assert row["sessions_in_model"] == (8 * 5.0 + 8 * 5.0) / 20
    assert steps(tmp_path, {"step": 0}, *actual, skip=4) is None
    assert BENCHMARK.line(row | {"config": "c", "fields": []})["largest d"] == ""  # not asked for, so not zero


def test_a_difference_is_wrong_in_exact_mode_alone():
    row = {"config": "tiny_calculator", "fields": ["--precision.exact", "True"], "difference_by_turn": [[0.0, 1e-7]]}
    assert BENCHMARK.is_wrong(row) and not BENCHMARK.is_wrong(row | {"difference_by_turn": [[0.0, 0.0]]})
    assert not BENCHMARK.is_wrong(row | {"fields": ["--precision.exact", "False"]})
