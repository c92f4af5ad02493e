"""Preflight refuses exactly what building refuses, in the same words, on every kind of hardware."""

import random
import typing
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_fp8rl.cli import config_functions
from megatron_fp8rl.config import (
    KERNELS,
    ConfigError,
    EngineConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    Violation,
)
from megatron_fp8rl.precision.hardware import Generation, Hardware
from megatron_fp8rl.preflight import findings, rules
from tests.helpers.family_configs import DEEPSEEK, GEMMA3, GLM, GLM_LITE, GPT_OSS, MINIMAX, MIXTRAL, OLMO2
from tests.helpers.models import small_model

FIELDS = {
    "precision": ("trainer", "rollout", "scales", "gradients", "params", "exact"),
    "parallel": ("dispatch",),
    "engine": ("batch_invariant", "kv_cache_dtype"),
}
KERNEL_FIELDS = {f"--{group}.{name}" for group, names in FIELDS.items() for name in names} - {"--engine.kv_cache_dtype"}
KERNEL_FIELDS |= {f"--precision.kernels.{role}" for role in KERNELS}
GENERATIONS: tuple[Generation, ...] = typing.get_args(Generation)


def build(cfg: RunConfig, generation: Generation, monkeypatch) -> list[Violation]:
    """What the trainer and the engines say when they are built, short of weights and processes."""
    from megatron_fp8rl.rollout.fleet import Fleet
    from megatron_fp8rl.trainer.model import build as trainer

    class Built(Exception):
        pass

    class Layers(trainer.LayerFactory):
        def stage(self, config, vp_stage):
            for layer in range(cfg.model.num_layers):
                self.layer(layer)
            raise Built

    def start(*_):
        raise Built

    hardware, result = Hardware(generation), []
    parallel = SimpleNamespace(device=torch.device("cpu"), tp_size=cfg.parallel.tensor, tp_rank=0, config=cfg.parallel)
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "local_hardware", lambda: hardware)
        patch.setattr(trainer, "LayerFactory", Layers)
        patch.setattr(trainer, "transformer_config", lambda *_: None)
        patch.setattr(trainer, "model_parallel_cuda_manual_seed", lambda *_, **__: None)
        patch.setattr(
            "megatron_fp8rl.trainer.model.layers._norm", lambda kernel, zero_centred: torch.rms_norm
        )  # imports what is not here
        patch.setattr("megatron_fp8rl.rollout.fleet.local_hardware", lambda: hardware)
        patch.setattr("megatron_fp8rl.rollout.fleet.LocalReplicas", start)
        patch.setattr("megatron_fp8rl.rollout.fleet.placement.visible_gpus", lambda: [])
        patch.setattr("megatron_fp8rl.rollout.fleet.placement.assign", lambda *_, **__: [])
        local = replace(cfg, engine=replace(cfg.engine, placement="colocated"))
        for entry in (lambda: trainer.build_chunks(cfg, parallel), lambda: Fleet.start(local, "model", "runs")):
            try:
                entry()
            except ConfigError as error:
                result += error.violations
            except Built:
                pass
            else:
                raise AssertionError("built without its layers or its engines")
    return list(dict.fromkeys(result))


def values(group: type, name: str) -> list:
    kind = typing.get_type_hints(group)[name]
    if name == "exact":
        return [False, True, "auto"]
    return [False, True] if kind is bool else list(typing.get_args(kind))


