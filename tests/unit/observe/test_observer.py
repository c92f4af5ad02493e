"""What a run leaves in its folder: after steps, after a resume, after a failure."""

import json
import math
import os
import re
import time
from contextlib import ExitStack
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from observed_run import make_config, make_groups, make_report, observe_run

from megatron_fp8rl.commands.report import write_reports
from megatron_fp8rl.kernels import compile_cache
from megatron_fp8rl.observe import observer as observer_module
from megatron_fp8rl.observe.metrics import UnknownMetricError
from megatron_fp8rl.observe.observer import Observer, StepLog
from megatron_fp8rl.observe.recording import read_steps
from megatron_fp8rl.observe.records import read_json_lines
from megatron_fp8rl.observe.spans import add_seconds, span
from megatron_fp8rl.report import run_report
from megatron_fp8rl.report.compare import compare_runs
from megatron_fp8rl.report.run_report import write_report
from megatron_fp8rl.types import PublishReport, single_turn


def test_a_step_is_one_line_with_everything_that_was_logged(tmp_path):
    groups = make_groups(step=1)
    with Observer(make_config(), True, tmp_path) as observer, observer.step(1) as log:
        with span("update"):
            pass
        add_seconds("generate", 2.0)
        log.groups(groups)
        log.mismatch(make_report(0.01))
        log.publish(
            PublishReport(
                version=1, num_tensors=3, num_fp8_tensors=2, num_bytes=100, seconds=0.5, pause_s=0.1, checksum="ab"
            )
        )
        log.update({"train/loss/mean": math.nan})
    (record,) = read_json_lines(tmp_path / "metrics.jsonl")
    num_tokens = sum(len(r.completions[0].token_ids) for g in groups for r in g.rollouts)
    assert record["step"] == 1
    assert record["reward/score/mean"] == 0.5
    assert record["mismatch/abs_logprob_diff/mean"] == 0.01
    assert record["publish/total/s"] == 0.5
    assert record["time/generate/s"] == 2.0
    assert record["rollout/tokens_per_s/mean"] == num_tokens / 2.0
    assert record["train/loss/mean"] is None  # a gap, since JSON has no NaN
    assert 0 < record["time/update/s"] < record["time/step/s"]
    (details,) = read_json_lines(tmp_path / "details.jsonl")
    assert details["checksum"] == "ab"
    assert [part["label"] for part in details["by_position"]] == ["0", "1", "2-3"]
    assert list(read_steps(tmp_path / "rollouts")) == [(1, groups)]
    assert json.loads((tmp_path / "config.json").read_text())["name"] == "observed"
    assert "matplotlib" not in json.loads((tmp_path / "versions.json").read_text())["packages"]
    assert json.loads((tmp_path / "done.json").read_text())["step"] == 1


