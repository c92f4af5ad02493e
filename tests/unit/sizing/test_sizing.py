"""A plan's arithmetic: rates are those of the measured rows, failures cost what a simulation says, the best is the best."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median

import numpy as np
import pytest

from benchmarks.ledger_rows import flops as flops_of_ledger
from megatron_fp8rl import __main__ as program
from megatron_fp8rl import cli
from megatron_fp8rl.config import PrecisionConfig, RolloutConfig, RunConfig
from megatron_fp8rl.preflight.memory import GPUS, TIGHT, copied_bytes, gpu_in
from megatron_fp8rl.preflight.trainer_memory import worst_rank
from megatron_fp8rl.preflight.weights import on_engine_worker
from megatron_fp8rl.sizing import against_runs, layout_choices, lost_time, rates, step_time
from megatron_fp8rl.sizing.step_time import Lengths
from model_configs import deepseek, qwen3

NETWORK = rates.Network()


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (against_runs.FOLDER / f"{name}.jsonl").read_text().splitlines()]


def known_rows() -> list[tuple[dict, RunConfig, Lengths]]:
    found = [(row, against_runs._of_ledger(row, against_runs.models())) for row in rows("ledger")]
    return [(row, *known) for row, known in found if known is not None]


def seconds_with(changes: dict[str, float], row: dict, cfg: RunConfig, lengths: Lengths) -> step_time.StepTime:
    gpu = gpu_in(row["device"])
    changed = replace(rates.of(gpu.name), **changes)
    return step_time.step_time(cfg, lengths, changed, NETWORK, memory_bytes=gpu.memory_bytes, gpus=row["gpus"])


def solved(equations: list[tuple[tuple[float, ...], float, float]]) -> np.ndarray:
    """Rates by least squares of relative errors, from (factors, measured seconds, seconds of all else)."""
    matrix = [[factor / seconds for factor in factors] for factors, seconds, _ in equations]
    return np.linalg.lstsq(
        np.array(matrix), np.array([1 - rest / seconds for _, seconds, rest in equations]), rcond=None
    )[0]


Equation = tuple[
    list[float], float, float
]  # seconds that each rate adds as it is, seconds measured, seconds of all else
FLOPS = ("linear_fp8", "linear_bf16", "experts_fp8", "experts_bf16", "attention", "head")
DENSE = ("linear_fp8", "linear_bf16", "attention", "feature_fp8_s", "feature_bf16_s", "parameter_bytes")
MIXTURE = ("experts_fp8", "experts_bf16")
HOST = ("host_moe_layer_s",)  # which kept no GPU waiting in the runs that rates come from


def free(names: Sequence[str]) -> dict[str, float]:
    """Rates with which these cost nothing."""
    return {name: math.inf if name in FLOPS else 0.0 for name in names}


def equation(names: Sequence[str], measured: float, seconds: Callable[[dict[str, float]], float]) -> Equation:
    none = free(names)
    rest = seconds(none)
    return [seconds(none | {name: getattr(rates.H200, name)}) - rest for name in names], measured, rest


def of_runs(letters: str, names: Sequence[str], phase: str) -> list[Equation]:
    return [
        equation(
            names,
            median(row["phases_s"][phase]),
            lambda changes: getattr(seconds_with(free(HOST) | changes, row, cfg, lengths), phase),
        )
        for row, cfg, lengths in known_rows()
        if row["run"] in letters
    ]


def of_layers(names: Sequence[str], *, head: bool) -> Iterator[Equation]:
    """Run A of ``layers``: of dense layers, or what is not of layers, of the mixture, too."""
    for row in (row for row in rows("layers") if row["run"] == "A" and (head or row["model"] == "qwen3_8b")):
        model = {"qwen3_8b": qwen3.qwen3_8b(), "qwen3_30b_a3b": qwen3.qwen3_30b_a3b()}[row["model"]]

        def of_depth(changes: dict[str, float], layers: int) -> float:
            """Seconds without the optimizer's."""
            rollout = RolloutConfig(
                prompts_per_step=row["tokens"] // 2048,
                completions_per_prompt=1,
                num_replicas=1,
                max_tokens_per_microbatch=row["tokens"],
            )
            precision = PrecisionConfig(trainer=row["precision"])
            cfg = RunConfig(
                name="layers", model=replace(model, num_layers=layers), precision=precision, rollout=rollout
            )
            all_of, rest = (
                seconds_with(one, row | {"gpus": 1}, cfg, Lengths(prompt=0, mean=2048, longest=2048)).update
                for one in (free(HOST) | changes, free((*FLOPS, *DENSE, *HOST)))
            )
            return all_of - rest

        half = row["layers"] // 2
        if head:
            measured = (row["busy_ms"] - row["layers_busy_ms"]) / 1e3
            yield equation(names, measured, lambda changes: 2 * of_depth(changes, half) - of_depth(changes, 2 * half))
        else:
            measured = row["layers_busy_ms"] / 1e3
            yield equation(names, measured, lambda changes: 2 * (of_depth(changes, 2 * half) - of_depth(changes, half)))


