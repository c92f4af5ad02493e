"""The ledger: rows of whole runs against figures computed by hand, shapes that do not fit, and one run on a CPU."""

import json
from dataclasses import replace

import pytest

from benchmarks import ledger, ledger_rows, record
from benchmarks.power import PowerMeter
from benchmarks.runner import parse, section
from megatron_fp8rl.config import ConfigError
from megatron_fp8rl.preflight import trainer_memory
from megatron_fp8rl.preflight.memory import GIB, GPUS
from model_configs import dense, qwen3


def test_flops_are_those_of_the_matrices_and_of_causal_attention():
    model = qwen3.qwen3_8b()
    matrices = 36 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288) + 151936 * 4096
    one = ledger_rows.flops(model, [1000.0])
    assert one == pytest.approx(2 * matrices * 1000 + 2 * 36 * 4096 * 1000**2, rel=1e-4)  # norms are counted, too
    assert ledger_rows.flops(model, [1000.0, 1000.0]) == pytest.approx(2 * one)
    experts = ledger_rows.flops(qwen3.qwen3_30b_a3b(), [1.0])
    assert 2 * 2.9e9 < experts < 2 * 3.2e9  # three billion active parameters, the embedding not multiplied
    tied = ledger_rows.flops(dense.qwen3_0_6b(), [1.0])
    assert 2 * 0.59e9 < tied < 2 * 0.61e9


def job(tmp_path, arm="fp8", **fields):
    options = parse(ledger.LEDGER, ["--shape", "tiny", "--arm", arm, "--folder", str(tmp_path)])
    result = ledger.job_of(options, "tiny", arm)
    return replace(result, cfg=replace(result.cfg, output_dir=str(tmp_path / arm), **fields))


def written(tmp_path, arm: str, seconds: list[float]) -> ledger_rows.Job:
    """A run with steps of these seconds."""
    run = job(tmp_path, arm)
    (tmp_path / arm).mkdir()
    zero = {"step": 0, "time/start_engines/s": 20.0, "time/publish/s": 1.0, "time/step/s": 1.0}
    zero |= {
        "time/start_command/s": 1.0,
        "time/start_imports/s": 8.0,
        "time/start_model/s": 2.0,
        "time/compile/s": 30.0,
    }
    steps = [
        {
            "step": i + 1,
            "time/step/s": s,
            "time/update/s": s / 2,
            "time/rollouts/s": s / 4,
            "publish/total/s": 0.1,
            "publish/num_tensors/sum": 25,
            "rollout/num_tokens/sum": 128.0,
            "rollout/length/mean": 16.0,
            "rollout/prompt_length/mean": 9.0,
            "rollout/num_completions/sum": 8.0,
            "mismatch/abs_logprob_diff/mean": 0.01,
        }
        for i, s in enumerate(seconds)
    ]
    steps[0] |= {"time/first_update/s": 32.0 + seconds[0] * 3 / 4, "time/compile/s": 12.0}
    if len(steps) > 2:
        steps[2] |= {"time/compile/s": 1.5}
    lines = "".join(json.dumps(line) + "\n" for line in [zero, *steps])
    (tmp_path / arm / "metrics.jsonl").write_text(lines)
    return run


def test_a_row_leaves_out_the_first_steps_and_those_after_the_last(tmp_path):
    run = written(tmp_path, "fp8", [90.0, 50.0, 4.0, 6.0, 5.0, 99.0])
    row = ledger_rows.row_of(run, PowerMeter(), 5)
    assert row["step_s"] == [5.0, 4.0, 6.0] and row["steps"] == 3 and row["phases_s"]["update"] == [2.5, 2.0, 3.0]
    starts = {"command": 1.0, "imports": 8.0, "engines": 20.0, "model": 2.0, "publish": 1.0}
    assert row["start_s"] == starts and row["first_updates_s"] == [45.0, 25.0]
    phases = {"imports": 9.0, "weights": 2.0, "engines": 20.0, "rollouts": 22.5, "update": 45.0}
    assert row["first_update_s"] == {"total": 99.5, **phases, "other": 1.0}
    assert row["slowest_update_s"] == 25.0 and row["compile_s"] == {"to_step_0": 30.0, "after_step_0": 13.5}
    assert row["tokens_per_s_gpu"] == pytest.approx(128 / 5) and row["sequences"] == 8
    per_token = 3 * ledger_rows.flops(run.cfg.model, [25.0] * 8)
    assert row["update_tflops_gpu"] == pytest.approx(per_token / 2.5 / 1e12)
    assert ledger_rows.row_of(run, PowerMeter(), 2) is None


