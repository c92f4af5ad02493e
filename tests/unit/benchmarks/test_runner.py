"""What all benchmarks share: arms in processes of their own, rows that are kept, failures that are said."""

import json
import os
import re
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import (
    agent_turns,
    experts,
    layers,
    ledger,
    linears,
    process_tree,
    publish,
    record,
    rollout_speed,
    runner,
)
from megatron_fp8rl.config import ConfigError, Violation

ALL = [
    agent_turns.AgentTurns,
    experts.Experts,
    layers.Layers,
    ledger.Ledger,
    linears.Linears,
    publish.Publish,
    rollout_speed.RolloutSpeed,
]

NO_GPU = pytest.mark.skipif(runner.num_gpus() > 0, reason="says what a machine without a GPU is told")
# Stands for Python: writes two rows for the first arm, for another nothing but an error, and sleeps for the third.
_PRETENDED = """#!/bin/sh
case "$4" in
*first*) echo '{"arm": "first", "value": 1}' > "$5"; echo '{"arm": "first", "error": "no kernel"}' >> "$5";;
*second*) echo "line before"; echo "ValueError: no such thing"; exit 1;;
*) sleep 60;;
esac
"""


class Example(runner.Benchmark):
    name, title, keys, about = "example", "An example", ("arm",), "About it."
    needed = 0

    def arguments(self, parser):
        parser.add_argument("--arm", nargs="+", default=["first"])

    def arms(self, options):
        return [{"arm": arm} for arm in options.arm]

    def gpus(self, arm):
        return self.needed

    def measure(self, arm, options):
        yield arm | {"value": os.environ["TORCHDYNAMO_DISABLE"]}

    def is_wrong(self, row):
        return row["value"] == "wrong"

    def line(self, row):
        return {"arm": row["arm"], "value": row["value"]}


