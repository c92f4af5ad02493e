"""What a plan prints, and that ``plan`` and ``doctor`` agree about the layouts that work."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fp8rl import __main__ as program
from megatron_fp8rl import cli
from megatron_fp8rl.config import EngineConfig, RunConfig, SamplingConfig, WeightSyncConfig
from megatron_fp8rl.preflight import plan, step_time
from megatron_fp8rl.preflight.assessment import DoctorOptions, assess, gpus_wanted
from megatron_fp8rl.preflight.auto_layout import all_layouts
from megatron_fp8rl.preflight.diagnosis import diagnose
from megatron_fp8rl.preflight.memory import GPUS, TIGHT
from megatron_fp8rl.preflight.plan import PlanOptions
from megatron_fp8rl.preflight.step_time import Lengths, Network, Rates
from model_configs import deepseek, qwen3
from tests.helpers.fields import set_fields

H200 = Rates.of("h200")


def works(cfg: RunConfig, num_gpus: int, gpu: str) -> tuple[bool, bool]:
    """Whether doctor knows a layout that works, and whether plan does."""
    machines = DoctorOptions(gpu=gpu, num_gpus=num_gpus)
    diagnosis = diagnose(cfg, machines)
    layouts, _ = all_layouts(cfg, machines, lambda cfg: timed())
    assert all(assess(layout.cfg, machines).works and gpus_wanted(layout.cfg) <= num_gpus for layout in layouts)
    return diagnosis.status < 2 or bool(diagnosis.change), bool(layouts)


@pytest.mark.parametrize("name", cli.config_functions())
def test_doctor_and_plan_agree_about_every_configuration(name):
    """On the GPUs that a configuration names, where each works, and on half as many."""
    function = cli.config_functions()[name]
    cfg, named = function(), re.search(r"on \d+ (H\d+)", function.__doc__)
    gpu = named[1].lower() if named else "h200"
    wanted = gpus_wanted(cfg)
    assert works(cfg, wanted, gpu) == (True, True)
    if wanted > 1:
        doctor, planned = works(cfg, wanted // 2, gpu)
        assert doctor == planned


def test_a_single_layout_gets_longer_microbatches_too():
    """On one GPU the configuration is the only layout."""
    cfg = cli.config_functions()["grpo_qwen3_0_6b"]()
    (choice,) = plan.plan(cfg, PlanOptions(gpus=1, gpu="h100")).layouts
    assert choice.cfg.optim.max_tokens_per_microbatch == 4 * cfg.optim.max_tokens_per_microbatch


@pytest.mark.parametrize("name", ["grpo_qwen3_30b_a3b", "grpo_qwen3_235b_a22b"])
def test_the_commands_print_the_same_verdict(name, capsys):
    gpus = str(gpus_wanted(cli.config_functions()[name]()))
    assert cli.main(program.COMMANDS, ["doctor", name, "--num_gpus", gpus]) == 1
    assert "This run can work" in capsys.readouterr().out
    assert cli.main(program.COMMANDS, ["plan", name, "--gpus", gpus]) == 0
    assert "No layout works" not in capsys.readouterr().out


def timed(**fields) -> step_time.StepTime:
    cfg = deepseek.grpo_deepseek_v3()
    cfg = replace(cfg, engine=EngineConfig(), sampling=SamplingConfig(), weight_sync=WeightSyncConfig())
    cfg = replace(cfg, parallel=replace(cfg.parallel, world_size=256, expert=64))
    cfg = replace(cfg, optim=replace(cfg.optim, max_tokens_per_microbatch=8192))
    fields |= dict(placement="separate", num_replicas=4, data=32, expert=32)
    fields |= dict(prompts_per_step=256, completions_per_prompt=16, max_prompt_tokens=1024, max_completion_tokens=7168)
    cfg = set_fields(cfg, **fields)
    lengths, memory = Lengths(prompt=512, mean=3584, longest=7168), GPUS["h200"].memory_bytes
    return step_time.step_time(cfg, lengths, H200, Network(), memory_bytes=memory, gpus=384)


def test_spare_memory_takes_the_wire_out_of_the_pause():
    direct, spare = timed(), timed(spare_weights="device")
    assert direct.pause == direct.publish == spare.publish
    assert spare.pause == pytest.approx(direct.publish - direct.wire) and spare.pause < 0.3
    # A worker keeps 1/32 of the experts and all of the rest: 39.5 GB at 40 GB/s, as tests/helpers/traffic.py counts.
    assert direct.wire == pytest.approx(39.5e9 / 40e9, rel=0.02)


def test_fp8_pays_where_the_gain_is_larger_than_the_error(capsys):
    args = ["plan", "grpo_qwen3_8b", "--gpus", "8"]
    assert cli.main(program.COMMANDS, [*args, "--engine.kv_cache_dtype", "fp8"]) == 0
    assert "does FP8 pay? yes: 1." in capsys.readouterr().out
    assert cli.main(program.COMMANDS, [*args, "--precision.trainer", "bf16", "--precision.rollout", "bf16"]) == 0
    assert "does FP8 pay? This run has none" in capsys.readouterr().out


def test_drafts_pay_with_few_sequences_and_lose_with_many(capsys):
    args = ["plan", "grpo_qwen3_8b", "--gpus", "8", "--precision.exact", "False", "--engine.draft_tokens", "15"]
    assert cli.main(program.COMMANDS, [*args, "--engine.speculation", "ngram"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("do 15 drafts pay")]
    shares = {int(sequences): int(share) for sequences, share in re.findall(r"(\d+): (\d+)%", line)}
    assert list(shares) == [1, 16, 64, 256]
    assert shares[1] < 10 < shares[16] < shares[64] < shares[256] < 100


def test_drafts_of_a_layer_are_planned_without_layouts_that_divide_it(capsys):
    args = "plan grpo_glm_45_air --gpus 64 --engine.speculation mtp --model.num_mtp_layers 1"
    assert cli.main(program.COMMANDS, args.split()) == 0
    shown = capsys.readouterr().out
    assert "without the host's work and the layer that drafts" in shown
    degrees = re.findall(r"= TP(\d+) PP(\d+)", shown)
    assert degrees and set(degrees) == {("1", "1")}


def test_sampling_overlaps_training_when_it_may():
    one, two = timed(), timed(max_staleness=1)
    assert one.step == pytest.approx(one.rollouts + one.driver + one.training + one.publish)
    assert two.step == max(two.rollouts + two.driver + two.pause, two.training + two.publish) < one.step


@pytest.mark.parametrize(("tokens", "longest"), [(8192, 16384), (16384, 16384)])
def test_microbatches_are_as_long_as_is_faster_and_fits(tokens, longest):
    """A mixture's host launches as many kernels for a long one; with 32,768 tokens no rank fits its GPU."""
    cfg = qwen3.grpo_qwen3_30b_a3b()
    cfg = replace(
        cfg,
        engine=replace(cfg.engine, placement="separate"),
        optim=replace(cfg.optim, max_tokens_per_microbatch=tokens),
    )
    choices = plan.plan(cfg, PlanOptions(gpus=16)).layouts
    sizes = {c.cfg.optim.max_tokens_per_microbatch for c in choices if c.cfg.parallel.tensor == 1}
    assert choices and max(sizes) == longest
    assert all(c.assessment.trainer.share <= TIGHT for c in choices)


