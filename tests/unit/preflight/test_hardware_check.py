"""What an accelerator, its kernels and its engines cannot do is refused by its field."""

from dataclasses import replace

import pytest

from megatron_fp8rl.preflight.rules import check
from tests.helpers.configs import DENSE, MOE, fields_of, make


@pytest.mark.parametrize(
    ("accelerator", "changes", "fields"),
    [
        ("blackwell", {"precision__scales": "fp32"}, ["--precision.scales"]),
        ("hopper", {"precision__scales": "fp32"}, []),
        ("blackwell", {}, []),
        ("ampere", {}, ["--precision.trainer"]),
    ],
)
def test_precision_fits_the_accelerator(accelerator, changes, fields):
    assert fields_of(make(**changes), accelerator) == fields


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"engine__num_replicas": 2}, "--engine.num_replicas"),
        ({"engine__sleep_level": 1, "sampling__max_staleness": 1}, "--engine.sleep_level"),
        ({"engine__sleep_level": 1, "engine__placement": "separate"}, "--engine.sleep_level"),
        ({"optim__offload": ("params",), "sampling__max_staleness": 1}, "--optim.offload"),
        ({"optim__offload": ("params", "params")}, "--optim.offload"),
        ({"engine__expert": 2}, "--engine.expert"),
        ({"precision__kernels__engine_experts": "triton"}, "--precision.kernels.engine_experts"),
        ({"precision__kernels__engine_linears": "cutlass"}, "--precision.kernels.engine_linears"),
        ({"weight_sync__transport": "nccl"}, "--weight_sync.transport"),
        (
            {"precision__kernels__engine_attention": "FLASHINFER", "engine__kv_cache_dtype": "fp8"},
            "--precision.kernels.engine_attention",
        ),
    ],
)
def test_engines_that_cannot_work_on_gpus(changes, field):
    assert fields_of(make(**changes), "hopper") == [field]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"engine__expert": 2}, "--engine.expert"),
        (
            {"precision__kernels__engine_experts": "deep_gemm", "precision__bf16_last_layers": 1},
            "--precision.kernels.engine_experts",
        ),
    ],
)
def test_experts_that_engines_cannot_hold(changes, field):
    assert fields_of(make(MOE, **changes), "hopper") == [field]


@pytest.mark.parametrize(
    "cfg",
    [
        make(engine__num_replicas=2, engine__placement="separate"),
        make(weight_sync__transport="ipc"),
        make(weight_sync__transport="nccl", engine__placement="separate"),
        make(parallel__world_size=2, engine__num_replicas=2, engine__sleep_level=2, optim__offload=("optimizer",)),
        make(
            MOE,
            parallel__world_size=2,
            engine__tensor=2,
            engine__expert=2,
            precision__kernels__engine_experts="deep_gemm",
        ),
        make(precision__kernels__engine_linears="cutlass", precision__scales="fp32"),
    ],
)
def test_engines_that_can_work_on_gpus(cfg):
    assert check(cfg, accelerator="hopper") == []


def test_weights_do_not_travel_between_gpus_without_one():
    assert fields_of(make(weight_sync__transport="nccl")) == ["--weight_sync.transport"]
    assert not fields_of(make(weight_sync__transport="ipc")) + fields_of(make(weight_sync__transport="gloo"))


def test_kernels_and_storage_that_cannot_be():
    assert fields_of(make(precision__kernels__trainer="te")) == ["--precision.kernels.trainer"]
    assert fields_of(make(precision__kernels__trainer="te"), "hopper") == []
    assert fields_of(make(precision__kernels__trainer="emulated"), "hopper") == []