def assert_fitted(names: Sequence[str], equations: list[Equation]) -> None:
    """Least squares would change no rate by more than a hundredth."""
    found = dict(zip(names, solved(equations), strict=True))
    assert all(found[name] == pytest.approx(1.0, abs=0.01) for name in names), found


def test_updates_cost_what_they_took():
    """Of dense models in runs J, R and S, and in layers alone; of mixtures in run P."""
    assert_fitted(["head"], list(of_layers(["head"], head=True)))
    assert_fitted(DENSE, [*of_runs("JRS", DENSE, "update"), *of_layers(DENSE, head=False)])
    assert_fitted(MIXTURE, of_runs("P", MIXTURE, "update"))


def test_passes_for_old_log_probabilities_are_a_third_of_an_update():
    """Those of run A, the last that had one, of which no rate comes."""
    of_run = [(row, cfg, lengths) for row, cfg, lengths in known_rows() if row["run"] == "A"]
    for row, cfg, lengths in of_run:
        found = seconds_with({}, row, replace(cfg, algo=replace(cfg.algo, updates_per_step=2)), lengths).old_logprobs
        assert found == pytest.approx(median(row["phases_s"]["old_logprobs"]), rel=0.06), row["arm"]
    assert len(of_run) == 2


def test_decode_steps_cost_what_the_measured_engines_took():
    """Of dense layers runs L, O, R and S of the ledger, and run B of the engine alone, 64 sequences of 8,192 tokens; of layers
    of experts run P."""
    names, model = ("decode_layer_s", "logit_s"), qwen3.qwen3_8b()
    equations = of_runs("LORS", names, "rollouts")
    for row in (row for row in rows("rollout_speed") if row["run"] == "B"):
        in_fp8 = row["precision"] == "fp8_kv"
        rollout = RolloutConfig(
            placement="separate",
            num_replicas=1,
            prompts_per_step=64,
            completions_per_prompt=1,
            kv_cache_dtype="fp8" if in_fp8 else "auto",
            max_prompt_tokens=512,
            max_completion_tokens=8192,
        )
        precision = PrecisionConfig() if in_fp8 else PrecisionConfig(trainer="bf16", rollout="bf16")
        cfg = RunConfig(name="engine", model=model, precision=precision, rollout=rollout)
        lengths, gpu = Lengths(prompt=512, mean=8192, longest=8192), {"device": "H200", "gpus": 2}
        equations.append(equation(names, row["seconds"], lambda one: seconds_with(one, gpu, cfg, lengths).rollouts))
    assert len(equations) == 10
    assert_fitted(names, equations)
    assert_fitted(["decode_moe_layer_s"], of_runs("P", ["decode_moe_layer_s"], "rollouts"))


def publications(*, with_scales: bool) -> list[tuple[dict, RunConfig, Lengths]]:
    """Rows of two H200s, one for the trainer and one for the engine, with scales of a cache or without."""
    return [
        (row, cfg, lengths)
        for row, cfg, lengths in known_rows()
        if "H200" in row["device"]
        and row["gpus"] == 2
        and cfg.rollout.placement == "separate"
        and (row["arm"] == "fp8_kv") == with_scales
    ]


def test_publications_cost_what_those_of_the_ledger_took():
    """Without scales of a cache, which are measured in the same phase."""
    names, equations = ("publish_s", "publish_s_per_byte"), []
    for row, cfg, lengths in publications(with_scales=False):
        factors = 1.0, float(on_engine_worker(cfg).sent)
        rest = seconds_with(dict.fromkeys(names, 0.0), row, cfg, lengths).publish
        equations.append((factors, median(row["phases_s"]["publish"]), rest))
    for name, value in zip(names, solved(equations), strict=True):
        assert getattr(rates.H200, name) == pytest.approx(value, rel=0.05)