def drawn(seed: int) -> RunConfig:
    """A configuration with random valid values in some of the fields that name kernels."""
    rng = random.Random(seed)
    cfg = rng.choice([function() for function in config_functions().values()])
    groups = {"precision": PrecisionConfig, "parallel": ParallelConfig, "engine": EngineConfig}
    for group, names in FIELDS.items():
        picked = rng.sample(names, rng.randint(1, len(names)))
        changes = {name: rng.choice(values(groups[group], name)) for name in picked}
        cfg = replace(cfg, **{group: replace(getattr(cfg, group), **changes)})
    roles = rng.sample(list(KERNELS), rng.randint(0, len(KERNELS)))
    kernels = {role: rng.choice(KERNELS[role]) for role in roles}
    cfg = replace(cfg, precision=replace(cfg.precision, kernels=kernels))
    if rng.random() < 0.3 and not cfg.model.is_moe:
        cfg = replace(cfg, model=replace(cfg.model, head_dim=rng.choice([64, 128])))
    if rng.random() < 0.3:
        cfg = replace(cfg, precision=replace(cfg.precision, bf16_last_layers=1))
    return cfg


CONFIGS = {name: function() for name, function in config_functions().items()}
CONFIGS |= {f"random {seed}": drawn(seed) for seed in range(100)}


@pytest.mark.slow
@pytest.mark.parametrize("generation", GENERATIONS)
def test_preflight_refuses_what_building_refuses_in_the_same_words(generation, monkeypatch):
    num_refused = num_built = 0
    for name, cfg in CONFIGS.items():
        built = build(cfg, generation, monkeypatch)
        before = rules.check(cfg, accelerator=generation)
        assert [str(v) for v in built if v not in before] == [], name
        assert [str(v) for v in before if v.field in KERNEL_FIELDS and v not in built] == [], name
        num_refused, num_built = num_refused + bool(built), num_built + (not built)
    assert num_refused > 10 and (generation == "ampere" or num_built > 10)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_what_is_installed_changes_no_other_answer(generation):
    """Without a package of kernels no new configuration is allowed."""
    from megatron_fp8rl.precision.kernel_choice import refusals

    for name, cfg in CONFIGS.items():
        everything, nothing = (
            refusals(cfg, Hardware(generation, p)) for p in (Hardware(generation).packages, frozenset())
        )
        assert {v.field for v in everything} <= {v.field for v in nothing} | {"--precision.kernels.trainer"}, name


EXACT = RunConfig(
    name="exact",
    precision=PrecisionConfig(exact=True),
    model=small_model((2, 256, 4, 2, 128, 512), experts=(4, 2, 256)),
)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_nobody_is_told_to_choose_the_value_that_is_set(generation):
    from megatron_fp8rl.precision.kernel_choice import refusals

    narrow = [replace(EXACT, model=replace(EXACT.model, head_dim=size)) for size in (32, 64, 96, 192, 256)]
    dense = small_model((2, 256, 4, 2, 64, 512), ffn=512)
    for cfg in (*CONFIGS.values(), *narrow, replace(EXACT, model=dense)):
        for violation in refusals(cfg, Hardware(generation)):
            assert not (violation.value == "auto" and "hoose auto" in violation.remedy), str(violation)


def test_exact_with_narrow_heads_names_precision_exact():
    from megatron_fp8rl.precision.kernel_choice import refusals

    cfg = replace(EXACT, model=replace(EXACT.model, head_dim=64))
    (violation,) = [v for v in refusals(cfg, Hardware("hopper")) if "head_dim" in v.problem]
    assert (violation.field, violation.value, violation.remedy) == ("--precision.exact", True, "Set False")
    explicit = replace(cfg, precision=replace(cfg.precision, kernels={"attention": "engine"}))
    assert any("hoose auto" in v.remedy for v in refusals(explicit, Hardware("hopper")))


def test_exact_names_every_field_that_is_in_its_way():
    from megatron_fp8rl.precision.kernel_choice import refusals

    wrong = {"precision.kernels.trainer": "emulated", "engine.speculation": "ngram", "precision.kernels.linears": "te"}
    fields = {violation.field for violation in refusals(findings.apply(EXACT, [*wrong.items()]), Hardware("hopper"))}
    assert {f"--{path}" for path in wrong} <= fields