@pytest.mark.slow
def test_layouts_are_allowed_and_the_cheapest_comes_first():
    cfg = qwen3.grpo_qwen3_30b_a3b()
    result = plan.plan(cfg, PlanOptions(gpus=32))
    assert len(result.layouts) > 20 and result.refused
    costs = [layout.cost for layout in result.layouts]
    assert costs == sorted(costs)
    assert all(gpus_wanted(layout.cfg) <= 32 for layout in result.layouts)
    few = plan.plan(cfg, PlanOptions(gpus=2))
    assert not few.layouts and few.refused


def test_the_command(capsys):
    assert cli.main(program.COMMANDS, ["plan", "grpo_qwen3_30b_a3b", "--gpus", "16", "--dollars", "3"]) == 0
    text = capsys.readouterr().out
    assert "does FP8 pay? yes: 1." in text and "measured steps differ from this arithmetic by 6% at most" in text
    assert ", 16,384 tokens a microbatch; " in text.partition("best: ")[2].splitlines()[0]
    assert "layouts considered" in text and "saved to files: every" in text and "dollars" in text
    assert cli.main(program.COMMANDS, ["plan", "grpo_deepseek_v3", "--gpus", "8"]) == 2
    assert "No layout works" in capsys.readouterr().out
    assert cli.main(program.COMMANDS, ["plan", "grpo_deepseek_v3", "--gpus", "0"]) == 2


def test_every_rate_has_a_value_a_date_and_a_source():
    data = tomllib.loads((Path(plan.__file__).parent / "rates.toml").read_text())
    for table in (data["h200"]["rates"], data["driver"]):
        assert all({"value", "unit", "date", "source", "what"} == set(entry) for entry in table.values())
    assert all({"value", "unit", "source"} == set(entry) for entry in data["network"].values())


def test_rates_of_a_gpu_that_was_not_measured_say_so():
    assert "not measured on H100" in Rates.of("h100").source
    assert Rates.of("h100").linear_fp8 == H200.linear_fp8
    assert Rates.of("h100").read_bytes_per_s == pytest.approx(H200.read_bytes_per_s * 3.35 / 4.8)


def test_spare_nodes_and_save_intervals():
    """Poisson with mean 2: P(n > 5) = 1.66 %, P(n > 6) = 0.45 %."""
    assert plan._spares(2.0) == 6 and plan._spares(0.001) == 0