def test_scales_of_a_cache_cost_what_they_add_to_a_publication():
    found = [
        median(row["phases_s"]["publish"]) - seconds_with({"kv_scales_s": 0.0}, row, cfg, lengths).publish
        for row, cfg, lengths in publications(with_scales=True)
    ]
    assert len(found) >= 3 and rates.H200.kv_scales_s == pytest.approx(median(found), rel=0.05)


def test_engines_sleep_and_wake_as_long_as_they_did():
    """In runs N, Q and R; the others of present code left their engines awake."""
    found = [
        median(row["phases_s"]["colocated"]) for row in rows("ledger") if row["run"] in "NQR" and row["layout"]["sleep"]
    ]
    assert len(found) == 5 and rates.H200.sleep_s == pytest.approx(median(found), rel=0.01)


def test_a_trainer_goes_to_the_host_and_back_as_fast_as_it_did():
    """In run U, all of its state on four GPUs at once; T is of older code."""
    found = [
        (row, cfg, lengths) for row, cfg, lengths in known_rows() if row["layout"]["offload"] and row["run"] != "T"
    ]
    errors = [seconds_with({}, *one).handover / median(one[0]["phases_s"]["colocated"]) - 1 for one in found]
    assert len(found) == 2 and max(map(abs, errors)) < 0.08 and abs(sum(errors)) < 0.01


def test_a_plan_moves_the_bytes_that_the_doctor_counts():
    """Attention on all ranks, experts on one each (run U), and a dense model (T); of some weights the doctor counts two copies."""
    gpu = GPUS["h200"]
    found = [(row, cfg, lengths) for row, cfg, lengths in known_rows() if row["layout"]["offload"]]
    assert len(found) >= 3
    for row, cfg, lengths in found:
        moved = (seconds_with({"sleep_s": 0.0}, row, cfg, lengths).handover) * rates.H200.host_bytes_per_s / 2
        counted = sum(copied_bytes(cfg, worst_rank(cfg, gpu, gpu.memory_bytes)).values())
        assert counted == pytest.approx(moved, rel=0.03), (row["run"], row["arm"])


def test_operations_are_those_of_the_ledger():
    model = replace(qwen3.qwen3_8b(), num_layers=20)
    lengths = [900.0, 1500.0, 40.0]
    assert step_time.Flops.of(model, sum(lengths), sum(n * n for n in lengths)).total == flops_of_ledger(model, lengths)


def test_measured_runs_are_met():
    """How far off the arithmetic is; a change that makes it worse has to say so here."""
    found = list(against_runs.compared())
    errors = {phase: [abs(one.error) for one in found if one.phase == phase] for phase in {one.phase for one in found}}
    assert len(errors["step"]) >= 17 and len(errors["publish"]) >= 18
    assert median(errors["step"]) < 0.02 and max(errors["step"]) < 0.06
    assert {round(measured, 2) for _, _, measured in against_runs.ratios()} == {
        1.32,
        1.33,
        1.39,
        1.41,
        1.43,
        1.44,
        1.56,
        1.59,
    }
    assert all(abs(predicted / measured - 1) < 0.05 for _, predicted, measured in against_runs.ratios())
    fitted = [abs(one.error) for one in found if one.phase == "rollouts" and not one.run.startswith("ledger U,")]
    assert median(fitted) < 0.02 and max(errors["rollouts"]) < 0.08
    assert median(errors["update"]) < 0.01 and max(errors["update"]) < 0.07 and median(errors["publish"]) < 0.02


@pytest.mark.parametrize("run", ["M", "Q"])
def test_runs_of_which_no_rate_comes_are_met(run):
    """M, 17 layers of a mixture on four GPUs, and Q, all of Qwen3-4B on one."""
    found = [one for one in against_runs.compared() if one.run.startswith(f"ledger {run},")]
    errors = {
        phase: [abs(one.error) for one in found if one.phase == phase] for phase in ("step", "update", "rollouts")
    }
    assert len(errors["step"]) == 2 and max(errors["step"]) < 0.05
    assert max(errors["update"]) < 0.07 and max(errors["rollouts"]) < 0.03
    (ratio,) = [ratio for ratio in against_runs.ratios() if ratio[0].startswith(f"ledger {run},")]
    assert ratio[1] == pytest.approx(ratio[2], rel=0.02)