def test_the_first_update_is_timed_from_the_command_and_compiling_in_each_step(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_FP8RL_STARTED", str(time.time() - 50))
    monkeypatch.setenv("MEGATRON_FP8RL_COMPILED", str(tmp_path / "compiled.jsonl"))
    batch = SimpleNamespace(num_loss_tokens=1, num_sequences=1, microbatches=())
    with Observer(replace(make_config(), output_dir=str(tmp_path))) as observer:
        for step in range(3):
            with observer.step(step) as log:
                if step:
                    log.updates([{"train/lr/mean": 1e-3}], [batch])
                if step < 2:
                    compile_cache.note("triton", f"kernel {step}", 2.0 + step)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert 50 < lines[1]["time/first_update/s"] < 100
    assert [line.get("time/compile/s") for line in lines] == [2.0, 3.0, None]
    assert not any("time/first_update/s" in line for line in (lines[0], lines[2]))


def test_a_step_whose_engines_verified_no_draft_has_a_warning(tmp_path):
    cfg = make_config()
    with Observer(replace(cfg, engine=replace(cfg.engine, speculation="mtp")), True, tmp_path) as observer:
        for step in (1, 2):
            (group,) = make_groups(step=step)
            if step == 2:
                rollout = group.rollouts[0]
                drafted = replace(rollout.completions[0], num_draft_tokens=4, num_accepted_tokens=1)
                rollout = replace(rollout, branches=single_turn(rollout.prompt, drafted))
                group = replace(group, rollouts=(rollout,))
            with observer.step(step) as log:
                log.groups([group])
    (details,) = read_json_lines(tmp_path / "details.jsonl")
    assert details["step"] == 1 and "verified no draft" in details["warnings"][0]


def test_means_over_several_updates_are_means_over_their_tokens(tmp_path):
    """Updates of 1 and 3 tokens whose ratios are 4, and 1, 2, 3: by hand the mean is 10 / 4."""
    batches = [SimpleNamespace(num_loss_tokens=n, num_sequences=1, microbatches=()) for n in (1, 3)]
    rows = [
        {"loss/update_ratio/mean": 4.0, "loss/update_ratio/max": 4.0, "train/lr/mean": 1e-3},
        {"loss/update_ratio/mean": 2.0, "loss/update_ratio/max": 3.0, "train/lr/mean": 3e-3},
    ]
    log = StepLog(SimpleNamespace(), 1)
    log.updates(rows, batches)
    assert log.metrics["loss/update_ratio/mean"] == 2.5
    assert log.metrics["loss/update_ratio/max"] == 4.0
    assert log.metrics["train/lr/mean"] == pytest.approx(2e-3)
    assert (log.metrics["train/num_updates/sum"], log.metrics["train/num_tokens/sum"]) == (2, 4)


def test_unknown_metrics_are_refused_at_once(tmp_path):
    with pytest.raises(UnknownMetricError, match="'reward/scores/mean'"), Observer(make_config(), True, tmp_path) as o:
        with o.step(1) as log:
            log.update({"reward/scores/mean": 1.0})


def test_a_resumed_run_drops_what_came_after_and_goes_on(tmp_path):
    observe_run(tmp_path, steps=range(1, 6))
    before = read_json_lines(tmp_path / "metrics.jsonl")
    observe_run(tmp_path, steps=range(4, 8))
    after = read_json_lines(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in after] == [1, 2, 3, 4, 5, 6, 7]
    assert after[:3] == before[:3]
    assert [step for step, _ in read_steps(tmp_path / "rollouts")] == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(ValueError, match="step 7 after step 7"), Observer(make_config(), True, tmp_path) as observer:
        for _ in range(2):
            with observer.step(7):
                pass


def test_a_resumed_run_keeps_the_step_that_it_resumes_after(tmp_path):
    observe_run(tmp_path, steps=range(1, 6))
    before = read_json_lines(tmp_path / "metrics.jsonl")
    with Observer(make_config(), True, tmp_path) as observer:
        with observer.prelude(3) as log:
            log.update({"eval/pass_rate/mean": 0.9})
        with observer.step(4) as log:
            log.update({"eval/pass_rate/mean": 0.8})
    after = read_json_lines(tmp_path / "metrics.jsonl")
    assert after[:3] == before[:3]
    assert [(record["step"], record["eval/pass_rate/mean"]) for record in after[3:]] == [(4, 0.8)]
    assert [step for step, _ in read_steps(tmp_path / "rollouts")] == [1, 2, 3]


def test_an_error_is_told_even_if_its_record_cannot_be_written(tmp_path, monkeypatch, capsys):
    real = observer_module.write_json

    def full(path, content):
        if path.name == "failure.json":
            raise OSError(28, "No space left on device", str(path))
        real(path, content)

    monkeypatch.setattr(observer_module, "write_json", full)
    cfg = make_config()
    cfg = replace(cfg, observe=replace(cfg.observe, display="plain"))
    with pytest.raises(RuntimeError, match="what ended the run"), Observer(cfg, True, tmp_path) as observer:
        with observer.step(1):
            raise RuntimeError("what ended the run")
    output = capsys.readouterr()
    assert "failure.json could not be written: [Errno 28]" in output.out + output.err


@pytest.mark.parametrize("name", ["metrics.jsonl", "details.jsonl"])
def test_a_full_disk_is_told_with_the_file(tmp_path, name):
    """Also if closing the file fails again, because its buffer is still full."""
    with pytest.raises(OSError, match="No space left on device: cannot write") as error:
        with Observer(make_config(), True, tmp_path) as observer, observer.step(1) as log:
            observer._files[name].close()
            observer._files[name] = open("/dev/full", "w")  # noqa: SIM115  closed by the observer
            log.details["warnings"] = ["something"]
    assert error.value.filename == str(tmp_path / name)


def test_a_full_disk_is_told_with_tensorboards_folder(tmp_path, monkeypatch):
    from torch.utils.tensorboard import SummaryWriter

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SummaryWriter, "flush", full)
    with pytest.raises(OSError, match="No space left on device: cannot write") as error:
        with Observer(make_config(), True, tmp_path) as observer, observer.step(1):
            pass
    assert error.value.filename == str(tmp_path / "tensorboard")