@pytest.mark.parametrize(
    ("accelerator", "changes", "field", "problem"),
    [
        ("cpu", {}, "params", "this machine is 'cpu'"),
        ("blackwell", {}, "params", "this machine is 'blackwell'"),
        ("hopper", {"trainer": "tensorwise"}, "params", "one scale per weight"),
        ("hopper", {"trainer": "delayed"}, "params", "one scale per weight"),
        ("hopper", {"trainer": "bf16", "rollout": "bf16"}, "params", "has no FP8 linears"),
        ("hopper", {"rollout": "bf16"}, "rollout", "sent to engines without conversion"),
        (
            "hopper",
            {"kernels__trainer": "emulated"},
            "kernels.trainer",
            "the emulation supports only BF16 and FP32 parameters",
        ),
        ("hopper", {"kernels__linears": "deep_gemm"}, "kernels.linears", "quantize BF16 parameters"),
        ("hopper", {"kernels__experts": "deep_gemm"}, "kernels.experts", "quantize BF16 parameters"),
    ],
)
def test_fp8_parameters_that_cannot_be(accelerator, changes, field, problem):
    wide = replace(MOE, hidden_size=256, moe_ffn_hidden_size=256, head_dim=128)
    changed = {f"precision__{name}": value for name, value in ({"params": "fp8"} | changes).items()}
    assert fields_of(make(wide, precision__params="fp8", precision__scales="fp32"), "hopper") == []
    (found,) = check(make(wide, **changed), accelerator=accelerator)
    assert found.field == f"--precision.{field}" and problem in found.problem
    assert "--precision.params bf16" in found.remedy
    (found,) = check(make(replace(wide, head_dim=64), precision__params="fp8"), accelerator="hopper")
    assert found.field == "--precision.params" and "heads of 64 rows" in found.problem


def test_grouped_experts_that_cannot_be():
    moe = replace(MOE, hidden_size=256, moe_ffn_hidden_size=256)
    for accelerator, fields in (("cpu", []), ("hopper", []), ("blackwell", ["--precision.kernels.experts"])):
        assert fields_of(make(moe, precision__kernels__experts="deep_gemm"), accelerator) == fields
    grouped = dict(precision__kernels__experts="deep_gemm")
    assert fields_of(make(moe, **grouped, precision__trainer="delayed"), "hopper") == ["--precision.kernels.experts"]
    assert fields_of(make(moe, **grouped, precision__gradients="e5m2"), "hopper") == ["--precision.gradients"]
    assert fields_of(make(moe, **grouped, precision__params="fp32"), "hopper") == ["--precision.params"]
    assert fields_of(make(moe, **grouped, precision__kernels__trainer="emulated"), "hopper") == [
        "--precision.kernels.experts"
    ]
    bf16 = grouped | dict(precision__trainer="bf16", precision__rollout="bf16")
    odd = replace(moe, hidden_size=192)
    assert fields_of(make(odd, **bf16), "hopper") == ["--model.hidden_size"]
    split = dict(parallel__world_size=4, parallel__expert_tensor=4)
    (found,) = check(make(moe, **bf16, **split), accelerator="hopper")
    assert found.field == "--parallel.expert_tensor" and "64 features" in found.problem


def test_linears_on_deep_gemm_that_cannot_be():
    asked = dict(precision__kernels__linears="deep_gemm")
    for accelerator, fields in (("cpu", []), ("hopper", []), ("blackwell", ["--precision.kernels.linears"])):
        assert fields_of(make(**asked), accelerator) == fields
    assert fields_of(make(**asked, precision__kernels__trainer="emulated")) == []
    assert fields_of(make(**asked, precision__kernels__trainer="emulated"), "hopper") == ["--precision.kernels.linears"]
    assert fields_of(make(**asked, precision__gradients="e5m2"), "hopper") == ["--precision.gradients"]
    assert fields_of(make(**asked, precision__params="fp32"), "hopper") == ["--precision.params"]
    for recipe in ("bf16", "delayed", "tensorwise"):
        (found,) = check(make(**asked, precision__trainer=recipe), accelerator="hopper")
        assert found.field == "--precision.kernels.linears" and f"recipe {recipe!r}" in found.problem


def test_choices_that_need_a_gpu():
    cfg = make(replace(DENSE, head_dim=128), precision__kernels__attention="engine", engine__batch_invariant=True)
    assert fields_of(cfg) == ["--precision.kernels.attention", "--engine.batch_invariant"]
    assert check(cfg, accelerator="hopper") == []
    narrow = replace(cfg, model=replace(cfg.model, head_dim=64))
    assert fields_of(narrow, "hopper") == ["--precision.kernels.attention"]
    cfg = make(MOE, engine__batch_invariant=True, precision__kernels__engine_experts="deep_gemm")
    assert fields_of(cfg, "hopper") == []
    cfg = replace(cfg, precision=replace(cfg.precision, scales="fp32"))
    assert fields_of(cfg, "hopper") == ["--precision.kernels.engine_experts"]
    cfg = make(engine__batch_invariant=True, weight_sync__transport="nccl", engine__placement="separate")
    assert fields_of(cfg, "hopper") == ["--weight_sync.transport"]