def rows_of(tmp_path, *runs: tuple[str, str, list[str], float]) -> list[dict]:
    """Rows of runs of (letter, arm, fields, seconds of the last step)."""
    rows = []
    for number, (letter, arm, fields, seconds) in enumerate(runs):
        folder = tmp_path / str(number)
        folder.mkdir()
        row = ledger_rows.row_of(written(folder, arm, [9.0, 9.0, seconds]), PowerMeter(), 3)
        rows.append(row | {"run": letter, "fields": fields, "device": "x", "stamp": record.stamp()})
    return rows


def test_ratios_are_formed_within_one_run_alone(tmp_path):
    rows = rows_of(tmp_path, ("A", "bf16", [], 6.0), ("A", "fp8", [], 4.0), ("B", "fp8", [], 3.0))
    text = section(ledger.LEDGER, rows)
    (of_a,) = [line for line in text.splitlines() if line.startswith("| A") and "| fp8 |" in line]
    (of_b,) = [line for line in text.splitlines() if line.startswith("| B")]
    assert "| 1.5 |" in of_a and "| 2 |" not in of_b
    assert text.count("commit") == 2


def test_a_ratio_is_to_the_fastest_bf16_of_a_run_whatever_its_fields(tmp_path):
    fields = ["--precision.kernels.experts", "deep_gemm"]
    rows = rows_of(tmp_path, ("A", "bf16", [], 6.0), ("A", "bf16", fields, 5.0), ("A", "fp8", [], 4.0))
    lines = [line for line in section(ledger.LEDGER, rows).splitlines() if line.startswith("| A")]
    assert [line.split(" | ")[2] for line in lines] == ["bf16", "bf16 --precision.kernels.experts deep_gemm", "fp8"]
    assert "| 1.25 |" in lines[2]


def test_starts_are_shown_of_rows_that_measured_them(tmp_path):
    rows = rows_of(tmp_path, ("A", "fp8", [], 6.0), ("B", "fp8", [], 3.0))
    text = section(ledger.LEDGER, rows)
    (of_a,) = [line for line in text.splitlines() if line.startswith("| A")]
    assert "to first update | slowest update | compiling after step 0" in text and of_a.endswith("| 39 | 4.5 | 14 |")
    for key in ("first_update_s", "slowest_update_s", "compile_s"):
        del rows[1][key]
    (of_b,) = [line for line in section(ledger.LEDGER, rows).splitlines() if line.startswith("| B")]
    assert of_b.endswith("|  |  |  |")


def test_drafts_are_shown_beside_the_arm_without_them(tmp_path):
    rows = rows_of(tmp_path, ("A", "fp8", [], 6.0), ("A", "drafts", [], 4.0), ("B", "fp8", [], 3.0))
    rows[0] |= {"sampled_tokens_per_s": 1000.0}
    rows[1] |= {"sampled_tokens_per_s": 1500.0, "acceptance": 0.32}
    head, _, plain, drafts, other = [line for line in section(ledger.LEDGER, rows).splitlines() if line[:1] == "|"]
    assert head.endswith("| sampled tokens/s | accepted drafts |")
    assert plain.endswith("| 1,000 |  |") and drafts.endswith("| 1,500 | 32% |") and other.endswith("|  |  |")


def test_arms_take_turns_and_rounds_are_rows_of_their_own(tmp_path):
    args = "--shape tiny --arm bf16 fp8 --rounds 2 --folder".split()
    options = parse(ledger.LEDGER, [*args, str(tmp_path)])
    actual = [(arm["arm"], arm["round"]) for arm in ledger.LEDGER.arms(options)]
    assert actual == [("bf16", 1), ("fp8", 1), ("bf16", 2), ("fp8", 2)] and "round" in ledger_rows.KEYS


def test_a_shape_without_an_exact_form_is_refused_by_name(tmp_path, capsys):
    """The search for a depth that fits also tries two gated delta nets, which keep neither keys nor values."""
    options = parse(ledger.LEDGER, ["--gpu", "h200", "--folder", str(tmp_path)])
    with pytest.raises(SystemExit):
        ledger.planned(options, "qwen3_next", "exact")
    assert "trainer computes gated delta nets in chunks" in capsys.readouterr().err


@pytest.mark.slow
def test_a_shape_that_does_not_fit_is_refused_with_a_depth_that_does(tmp_path, capsys):
    args = ["--plan", "--gpu", "h100", "--shape", "8b_separate", "--arm", "bf16", "--folder", str(tmp_path)]
    with pytest.raises(SystemExit, match="2"):
        ledger.main(args)
    output = capsys.readouterr().err
    assert "8b_separate, bf16" in output and "of 79.1 GiB (H100)" in output
    fits = int(output.rsplit("--layers ", 1)[1].split()[0])
    assert 4 < fits < 20
    assert ledger.main([*args, "--layers", str(fits)]) == 0
    assert f"8b_separate bf16: {fits} layers, 1 trainer ranks, separate" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        ledger.main([*args, "--layers", str(fits + 1)])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(ledger.SHAPES) - {"30b_a3b_eight"}))