@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_killed_between_a_checkpoint_and_its_steps_line_writes_the_line_when_it_goes_on(tmp_path, is_there):
    observe_run(tmp_path, steps=range(1, 4 if is_there else 3))
    before = read_json_lines(tmp_path / "metrics.jsonl")
    with Observer(make_config(), True, tmp_path) as observer:
        log = StepLog(observer, 3)
        log.update({"train/loss/mean": 0.5, "train/entropy/mean": float("nan")})
        log.details["warnings"] = ["one"]
        record = log.record()  # as a checkpoint keeps it
        with observer.prelude(3, record) as log:
            log.update({"eval/pass_rate/mean": 0.9})
    after = read_json_lines(tmp_path / "metrics.jsonl")
    if is_there:
        assert after == before
        return
    assert after[:2] == before
    assert after[2] == {"step": 3, "train/loss/mean": 0.5, "eval/pass_rate/mean": 0.9}
    assert read_json_lines(tmp_path / "details.jsonl")[-1] == {"step": 3, "warnings": ["one"]}


def test_lines_are_on_disk_before_the_checkpoint_that_follows_them(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        os, "fsync", lambda number: synced.append((os.readlink(f"/proc/self/fd/{number}"), os.fstat(number).st_size))
    )
    with Observer(make_config(), True, tmp_path) as observer:
        with observer.step(1) as log:
            log.update({"train/loss/mean": 0.5})
        assert not observer.lacks(1) and observer.lacks(2)
        with observer.step(2) as log:
            del synced[:]
            log.record()  # what a checkpoint of step 2 keeps
            assert (str(tmp_path / "metrics.jsonl"), (tmp_path / "metrics.jsonl").stat().st_size) in synced
            assert synced[0][1] > 0


def test_the_prelude_of_a_new_run_is_step_0(tmp_path):
    with Observer(make_config(), True, tmp_path) as observer, observer.prelude(0) as log:
        log.update({"eval/pass_rate/mean": 0.4})
    (record,) = read_json_lines(tmp_path / "metrics.jsonl")
    assert (record["step"], record["eval/pass_rate/mean"]) == (0, 0.4)


def test_tensorboard_holds_the_same_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    observe_run(tmp_path, steps=range(1, 3), cfg=make_config())
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    written = [(event.step, event.value) for event in events.Scalars("reward/score/mean")]
    records = read_json_lines(tmp_path / "metrics.jsonl")
    assert written == [(record["step"], pytest.approx(record["reward/score/mean"])) for record in records]


