"""Jobs side by side on pretended GPUs: what passes, fails, hangs, is cut short, and goes on in the next call."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from benchmarks import __main__ as program
from benchmarks import job_runner, record
from benchmarks.job_runner import JobRunner, States
from benchmarks.jobs import JOBS, Job
from benchmarks.results import Results, locked
from tests.helpers.processes import is_running, until

ROOT = Path(__file__).parents[3]
DO = {
    "pass": "print('RESULT {\"a\": 1}')",
    "fail": "raise ValueError('the rank 3 is wrong')",
    "row": "print('RESULT {\"a\": 1, \"error\": \"no kernel\"}')",
    "meet": (
        "mine, other = Path(sys.argv[2]), Path(sys.argv[3]); mine.write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "while not other.exists(): time.sleep(0.05)"
    ),
    "gpus": "print(os.environ['CUDA_VISIBLE_DEVICES'])",
    "hang": (
        "code = 'import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)'\n"
        "child = subprocess.Popen([sys.executable, '-c', code], start_new_session=True)\n"
        "signal.signal(15, signal.SIG_IGN); Path(sys.argv[2]).write_text(str(child.pid)); time.sleep(600)"
    ),
    "orphan": (
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "Path(sys.argv[2]).write_text(str(child.pid)); time.sleep(6.0)"
    ),
    "second": "if not Path('once').exists(): Path('once').touch(); time.sleep(600)",
    "budget": "print('SKIPPED b: the budget is spent; run the same command again') if float(sys.argv[3]) < 20 else 0",
}  # fmt: skip


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A function that makes a job of a module of its own; the working folder is ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(job_runner, "GRACE_S", 0.5)
    monkeypatch.setattr(job_runner, "_POLL_S", 0.05)
    imports = "import os, signal, subprocess, sys, time\nfrom pathlib import Path\n"

    def make(name: str, what: str, *arguments: str, module: str = "", **options) -> Job:
        module = f"fake_{module or name}".replace(".", "_")
        body = "\n".join(f"    {line}" for line in DO[what].splitlines())
        (tmp_path / f"{module}.py").write_text(f"{imports}if True:\n{body}\n")
        return Job(name=name, module=module, arguments=(what, *arguments), **{"seconds": 1, "limit_s": 200} | options)

    return make


def run(jobs, num_gpus=2, device="GPU", **options) -> JobRunner:
    states = States(Path("jobs.json"), device)
    runner = JobRunner([str(i) for i in range(num_gpus)], states, Path("logs"), **options)
    runner.run(program.queue(jobs, states, []))
    return runner


def statuses(runner: JobRunner) -> dict[str, str]:
    return {outcome.name: outcome.status for outcome in runner.outcomes}


def test_what_passes_is_not_run_again_and_what_fails_comes_last(fake):
    jobs = [fake("a", "fail"), fake("b", "pass"), fake("c", "row")]
    first = run(jobs, 1)
    assert [(o.name, o.status) for o in first.outcomes] == [("a", "failed"), ("b", "passed"), ("c", "failed")]
    notes = [outcome.note for outcome in first.outcomes]
    assert notes == ["ValueError: the rank 3 is wrong", "1 row", "row failed: no kernel"]
    jobs.append(fake("d", "pass"))
    assert [outcome.name for outcome in run(jobs, 1).outcomes] == ["d", "a", "c"]
    states = States(Path("jobs.json"), "GPU")
    assert [job.name for job in program.queue(jobs, states, ["failed"])] == ["a", "c"]
    assert [job.name for job in program.queue(jobs, states, ["b", "c"])] == ["b", "c", "a"]
    assert len(program.queue(jobs, States(Path("jobs.json"), "other GPU"), [])) == 4
    jobs[1] = fake("b", "pass", "--other")
    assert "b" in [job.name for job in program.queue(jobs, states, [])]


def test_jobs_run_in_the_order_in_which_they_are_named(fake):
    jobs = [fake(name, "pass") for name in ("x.a", "x.b", "c", "d")]
    for words, expected in (
        ([], ["x.a", "x.b", "c", "d"]),
        (["--only", "d", "x.*", "c"], ["d", "x.a", "x.b", "c"]),
        (["--only", "x.b", "*", "--skip", "c"], ["x.b", "x.a", "d"]),
    ):
        assert [job.name for job in program.parse(words, jobs).jobs] == expected


def test_light_jobs_share_the_cores_of_their_gpu(fake, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(job_runner.os, "cpu_count", lambda: 64)
    runner = JobRunner(["0", "1"], States(Path("jobs.json"), "GPU"), Path("logs"))
    jobs = [fake("a", "pass", is_light=is_light) for is_light in (False, True)]
    alone, light = (int(runner._environment(job, ["0"])["OMP_NUM_THREADS"]) for job in jobs)
    assert alone == 32 and light == 32 // job_runner.MAX_LIGHT


def test_jobs_run_side_by_side_on_gpus_of_their_own(fake):
    jobs = [fake("a", "meet", "a", "b"), fake("b", "meet", "b", "a"), fake("wide", "gpus", num_gpus=2)]
    jobs += [fake("after", "pass"), fake("too_wide", "pass", num_gpus=3)]
    runner = run(jobs)
    assert statuses(runner) == dict.fromkeys(("a", "b", "wide", "after"), "passed")
    assert {Path("a").read_text(), Path("b").read_text()} == {"0", "1"}
    assert Path("logs/wide.log").read_text().strip() == "0,1"
    assert [outcome.name for outcome in runner.outcomes][2:] == ["wide", "after"]  # nothing overtakes it
    assert runner.left_out == {"too_wide": "needs 3 GPUs"}


def test_jobs_of_one_program_run_side_by_side(fake):
    jobs = [fake("a", "meet", "a", "b", module="same"), fake("b", "meet", "b", "a", module="same")]
    assert statuses(run(jobs)) == {"a": "passed", "b": "passed"}


def test_light_jobs_share_a_gpu_with_each_other_and_with_nothing_else(fake, monkeypatch):
    monkeypatch.setattr(job_runner, "MAX_LIGHT", 2)
    jobs = [fake("a", "meet", "a", "b", is_light=True), fake("b", "meet", "b", "c", is_light=True)]
    jobs += [fake("c", "meet", "c", "d", is_light=True), fake("heavy", "meet", "d", "c")]
    jobs += [fake("wide", "gpus", num_gpus=3)]
    runner = run(jobs, 3)
    assert set(statuses(runner).values()) == {"passed"} and len(runner.outcomes) == 5
    # The third waits for room beside the others: another job wants the second GPU.
    assert [Path(name).read_text() for name in "abcd"] == ["0", "0", "0", "1"]
    assert Path("logs/wide.log").read_text().strip() == "0,1,2"  # each GPU is free once, whatever shared it


def test_light_jobs_take_a_second_gpu_that_nobody_else_wants(fake, monkeypatch):
    monkeypatch.setattr(job_runner, "MAX_LIGHT", 2)
    jobs = [fake(name, "meet", name, "c", is_light=True) for name in "ab"]
    jobs.append(fake("c", "meet", "c", "a", is_light=True))
    assert set(statuses(run(jobs)).values()) == {"passed"}
    assert [Path(name).read_text() for name in "abc"] == ["0", "0", "1"]


def test_light_jobs_leave_a_gpu_alone_that_a_process_keeps(fake, monkeypatch):
    monkeypatch.setattr(job_runner.ProcessTree, "end", _survives)
    jobs = [fake("a", "pass", is_light=True), fake("b", "pass", is_light=True), fake("c", "pass")]
    runner = run(jobs, 1)
    assert runner.left_out == {"c": "a process that cannot be killed keeps its GPU"}
    assert statuses(runner) == {"a": "failed", "b": "failed"}


def _survives(self, grace_s: float) -> None:
    self.wait(grace_s)
    raise RuntimeError("a process outlives SIGKILL")


def test_a_job_beyond_its_limit_is_killed_with_everything_it_started(fake):
    runner = run([fake("a", "hang", "pid", limit_s=15), fake("b", "pass")], 1)
    assert statuses(runner) == {"a": "failed", "b": "passed"}
    assert runner.outcomes[0].note == "no end within its limit of 15 s"
    pid = int(Path("pid").read_text())
    until(lambda: not is_running(pid), "the end of what a job started")


def test_what_a_job_leaves_behind_ends_with_it(fake):
    runner = run([fake("a", "orphan", "pid")], 1)
    assert statuses(runner) == {"a": "passed"}
    pid = int(Path("pid").read_text())
    until(lambda: not is_running(pid), "the end of what a job started")


def test_the_budget_ends_everything_in_time_and_the_next_call_goes_on(fake):
    jobs = [fake("long", "second"), fake("other", "pass", seconds=100), fake("piece", "budget", tail_s=1)]
    started = time.monotonic()
    runner = run(jobs, budget_s=30, end_s=15)
    assert time.monotonic() - started < 30
    assert statuses(runner) == {"long": "cut", "piece": "part"}
    assert runner.left_out["other"].startswith("needs 100 s, ")
    assert statuses(run(jobs)) == {"long": "passed", "other": "passed", "piece": "passed"}


def test_a_stop_request_cuts_what_runs(fake):
    runner = run([fake("a", "hang", "pid"), fake("b", "pass")], 1, is_stopped=lambda: Path("pid").exists())
    assert statuses(runner) == {"a": "cut"} and runner.left_out == {"b": "the time was over"}


def test_the_program_from_its_command_line_to_its_archive(fake, tmp_path, monkeypatch, capsys):
    jobs = [fake("gpu.a", "pass"), fake("gpu.b", "fail"), fake("c", "pass"), fake("big", "pass", min_gpu_gib=100)]
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setattr(program, "visible_gpus", lambda: (["0", "1"], "NVIDIA Test", 80.0))
    monkeypatch.setattr(program.signal, "signal", lambda *_: None)
    assert program.main(["--skip", "c", "--archive", str(tmp_path / "x.tar.gz")], jobs) == 1
    text = capsys.readouterr().out
    assert "benchmarks: 1 failed, 1 passed, 1 not started;" in text and "on 2 NVIDIA Test" in text
    assert "FAILED gpu.b" in text and "ValueError: the rank 3 is wrong" in text.partition("FAILED gpu.b")[2]
    assert "not started, needs GPUs of 100 GiB: big" in text
    names = tarfile.open(tmp_path / "x.tar.gz").getnames()
    assert {f"runs/benchmarks/{n}" for n in ("logs/gpu.b.log", "jobs.json", "summary.txt")} <= set(names)
    assert program.main(["--only", "gpu.a", "c"], jobs) == 0
    assert "passed before: gpu.a" in capsys.readouterr().out
    assert program.main(["--only", "gpu.*", "--gpus", "3"], jobs) == 2
    assert program.main(["--list"], jobs) == 0
    assert "gpu.a" in capsys.readouterr().out
    for wrong in (["--only", "nothing"], ["--budget-s", "20"], ["--gpus", "0"]):
        with pytest.raises(SystemExit):
            program.parse(wrong, jobs)


def test_visible_gpus_are_those_that_cuda_may_use(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-aa, NVIDIA H200, 143771'\necho '1, GPU-bb, NVIDIA H200, 143771'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    names, model, gib = program.visible_gpus()
    assert (names, model) == (["0", "1"], "NVIDIA H200") and 140 < gib < 141
    for given, expected in {"1": ["1"], "GPU-bb,GPU-aa": ["GPU-bb", "GPU-aa"], "": [], "7": []}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
        assert program.visible_gpus()[0] == expected


def _write(folder: Path, number: int) -> None:
    path = folder / "measured.md"
    results = Results(folder / "rows.jsonl", ("n",))
    for i in range(20):
        record.replace(f"s{number}", f"{number}: {i}", path=path)
        results.add({"n": [number, i], "fill": "x" * 20_000})
        with record.turn(path):
            rows = results.rows()
            time.sleep(0.001 * number)  # a table takes time to make: without a turn an older one could come last
            record.replace("table", f"{len(rows)} rows", path=path)


def test_several_processes_write_one_document_and_one_file_of_rows(tmp_path):
    (tmp_path / "measured.md").write_text("# Title\n")
    processes = [multiprocessing.get_context("fork").Process(target=_write, args=(tmp_path, n)) for n in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
    assert [process.exitcode for process in processes] == [0] * 4
    text = (tmp_path / "measured.md").read_text()
    assert all(f"<!-- begin s{n} -->\n{n}: 19\n<!-- end s{n} -->" in text for n in range(4))
    assert len(Results(tmp_path / "rows.jsonl", ("n",)).rows()) == 80
    assert "<!-- begin table -->\n80 rows\n<!-- end table -->" in text


def _hold(path: Path, held: Path) -> None:
    with locked(path):
        held.touch()
        time.sleep(600)


def test_a_lock_that_another_process_keeps_is_named_after_its_deadline(tmp_path):
    path = tmp_path / "measured.md"
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(path, tmp_path / "held"))
    process.start()
    try:
        until((tmp_path / "held").exists, "the other process to hold the lock")
        with pytest.raises(TimeoutError, match=r"measured\.md: another process has held its lock .* for 0\.2 s"):
            with locked(path, deadline_s=0.2):
                pass
    finally:
        process.kill()
        process.join(60)
    with locked(path, deadline_s=10.0), locked(path, deadline_s=0.0):  # it died, and one's own lock is no obstacle
        pass
    with locked(path, deadline_s=10.0):
        pass


def test_every_job_is_a_command_that_its_program_understands():
    assert len({job.name for job in JOBS}) == len(JOBS)
    files = {argument for job in JOBS for argument in job.arguments if argument.startswith("tests/")}
    assert files == {str(p.relative_to(ROOT)) for f in ("gpu", "multi_gpu") for p in ROOT.glob(f"tests/{f}/test_*.py")}
    for job in JOBS:
        assert 0 < job.least_s <= job.seconds <= job.limit_s, job.name
        if job.module == "pytest":
            continue
        parse = importlib.import_module(job.module).parse
        for seconds in (None, 200.0):
            options = parse(job.command(seconds)[3:])
            if isinstance(options, tuple):  # benchmarks.probe: options, and fields of its configuration
                options, overrides = options
                importlib.import_module(job.module).run_config(options, overrides)
            assert job.tail_s is None or seconds is None or options.budget_s == 200 - job.tail_s


def test_tests_run_without_pytest_xdist():
    """A GPU machine may have pytest alone."""
    words = ["pytest", "-q", "--collect-only", "-p", "no:xdist", "-p", "no:cacheprovider", "tests/test_imports.py"]
    found = subprocess.run([sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0 and "test_imports.py::" in found.stdout, found.stdout + found.stderr


def test_every_benchmark_of_the_document_has_a_job():
    text = record.MEASURED.read_text()
    listed = {f"benchmarks.{line.split('`')[1]}" for line in text.splitlines() if line.startswith("| `")}
    assert listed and listed <= {job.module for job in JOBS}
