"""Sessions of several turns: a row of a run whose steps are known."""

from __future__ import annotations

import json

from benchmarks import agent_turns
from megatron_fp8rl.report.run_data import RunData

BENCHMARK = agent_turns.AgentTurns()


def steps(tmp_path, *found):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
    return agent_turns.row_of(RunData(tmp_path))


def step(number: int, update: float, *turns: float):
    of_turns = {f"mismatch/abs_logprob_diff_turn_{i}/{kind}": value for i, value in enumerate(turns, 1) for kind in ("mean", "max")}
    return {"step": number, "time/update/s": update, "session/tools/s": 2.0, "session/turns/mean": 2.0, **of_turns}


def test_a_row_has_the_largest_difference_of_each_turn_and_medians_without_the_first_step(tmp_path):
    row = steps(tmp_path, {"step": 0}, step(1, 30.0, 0.1, 0.2), step(2, 4.0, 0.3), step(3, 6.0, 0.0, 0.1))
    assert row["difference_by_turn"] == [[0.3, 0.3], [0.2, 0.2]]
    assert row["phases_s"] == {"update": 5.0} and row["first_update_s"] == 30.0 and row["session_s"] == {"tools": 2.0}
    assert steps(tmp_path, {"step": 0}, step(1, 30.0)) is None


def test_a_difference_is_wrong_in_exact_mode_alone():
    row = {"config": "tiny_calculator", "fields": ["--precision.exact", "True"], "difference_by_turn": [[0.0, 1e-7]]}
    assert BENCHMARK.is_wrong(row) and not BENCHMARK.is_wrong(row | {"difference_by_turn": [[0.0, 0.0]]})
    assert not BENCHMARK.is_wrong(row | {"fields": ["--precision.exact", "False"]})
