"""The rates of a plan are those of the measured rows, and whole steps are predicted within a few percent."""

from dataclasses import replace
from statistics import median

import pytest

from benchmarks.ledger_rows import flops as flops_of_ledger
from benchmarks.planner import against_runs, fit
from megatron_fp8rl.preflight import step_time
from megatron_fp8rl.preflight.memory import GPUS, copied_bytes
from megatron_fp8rl.preflight.trainer_memory import worst_rank
from model_configs import qwen3

RATIOS = {1.32, 1.33, 1.39, 1.41, 1.43, 1.44, 1.56, 1.59}  # BF16 over FP8, measured


def test_stored_rates_are_those_of_the_rows():
    """Least squares would change no rate by more than a hundredth, rates of publications by five."""
    factors = fit.fitted()
    assert len(factors) == 16 and len(fit.decode_equations()) == 10
    for name, factor in factors.items():
        assert factor == pytest.approx(1.0, abs=0.05 if name.startswith(("publish", "kv_scales")) else 0.011), name


def test_passes_for_old_log_probabilities_are_a_third_of_an_update():
    """Run A, the last with such a pass; no rate is fitted to it."""
    of_run = [(row, cfg, lengths) for row, cfg, lengths in fit.known_rows() if row["run"] == "A"]
    for row, cfg, lengths in of_run:
        actual = fit.seconds_with(
            {}, row, replace(cfg, algo=replace(cfg.algo, updates_per_step=2)), lengths
        ).old_logprobs
        assert actual == pytest.approx(median(row["phases_s"]["old_logprobs"]), rel=0.06), row["arm"]
    assert len(of_run) == 2


def test_a_trainer_goes_to_the_host_and_back_as_fast_as_it_did():
    """In run U, all of its state on four GPUs at once; T is of older code."""
    actual = [
        (row, cfg, lengths) for row, cfg, lengths in fit.known_rows() if row["layout"]["offload"] and row["run"] != "T"
    ]
    errors = [fit.seconds_with({}, *row).handover / median(row[0]["phases_s"]["colocated"]) - 1 for row in actual]
    assert len(actual) == 2 and max(map(abs, errors)) < 0.08 and abs(sum(errors)) < 0.01


def test_a_plan_moves_the_bytes_that_the_doctor_counts():
    """A mixture (run U) and a dense model (T). The doctor counts two copies of some weights."""
    gpu = GPUS["h200"]
    actual = [(row, cfg, lengths) for row, cfg, lengths in fit.known_rows() if row["layout"]["offload"]]
    assert len(actual) >= 3
    for row, cfg, lengths in actual:
        moved = (fit.seconds_with({"sleep_s": 0.0}, row, cfg, lengths).handover) * fit.H200.host_bytes_per_s / 2
        counted = sum(copied_bytes(cfg, worst_rank(cfg, gpu, gpu.memory_bytes)).values())
        assert counted == pytest.approx(moved, rel=0.03), (row["run"], row["arm"])


def test_operations_are_those_of_the_ledger():
    model = replace(qwen3.qwen3_8b(), num_layers=20)
    lengths = [900.0, 1500.0, 40.0]
    assert step_time.Flops.of(model, sum(lengths), sum(n * n for n in lengths)).total == flops_of_ledger(model, lengths)


def test_measured_runs_are_met():
    """The errors of the arithmetic; a change that increases them must change these bounds."""
    actual = list(against_runs.comparisons())
    errors = {
        phase: [abs(row.error) for row in actual if row.phase == phase] for phase in {row.phase for row in actual}
    }
    assert len(errors["step"]) >= 17 and len(errors["publish"]) >= 18
    assert median(errors["step"]) < 0.02 and max(errors["step"]) < step_time.largest_step_error() == 0.06
    assert {round(measured, 2) for _, _, measured in against_runs.ratios()} == RATIOS
    assert all(abs(predicted / measured - 1) < 0.05 for _, predicted, measured in against_runs.ratios())
    fitted = [abs(row.error) for row in actual if row.phase == "rollouts" and not row.run.startswith("ledger U,")]
    assert median(fitted) < 0.023 and max(errors["rollouts"]) < 0.08
    assert median(errors["update"]) < 0.011 and median(errors["publish"]) < 0.02
    *others, largest = sorted((abs(row.error), row.run) for row in actual if row.phase == "update")
    # Run W updates six layers on one GPU. The rates come from layers whose experts are on two.
    assert max(others)[0] < 0.07 and largest[0] < 0.17 and largest[1].startswith("ledger W,")


@pytest.mark.parametrize("run", ["M", "Q"])
def test_runs_of_which_no_rate_comes_are_met(run):
    """M, 17 layers of a mixture on four GPUs, and Q, Qwen3-4B on one."""
    actual = [row for row in against_runs.comparisons() if row.run.startswith(f"ledger {run},")]
    errors = {
        phase: [abs(row.error) for row in actual if row.phase == phase] for phase in ("step", "update", "rollouts")
    }
    assert len(errors["step"]) == 2 and max(errors["step"]) < 0.05
    assert max(errors["update"]) < 0.07 and max(errors["rollouts"]) < 0.03
    (ratio,) = [ratio for ratio in against_runs.ratios() if ratio[0].startswith(f"ledger {run},")]
    assert ratio[1] == pytest.approx(ratio[2], rel=0.02)


def test_rollouts_of_a_whole_mixture_are_met():
    """Run U, 48 layers on four GPUs; no engine rate is fitted to it."""
    actual = [row for row in against_runs.comparisons() if row.run.startswith("ledger U,")]
    assert (
        {row.phase for row in actual} == {"rollouts"}
        and len(actual) == 2
        and max(abs(row.error) for row in actual) < 0.05
    )


def test_the_host_takes_what_it_took_for_the_layers_of_a_mixture():
    """Run I, limited by kernel launches in both precisions. The rate is that of FP8, whose kernels are shortest."""
    for row in (row for row in against_runs.rows("ledger") if row["run"] == "I"):
        cfg, lengths = against_runs.ledger_config(row, against_runs.models())
        seconds = median(row["phases_s"]["update"])
        of_gpus = fit.seconds_with(fit.free(fit.HOST), row, cfg, lengths).update
        assert of_gpus < 0.82 * seconds
        actual = fit.seconds_with({}, row, cfg, lengths).update
        assert actual == pytest.approx(seconds, rel=0.005 if row["arm"] == "fp8_kv" else 0.04)
