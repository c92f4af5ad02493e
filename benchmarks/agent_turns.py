"""Sessions of agents: log-probability differences by turn, and the time of each part.

    python -m benchmarks.agent_turns                                          talk_qwen3_1_7b on this machine's GPU
    python -m benchmarks.agent_turns --config tiny_calculator -- --model.random True --warm_start.steps 0

Runs ``python -m megatron_fp8rl train CONFIG``; options after ``--`` are fields of that configuration. A row has the
mean and the largest |old - rollout| of each turn over all steps. Times count the steps after the first ``--skip``.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import runner
from benchmarks.record import Row, nats
from benchmarks.whole_runs import follow
from megatron_fp8rl import cli
from megatron_fp8rl.observe.metrics import PHASES
from megatron_fp8rl.report.run_data import RunData

_TURN = re.compile(r"mismatch/abs_logprob_diff_turn_(\d+)/mean")
_SESSION = re.compile(r"session/(\w+)/s")


def row_of(run: RunData, skip: int = 1) -> Row | None:
    """The row of a run; None if it has no step after the first ``skip``."""
    steps = [step for step in run.records if step["step"] > 0]
    counted = steps[skip:]
    if not counted:
        return None
    known = dict.fromkeys(key for step in steps for key in step)
    turns = sorted(int(match[1]) for key in known if (match := _TURN.fullmatch(key)))
    session_parts = [match[1] for key in known if (match := _SESSION.fullmatch(key))]

    def median(key: str) -> float:
        return statistics.median(step.get(key) or 0.0 for step in counted)

    def total(key: str) -> float:
        return sum(step.get(key) or 0.0 for step in counted)

    def largest(key: str) -> float:
        return max(step.get(key, 0.0) for step in steps)  # a step may lack a turn

    seconds = total("time/step/s")
    trained = sum(
        step.get("rollout/num_tokens/sum", 0.0) * (1 - step.get("rollout/window_stale_tokens/mean", 0.0))
        for step in counted
    )
    in_model_s = sum(s.get("session/model/s", 0.0) * s.get("rollout/num_completions/sum", 0.0) for s in counted)
    return {
        "num_steps": len(steps),
        "num_counted": len(counted),
        "median_step_s": median("time/step/s"),
        "trained_tokens_per_s": trained / seconds,
        "trainer_waits": total("time/rollouts/s") / seconds,
        "sessions_in_model": in_model_s / seconds,
        "staleness": total("rollout/staleness/mean") / len(counted),
        "length_bias": counted[-1].get("rollout/window_length_bias/mean", 1.0),
        "sessions": median("rollout/num_completions/sum"),
        "turns": median("session/turns/mean"),
        "sampled_tokens": median("rollout/num_tokens/sum"),
        "difference_by_turn": [
            [largest(f"mismatch/abs_logprob_diff_turn_{turn}/{kind}") for kind in ("mean", "max")] for turn in turns
        ],
        "prefill_saved": median("rollout/prefill_saved/mean"),
        "session_s": {part: median(f"session/{part}/s") for part in session_parts},
        "phases_s": {phase: value for phase in PHASES if (value := median(f"time/{phase}/s"))},
        "first_update_s": steps[0].get("time/update/s"),
    }


class AgentTurns(runner.Benchmark):
    name, title, about = "agent_turns", "Sessions of agents", __doc__
    keys = ("config", "fields", "device", "run")

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--config", default="talk_qwen3_1_7b")
        parser.add_argument("--steps", type=int, default=3, help="steps of the run, which is killed after them")
        parser.add_argument(
            "--skip", type=int, default=1, help="first steps that do not count: kernels compile, queues fill"
        )
        parser.add_argument("fields", nargs="*", help="fields of the configuration, after --")

    def settle(self, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        if options.quick:
            options.steps, options.skip = 2, 1
        if not 0 <= options.skip < options.steps:
            parser.error(f"--skip {options.skip}: must be at least 0 and less than --steps {options.steps}")

    def arms(self, options: argparse.Namespace) -> list[Row]:
        return [{"config": options.config, "fields": options.fields}]

    def gpus(self, arm: Row) -> int:
        return 0  # the configuration decides

    def rows_of(self, arm: Row, options: argparse.Namespace, log: Path) -> Iterator[Row]:
        folder = (options.folder / "run").resolve()
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "megatron_fp8rl", "train", options.config, *options.fields]
        command += ["--output_dir", str(folder), "--num_steps", str(options.steps), "--observe.display", "plain"]
        follow(options.config, command, folder, log, options.run_limit_s, until=options.steps)
        row = row_of(RunData(folder), options.skip)
        yield arm | (row or {"error": runner.failure_in(log, options.run_limit_s)})

    def is_wrong(self, row: Row) -> bool:
        """Whether a run in exact mode has differences."""
        cfg = cli.parse_overrides(cli.load_config(row["config"]), row["fields"])
        return cfg.precision.exact is True and any(worst > 0 for _, worst in row.get("difference_by_turn", ()))

    def line(self, row: Row) -> Row:
        seconds = ", ".join(f"{part} {value:.1f}" for part, value in row["session_s"].items())
        return {
            "config": " ".join([row["config"], *row["fields"]]),
            "sessions, turns": f"{row['sessions']:.0f} x {row['turns']:.1f}",
            "sampled tokens": f"{row['sampled_tokens']:,.0f}",
            "prefill saved": f"{row['prefill_saved']:.0%}",
            "mean d by turn": ", ".join(nats(mean) for mean, _ in row["difference_by_turn"]),
            "largest d": nats(max((worst for _, worst in row["difference_by_turn"]), default=None)),
            "a session's seconds": seconds,
            "rollouts s": round(row["phases_s"].get("rollouts", 0.0), 1),
            "update s": round(row["phases_s"].get("update", 0.0), 1),
            "steps": row.get("num_counted", ""),
            "tokens/s": f"{row['trained_tokens_per_s']:,.0f}" if "trained_tokens_per_s" in row else "",
            "trainer waits": f"{row['trainer_waits']:.0%}" if "trainer_waits" in row else "",
            "sessions in the model": f"{row['sessions_in_model']:.0f}" if "sessions_in_model" in row else "",
            "age": f"{row['staleness']:.1f}" if "staleness" in row else "",
            "length bias": f"{row['length_bias']:.2f}" if "length_bias" in row else "",
        }

    def notes(self, rows: Sequence[Row]) -> str:
        return (
            "d: |log-probability of the trainer - of the engine| of a sampled token, in nats; largest step of each "
            "turn. Seconds: medians over the counted steps. tokens/s: trained tokens per second, including waits. "
            "Sessions in the model: mean number of sessions in the engines. Age: mean versions between sampling and "
            "training. Length bias: mean length of trained completions over that of all finished completions."
        )


if __name__ == "__main__":
    sys.exit(runner.main(AgentTurns()))