@pytest.fixture
def pretended(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(_PRETENDED)
    python.chmod(0o755)
    monkeypatch.setattr(runner.sys, "executable", str(python))
    return lambda *args: runner.main(Example(), [*args, "--folder", str(tmp_path / "out")])


def test_rows_are_kept_and_failures_are_told(pretended, tmp_path, capsys):
    assert pretended("--arm", "first", "second", "third", "--run-limit-s", "3") == 1
    output = capsys.readouterr().out
    assert "FAILED first: no kernel" in output and "FAILED second: ValueError: no such thing" in output
    assert "FAILED third: no result within 3 s; see" in output and "line before" in output
    (row,) = map(json.loads, (tmp_path / "out" / "example.jsonl").read_text().splitlines())
    assert (row["arm"], row["value"], row["run"]) == ("first", 1, "A") and row["device"] and "stamp" in row
    text = (tmp_path / "out" / "performance.md").read_text()
    assert "## An example" in text and "| A | first | 1 |" in text and "\n- A: 20" in text


def test_what_is_measured_again_has_another_letter_and_the_table_can_be_made_alone(pretended, tmp_path, capsys):
    for _ in range(2):
        pretended()
    path = tmp_path / "out" / "performance.md"
    made = path.read_text()
    assert "| B | first | 1 |" in made and "| A |" not in made  # the newest
    path.unlink()
    capsys.readouterr()
    assert pretended("--table") == 0 and path.read_text() == made and "RESULT" not in capsys.readouterr().out


def test_a_row_that_shows_something_broken_is_an_exit_status(tmp_path, monkeypatch):
    monkeypatch.setattr(Example, "rows_of", lambda self, arm, options, log: [arm | {"value": "wrong"}])
    assert runner.main(Example(), ["--folder", str(tmp_path)]) == 1


@NO_GPU
def test_too_few_gpus_are_an_exit_status(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Example, "needed", 2)
    assert runner.main(Example(), ["--folder", str(tmp_path)]) == 2
    assert "benchmarks.example of first needs 2 GPUs; this machine has 0" in capsys.readouterr().err


def test_a_worker_writes_rows_of_rank_0_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    for rank in "10":
        monkeypatch.setenv("RANK", rank)
        assert runner.main(Example(), ["--worker", '{"arm": "x"}', str(tmp_path / "rows")]) == 0
    assert (tmp_path / "rows").read_text() == '{"arm": "x", "value": "1"}\n'


def test_the_reason_of_a_refusal_is_the_last_exception_of_its_log():
    log = "replica died; its log ends with\n  File x, line 3\nValueError: first\nRuntimeError: no such kernel\nbye"
    assert runner.reason(RuntimeError(log)) == "RuntimeError: RuntimeError: no such kernel"
    log = "bucket 1: status 500\n(Worker) x.UnwritableKernel: a.weight: why\nvllm.EngineDeadError: it died"
    assert runner.reason(RuntimeError(log)) == "RuntimeError: UnwritableKernel: a.weight: why"
    assert runner.reason(ValueError("linear_backend = 'x': cannot be read")).endswith("cannot be read")


def test_the_failure_of_a_configuration_has_its_mistakes(tmp_path):
    log = tmp_path / "log"
    error = ConfigError([Violation("--seed", -1, "is below 0", "Raise it"), Violation("--x", 2, "is odd", "Lower it")])
    log.write_text(f"begin\npython -m megatron_fp8rl: {error}\n\nValueError: later\n")
    assert runner.failure_in(log, 1.0) == (
        "python -m megatron_fp8rl: 2 mistakes in the configuration: "
        "1. --seed = -1: is below 0. Raise it. 2. --x = 2: is odd. Lower it."
    )
    log.write_text("begin\n  x.EngineError: it died\n  1. a list\n")
    assert runner.failure_in(log, 1.0) == "x.EngineError: it died"


def test_the_page_is_generated_from_the_rows():
    text = record.PAGE.read_text(encoding="utf-8")
    names = re.findall(r"<!-- begin (\w+) -->", text)
    assert names
    for benchmark in (program() for program in ALL if program.name in names):
        rows = record.Results(record.KEPT / f"{benchmark.name}.jsonl", benchmark.keys).rows()
        shown = record.not_superseded(benchmark.name, rows)
        assert runner.section(benchmark, shown) in text and f"<!-- end {benchmark.name} -->" in text


@pytest.mark.parametrize("program", ALL)
def test_programs_explain_themselves(program, capsys):
    with pytest.raises(SystemExit) as end:
        runner.main(program(), ["--help"])
    assert end.value.code == 0 and "--run-limit-s" in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        runner.parse(program(), ["--no-such-option"])
    assert end.value.code == 2


@NO_GPU
@pytest.mark.parametrize("program, args", [(linears.Linears, ["--quick"]), (publish.Publish, ["--layout", "tp2+tp2"])])
def test_without_a_gpu_real_models_are_refused(program, args, tmp_path, capsys):
    assert runner.main(program(), [*args, "--folder", str(tmp_path)]) == 2
    assert "GPU" in capsys.readouterr().err and not list(Path(tmp_path).glob("*.jsonl"))


def test_what_a_command_has_started_ends_with_it(tmp_path):
    """Includes a descendant that leads a session and ignores SIGTERM, after the command has ended."""
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(100)"
    )
    script = f'{sys.executable} -c "{deaf}" & setsid {sys.executable} -c "{deaf}" & sleep 2; echo ended'
    log = tmp_path / "log"
    assert process_tree.run_logged(["sh", "-c", script], log, 30.0)
    assert log.read_text().count("deaf") == 2 and "ended" in log.read_text()
    left = [process for process in psutil.process_iter(["cmdline"]) if deaf in (process.info["cmdline"] or [])]
    assert not left
    assert not process_tree.run_logged(["sleep", "30"], log, 0.5)


@pytest.mark.slow
@NO_GPU
def test_a_whole_benchmark_on_this_machine(tmp_path):
    assert runner.main(ledger.Ledger(), ["--quick", "--arm", "bf16", "fp8", "--folder", str(tmp_path)]) == 0
    rows = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [(row["arm"], row["steps"], row["run"]) for row in rows] == [("bf16", 2, "A"), ("fp8", 2, "A")]
    text = (tmp_path / "performance.md").read_text()
    assert "| A | tiny, 2 layers" in text and all(row["phases_s"]["update"][0] > 0 for row in rows)