def test_exact_accepts_kept_entries_on_a_gpu_unless_experts_are_recorded():
    from megatron_fp8rl.precision.kernel_choice import refusals

    cfg = replace(EXACT, sampling=replace(EXACT.sampling, top_p=0.9, top_k=5, min_p=0.1))
    recording = replace(cfg, engine=replace(cfg.engine, record_routed_experts=True))
    assert not refusals(cfg, Hardware("hopper")) and not refusals(recording, Hardware("cpu"))
    assert [v.field for v in refusals(recording, Hardware("hopper"))] == ["--engine.record_routed_experts"]


def test_latent_attention_and_every_other_family_are_exact_on_a_cpu():
    from megatron_fp8rl.precision.kernel_choice import choose

    cfg = replace(EXACT, precision=PrecisionConfig(trainer="bf16", rollout="bf16"))
    for model in (MIXTRAL, GLM, MINIMAX, DEEPSEEK, GLM_LITE):
        run = replace(cfg, model=model)
        assert not [v for v in rules.check(run, accelerator="cpu") if "exact" in str(v)]
        assert choose(run, Hardware("cpu")).exact == "on"


@pytest.mark.parametrize(
    ("path", "size"),
    [("kv_lora_rank", 384), ("kv_lora_rank", 1024), ("qk_rope_head_dim", 48), ("qk_nope_head_dim", 96)],
)
def test_latent_attention_is_exact_on_a_gpu_where_that_is_asked(path, size):
    from megatron_fp8rl.precision.kernel_choice import choose, refusals
    from model_configs.deepseek import deepseek_v3, kimi_k2
    from model_configs.glm import glm_47_flash

    for model in (deepseek_v3(), kimi_k2()):
        assert not refusals(replace(EXACT, model=model), Hardware("hopper"))
    cfg = replace(EXACT, model=glm_47_flash())
    assert not refusals(cfg, Hardware("hopper"))
    chosen = choose(cfg, Hardware("hopper"))
    assert (chosen.trainer.attention, chosen.trainer.linear_kernel(576, 2048)) == ("cudnn", "deep_gemm")
    auto = choose(replace(cfg, precision=replace(cfg.precision, exact="auto")), Hardware("hopper"))
    assert auto.exact == "off" and "latent attention are not measured" in auto.reasons["exact"]
    other = replace(cfg, model=replace(cfg.model, mla=replace(cfg.model.mla, **{path: size})))
    assert [wrong.field for wrong in refusals(other, Hardware("hopper"))] == [f"--model.mla.{path}"]


@pytest.mark.parametrize("more", [{"trainer": "bf16", "rollout": "bf16"}, {"bf16_last_layers": 1}], ids=["all", "edge"])
def test_bf16_layers_are_exact_on_a_gpu_where_that_is_asked_and_no_layer_has_experts(more):
    from megatron_fp8rl.precision.kernel_choice import choose, refusals

    dense = replace(EXACT, model=small_model((2, 256, 4, 2, 128, 512), ffn=512))
    auto = replace(dense, precision=PrecisionConfig(**more))
    asked = replace(auto, precision=replace(auto.precision, exact=True))
    (wrong,) = refusals(replace(asked, model=EXACT.model), Hardware("hopper"))
    assert "BF16 experts" in wrong.problem and wrong.field.removeprefix("--precision.") in {*more}
    hardware = Hardware("hopper", packages=frozenset({"transformer_engine", "vllm", "deep_gemm"}))
    assert not refusals(asked, hardware) and choose(asked, hardware).exact == "on"
    choice = choose(auto, hardware)
    assert choice.exact == "off" and "costs of exact BF16 products" in choice.reasons["exact"]
    assert choose(auto, Hardware("cpu")).exact == "on"


def test_auto_is_exact_on_a_gpu_with_bf16_edges_up_to_a_quarter_of_the_layers():
    from megatron_fp8rl.precision.kernel_choice import choose

    dense = small_model((16, 256, 4, 2, 128, 512), ffn=512)
    for first, last, exact in ((2, 2, "on"), (1, 0, "on"), (0, 4, "on"), (3, 2, "off")):
        precision = PrecisionConfig(bf16_first_layers=first, bf16_last_layers=last)
        choice = choose(replace(EXACT, model=dense, precision=precision), Hardware("hopper"))
        assert choice.exact == exact, choice.reasons["exact"]
    assert "precision.bf16_first_layers = 3: costs of exact BF16 products" in choice.reasons["exact"]


