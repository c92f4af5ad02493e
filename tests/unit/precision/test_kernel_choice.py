"""What a rank multiplies, which kernels are chosen for it, and that both ends and preflight refuse the same."""

from dataclasses import replace

import pytest

from megatron_fp8rl.config import EngineConfig, ParallelConfig, PrecisionConfig
from megatron_fp8rl.precision import kernel_choice
from megatron_fp8rl.precision.hardware import PACKAGES, Hardware
from megatron_fp8rl.precision.kernel_choice import KernelChoice, choose, refusals
from megatron_fp8rl.precision.matmul_shapes import Experts, Linear, Range, Use, experts_of, linears_of
from megatron_fp8rl.preflight import rules
from model_configs.deepseek import grpo_deepseek_v3
from model_configs.qwen3 import grpo_qwen3_8b, grpo_qwen3_30b_a3b
from model_configs.tiny import tiny_qwen3_next

HOPPER, CPU = Hardware("hopper"), Hardware("cpu")


def chosen(field, cfg):
    return getattr(KernelChoice.of(cfg, HOPPER).trainer, field)


def make(cfg, tokens: int = 16_384, **parallel):
    return replace(
        cfg,
        parallel=ParallelConfig(**parallel),
        engine=EngineConfig(),
        precision=PrecisionConfig(exact=False),
        optim=replace(cfg.optim, max_tokens_per_microbatch=tokens),
    )


def test_experts_of_a_rank():
    cfg = make(grpo_qwen3_30b_a3b(), world_size=16, tensor=2, expert=8)
    assert experts_of(cfg.model, cfg.parallel, cfg.optim) == Experts(16, 8192 * 8, 2048, 768)
    split = make(grpo_qwen3_30b_a3b(), world_size=2, context=2)
    assert experts_of(split.model, split.parallel, split.optim) == Experts(128, 8192 * 8, 2048, 768)
    divided = make(grpo_qwen3_30b_a3b(), world_size=2, expert_tensor=2)
    assert experts_of(divided.model, divided.parallel, divided.optim) == Experts(
        128, 16_384 * 8 * 2, 2048, 384
    )  # both ranks see the tokens of both
    dense = grpo_qwen3_8b()
    assert experts_of(dense.model, dense.parallel, dense.optim) is None