def test_rollouts_of_a_whole_mixture_are_met():
    """Run U, all 48 layers on four GPUs, of which no rate of an engine comes."""
    found = [one for one in against_runs.compared() if one.run.startswith("ledger U,")]
    assert (
        {one.phase for one in found} == {"rollouts"} and len(found) == 2 and max(abs(one.error) for one in found) < 0.05
    )


def test_the_host_takes_what_it_took_for_the_layers_of_a_mixture():
    """Run I, whose updates took the same in both precisions: kernels were launched more slowly than GPUs ran them. The rate is
    that of FP8, whose GPUs had least to do."""
    for row in (row for row in rows("ledger") if row["run"] == "I"):
        cfg, lengths = against_runs._of_ledger(row, against_runs.models())
        seconds = median(row["phases_s"]["update"])
        of_gpus = seconds_with(free(HOST), row, cfg, lengths).update
        assert of_gpus < 0.82 * seconds
        found = seconds_with({}, row, cfg, lengths).update
        assert found == pytest.approx(seconds, rel=0.005 if row["arm"] == "fp8_kv" else 0.04)


@pytest.mark.parametrize(("interval_s", "save_s"), [(600.0, 20.0), (3600.0, 5.0), (1800.0, 60.0)])
def test_time_lost_is_that_of_a_simulation(interval_s, save_s):
    """Node failures drawn one by one over a thousand days, against the formula."""
    draw, restart, rate = random.Random(7), lost_time.Restart(load_s=30.0), 1 / 3600
    useful = since = clock = 0.0
    end = 1000 * 86_400.0
    failure = draw.expovariate(rate)
    while clock < end:
        upto = clock + (interval_s - since)
        if failure < upto:
            clock = failure + restart.total
            failure = clock + draw.expovariate(rate)
            since = 0.0
            continue
        useful += interval_s
        clock, since = upto + save_s, 0.0
        failure = max(failure, clock)
    lost = lost_time.loss(
        interval_s, failures_per_hour=1.0, save_s=save_s, restart=restart, repair_s=7200.0, spare_nodes=12
    )
    # The formula counts a first order: failures during a restart and in repeated steps come on top.
    assert 1 - useful / clock == pytest.approx(lost.share, rel=0.35 if interval_s > 3000 else 0.2)


def test_the_best_interval_loses_least():
    every = lost_time.best_interval_s(1.0, 20.0)
    given = dict(failures_per_hour=1.0, save_s=20.0, restart=lost_time.Restart(), repair_s=7200.0, spare_nodes=9)
    assert all(lost_time.loss(every, **given).total < lost_time.loss(every * f, **given).total for f in (0.8, 1.25))


@pytest.mark.parametrize("spares", [0, 1, 3])
def test_waiting_for_nodes_is_that_of_a_simulation(spares):
    """Nodes that are lost one by one and come back after times drawn from another distribution each."""
    draw, end = random.Random(spares), 20_000.0  # hours
    events, clock = [], 0.0
    while clock < end:
        clock += draw.expovariate(1.0)
        events += [(clock, 1), (clock + draw.uniform(0.0, 4.0), -1)]
    missing, before, waited = 0, 0.0, 0.0
    for at, change in sorted(events):
        waited += (at - before) * (missing > spares)
        missing, before = missing + change, at
    assert lost_time.waiting_share(1.0, 7200.0, spares) == pytest.approx(waited / end, rel=0.05)
    enough = lost_time.spares_for(1.0, 7200.0)
    assert lost_time.waiting_share(1.0, 7200.0, enough) < 0.01 <= lost_time.waiting_share(1.0, 7200.0, enough - 1)


def timed(**fields) -> step_time.StepTime:
    rollout = RolloutConfig(
        placement="separate",
        prompts_per_step=256,
        completions_per_prompt=16,
        max_prompt_tokens=1024,
        max_completion_tokens=7168,
        max_tokens_per_microbatch=8192,
        num_replicas=4,
        data=32,
        expert=32,
        **fields,
    )
    cfg = deepseek.grpo_deepseek_v3()
    cfg = replace(cfg, rollout=rollout, parallel=replace(cfg.parallel, world_size=256, expert=64))
    return step_time.step_time(
        cfg,
        Lengths(prompt=512, mean=3584, longest=7168),
        rates.H200,
        NETWORK,
        memory_bytes=GPUS["h200"].memory_bytes,
        gpus=384,
    )