def test_windows_that_sequences_exceed_are_inexact_on_a_gpu_until_they_are_measured():
    from megatron_fp8rl.precision.kernel_choice import choose, refusals

    longest = EXACT.max_sequence_tokens
    for window, is_exact in ((longest, True), (longest - 1, False)):
        cfg = replace(EXACT, model=replace(EXACT.model, sliding_window=window))
        wrong = [v for v in refusals(cfg, Hardware("hopper")) if f"model.sliding_window = {window}" in v.problem]
        assert [v.field for v in wrong] == [] if is_exact else ["--precision.exact"]
        auto = replace(cfg, precision=replace(cfg.precision, exact="auto"))
        assert choose(auto, Hardware("hopper")).exact == ("on" if is_exact else "off")


def test_attention_over_an_fp8_cache_has_windows():
    from megatron_fp8rl.precision.kernel_choice import choose, refusals

    hopper = Hardware("hopper")
    layers = ("sliding_attention", "full_attention")
    model = replace(EXACT.model, sliding_window=EXACT.max_sequence_tokens // 2, layer_types=layers)
    auto = replace(EXACT, model=model, precision=replace(EXACT.precision, exact="auto"))
    choice = choose(findings.apply(auto, [("engine.kv_cache_dtype", "fp8")]), hopper)
    assert (choice.exact, choice.trainer.attention, choice.engine.attention) == ("on", "engine", "FP8_CACHE")
    choice = choose(auto, hopper)  # over a BF16 cache
    assert (choice.exact, choice.trainer.attention, choice.engine.attention) == ("off", "cudnn", "vllm")
    assert "sliding_window" in choice.reasons["exact"]
    with_engine = findings.apply(auto, [("precision.kernels.attention", "engine")])
    (wrong,) = refusals(with_engine, hopper)
    assert wrong.field == "--precision.kernels.attention" and "model.sliding_window" in wrong.problem
    assert ["--precision.exact"] == [wrong.field for wrong in refusals(replace(EXACT, model=model), hopper)]


_BLOCKS = dict(hidden_size=256, head_dim=128, vocab_size=512)


@pytest.mark.parametrize("model", [GLM, MINIMAX], ids=lambda model: model.family)
def test_families_of_whole_blocks_are_exact_on_a_gpu(model):
    """The routers of GLM-4.5 and MiniMax-M2, and the norms of the latter, which span all heads of a rank."""
    from megatron_fp8rl.precision.kernel_choice import refusals

    cfg = replace(EXACT, model=replace(model, **_BLOCKS, moe_ffn_hidden_size=256))
    assert not refusals(cfg, Hardware("hopper"))
    divided = replace(
        cfg, engine=replace(cfg.engine, tensor=2, expert=2), parallel=replace(cfg.parallel, world_size=2, tensor=2)
    )
    fields = [violation.field for violation in refusals(divided, Hardware("hopper"))]
    assert fields == ([] if model.family == "glm4_moe" else ["--engine.tensor"])


def test_other_routers_are_inexact_on_a_gpu_and_gemma_is_exact_where_that_is_asked():
    from megatron_fp8rl.precision.kernel_choice import choose, refusals

    unbiased = replace(GLM, **_BLOCKS, router=replace(GLM.router, correction_bias=False))
    (wrong,) = refusals(replace(EXACT, model=unbiased), Hardware("hopper"))
    assert wrong.field == "--model.router.score"
    gemma = replace(EXACT, model=replace(GEMMA3, **_BLOCKS), engine=replace(EXACT.engine, kv_cache_dtype="fp8"))
    assert not refusals(gemma, Hardware("hopper"))
    auto = choose(replace(gemma, precision=replace(gemma.precision, exact="auto")), Hardware("hopper"))
    assert auto.exact == "off" and "Gemma 3 are not measured" in auto.reasons["exact"]


def test_auto_is_exact_on_a_gpu_with_norms_of_outputs_and_one_gpu_per_engine():
    from megatron_fp8rl.precision.kernel_choice import choose, refusals

    asked = replace(EXACT, model=replace(OLMO2, **_BLOCKS, ffn_hidden_size=256), engine=EngineConfig())
    auto = replace(asked, precision=replace(asked.precision, exact="auto"))
    assert not refusals(asked, Hardware("hopper"))
    for cfg in (asked, auto, findings.apply(auto, [("engine.kv_cache_dtype", "fp8")])):
        assert choose(cfg, Hardware("hopper")).exact == "on"
    divided = replace(auto, engine=EngineConfig(tensor=2), parallel=replace(auto.parallel, world_size=2, tensor=2))
    assert choose(divided, Hardware("hopper")).exact == "off"


def test_attention_sinks_and_biased_experts_are_inexact_on_a_gpu_and_exact_on_a_cpu():
    from megatron_fp8rl.precision.kernel_choice import choose, refusals

    cfg = replace(EXACT, model=replace(GPT_OSS, hidden_size=256, max_position_embeddings=4096), engine=EngineConfig())
    texts = [violation.problem for violation in refusals(cfg, Hardware("hopper"))]
    assert any("the attention sinks of gpt_oss are not measured" in text for text in texts), texts
    assert not refusals(cfg, Hardware("cpu"))
    auto = replace(cfg, precision=replace(cfg.precision, exact="auto"))
    choice = choose(auto, Hardware("hopper"))
    assert (choice.exact, choice.trainer.experts, choice.engine.experts) == ("off", "te", "triton")
    over_fp8 = findings.apply(auto, [("engine.kv_cache_dtype", "fp8")])
    assert choose(over_fp8, Hardware("hopper")).engine.attention == "vllm"
    for path, value in (("precision.kernels.experts", "deep_gemm"), ("precision.kernels.engine_experts", "deep_gemm")):
        (violation,) = refusals(
            findings.apply(auto, [(path, value)]), Hardware("hopper"), (path.count("engine") and "engine") or "trainer"
        )
        assert violation.field == f"--{path}" and "biases" in violation.problem
    divided = replace(cfg, engine=EngineConfig(tensor=2, expert=2), parallel=ParallelConfig(world_size=2, tensor=2))
    assert [violation.field for violation in refusals(divided, Hardware("cpu"))] == ["--engine.tensor"]
    for path, value in (("parallel.expert_tensor", 2), ("engine.expert", 1)):
        fields = {
            violation.field for violation in rules.check(findings.apply(divided, [(path, value)]), accelerator="cpu")
        }
        assert f"--{path}" in fields


def test_exact_selects_the_kernels_that_both_ends_share():
    from megatron_fp8rl.precision.kernel_choice import choose

    choice = choose(EXACT, Hardware("hopper"))
    assert (choice.trainer.linears, choice.trainer.experts, choice.trainer.attention) == (
        "deep_gemm",
        "deep_gemm",
        "engine",
    )
    assert (choice.trainer.norms, choice.trainer.router, choice.trainer.combine) == (
        "batch_invariant",
        "batch_invariant",
        "sum",
    )
    assert (choice.engine.linears, choice.engine.experts, choice.engine.norms) == (
        "deep_gemm",
        "deep_gemm",
        "batch_invariant",
    )


@pytest.mark.parametrize(
    "path, value, on_gpu_only",
    [
        ("engine.speculation", "ngram", True),
        ("engine.tensor", 2, False),  # engine.expert is 1
        ("parallel.tensor", 2, True),
        ("parallel.expert_tensor", 2, False),
        ("precision.trainer", "bf16", False),
        ("precision.bf16_first_layers", 1, True),
        ("precision.kernels.linears", "te", True),
        ("precision.kernels.engine_experts", "triton", True),
        ("model.head_dim", 64, True),
        ("model.moe_ffn_hidden_size", 192, True),
    ],
)
def test_exact_refuses_what_cannot_be(path, value, on_gpu_only):
    from megatron_fp8rl.precision.kernel_choice import refusals

    cfg = findings.apply(EXACT, [(path, value)])
    assert not refusals(replace(cfg, precision=replace(cfg.precision, exact=False)), Hardware("cpu"))
    assert refusals(cfg, Hardware("hopper"))
    assert bool(refusals(cfg, Hardware("cpu"))) != on_gpu_only


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_exact_with_an_fp8_cache_uses_our_attention_at_both_ends(head_dim):
    from megatron_fp8rl.precision.kernel_choice import choose, refusals

    changes = [("engine.kv_cache_dtype", "fp8"), ("model.head_dim", head_dim)]
    cfg = findings.apply(EXACT, changes)
    choice = choose(cfg, Hardware("hopper"))
    assert (choice.trainer.attention, choice.engine.attention) == ("engine", "FP8_CACHE")
    assert not choice.engine.rounds_queries
    flash = findings.apply(cfg, [("precision.kernels.engine_attention", "FLASH_ATTN")])
    (violation,) = refusals(flash, Hardware("hopper"))
    assert violation.field == "--precision.kernels.engine_attention" and "FP8_CACHE" in violation.choices
    (violation,) = refusals(findings.apply(cfg, [("model.head_dim", 192)]), Hardware("hopper"))
    assert "head_dim 64, 96, 128 or 256" in violation.problem


DENSE = replace(
    EXACT,
    model=replace(
        EXACT.model, family="qwen3", num_experts=0, experts_per_token=0, moe_ffn_hidden_size=0, ffn_hidden_size=512
    ),
)


SHARED = replace(EXACT, model=replace(EXACT.model, num_shared_experts=1))
WIDE = replace(DENSE, model=replace(DENSE.model, num_attention_heads=8, num_key_value_heads=8, ffn_hidden_size=1024))
OTHER = replace(EXACT, model=replace(EXACT.model, family="mixtral", qk_norm=False))


@pytest.mark.parametrize(
    "cfg, data, tensor, expert, trainer, on_cpu, on_gpu",
    [
        (DENSE, 1, 2, 1, 2, "", ""),
        (EXACT, 1, 2, 2, 2, "", ""),
        (EXACT, 2, 1, 2, 1, "", ""),
        (EXACT, 1, 2, 2, 1, "", "parallel.tensor"),  # a trainer's rank would divide its product
        (EXACT, 2, 1, 2, 2, "", "parallel.tensor"),
        (EXACT, 1, 2, 1, 2, "engine.expert", "engine.expert"),
        (DENSE, 1, 4, 1, 4, "", ""),
        (WIDE, 1, 8, 1, 8, "", ""),
        (DENSE, 1, 4, 1, 3, "parallel.tensor", "parallel.tensor"),
        (EXACT, 4, 1, 4, 1, "", ""),
        (EXACT, 2, 2, 4, 2, "", ""),
        (OTHER, 2, 2, 4, 2, "engine.data", "engine.data"),
        (SHARED, 1, 2, 2, 2, "", ""),
        (SHARED, 4, 1, 4, 1, "", ""),
        (SHARED, 2, 2, 4, 2, "engine.data", "engine.data"),
    ],
)
def test_exact_accepts_sums_that_both_ends_add_in_one_order(cfg, data, tensor, expert, trainer, on_cpu, on_gpu):
    from megatron_fp8rl.precision.kernel_choice import refusals

    cfg = replace(
        cfg,
        engine=replace(cfg.engine, data=data, tensor=tensor, expert=expert),
        parallel=replace(cfg.parallel, world_size=trainer, tensor=trainer),
    )
    for hardware, refused in ((Hardware("cpu"), on_cpu), (Hardware("hopper"), on_gpu)):
        assert [v.field for v in refusals(cfg, hardware)] == ([f"--{refused}"] if refused else []), hardware


AUTO = replace(EXACT, precision=PrecisionConfig())


@pytest.mark.parametrize(
    "path, value, on_cpu, on_hopper",
    [
        ("name", "auto", True, True),
        ("sampling.temperature", 0.7, True, True),
        ("sampling.max_staleness", 2, True, True),
        ("sampling.top_p", 0.9, True, True),
        ("precision.scales", "fp32", True, False),
        ("precision.kernels.engine_experts", "triton", True, False),
        ("model.head_dim", 64, True, False),  # no field asks for this
        ("engine.placement", "remote", True, False),  # weights by NCCL
        ("precision.exact", False, False, False),
        ("precision.kernels.attention", "auto", True, True),
    ],
)
def test_auto_is_exact_unless_a_field_forbids_it_and_then_names_the_field(path, value, on_cpu, on_hopper):
    from megatron_fp8rl.precision.kernel_choice import KernelChoice, refusals, resolved

    cfg = findings.apply(AUTO, [(path, value)])
    for hardware, expected in ((Hardware("cpu"), on_cpu), (Hardware("hopper"), on_hopper)):
        choice = KernelChoice.of(cfg, hardware)
        assert resolved(cfg, hardware).precision.exact is expected
        assert choice.exact == ("on" if expected else "off")
        assert choice.record()["precision.exact"] == choice.exact_text()
        if not expected and value:
            assert f"{path.rpartition('.')[2]}" in choice.exact_text() or "NCCL" in choice.exact_text()
            assert str(value) in choice.exact_text() or "NCCL" in choice.exact_text()
        if path != "engine.placement":
            assert not [v for v in rules.check(cfg, accelerator=hardware.generation) if "exact" in str(v)]
        # The kernels are those of the same configuration with the answer in place of "auto".
        assert choice == KernelChoice.of(resolved(cfg, hardware), hardware) and not refusals(cfg, hardware)
    assert resolved(cfg, Hardware("blackwell")).precision.exact is False


def test_true_allows_what_auto_avoids_because_it_is_not_measured():
    from megatron_fp8rl.precision.kernel_choice import refusals

    assert not refusals(findings.apply(EXACT, [("precision.scales", "fp32")]), Hardware("hopper"))


def test_weights_by_nccl_are_refused_for_exact_engines_but_only_forbid_auto():
    remote = findings.apply(AUTO, [("engine.placement", "remote")])
    exact = findings.apply(remote, [("precision.exact", True)])
    (violation,) = [v for v in rules.check(exact, accelerator="hopper") if "NCCL" in v.problem]
    assert violation.field == "--weight_sync.transport"
    assert not [v for v in rules.check(remote, accelerator="hopper") if "NCCL" in v.problem]


def test_an_fp8_cache_is_proposed_where_it_would_be_exact_and_faster():
    from megatron_fp8rl.precision.kernel_choice import KernelChoice

    dense = replace(AUTO, model=small_model((2, 256, 4, 2, 128, 512), ffn=512))
    assert "--engine.kv_cache_dtype fp8" in KernelChoice.of(dense, Hardware("hopper")).exact_text()
    assert "kv_cache" not in KernelChoice.of(dense, Hardware("cpu")).exact_text()
    fp8 = findings.apply(dense, [("engine.kv_cache_dtype", "fp8")])
    assert KernelChoice.of(fp8, Hardware("hopper")).exact_text().startswith("on: trainer and engine")


def test_an_engines_parts_are_those_of_the_finer_end(monkeypatch):
    from megatron_fp8rl.precision.kernel_choice import KernelChoice, refusals
    from megatron_fp8rl.precision.kernel_support import engine_parts

    def parts(cfg: RunConfig, trainer: int, **engine: int) -> int:
        parallel = replace(cfg.parallel, world_size=trainer, tensor=trainer)
        return engine_parts(replace(cfg, parallel=parallel, engine=replace(cfg.engine, **engine)))

    assert parts(DENSE, 2, tensor=2) == parts(EXACT, 1, data=2, expert=2) == 0, "the sums of two ranks"
    assert parts(DENSE, 1, tensor=4) == parts(DENSE, 4, tensor=2) == parts(DENSE, 4, tensor=4) == 4
    assert parts(EXACT, 1, data=4, expert=4) == 1 and parts(SHARED, 2, tensor=2, expert=2) == 2

    divided = findings.apply(DENSE, [("engine.tensor", 4), ("precision.kernels.linears", "deep_gemm")])
    (violation,) = refusals(divided, Hardware("cpu"))
    assert violation.field == "--precision.kernels.linears" and "parallel.tensor 4" in violation.remedy
    asked = findings.apply(DENSE, [("engine.tensor", 4), ("parallel.world_size", 4), ("parallel.tensor", 4)])
    auto = replace(asked, precision=PrecisionConfig())
    for hardware, is_on in ((Hardware("cpu"), "on"), (Hardware("hopper"), "off")):
        assert KernelChoice.of(asked, hardware).exact == "on" and KernelChoice.of(auto, hardware).exact == is_on
    assert "engine.tensor = 4" in KernelChoice.of(auto, Hardware("hopper")).exact_text()
    monkeypatch.setenv("MEGATRON_FP8RL_SKIP_PATCHES", "add_in_rank_order")
    (violation,) = refusals(findings.apply(DENSE, [("engine.tensor", 4)]), Hardware("cpu"))
    assert violation.field == "--engine.tensor" and "add_in_rank_order" in violation.problem


def _tiny(**precision) -> RunConfig:
    model = small_model((2, 128, 2, 2, 64, 32), experts=(2, 1, 128), max_position_embeddings=64)
    return RunConfig(name="tiny", model=model, precision=PrecisionConfig(**precision))


def _really_built(precisions: list[dict]) -> list[tuple[str, list[str]]]:
    """On a rank: the classes that multiply each model's FP8 linears, or the rejections."""
    from megatron_fp8rl.trainer.model.build import build_chunks, named_linears
    from megatron_fp8rl.trainer.parallel import Parallel

    parallel, result = Parallel.init(_tiny().parallel, deadline_s=60), []
    for precision in precisions:
        try:
            chunks = build_chunks(_tiny(**precision), parallel)
        except ConfigError as error:
            result.append(("refused", [str(v) for v in error.violations]))
            continue
        linears = [linear for _, linear in named_linears(chunks, parallel) if linear.recipe is not None]
        result.append(("built", sorted({getattr(linear.gemm, "__name__", "grouped") for linear in linears})))
    parallel.close()
    return result


@pytest.mark.slow
def test_models_are_built_with_the_kernels_that_were_chosen_or_refused_as_preflight_does():
    from tests.helpers.dist import run_ranks

    precisions = [
        {},
        {"trainer": "bf16", "rollout": "bf16"},
        {"trainer": "delayed"},
        {"kernels": {"linears": "deep_gemm"}},
        {"kernels": {"experts": "deep_gemm"}},
        {"kernels": {"trainer": "te"}},
        {"kernels": {"linears": "deep_gemm"}, "gradients": "e5m2"},
        {"kernels": {"experts": "deep_gemm"}, "trainer": "tensorwise"},
        {"params": "fp8"},
        {"kernels": {"attention": "engine"}},
    ]
    (actual,) = run_ranks(1, _really_built, precisions)
    built = [names for status, names in actual if status == "built"]
    assert built == [["in_torch"], [], ["in_torch"], ["in_torch", "on_deep_gemm"], ["grouped", "in_torch"]]
    for precision, (status, texts) in zip(precisions, actual, strict=True):
        kernels = [str(v) for v in rules.check(_tiny(**precision), accelerator="cpu") if v.field in KERNEL_FIELDS]
        assert kernels == (texts if status == "refused" else []), precision