def test_every_shape_can_be_planned_for_h200(name, tmp_path):
    options = parse(ledger.LEDGER, ["--gpu", "h200", "--folder", str(tmp_path)])
    shape = ledger.SHAPES[name]
    for arm in ["bf16", "fp8"] if name in ledger._OTHERS else ledger.ARMS:  # GPUs refuse exact runs of some
        if arm == "fp8_deep_gemm" and shape.gpus and not shape.model.is_moe:
            with pytest.raises(ConfigError, match="engine_experts.*the model is dense"):
                ledger.job_of(options, name, arm)
            continue
        actual = ledger.job_of(options, name, arm)
        assert actual.cfg.num_steps > options.steps and actual.cfg.checkpoint.every_steps == 0
        assert actual.cfg.precision.exact == (arm in ("exact", "exact_kv"))
        assert (actual.cfg.engine.kv_cache_dtype == "fp8") == (arm in ("fp8_kv", "exact_kv"))


@pytest.mark.parametrize(
    ("runs", "least", "most"), [("JLNO", 0.985, 1.015), ("M", 0.96, 1.0)], ids=["dense", "mixture"]
)
def test_a_trainer_takes_the_memory_that_the_doctor_predicts(runs, least, most, tmp_path):
    """Present code, and a GPU without running engines during training. Device memory includes allocator fragments."""
    rows = [json.loads(line) for line in (record.KEPT / "ledger.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["run"] in runs]
    assert len(rows) == 2 * len(runs)
    for row in rows:
        options = parse(ledger.LEDGER, ["--gpu", "h200", "--folder", str(tmp_path), "--layers", str(row["layers"])])
        tokens, recompute = row["layout"]["microbatch"], row["layout"]["recompute"]
        fields = f"--optim.max_tokens_per_microbatch {tokens} --optim.recompute {recompute}"
        fields += f" --optim.logprob_chunk_tokens {max(8192, tokens)}"
        options.overrides = [*row["fields"], *fields.split()]
        cfg = ledger.job_of(options, row["shape"], row["arm"]).cfg
        predicted = trainer_memory.worst_rank(cfg, GPUS["h200"], GPUS["h200"].memory_bytes).total_bytes
        assert least < predicted / GIB / row["memory_gib"]["train_device"] < most, (row["run"], row["arm"])


def test_a_trainer_that_offloads_takes_the_memory_that_the_doctor_predicts(tmp_path):
    """Run U, 48 layers on four GPUs, at its peak: BF16 in the optimizer's step, FP8 in the passes."""
    rows = [json.loads(line) for line in (record.KEPT / "ledger.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["run"] == "U"]
    assert len(rows) == 2
    for row in rows:
        options = parse(ledger.LEDGER, ["--gpu", "h200", "--folder", str(tmp_path)])
        cfg = ledger.job_of(options, row["shape"], row["arm"]).cfg
        assert cfg.optim.max_tokens_per_microbatch == row["layout"]["microbatch"]
        assert set(cfg.optim.offload) == set(row["layout"]["offload"])
        estimate = trainer_memory.worst_rank(cfg, GPUS["h200"], GPUS["h200"].memory_bytes)
        predicted = estimate.total_bytes - estimate.part("communication, CUDA").num_bytes
        assert predicted / GIB == pytest.approx(row["memory_gib"]["train_allocated"], rel=0.01), row["arm"]


def test_a_mistake_of_the_user_is_named(tmp_path):
    options = parse(ledger.LEDGER, ["--model", str(tmp_path / "none"), "--data", "x.jsonl", "--reward", "math"])
    with pytest.raises(ConfigError, match="is not a folder"):
        ledger.job_of(options, "user", "fp8")


def test_the_history_has_every_run_of_the_shape_with_bf16():
    def row(run, arm, seconds, **more):
        key = {"shape": "8b_colocated", "layers": 36, "completion_tokens": 1024, "fields": []}
        return key | {"run": run, "arm": arm, "step_s": [seconds], "stamp": {"date": "d", "commit": f"c{run}"}} | more

    rows = [row("A", "bf16", 12.0), row("A", "fp8_kv", 8.0), row("B", "fp8_kv", 7.0), row("C", "bf16", 9.0)]
    rows += [row("C", "exact_kv", 6.0), row("D", "bf16", 5.0, completion_tokens=8192), row("E", "bf16", 5.0, layers=20)]
    lines = ledger_rows.history(rows, "8b_colocated", 36, {"A": "a busy host"}).splitlines()
    first, second = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:])
    assert first == ["A", "d", "cA", "12", "8", "1.5", "", "", "a busy host"]
    assert second == ["C", "d", "cC", "9", "", "", "6", "1.5", ""]