def test_spare_memory_takes_the_wire_out_of_the_pause():
    direct, spare = timed(), timed(spare_weights="device")
    assert direct.pause == direct.publish == spare.publish
    assert spare.pause == pytest.approx(direct.publish - direct.wire) and spare.pause < 0.3
    # A worker keeps 1/32 of the experts and all of the rest: 39.5 GB at 40 GB/s, as tests/helpers/traffic.py counts.
    assert direct.wire == pytest.approx(39.5e9 / 40e9, rel=0.02)


def test_fp8_pays_where_the_gain_is_larger_than_the_error(capsys):
    words = ["plan", "grpo_qwen3_8b", "--gpus", "8"]
    assert cli.main(program.COMMANDS, [*words, "--rollout.kv_cache_dtype", "fp8"]) == 0
    assert "does FP8 pay? yes: 1." in capsys.readouterr().out
    assert cli.main(program.COMMANDS, [*words, "--precision.trainer", "bf16", "--precision.rollout", "bf16"]) == 0
    assert "does FP8 pay? This run has none" in capsys.readouterr().out


@pytest.mark.parametrize(("tokens", "longest"), [(8192, 16384), (16384, 16384)])
def test_microbatches_are_as_long_as_is_faster_and_fits(tokens, longest):
    """A mixture's host launches as many kernels for a long one; with 32,768 tokens no rank fits its GPU."""
    cfg = qwen3.grpo_qwen3_30b_a3b()
    cfg = replace(cfg, rollout=replace(cfg.rollout, placement="separate", max_tokens_per_microbatch=tokens))
    lengths = Lengths(prompt=256, mean=1024, longest=2048)
    found = layout_choices.choices(cfg, GPUS["h200"], 16, lengths, rates.H200, NETWORK, 8).found
    sizes = {choice.cfg.rollout.max_tokens_per_microbatch for choice in found if choice.cfg.parallel.tensor == 1}
    assert found and max(sizes) == longest and all(choice.trainer_share <= TIGHT for choice in found)


def test_sampling_overlaps_training_when_it_may():
    one, two = timed(), timed(max_staleness=1)
    assert one.step == pytest.approx(one.rollouts + one.driver + one.training + one.publish)
    assert two.step == max(two.rollouts + two.driver + two.pause, two.training + two.publish) < one.step


@pytest.mark.slow
def test_layouts_are_allowed_and_the_cheapest_comes_first():
    cfg = qwen3.grpo_qwen3_30b_a3b()
    rollout = replace(cfg.rollout, placement="separate")
    cfg = replace(cfg, rollout=rollout)
    lengths = Lengths(prompt=256, mean=1024, longest=2048)
    found = layout_choices.choices(cfg, GPUS["h200"], 32, lengths, rates.H200, NETWORK, 8)
    assert len(found.found) > 20 and found.num_considered == len(found.found) + found.refused.total()
    costs = [choice.time.gpu_seconds_per_million for choice in found.found]
    assert costs == sorted(costs)
    for choice in found.found:
        used = choice.cfg.parallel.world_size + choice.cfg.rollout.num_replicas * choice.cfg.rollout.ranks
        assert used <= 32 and choice.trainer_share <= 0.92 and choice.engine_share <= 1.0
    few = layout_choices.choices(cfg, GPUS["h200"], 2, lengths, rates.H200, NETWORK, 8)
    assert not few.found and few.refused


def test_the_command(capsys):
    assert cli.main(program.COMMANDS, ["plan", "grpo_qwen3_30b_a3b", "--gpus", "16", "--dollars", "3"]) == 0
    text = capsys.readouterr().out
    assert "does FP8 pay? yes: 1." in text and "measured: ledger J, H200: 8b_separate fp8_kv" in text
    assert ", 16,384 tokens a microbatch; " in text.partition("best: ")[2].splitlines()[0]
    assert "layouts considered" in text and "lost a day" in text and "in the median" in text and "dollars" in text
    assert cli.main(program.COMMANDS, ["plan", "grpo_deepseek_v3", "--gpus", "8"]) == 2
    assert "No layout works" in capsys.readouterr().out
    assert cli.main(program.COMMANDS, ["plan", "grpo_deepseek_v3", "--gpus", "0"]) == 2


def test_of_a_gpu_that_was_not_measured_it_says_so():
    assert rates.of("h200") is rates.H200
    assert "not measured on H100" in rates.of("h100").source
    assert rates.of("h100").linear_fp8 == rates.H200.linear_fp8
    assert RunConfig(name="x", model=qwen3.qwen3_8b(), precision=PrecisionConfig()).rollout.spare_weights == "none"