def test_linears_of_a_rank():
    """Qwen3-8B: 32 query heads and 2 x 8 of keys and values, 128 wide."""
    actual = linears_of(make(grpo_qwen3_8b(), world_size=2, tensor=2))
    assert [(use.name, use.shape) for use in actual] == [
        ("self_attention.linear_qkv", Linear("linear", 16_384, (32 + 16) * 128 // 2, 4096)),
        ("self_attention.linear_proj", Linear("linear", 16_384, 4096, 4096 // 2)),
        ("mlp.linear_fc1", Linear("mlp", 16_384, 4096, 12_288 // 2)),
    ]
    assert {use.num_layers for use in actual} == {36}
    assert [use.shape.what for use in linears_of(grpo_qwen3_30b_a3b())] == ["linear", "linear"]


def test_replicated_linears_see_a_ranks_own_tokens():
    cfg = grpo_deepseek_v3()
    assert (cfg.parallel.tensor, cfg.optim.max_tokens_per_microbatch) == (4, 8192)
    by_name = {use.name: use for use in linears_of(cfg)}
    assert by_name["self_attention.linear_kv_down_proj"].shape == Linear("linear", 2048, 512 + 64, 7168)
    assert by_name["self_attention.linear_q_up_proj"].shape.tokens == 8192
    assert (by_name["mlp.linear_fc1"].num_layers, by_name["mlp.shared_experts.linear_fc1"].num_layers) == (3, 58)


def test_edge_layers_in_bf16_do_not_count():
    cfg = replace(grpo_qwen3_8b(), precision=PrecisionConfig(trainer="bf16", bf16_first_layers=1, bf16_last_layers=2))
    assert {use.num_layers for use in linears_of(cfg)} == {33}
    none = replace(grpo_qwen3_8b(), precision=PrecisionConfig(bf16_first_layers=18, bf16_last_layers=18))
    assert linears_of(none) == []


def test_operations_match_the_parameters():
    """Forward is 2 operations to a weight and token, backward 4."""
    (qkv, proj, mlp) = linears_of(make(grpo_qwen3_8b()))
    assert isinstance(mlp, Use)
    weights = (48 + 32) * 128 * 4096 + 3 * 4096 * 12_288
    assert sum(use.shape.num_operations for use in (qkv, proj, mlp)) == 6 * 16_384 * weights


def test_auto_is_what_was_faster_on_an_h200():
    moe = make(grpo_qwen3_30b_a3b())
    for trainer, tokens, actual in (
        ("blockwise", 16_384, "deep_gemm"),
        ("blockwise", 512, "deep_gemm"),
        ("delayed", 16_384, "te"),
        ("bf16", 16_384, "deep_gemm"),
        ("bf16", 32_768, "deep_gemm"),
        ("bf16", 65_536, "te"),
    ):
        cfg = replace(make(moe, tokens), precision=PrecisionConfig(trainer=trainer, exact=False))
        assert chosen("experts", cfg) == actual, (trainer, tokens)
    assert [chosen("linears", make(grpo_qwen3_8b(), tokens)) for tokens in (1024, 16_384)] == ["te", "deep_gemm"]


@pytest.mark.parametrize("field", ["linears", "experts"])
def test_auto_follows_the_thresholds_in_tokens_and_sides(monkeypatch, field):
    # Of 16,384 tokens each of 128 experts receives 1,024; the largest linear of attention multiplies all.
    tokens = {"linears": 16_384, "experts": 1024}[field]
    cfg = make(grpo_qwen3_30b_a3b())
    for actual, expected in (
        (Range(first=tokens), "deep_gemm"),
        (Range(first=tokens + 1), "te"),
        (Range(first=0, last=tokens), "deep_gemm"),
        (Range(first=0, last=tokens - 1), "te"),
        (Range(first=0, smallest_side=4096), "te"),
    ):
        monkeypatch.setitem(kernel_choice.DEEP_GEMM_IS_FASTER, (field, "blockwise"), actual)
        assert chosen(field, cfg) == expected
        assert chosen(field, replace(cfg, precision=PrecisionConfig(kernels={field: "te"}))) == "te"
    assert chosen(field, replace(cfg, precision=PrecisionConfig(kernels={field: "deep_gemm"}))) == "deep_gemm"


@pytest.mark.parametrize("field", ["linears", "experts"])
def test_auto_chooses_nothing_that_would_be_refused(monkeypatch, field):
    everywhere = dict.fromkeys(kernel_choice.DEEP_GEMM_IS_FASTER, Range(first=0))
    monkeypatch.setattr(kernel_choice, "DEEP_GEMM_IS_FASTER", everywhere)
    cfg, taken = grpo_qwen3_30b_a3b(), set()
    for trainer in ("bf16", "delayed", "tensorwise", "blockwise"):
        for more in (
            {},
            {"gradients": "e5m2"},
            {"params": "fp32"},
            {"params": "fp8"},
            {"kernels": {"trainer": "emulated"}},
        ):
            asked = replace(cfg, precision=PrecisionConfig(trainer=trainer, rollout="bf16", **more))
            if chosen(field, asked) != "deep_gemm":
                continue
            named = replace(
                asked, precision=replace(asked.precision, kernels={**asked.precision.kernels, field: "deep_gemm"})
            )
            before, after = (rules.check(c, accelerator="hopper") for c in (asked, named))
            assert [v.field for v in after] == [v.field for v in before], (trainer, more)
            taken.add(trainer)
    assert taken == {"linears": {"blockwise"}, "experts": {"blockwise", "bf16"}}[field]


def test_experts_that_the_kernels_do_not_divide_stay(monkeypatch):
    monkeypatch.setitem(kernel_choice.DEEP_GEMM_IS_FASTER, ("experts", "blockwise"), Range(first=0, smallest_side=1))
    odd = make(grpo_qwen3_30b_a3b(), world_size=4, expert_tensor=4)  # 192 features on a rank
    assert chosen("experts", odd) == "te" and chosen("experts", grpo_qwen3_8b()) == "te"


def run(recipe: str = "blockwise", **kernels: str):
    return replace(grpo_qwen3_30b_a3b(), precision=PrecisionConfig(trainer=recipe, kernels=kernels, exact=False))


def said(cfg, hardware):
    return [str(violation) for violation in refusals(cfg, hardware)]


def test_a_cpu_emulates_and_says_so_when_asked_for_more():
    assert choose(run(), CPU).trainer.kernels == "emulated"
    (text,) = said(run(trainer="te"), CPU)
    assert text.startswith("--precision.kernels.trainer = 'te': Transformer Engine needs a GPU") and text.endswith(
        "Choose auto."
    )


@pytest.mark.parametrize("trainer", ["bf16", "blockwise", "tensorwise", "delayed"])
def test_a_gpu_takes_transformer_engine_unless_told_otherwise(trainer):
    for asked, taken in (("auto", "te"), ("te", "te"), ("emulated", "emulated")):
        kernels = choose(run(trainer, trainer=asked), HOPPER).trainer
        assert (kernels.kernels, kernels.norms) == (taken, taken)


def test_gated_delta_nets_on_gpus_are_inexact_and_not_tried():
    delta_nets = replace(tiny_qwen3_next(), precision=PrecisionConfig())
    on_gpu = choose(delta_nets, HOPPER)
    assert on_gpu.exact_text().startswith("off: the trainer computes gated delta nets in chunks")
    assert "have not run on GPUs yet" in on_gpu.untried(delta_nets)
    assert choose(run(), HOPPER).untried(run()) is None
    assert choose(delta_nets, Hardware("cpu")).untried(delta_nets) is None


def test_what_is_not_installed_is_named_with_the_remedy():
    without = {name: Hardware("hopper", frozenset(PACKAGES) - {name}) for name in PACKAGES}
    for asked in ("auto", "te"):
        (text,) = said(run(trainer=asked), without["transformer_engine"])
        assert "pip install 'transformer-engine" in text and "--precision.kernels.trainer emulated" in text
    assert not said(run(trainer="emulated"), without["transformer_engine"])
    for field in ("linears", "experts"):
        (text,) = said(run(**{field: "deep_gemm"}), without["deep_gemm"])
        assert "DeepGEMM is not installed" in text and f"--precision.kernels.{field} te" in text
        assert getattr(choose(run(), without["deep_gemm"]).trainer, field) == "te"
    flashinfer = run(engine_attention="FLASHINFER")
    (text,) = said(flashinfer, without["flashinfer"])
    assert text.startswith("--precision.kernels.engine_attention = 'FLASHINFER': the package flashinfer")
    assert not refusals(flashinfer, without["flashinfer"], "trainer")  # where engines live elsewhere


def test_engines_emulate_mxfp8_only_if_told_to():
    """The refusal of ``auto`` names the emulation, and the emulation needs no other package."""
    dense, mixture = (
        replace(cfg, precision=PrecisionConfig(trainer="bf16", rollout="mxfp8", exact=False))
        for cfg in (grpo_qwen3_8b(), grpo_qwen3_30b_a3b())
    )
    remedy, hardware = "--precision.kernels.engine_linears emulated", Hardware("hopper", frozenset())
    (text,) = said(dense, HOPPER)
    assert text.startswith("--precision.rollout = 'mxfp8': only Blackwell's tensor cores") and remedy in text
    kernels = {"engine_linears": "emulated", "trainer": "emulated"}
    emulated = replace(dense, precision=replace(dense.precision, kernels=kernels))
    assert not refusals(emulated, hardware)
    choice = choose(emulated, hardware)
    assert choice.engine.linears == "emulated" and choice.exact == "off"
    assert not choice.disagreements({"linears": ["EmulationMxfp8LinearKernel"]})
    assert choice.disagreements({"linears": ["MarlinMxfp8LinearKernel"]})
    (text,) = said(replace(mixture, precision=emulated.precision), HOPPER)
    assert text.startswith("--precision.kernels.engine_linears = 'emulated': emulates linears but no experts")


@pytest.mark.parametrize(("dispatch", "package"), [("deepep", "deep_ep"), ("hybridep", "hybrid_ep")])
def test_what_carries_tokens_is_refused_where_it_cannot(dispatch, package):
    wide = make(grpo_qwen3_30b_a3b(), world_size=8, expert=8, dispatch=dispatch)
    choice = choose(wide, HOPPER)
    assert choice.trainer.dispatch == dispatch and not refusals(wide, HOPPER)
    assert choice.trainer.combine == "experts"  # where the engine's DeepGEMM would have them added with weights, too
    deep_gemm = replace(
        wide, precision=replace(wide.precision, kernels={**wide.precision.kernels, "engine_experts": "deep_gemm"})
    )
    assert choose(deep_gemm, HOPPER).trainer.combine == "experts"
    for cfg, hardware, problem in (
        (wide, CPU, "needs a GPU"),
        (wide, Hardware("ampere"), "needs Hopper"),
        (wide, Hardware("hopper", frozenset(PACKAGES) - {package}), "is not installed"),
        (make(grpo_qwen3_30b_a3b(), world_size=8, dispatch=dispatch), HOPPER, "has all experts"),
        (make(grpo_qwen3_8b(), world_size=8, dispatch=dispatch), HOPPER, "has all experts"),
        (replace(wide, precision=PrecisionConfig(exact=True)), HOPPER, "in a different order"),
    ):
        (text,) = [text for text in said(cfg, hardware) if f"--parallel.dispatch = '{dispatch}'" in text]
        assert problem in text and "alltoall" in text, text


def test_tokens_are_gathered_where_a_group_has_no_more_ranks_than_a_token_has_experts():
    grouped = PrecisionConfig(kernels={"experts": "deep_gemm"}, exact=False)
    base = make(grpo_qwen3_30b_a3b())  # 8 experts of a token
    for ranks, expected in ((1, "gather"), (2, "gather"), (8, "gather"), (16, "alltoall")):
        cfg = replace(make(base, world_size=ranks, expert=ranks), precision=grouped)
        assert choose(cfg, HOPPER).trainer.dispatch == expected
    wide = make(base, world_size=8, expert=2)
    for cfg, hardware in (
        (wide, CPU),  # engines there add a token's experts as the all-to-all's combine does
        (replace(wide, precision=PrecisionConfig(exact=True)), HOPPER),
        (replace(wide, precision=PrecisionConfig(kernels={"experts": "te"})), HOPPER),
        (make(base, world_size=8, expert=2, expert_tensor=2, tensor=2), HOPPER),
        (grpo_qwen3_8b(), HOPPER),
    ):
        assert choose(cfg, hardware).trainer.dispatch == "alltoall"
    asked = make(grpo_qwen3_30b_a3b(), world_size=4, expert=4, dispatch="gather")
    assert choose(asked, CPU).trainer.experts == choose(asked, HOPPER).trainer.experts == "deep_gemm"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"precision": PrecisionConfig(kernels={"experts": "te"})},
            "precision.kernels.experts = 'te' needs tokens sorted by expert",
        ),
        ({"precision": PrecisionConfig(exact=True)}, "in a different order"),
        ({"parallel": {"expert_tensor": 2, "tensor": 2}}, "partial outputs of experts divided by"),
    ],
)
def test_gathering_is_refused_where_it_cannot_be(changes, problem):
    cfg = make(grpo_qwen3_30b_a3b(), world_size=8, expert=2, dispatch="gather", **changes.get("parallel", {}))
    cfg = replace(cfg, precision=changes.get("precision", cfg.precision))
    (text,) = [text for text in said(cfg, HOPPER) if "--parallel.dispatch = 'gather'" in text]
    assert problem in text
    (text,) = said(make(grpo_qwen3_8b(), world_size=1, dispatch="gather"), HOPPER)
    assert "this model has no experts" in text


def test_the_record_of_a_run_names_what_computes():
    on_cpu = choose(run(), CPU).record()
    assert on_cpu["trainer kernel, FP8 linears"] == "PyTorch (emulated)"
    assert on_cpu["trainer kernel, expert linears"] == on_cpu["trainer kernel, norms"] == "PyTorch"
    asked = run(linears="deep_gemm", experts="deep_gemm")
    for hardware, linears, experts in (
        (HOPPER, "DeepGEMM", "DeepGEMM (grouped)"),
        (CPU, "PyTorch (as DeepGEMM)", "PyTorch (as DeepGEMM)"),
    ):
        record = choose(asked, hardware).record()
        assert (record["trainer kernel, FP8 linears"], record["trainer kernel, expert linears"]) == (linears, experts)
    assert (
        choose(run(experts="te"), HOPPER).record()["trainer kernel, expert linears"] == "Transformer Engine (grouped)"
    )


def test_a_matrix_that_is_not_in_whole_blocks_stays_with_the_other_kernels():
    kernels = choose(run(linears="deep_gemm"), HOPPER).trainer
    assert kernels.linear_kernel(256, 384) == "deep_gemm"
    assert kernels.linear_kernel(576, 7168) == "deep_gemm"  # the last block of rows is half a block
    assert kernels.linear_kernel(544, 7168) == kernels.linear_kernel(7168, 64) == "te"
    assert choose(run(linears="deep_gemm"), CPU).trainer.linear_kernel(544, 7168) == "emulated"


def test_engines_that_compute_with_another_kernel_are_told_by_name():
    choice = choose(run(), HOPPER)
    sound = {
        "linears": ["DeepGemmFp8BlockScaledMMKernel"],
        "experts": ["Fp8MoEMethod (TRITON)"],
        "attention": ["FLASH_ATTN"],
    }
    assert choice.disagreements(sound) == []
    (text,) = choice.disagreements(sound | {"experts": ["Fp8MoEMethod (DEEPGEMM)"]})
    assert "precision.kernels.engine_experts: Triton was chosen" in text and "DEEPGEMM" in text
    (text,) = choice.disagreements({"linears": [*sound["linears"], "CutlassFp8BlockScaledMMKernel"]})
    assert "DeepGEMM was chosen" in text and "uses CutlassFp8BlockScaledMMKernel" in text
    named = run(engine_attention="TRITON_ATTN")
    assert choose(named, HOPPER).disagreements(sound)
    assert choose(run(), CPU).disagreements({"linears": ["EmulatedFp8LinearMethod"], "attention": ["CPU_ATTN"]}) == []