def test_tensorboard_shows_all_steps_after_the_clock_has_jumped_back(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    true_time = time.time
    for shift_s, steps in ((0, range(1, 5)), (-3600, range(3, 6)), (-86400, range(6, 8)), (60, range(8, 10))):
        monkeypatch.setattr(time, "time", lambda shift_s=shift_s: true_time() + shift_s)
        monkeypatch.setattr(observer_module, "time", time.time)
        observe_run(tmp_path, steps=steps, cfg=make_config())
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward/score/mean")] == [*range(1, 10)]


def test_wandb_that_is_not_installed_is_asked_for_in_plain_words(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)  # makes the import fail
    cfg = make_config()
    cfg = replace(cfg, observe=replace(cfg.observe, wandb_project="p"))
    with pytest.raises(ImportError, match="pip install wandb"), Observer(cfg, True, tmp_path):
        pass


def test_only_the_writer_writes(tmp_path):
    with Observer(make_config(), False, tmp_path / "run") as observer, observer.step(1) as log:
        log.groups(make_groups(step=1))
        log.mismatch(make_report(0.01))
    assert not (tmp_path / "run").exists()


class _Links(HTMLParser):
    """Collects what a page would load, and checks that its elements close."""

    def __init__(self):
        super().__init__()
        self.sources, self.open = [], []

    def handle_starttag(self, tag, attributes):
        self.sources += [value for name, value in attributes if name in ("src", "href", "srcset")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_report_stands_alone_and_shows_the_run(tmp_path):
    observe_run(tmp_path, steps=range(1, 5))
    write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    links = _Links()
    links.feed(page)
    assert links.open == []
    assert len(links.sources) >= 10
    assert all(source.startswith("data:image/svg+xml;base64,") for source in links.sources)
    assert "http" not in re.sub(r'src="[^"]*"', "", page)
    for text in (
        "Completions of step 1",
        "Completions of step 4",
        "4 + 4 = ",
        "Largest disagreement",
        "chain_sum/4#0",
        "output_dir",
        "reward/score/mean",
        "the alarm of step 2",
    ):
        assert text in page
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_an_exact_run_has_a_sentence_in_place_of_plots_of_zeros(tmp_path):
    observe_run(tmp_path / "exact", steps=range(1, 4), mismatch=0.0)
    observe_run(tmp_path / "other", steps=range(1, 4))
    sentence = "equal log-probabilities for every token of all 3 measured steps"
    titles = 'alt="Mismatch between', 'alt="Mismatch along', 'alt="Importance weights', "Largest disagreement"
    for name, is_exact in (("exact", True), ("other", False)):
        page = write_report(tmp_path / name).read_text()
        assert (sentence in page) == is_exact and [title in page for title in titles] == [not is_exact] * len(titles)
    assert "0.0e+00" not in (tmp_path / "exact" / "report.html").read_text()


@pytest.mark.parametrize("clipped", [0.0, 0.01])
def test_a_report_has_a_sentence_in_place_of_a_plot_without_clipped_tokens(tmp_path, clipped):
    keys = ("loss/clip_fraction_low/mean", "loss/clip_fraction_high/mean", "reward/zero_variance/mean")
    records = [{"step": step, "train/loss/mean": 0.1 * step} | dict.fromkeys(keys, clipped) for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    page = write_report(tmp_path).read_text()
    for sentence, title in (("No token was clipped.", "Clipped tokens"), ("truncated or without", "Without learning")):
        assert (sentence in page, f'alt="{title}' in page) == (not clipped, bool(clipped))
    assert 'alt="Loss"' in page and '<div class="plots"></div>' not in page


def test_the_time_to_the_first_update_contains_a_warm_start(tmp_path):
    records = [
        {"step": 0, "time/start/s": 90.0, "time/publish/s": 1.0, "time/start_engines/s": 2.0},
        {"step": 1, "time/rollouts/s": 3.0, "time/update/s": 4.0, "time/first_update/s": 100.0},
    ]
    for folder in (tmp_path, tmp_path / "warm_start"):
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert "Start: 100 s from the command to the first update" in write_report(tmp_path).read_text()


@pytest.mark.slow
def test_a_failed_run_has_its_report_and_raises(tmp_path):
    with pytest.raises(RuntimeError, match="down_proj <differs>"):
        observe_run(tmp_path, steps=range(1, 5), fail_at=3)
    write_report(tmp_path)
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert (failure["step"], failure["error"]) == (3, "RuntimeError")
    assert "reward/score/mean" in failure["metrics_of_the_unfinished_step"]
    assert [record["step"] for record in read_json_lines(tmp_path / "metrics.jsonl")] == [1, 2]
    assert not (tmp_path / "done.json").exists()
    page = (tmp_path / "report.html").read_text()
    assert "The run failed in step 3: RuntimeError" in page
    assert "down_proj &lt;differs&gt;" in page
    observe_run(tmp_path, steps=range(3, 5))
    assert not (tmp_path / "failure.json").exists()


def test_a_run_that_fails_before_its_first_step_has_a_report(tmp_path):
    with pytest.raises(RuntimeError, match="no engine"), Observer(make_config(), True, tmp_path):
        raise RuntimeError("no engine")
    write_report(tmp_path)
    assert "The run failed before the first step" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_a_run_that_ends_with_an_error_has_its_report_drawn_by_the_program(tmp_path, monkeypatch, capsys):
    cfg = replace(make_config(), output_dir=str(tmp_path))
    write_reports(cfg)
    assert not capsys.readouterr().err, "a run that never began has no report, and that is no error"
    shown = replace(cfg, observe=replace(cfg.observe, display="plain"))
    Path(cfg.run_dir, "hf").mkdir(parents=True)
    write_reports(shown)
    assert "weights" not in capsys.readouterr().out, "left by a run that was not finished"
    Path(cfg.run_dir, "done.json").write_text("{}")
    write_reports(shown)
    assert f"weights, as a Hugging Face folder: {cfg.run_dir}/hf" in capsys.readouterr().out
    with pytest.raises(RuntimeError), ExitStack() as stack:
        stack.callback(write_reports, cfg)
        observe_run(cfg.run_dir, steps=range(1, 5), fail_at=3)
    assert "The run failed in step 3" in Path(cfg.run_dir, "report.html").read_text()
    monkeypatch.setattr(run_report, "write_report", lambda folder: 1 / 0)
    write_reports(cfg)
    assert "could not be written: ZeroDivisionError" in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="has neither metrics.jsonl nor config.json"):
        write_report(tmp_path)


def test_arms_are_compared_over_seeds(tmp_path):
    for arm, level in (("fp8", 0.02), ("bf16", 0.01)):
        for seed in (1, 2):
            observe_run(tmp_path / f"{arm}{seed}", steps=range(1, 4), mismatch=level * seed)
    runs = [(arm, seed, tmp_path / f"{arm}{seed}") for arm in ("fp8", "bf16") for seed in (1, 2)]
    table = compare_runs(runs, tmp_path / "study").read_text()
    summary = json.loads((tmp_path / "study" / "study.json").read_text())
    cell = summary["fp8"]["mean abs diff"]
    assert cell == {"mean": pytest.approx(0.03), "std": pytest.approx(0.0002**0.5), "num_seeds": 2}
    assert "| fp8 | 2 | " in table and "3.00e-02 ± 1.41e-02" in table
    assert (tmp_path / "study" / "study.png").read_bytes().startswith(b"\x89PNG")
    assert "difference" not in table
    home = tmp_path / "evaluation"
    for arm, seed, folder in runs:
        result = home / "evaluations" / f"{arm}{seed}"
        result.mkdir(parents=True)
        (result / "eval.json").write_text(json.dumps({"checkpoint": str(folder / "hf"), "step": 3, "name": arm}))
        passed = (2 if arm == "fp8" else 1) + seed - 1
        rows = [{"prompt_id": f"sums/{i}", "num_passed": passed, "num_completions": 4} for i in range(9)]
        (result / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = compare_runs(runs, tmp_path / "study", home).read_text()
    summary = json.loads((tmp_path / "study" / "study.json").read_text())
    assert summary["fp8"]["accuracy"]["value"] == pytest.approx(2.5 / 4)
    assert summary["bf16"]["difference"] == pytest.approx({"value": -0.25, "low": -0.5, "high": 0.0})
    assert "| arm | accuracy | difference from fp8 |" in table and "| bf16 | 0.375 [0.250, 0.500] | -0.250" in table
    with pytest.raises(FileNotFoundError, match="bf16, seed 9"):
        compare_runs([*runs, ("bf16", 9, tmp_path / "missing")], tmp_path / "study")
