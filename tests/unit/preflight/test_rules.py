"""All mistakes at once, each with option, value and remedy; sound configurations pass."""

import ast
import json
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megatron_fp8rl import upstream
from megatron_fp8rl.algo.old_pass import needs_old_pass
from megatron_fp8rl.commands.grpo import model_in
from megatron_fp8rl.config import (
    ConfigError,
    EnvironmentConfig,
    GdnConfig,
    MlaConfig,
    RewardConfig,
    RopeScaling,
    RouterConfig,
)
from megatron_fp8rl.names import registry
from megatron_fp8rl.observe.recording import RolloutWriter
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.kernel_choice import KernelChoice, resolved
from megatron_fp8rl.preflight.data_check import doubts
from megatron_fp8rl.preflight.rules import check
from tests.helpers import gemma3
from tests.helpers.configs import DENSE, MOE, fields_of, make
from tests.helpers.rollouts import make_group

ROUTER = RouterConfig(score="sigmoid", correction_bias=True)
EXACT = RewardConfig()
FORM = RewardConfig(function="format", options={"pattern": "x"})


def changes_of(*texts: str) -> dict[str, Any]:
    """Keywords for ``make`` from texts such as "parallel.tensor=2"."""
    changes = {}
    for text in texts:
        path, _, value = text.partition("=")
        try:
            changes[path.replace(".", "__")] = ast.literal_eval(value)
        except (ValueError, SyntaxError):  # a name
            changes[path.replace(".", "__")] = value
    return changes


@pytest.mark.parametrize(
    "cfg",
    [
        make(),
        make(MOE),
        make(parallel__world_size=2, parallel__tensor=2, engine__tensor=2),
        make(MOE, parallel__world_size=8, parallel__tensor=2, parallel__expert=4, parallel__expert_tensor=2),
        make(parallel__world_size=8, parallel__pipeline=2, parallel__virtual_stages=2, parallel__context=2),
        make(parallel__world_size=3, parallel__pipeline=3),  # 4 layers: 2, 1 and 1
        make(precision__trainer="delayed", precision__bf16_first_layers=1, precision__bf16_last_layers=1),
        make(algo__loss="cispo", algo__clip_low=1.0, algo__clip_high=4.0),
        make(observe__eval_prompts=0),
        make(algo__correction="geometric_mask", algo__correction_low=0.999, algo__correction_high=1.002),
    ],
)
def test_sound_configurations_pass(cfg):
    assert check(cfg, accelerator="cpu") == []


def test_exact_runs_measure_no_bounds():
    fp8 = {"precision__trainer": "blockwise", "precision__rollout": "blockwise"}
    exact, auto = (make(**fp8, algo__correction_quantile=0.01, precision__exact=value) for value in (True, "auto"))
    (refused,) = check(exact, accelerator="cpu")
    assert f"{refused}".startswith("--algo.correction_quantile = 0.01: precision.exact: an exact run has no noise")
    assert refused.remedy == "Set None, or --precision.exact False"
    assert check(auto, accelerator="cpu") == []
    assert resolved(auto, Hardware("cpu")).precision.exact is False and needs_old_pass(auto)
    assert resolved(make(**fp8), Hardware("cpu")).precision.exact is True and not needs_old_pass(make(**fp8))


_REPLAYS = (("old", False, []), ("rollout", True, []), ("rollout", False, ["--algo.router_replay"]))


def test_router_replay_needs_a_router_and_recorded_experts(tmp_path):
    assert fields_of(make(algo__router_replay="old")) == ["--algo.router_replay"]
    for mode, records, fields in _REPLAYS:
        cfg = make(MOE, algo__router_replay=mode, engine__record_routed_experts=records)
        assert fields_of(cfg) == fields
    (violation,) = check(cfg, accelerator="cpu")
    assert "--engine.record_routed_experts True" in violation.remedy
    for has_experts, fields in ((False, ["--sampling.replay"]), (True, [])):
        folder, cfg = tmp_path / str(has_experts), replace(cfg, num_steps=1)
        with closing(RolloutWriter(folder)) as writer:
            writer.write(1, [make_group(0, experts=has_experts)])
        assert fields_of(replace(cfg, sampling=replace(cfg.sampling, replay=str(folder)))) == fields
    missing = replace(cfg, sampling=replace(cfg.sampling, replay="missing"))
    assert fields_of(missing) == ["--sampling.replay"]


def test_on_a_gpu_adapters_are_merged_into_bf16_weights_and_experts_run_one_by_one():
    def texts(model, **changes) -> list[str]:
        return [f"{each}" for each in check(make(model, lora__rank=8, **changes), accelerator="hopper")]

    (refused,) = texts(MOE, precision__kernels__experts="deep_gemm")
    assert refused.startswith("--precision.kernels.experts = 'deep_gemm': DeepGEMM's grouped kernels run both linears")
    assert texts(MOE, precision__kernels__experts="deep_gemm", lora__targets=("attention",)) == []
    assert KernelChoice.of(make(MOE, lora__rank=8), Hardware("hopper")).trainer.experts == "te"
    (refused,) = texts(replace(MOE, head_dim=128), precision__exact=True)
    assert refused.startswith("--precision.exact = True: precision.kernels.experts: DeepGEMM's grouped kernels run")
    (refused,) = texts(DENSE, precision__params="fp8")
    assert refused.startswith("--precision.params = 'fp8': without BF16 weights, adapters cannot be merged")


def test_engines_with_adapters_refuse_what_vllm_does_not_support():
    def texts(model, hardware="cpu", **changes) -> list[str]:
        return [
            f"{each}" for each in check(make(model, lora__rank=8, lora__merge=False, **changes), accelerator=hardware)
        ]

    assert texts(DENSE) == texts(MOE, lora__targets=("attention",)) == []
    (refused,) = texts(MOE)
    assert refused.startswith("--lora.targets = (): includes experts by default") and "Set attention, or" in refused
    (refused,) = texts(MOE, lora__targets=("experts", "attention"))
    assert "or --lora.merge True" in refused
    (refused,) = texts(DEEPSEEK, lora__targets=("attention",))
    assert refused.startswith("--lora.merge = False: vLLM folds a factor of latent attention")
    exact = {"precision__exact": True, "precision__trainer": "blockwise", "precision__rollout": "blockwise"}
    assert texts(DENSE, **exact) == []
    (refused,) = texts(DENSE, **exact, engine__tensor=2)
    assert refused.startswith("--lora.merge = False: precision.exact: vLLM's linears with adapters do not add")
    assert "--lora.merge" in " ".join(texts(DENSE, "hopper", **exact))


def test_five_mistakes_give_five_violations():
    cfg = make(
        parallel__pipeline=5,
        parallel__world_size=5,
        precision__kernels__trainer="te",
        sampling__completions_per_prompt=1,
        algo__clip_low=-0.2,
        data__environments=(),
    )
    violations = check(cfg, accelerator="cpu")
    assert [violation.field for violation in violations] == [
        "--parallel.pipeline",
        "--precision.kernels.trainer",
        "--sampling.completions_per_prompt",
        "--algo.clip_low",
        "--data.environments",
    ]
    message = str(ConfigError(violations))
    assert message.startswith(
        "5 mistakes in the configuration:\n  1. --parallel.pipeline = 5: pipeline x virtual_stages = 5 stages cannot "
        "each have one of the 4 layers"
    )
    assert "Lower the product to 4 or less" in message


# Refused alone, by the field that is set.
SINGLE = """
    parallel.virtual_stages=2 engine.tensor=3 optim.min_lr=1.0 optim.beta2=1.0 sampling.max_completion_tokens=5000
    optim.max_tokens_per_microbatch=100 sampling.temperature=0.0 sampling.top_p=0.0
    engine.record_routed_experts=True sampling.replay=missing model.embedding_range=0.0 output_dir=/proc/x
    engine.deadline_scale=0.0 sampling.temperature=1e-09 engine.num_replicas=100000 scoring.num_workers=100000
    engine.kv_cache_bytes=1000 algo.updates_per_step=1000 algo.loss=nowhere:loss algo.advantage=nowhere
    observe.eval_prompts=-1 algo.veto_below=1.5 algo.correction_high=0.9 algo.overlong_buffer_tokens=4
    data.chat_template=True data.tokenizer=no/such/folder model.hf_path=no/such/folder model.num_key_value_heads=3
    checkpoint.keep=0 name=a/b
"""


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        *((changes_of(text), f"--{text.partition('=')[0]}") for text in SINGLE.split()),
        ({"parallel__tensor": 2}, "--parallel.world_size"),
        ({"parallel__expert": 2, "parallel__world_size": 2}, "--parallel.expert"),
        ({"precision__bf16_first_layers": 3, "precision__bf16_last_layers": 2}, "--precision.bf16_first_layers"),
        ({"optim__recompute": "selective", "optim__recompute_modules": ()}, "--optim.recompute_modules"),
        ({"optim__recompute": "selective", "optim__recompute_modules": ("moe",)}, "--optim.recompute_modules"),
        ({"lora__rank": 0}, "--lora.rank"),
        ({"lora__rank": -4}, "--lora.rank"),
        ({"lora__rank": 8, "lora__alpha": 0.0}, "--lora.alpha"),
        ({"lora__rank": 8, "lora__targets": ("experts",)}, "--lora.targets"),  # of a dense model
        ({"lora__rank": 8, "lora__targets": ("mlp",)}, "--lora.targets"),
        ({"lora__rank": 8, "lora__targets": ("dense", "dense")}, "--lora.targets"),
        ({"lora__targets": ("dense",)}, "--lora.targets"),  # without a rank
        ({"lora__merge": False}, "--lora.merge"),
        ({"lora__rank": 513, "lora__merge": False}, "--lora.rank"),
        ({"lora__rank": 8, "lora__merge": False, "weight_sync__spare_weights": "host"}, "--weight_sync.spare_weights"),
        ({"lora__rank": 8, "lora__merge": False, "engine__speculation": "ngram"}, "--engine.speculation"),
        ({"sampling__stop_strings": ("\n", "")}, "--sampling.stop_strings"),
        ({"sampling__stop_token_ids": (512,)}, "--sampling.stop_token_ids"),
        ({"seed": 2**70}, "--seed"),
        ({"model__embedding_range": 1.0, "model__tie_embeddings": True}, "--model.embedding_range"),
        ({"sampling__prompts_per_step": 10**9}, "--sampling.prompts_per_step"),
        ({"sampling__max_staleness": 10**6}, "--sampling.max_staleness"),
        ({"sampling__max_staleness": 1, "sampling__window_groups": 129}, "--sampling.window_groups"),
        ({"sampling__max_completion_tokens": 1, "algo__overlong": "mask"}, "--algo.overlong"),
        ({"data__environments": (EnvironmentConfig(weight=float("inf")),)}, "--data.environments.0.weight"),
        ({"algo__loss_options": {"dual_clip": 1.1}}, "--algo.loss_options.dual_clip"),
        ({"algo__loss_options": {"aggregate": "token"}}, "--algo.loss_options"),
        ({"observe__eval_prompts": 0, "warm_start__stop_pass_rate": 0.5}, "--warm_start.stop_pass_rate"),
        ({"algo__correction": "mask", "algo__correction_low": 3.0}, "--algo.correction_low"),
        *(({"algo__correction_quantile": value}, "--algo.correction_quantile") for value in (0.0, 0.5, -0.1)),
        ({"algo__correction_quantile": 0.01, "algo__correction": "off"}, "--algo.correction_quantile"),
        ({"algo__correction_quantile": 0.01, "algo__correction_high": 3.0}, "--algo.correction_high"),
        (
            {"algo__correction_quantile": 0.01, "algo__correction": "mask", "algo__correction_low": 0.5},
            "--algo.correction_low",
        ),
        ({"algo__overlong": "penalty"}, "--algo.overlong_buffer_tokens"),
        ({"algo__clip_high": float("nan")}, "--algo.clip_high"),
        ({"data__environments": (EnvironmentConfig(template="plain"),)}, "--data.environments.0.template"),
        (
            {"data__environments": (EnvironmentConfig(dataset="no.jsonl", rewards=(EXACT,)),)},
            "--data.environments.0.dataset",
        ),
        (
            {"data__environments": (EnvironmentConfig(dataset=__file__, rewards=(EXACT,)),)},
            "--data.environments.0.dataset",
        ),
        ({"data__environments": (EnvironmentConfig(dataset="hub:x/y"),)}, "--data.environments.0.rewards"),
        ({"data__environments": (EnvironmentConfig(rewards=(EXACT,)),)}, "--data.environments.0.rewards"),
        (
            {
                "data__environments": (
                    EnvironmentConfig(dataset="hub:x/y", eval="hub:x/z", rewards=(RewardConfig(function="maths"),)),
                )
            },
            "--data.environments.0.rewards.0.function",
        ),
        (
            {"data__environments": (EnvironmentConfig(dataset="hub:x/y", rewards=(EXACT, FORM, FORM, EXACT)),)},
            "--data.environments.0.rewards.3.function",
        ),
        ({"model__family": "qwen3_moe"}, "--model.num_experts"),
        ({"output_dir": "/dev/null/{name}"}, "--output_dir"),
        ({"output_dir": "runs/{step}"}, "--output_dir"),
    ],
)
def test_one_mistake_gives_its_violation_alone(changes, field):
    violations = check(make(**changes), accelerator="cpu")
    assert [violation.field for violation in violations] == [field]
    assert violations[0].remedy


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"router": replace(ROUTER, num_groups=3)}, "--model.router.num_groups"),
        ({"router": replace(ROUTER, num_groups=8)}, "--model.router.num_groups"),
        ({"router": replace(ROUTER, num_groups=4)}, "--model.router.groups_per_token"),
        ({"num_mtp_layers": 1}, "--model.num_mtp_layers"),
        ({"rotary_fraction": 0.55}, "--model.rotary_fraction"),
    ],
    ids=str,
)
def test_what_a_router_or_a_rotation_cannot_be(changes, field):
    glm = replace(
        MOE,
        family="glm4_moe",
        qkv_bias=True,
        qk_norm=True,
        num_shared_experts=1,
        experts_per_token=3,
        rotary_fraction=0.5,
        router=ROUTER,
    )
    assert check(make(glm), accelerator="cpu") == []
    assert fields_of(make(replace(glm, **changes))) == [field]


# 8 groups of four query heads, a key and a value head of 128 are 768 rows each: 16 ranks have 384 rows, 32 have 192.
WIDE = replace(
    DENSE, hidden_size=512, num_attention_heads=32, num_key_value_heads=8, head_dim=128, ffn_hidden_size=8192
)


@pytest.mark.parametrize(
    ("model", "changes", "option", "shard", "degrees"),
    [
        # 4 key/value heads of 64 are 256 rows: a rank has 64. The 8 query heads tile.
        (
            DENSE,
            {"parallel__world_size": 4, "parallel__tensor": 4},
            "--parallel.tensor",
            "rows of k_proj and v_proj: num_key_value_heads x head_dim = 256, and one rank has 64",
            "1, 2",
        ),
        (
            WIDE,
            {"parallel__world_size": 32, "parallel__tensor": 32},
            "--parallel.tensor",
            "(num_attention_heads + 2 x num_key_value_heads) x head_dim = 6144, and one rank has 192",
            "1, 2, 4, 8, 16",
        ),
        (
            MOE,
            {"engine__tensor": 4, "precision__trainer": "bf16"},
            "--engine.tensor",
            "down_proj of every expert: moe_ffn_hidden_size = 256, and one rank has 64",
            "1, 2",
        ),
    ],
)
def test_a_rank_that_fp8_cannot_tile_is_named_with_the_degrees_that_can(model, changes, option, shard, degrees):
    (violation,) = check(make(model, **changes), accelerator="cpu")
    assert violation.field == option and shard in violation.problem and "q_proj:" not in violation.problem
    assert violation.remedy == f"Degrees that tile: {degrees}"


GLM_DENSE = replace(MOE, family="glm4_moe", router=ROUTER, first_dense_layers=1, ffn_hidden_size=640)
TWO = {"parallel__world_size": 2, "parallel__tensor": 2, "parallel__expert": 2}
NARROW = replace(DENSE, hidden_size=192)
MX = {"precision__trainer": "mxfp8", "precision__rollout": "mxfp8"}
MLA = MlaConfig(q_lora_rank=128, kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64)
EXPERTS = {"num_experts": 8, "experts_per_token": 2, "moe_ffn_hidden_size": 256, "num_shared_experts": 1}
DEEPSEEK = replace(
    DENSE, family="deepseek_v3", qk_norm=None, num_key_value_heads=8, head_dim=96, mla=MLA, router=ROUTER, **EXPERTS
)


@pytest.mark.parametrize(
    ("model", "changes", "fields"),
    [
        (WIDE, {"parallel__world_size": 16, "parallel__tensor": 16}, []),
        (WIDE, {"engine__tensor": 32}, []),  # an engine copies whole key/value heads
        (WIDE, {"parallel__world_size": 32, "parallel__tensor": 32, "precision__trainer": "tensorwise"}, []),
        (MOE, {"parallel__world_size": 4, "parallel__expert_tensor": 4}, ["--parallel.expert_tensor"]),
        (NARROW, {}, ["--model.hidden_size"]),
        # A scale per tensor needs 16 only, and the engine is BF16.
        (NARROW, {"precision__trainer": "tensorwise", "precision__rollout": "bf16"}, []),
        # MXFP8 has tiles of 32: SmolLM2's hidden size, and 64 rows of keys on a rank, which blockwise refuses.
        (replace(NARROW, hidden_size=576), {}, ["--model.hidden_size"]),
        (replace(NARROW, hidden_size=576), MX, []),
        (replace(NARROW, hidden_size=560), MX, ["--model.hidden_size"]),
        (DENSE, MX | {"parallel__world_size": 4, "parallel__tensor": 4, "engine__tensor": 4}, []),
        (replace(DENSE, head_dim=16), MX | {"parallel__world_size": 4, "parallel__tensor": 4}, ["--parallel.tensor"]),
        (NARROW, {"precision__bf16_first_layers": 4}, []),
        (NARROW, {"precision__trainer": "bf16", "precision__rollout": "bf16"}, []),
        # The tensor degree divides dense layers before the experts.
        (GLM_DENSE, TWO, ["--parallel.tensor"]),
        (GLM_DENSE, TWO | {"precision__bf16_first_layers": 1}, []),
        (replace(GLM_DENSE, ffn_hidden_size=0), {}, ["--model.ffn_hidden_size"]),
        (DEEPSEEK, {}, []),  # kv_a_proj_with_mqa has 288 rows: its last block is partial at both ends
        # A rank has 96 rows of q_b_proj, 128 of kv_b_proj and 64 columns of o_proj.
        (DEEPSEEK, {"engine__tensor": 8}, ["--engine.tensor"]),
        (DEEPSEEK, {"model__mla__q_lora_rank": 96}, ["--model.mla.q_lora_rank"]),
        (DEEPSEEK, {"model__mla__q_lora_rank": None}, []),
        (DEEPSEEK, {"model__mla": None}, ["--model.family"]),
        (DEEPSEEK, {"engine__kv_cache_dtype": "fp8"}, []),  # exact on a CPU
        (DEEPSEEK, {"engine__kv_cache_dtype": "fp8", "precision__exact": False}, ["--engine.kv_cache_dtype"]),
    ],
)
def test_degrees_and_sizes_that_tile(model, changes, fields):
    assert fields_of(make(model, **changes)) == fields


NEXT = replace(
    MOE,
    family="qwen3_next",
    qk_norm=True,
    num_shared_experts=1,
    layer_types=("linear_attention", "full_attention"),
    gdn=GdnConfig(num_key_heads=4, num_value_heads=8, key_head_dim=64, value_head_dim=64),
)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({}, []),
        ({"parallel__world_size": 2, "parallel__context": 2}, ["--parallel.context"]),
        ({"engine__tensor": 2}, ["--engine.tensor"]),
        ({"engine__data": 2, "engine__expert": 2}, ["--engine.data"]),
        ({"engine__kv_cache_dtype": "fp8"}, ["--engine.kv_cache_dtype"]),
        ({"engine__record_routed_experts": True}, ["--engine.record_routed_experts"]),
        ({"engine__speculation": "ngram"}, ["--engine.speculation"]),
        ({"precision__rollout": "mxfp8"}, ["--precision.rollout"]),
        ({"lora__rank": 4}, ["--lora.rank"]),
        ({"model__gdn": None}, ["--model.layer_types"]),
        ({"model__gdn__num_key_heads": 3}, ["--model.gdn.num_key_heads"]),
        ({"model__gdn__conv_width": 0}, ["--model.gdn.conv_width"]),
        ({"model__layer_types": ("sliding_attention",), "model__sliding_window": 8}, ["--model.family"]),
        ({"engine__kv_cache_bytes": 100_000}, ["--engine.kv_cache_bytes"]),
    ],
)
def test_gated_delta_nets_on_a_cpu(changes, fields):
    cfg = make(NEXT, **changes)
    assert [violation.field for violation in check(cfg, accelerator="cpu")] == fields


NEXT_IN_PARTS = replace(NEXT, family="qwen3_5_moe_text", ffn_hidden_size=0)


@pytest.mark.parametrize("model", [NEXT, NEXT_IN_PARTS], ids=["two projections", "four projections"])
def test_gated_delta_nets_on_a_gpu(model):
    assert not check(make(model), accelerator="hopper")
    (violation,) = check(make(model, precision__exact=True), accelerator="hopper")
    assert violation.field == "--precision.exact" and "engines decode by the recurrence" in violation.problem
    (violation,) = check(make(model, engine__batch_invariant=True), accelerator="hopper")
    assert violation.field == "--engine.batch_invariant" and "gated delta nets" in violation.problem


def test_stacked_rows_of_a_gated_delta_net_fill_fp8_tiles():
    assert not check(make(NEXT_IN_PARTS), accelerator="cpu")
    narrow = {"model__gdn__key_head_dim": 16}
    (violation,) = check(make(NEXT_IN_PARTS, **narrow), accelerator="cpu")
    assert violation.field == "--model.gdn.num_key_heads" and "key_head_dim = 64 is no multiple" in violation.problem
    in_bf16 = {"precision__trainer": "bf16", "precision__rollout": "bf16"}
    assert not check(make(NEXT_IN_PARTS, **narrow, **in_bf16), accelerator="cpu")


def test_what_a_family_does_not_have_is_refused():
    (violation,) = check(make(replace(DENSE, qkv_bias=True)), accelerator="cpu")
    assert violation.field == "--model.family" and "qkv_bias = True" in violation.problem


def test_sequences_may_be_longer_than_a_window_of_attention():
    window = make(replace(DENSE, family="mistral", qk_norm=False, sliding_window=32))
    assert window.max_sequence_tokens > 32 and not check(window, accelerator="cpu")


@pytest.mark.parametrize(("factor", "limit"), [(1.25, 80), (1.5, 96), (8.0, None)])
def test_sequences_are_not_longer_than_the_engine_takes_with_yarn(factor, limit):
    scaling = RopeScaling(kind="yarn", factor=factor, original_max_position_embeddings=64)
    errors = check(make(replace(DEEPSEEK, rope_scaling=scaling)), accelerator="cpu")
    lengths = [violation for violation in errors if violation.field == "--sampling.max_completion_tokens"]
    if limit is None:
        assert not lengths
        return
    assert f"the model has {limit} positions by the factor of its rope_scaling" in lengths[0].problem
    cfg = make(replace(DEEPSEEK, rope_scaling=scaling), sampling__max_completion_tokens=lengths[0].choices[0])
    assert cfg.max_sequence_tokens == limit and "--sampling.max_completion_tokens" not in fields_of(cfg)


def test_longrope_and_its_family_are_checked():
    lists = {"short_factor": (1.0,) * 64, "long_factor": (2.0,) * 64}
    scaling = RopeScaling(kind="longrope", factor=2.0, original_max_position_embeddings=64, **lists)
    options = {"hidden_size": 1024, "head_dim": 128, "max_position_embeddings": 128, "rope_scaling": scaling}
    phi = replace(DENSE, family="phi3", qk_norm=False, num_attention_heads=8, **options)
    assert fields_of(make(phi, sampling__max_prompt_tokens=64, sampling__max_completion_tokens=64)) == []
    too_long = make(phi, sampling__max_prompt_tokens=64, sampling__max_completion_tokens=65)
    (error,) = check(too_long, accelerator="cpu")
    assert error.field == "--sampling.max_completion_tokens" and "the model has 128 positions" in error.problem
    short = replace(scaling, long_factor=(2.0,) * 63)
    errors = {error.field: error.problem for error in check(make(replace(phi, rope_scaling=short)), accelerator="cpu")}
    assert "has 63 numbers, and a head has 64 rotated pairs" in errors["--model.rope_scaling.long_factor"]
    (error,) = check(make(phi, lora__rank=16), accelerator="cpu")
    assert error.field == "--lora.rank" and "checkpoints of this family combine the matrices" in error.problem


@pytest.mark.parametrize(
    ("keys", "least"),
    [
        ({"max_seq_len": 40}, 40),
        ({"seq_length": 40, "n_positions": 39}, 39),
        ({"model_max_length": 40, "seq_length": 8}, 40),
        ({"model_max_length": 4096, "seq_length": 8}, None),
        ({"max_seq_len": 4096, "seq_length": None}, None),
    ],
)
def test_a_key_that_shortens_the_engines_sequences_is_refused(keys, least, tmp_path):
    config = registry.to_hf_config(make().model) | keys
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(4)}, tmp_path / "model.safetensors")
    errors = check(make(model__hf_path=str(tmp_path)), accelerator="cpu")
    if least is None:
        assert errors == []
    else:
        assert [f"= {least}, and vLLM computes no longer sequences" in error.problem for error in errors] == [True]


@pytest.mark.parametrize("shorter", [0, 1])
@pytest.mark.parametrize("factor", [1, 2])
def test_linear_scaling_lengthens_the_engines_sequences(factor, shorter, tmp_path):
    """vLLM multiplies by the factor, but for Gemma 3 (``factor`` 1), whose config.json says the scaled length."""
    scaling = RopeScaling(kind="linear", factor=2.0, original_max_position_embeddings=DENSE.max_position_embeddings)
    model = replace(DENSE, rope_scaling=scaling, hf_path=str(tmp_path))
    if factor == 1:
        folder = tmp_path / "gemma3"
        gemma3.published(folder)
        model = replace(model_in(folder), hf_path=str(tmp_path))
    cfg = make(model, precision__trainer="bf16", precision__rollout="bf16")
    config = registry.to_hf_config(cfg.model) | {"max_seq_len": cfg.max_sequence_tokens // factor - shorter}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"a": torch.zeros(4)}, tmp_path / "model.safetensors")
    assert len(check(cfg, accelerator="cpu")) == shorter


def test_a_checkpoint_folder_needs_config_and_weights_of_the_model(tmp_path):
    cfg = make(model__hf_path=str(tmp_path))
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    config.write_text("{}")
    assert fields_of(cfg) == ["--model.hf_path"]
    save_file({"a": torch.zeros(4)}, weights)
    for content in ("{}", "{", "[]", '{"model_type": "gpt2"}'):
        config.write_text(content)
        assert fields_of(cfg) == ["--model.hf_path"]
    config.write_text(json.dumps(registry.to_hf_config(make().model)))
    assert fields_of(cfg) == []
    (error,) = check(make(model__hf_path=str(tmp_path), model__rope_theta=5.0, model__vocab_size=7))
    assert "vocab_size is" in error.problem and "rope_theta is" in error.problem and "hidden_size" not in error.problem
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    (error,) = check(cfg, accelerator="cpu")
    assert f"model.safetensors has {len(whole) - 1} bytes instead of {len(whole)}" in error.problem
    weights.write_bytes(whole[:4] + b"\xff" * 40)
    assert fields_of(cfg) == ["--model.hf_path"]


def test_every_shipped_configuration_is_sound():
    from megatron_fp8rl.cli import config_functions

    for name, function in config_functions().items():
        cfg = function()
        assert check(cfg, accelerator="hopper") == [], name


def test_a_replay_needs_every_step_and_samples_nothing(tmp_path):
    with closing(RolloutWriter(tmp_path)) as writer:
        for step in (1, 2, 4):
            writer.write(step, [make_group(step)])
    (short,) = check(make(sampling__replay=str(tmp_path), num_steps=4), accelerator="cpu")
    assert "holds no step 3, and num_steps = 4" in short.problem and "--num_steps 2" in short.remedy
    assert fields_of(make(sampling__replay=str(tmp_path), num_steps=2)) == []
    truncated = make(sampling__replay=str(tmp_path), num_steps=2, sampling__top_p=0.9)
    assert [v.field for v in check(truncated, accelerator="cpu") if "no kept entries" in v.problem]
    assert fields_of(make(sampling__replay=str(tmp_path), num_steps=2, observe__eval_every=1)) == [
        "--observe.eval_every"
    ]


def test_a_chat_template_has_to_be_there(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    cfg = make(data__tokenizer=str(tmp_path), data__chat_template=True)
    assert fields_of(cfg) == ["--data.chat_template"]
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert fields_of(cfg) == []


@pytest.mark.parametrize(
    ("changes", "code", "choices"),
    [
        ({"sampling__max_staleness": -1}, "range", (0, 1000)),
        ({"optim__warmup_steps": -1}, "range", (0,)),
        ({"algo__clip_low": 0.0}, "range", ()),
        ({"engine__tensor": 3}, "divisor", (1, 2, 4, 8)),
        ({"parallel__world_size": 4, "parallel__tensor": 4}, "untiled_shard", (1, 2)),
        ({"model__hidden_size": 192}, "untiled_size", ()),
        ({"algo__updates_per_step": 1000}, "invalid", (256,)),
        ({"weight_sync__transport": "nccl"}, "invalid", ("auto",)),
        ({"output_dir": "runs/{step}"}, "invalid", ()),
    ],
)
def test_violations_have_a_code_and_values_to_try(changes, code, choices):
    (violation,) = check(make(**changes), accelerator="cpu")
    assert (violation.code, violation.choices) == (code, choices)


def test_what_starts_all_the_same_is_doubted():
    cfg = make(
        optim__warmup_steps=50, num_steps=5, engine__sleep_level=1, precision__kernels__engine_attention="FLASHINFER"
    )
    said = [finding.problem for finding in doubts(cfg, "cpu")]
    assert said == [
        "--optim.warmup_steps 50 is longer than the run of 5 updates, which ends at 0.1 of the learning rate",
        "--precision.kernels.engine_attention FLASHINFER has no effect without a GPU",
        "--engine.sleep_level 1 has no effect without a GPU",
    ]
    assert len(doubts(cfg, "hopper")) == 1 and doubts(make(), "cpu") == []
    (remote,) = doubts(make(engine__placement="remote"), "cpu")
    assert "`python -m launch` starts them" in remote.problem
    window = {"sampling__max_staleness": 4, "sampling__prompts_per_step": 16}
    (full,) = doubts(make(sampling__window_groups=80, **window), "cpu")
    assert "groups stay 5 steps in a window of 80" in full.problem and "up to 64 groups" in full.problem
    assert doubts(make(sampling__window_groups=64, **window), "cpu") == []


def test_an_exact_run_warns_once_of_everything_that_depends_on_time_or_chance():
    judge = RewardConfig(function="judge", options={"url": "http://localhost/v1", "model": "m"})
    source = EnvironmentConfig(dataset="rows.jsonl", rewards=(judge,), agent="tests.agents:play")
    cfg = make(precision__exact=True, sampling__max_staleness=2, data__environments=(source,))
    (finding,) = doubts(cfg, "cpu")
    assert (finding.severity, finding.subject) == ("warning", "--precision.exact")
    assert "because of --sampling.max_staleness 2 and agents and the reward judge (" in finding.problem
    assert doubts(replace(cfg, precision=replace(cfg.precision, exact="auto")), "cpu") == []
    assert doubts(make(precision__exact=True), "cpu") == []


WIDE_MOE = replace(MOE, hidden_size=256, moe_ffn_hidden_size=256)
# accelerator, model, changes -> refused fields
CHOICES = """
    blackwell dense precision.scales=fp32 -> precision.scales
    hopper dense precision.scales=fp32
    blackwell dense
    ampere dense -> precision.trainer
    cpu moe precision.trainer=mxfp8 precision.rollout=mxfp8 precision.exact=True
    cpu dense precision.trainer=mxfp8 precision.kernels.linears=deep_gemm -> precision.kernels.linears
    hopper dense precision.trainer=mxfp8 precision.rollout=mxfp8 -> precision.trainer
    hopper dense precision.trainer=mxfp8 precision.rollout=bf16 precision.kernels.trainer=emulated
    hopper dense precision.trainer=bf16 precision.rollout=mxfp8 -> precision.rollout
    hopper dense precision.trainer=bf16 precision.rollout=mxfp8 precision.kernels.engine_linears=emulated
    hopper dense precision.trainer=mxfp8 precision.rollout=mxfp8 precision.kernels.trainer=emulated \
        precision.kernels.engine_linears=emulated precision.bf16_first_layers=1 precision.bf16_last_layers=1
    hopper dense precision.trainer=mxfp8 precision.rollout=mxfp8 precision.kernels.engine_linears=emulated \
        -> precision.trainer
    hopper dense precision.trainer=bf16 precision.rollout=mxfp8 precision.kernels.engine_linears=emulated \
        engine.batch_invariant=True -> engine.batch_invariant
    hopper moe precision.trainer=bf16 precision.rollout=mxfp8 precision.kernels.engine_linears=emulated \
        -> precision.kernels.engine_linears
    hopper dense precision.kernels.engine_linears=emulated -> precision.kernels.engine_linears
    ampere dense precision.trainer=bf16 precision.rollout=mxfp8 precision.kernels.engine_linears=emulated \
        -> precision.rollout
    blackwell dense precision.trainer=mxfp8 precision.rollout=mxfp8
    blackwell moe precision.trainer=mxfp8 precision.rollout=mxfp8
    blackwell dense precision.trainer=mxfp8 precision.rollout=mxfp8 precision.kernels.engine_linears=deep_gemm \
        -> precision.kernels.engine_linears
    blackwell moe precision.trainer=mxfp8 precision.rollout=mxfp8 precision.kernels.engine_experts=triton \
        -> precision.kernels.engine_experts
    blackwell dense precision.trainer=mxfp8 precision.rollout=mxfp8 engine.batch_invariant=True \
        -> engine.batch_invariant
    blackwell moe precision.trainer=mxfp8 precision.rollout=mxfp8 precision.bf16_last_layers=1 \
        -> precision.bf16_last_layers
    hopper dense engine.num_replicas=2 -> engine.num_replicas
    hopper dense engine.num_replicas=2 engine.placement=separate
    hopper dense engine.sleep_level=1 sampling.max_staleness=1 -> engine.sleep_level
    hopper dense engine.sleep_level=1 engine.placement=separate -> engine.sleep_level
    hopper dense optim.offload=('params',) sampling.max_staleness=1 -> optim.offload
    hopper dense optim.offload=('params','params') -> optim.offload
    hopper dense engine.sleep_level=2 optim.offload=('optimizer',)
    hopper dense engine.expert=2 -> engine.expert
    hopper moe engine.expert=2 -> engine.expert
    hopper moe parallel.world_size=2 engine.tensor=2 engine.expert=2 precision.kernels.engine_experts=deep_gemm
    hopper moe precision.kernels.engine_experts=deep_gemm precision.bf16_last_layers=1 \
        -> precision.kernels.engine_experts
    hopper dense precision.kernels.engine_experts=triton -> precision.kernels.engine_experts
    hopper dense precision.kernels.engine_linears=cutlass -> precision.kernels.engine_linears
    hopper dense precision.kernels.engine_linears=cutlass precision.scales=fp32
    hopper dense precision.kernels.engine_attention=FLASHINFER engine.kv_cache_dtype=fp8 \
        -> precision.kernels.engine_attention
    hopper dense weight_sync.transport=nccl -> weight_sync.transport
    hopper dense weight_sync.transport=nccl engine.placement=separate
    hopper dense weight_sync.transport=ipc
    cpu dense weight_sync.transport=nccl -> weight_sync.transport
    cpu dense weight_sync.transport=ipc
    cpu dense weight_sync.transport=gloo
    cpu dense precision.kernels.trainer=te -> precision.kernels.trainer
    hopper dense precision.kernels.trainer=te
    hopper dense precision.kernels.trainer=emulated
    cpu wide_moe precision.kernels.experts=deep_gemm
    hopper wide_moe precision.kernels.experts=deep_gemm
    blackwell wide_moe precision.kernels.experts=deep_gemm -> precision.kernels.experts
    hopper wide_moe precision.kernels.experts=deep_gemm precision.trainer=delayed -> precision.kernels.experts
    hopper wide_moe precision.kernels.experts=deep_gemm precision.gradients=e5m2 -> precision.gradients
    hopper wide_moe precision.kernels.experts=deep_gemm precision.params=fp32 -> precision.params
    hopper wide_moe precision.kernels.experts=deep_gemm precision.kernels.trainer=emulated -> precision.kernels.experts
    hopper wide_moe model.hidden_size=192 precision.kernels.experts=deep_gemm precision.trainer=bf16 \
        precision.rollout=bf16 -> model.hidden_size
    hopper wide_moe precision.kernels.experts=deep_gemm precision.trainer=bf16 precision.rollout=bf16 \
        parallel.world_size=4 parallel.expert_tensor=4 -> parallel.expert_tensor
    cpu dense precision.kernels.linears=deep_gemm
    hopper dense precision.kernels.linears=deep_gemm
    blackwell dense precision.kernels.linears=deep_gemm -> precision.kernels.linears
    cpu dense precision.kernels.linears=deep_gemm precision.kernels.trainer=emulated
    hopper dense precision.kernels.linears=deep_gemm precision.kernels.trainer=emulated -> precision.kernels.linears
    hopper dense precision.kernels.linears=deep_gemm precision.gradients=e5m2 -> precision.gradients
    hopper dense precision.kernels.linears=deep_gemm precision.params=fp32 -> precision.params
    hopper dense precision.kernels.linears=deep_gemm precision.trainer=bf16 -> precision.kernels.linears
    hopper dense precision.kernels.linears=deep_gemm precision.trainer=delayed -> precision.kernels.linears
    hopper dense precision.kernels.linears=deep_gemm precision.trainer=tensorwise -> precision.kernels.linears
    cpu dense model.head_dim=128 precision.kernels.attention=engine engine.batch_invariant=True \
        -> precision.kernels.attention engine.batch_invariant
    hopper dense model.head_dim=128 precision.kernels.attention=engine engine.batch_invariant=True
    hopper dense precision.kernels.attention=engine engine.batch_invariant=True -> precision.kernels.attention
    hopper moe engine.batch_invariant=True precision.kernels.engine_experts=deep_gemm
    hopper moe engine.batch_invariant=True precision.kernels.engine_experts=deep_gemm precision.scales=fp32
    hopper dense engine.batch_invariant=True weight_sync.transport=nccl engine.placement=separate \
        -> weight_sync.transport
"""


@pytest.mark.parametrize("line", CHOICES.strip().splitlines())
def test_choices_fit_the_accelerator(line):
    start, _, fields = line.partition("->")
    accelerator, model, *changes = start.split()
    cfg = make({"dense": DENSE, "moe": MOE, "wide_moe": WIDE_MOE}[model], **changes_of(*changes))
    assert fields_of(cfg, accelerator) == [f"--{field}" for field in fields.split()]


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
    (error,) = check(make(wide, **changed), accelerator=accelerator)
    assert error.field == f"--precision.{field}" and problem in error.problem
    assert "--precision.params bf16" in error.remedy
    (error,) = check(make(replace(wide, head_dim=64), precision__params="fp8"), accelerator="hopper")
    assert error.field == "--precision.params" and "heads of 64 rows" in error.problem


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"draft_tokens": 17}, "draft_tokens", "is outside [1, 16]"),
        ({"lookup_min": 0}, "lookup_min", "is outside [1, 16]"),
        ({"lookup_min": 5}, "lookup_min", "exceeds engine.lookup_max = 4"),
        ({"speculation": "none", "draft_tokens": 2}, "draft_tokens", "has no effect without drafts"),
    ],
)
def test_wrong_drafts_are_refused_by_field(changes, field, problem):
    changed = {f"engine__{name}": value for name, value in ({"speculation": "ngram"} | changes).items()}
    (error,) = check(make(**changed), accelerator="cpu")
    assert error.field == f"--engine.{field}" and problem in error.problem


def test_what_does_not_work_with_drafts_is_refused(monkeypatch):
    drafts = {"engine__speculation": "ngram"}
    assert fields_of(make(**drafts)) == fields_of(make(**drafts, sampling__top_p=0.9, sampling__top_k=5)) == []
    assert fields_of(make(**drafts, sampling__min_p=0.1)) == ["--sampling.min_p"]
    assert fields_of(make(MOE, **drafts, engine__data=2)) == ["--engine.data"]
    monkeypatch.setattr(upstream, "applies", lambda *names: "verify_in_order" not in names)
    assert fields_of(make(**drafts)) == ["--engine.speculation"] and fields_of(make()) == []


DRAFTING = replace(  # with a layer that drafts
    MOE,
    family="glm4_moe",
    num_shared_experts=1,
    num_mtp_layers=1,
    router=RouterConfig(score="sigmoid", correction_bias=True),
)


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({}, []),
        ({"engine__draft_tokens": 1, "sampling__top_p": 0.9}, []),
        ({"model__num_mtp_layers": 0}, ["--engine.speculation"]),
        ({"model__num_mtp_layers": 2}, ["--model.num_mtp_layers"]),
        ({"engine__speculation": "ngram"}, ["--model.num_mtp_layers"]),
        ({"engine__lookup_min": 1}, ["--engine.lookup_min"]),
        ({"engine__lookup_max": 3}, ["--engine.lookup_max"]),
        ({"engine__draft_tokens": 17}, ["--engine.draft_tokens"]),
        ({"parallel__world_size": 2, "parallel__tensor": 2}, ["--parallel.tensor"]),
        ({"parallel__world_size": 2, "parallel__pipeline": 2}, ["--parallel.pipeline"]),
        ({"parallel__world_size": 2, "parallel__context": 2}, ["--parallel.context"]),
        ({"parallel__world_size": 2, "parallel__expert": 2}, []),
        ({"engine__tensor": 2}, ["--engine.tensor"]),
        ({"engine__data": 2}, ["--engine.data"]),
        ({"engine__sleep_level": 2}, ["--engine.sleep_level"]),
        ({"lora__rank": 8}, ["--lora.rank"]),
        ({"sampling__min_p": 0.1}, ["--sampling.min_p"]),
    ],
    ids=str,
)
def test_drafts_of_multi_token_prediction_are_refused_by_field(changes, fields):
    violations = check(make(DRAFTING, **{"engine__speculation": "mtp"} | changes), accelerator="cpu")
    assert [violation.field for violation in violations] == fields
    assert all(violation.remedy for violation in violations)


def test_a_family_without_prediction_layers_has_no_drafts_of_them(monkeypatch):
    fields = fields_of(make(replace(MOE, num_mtp_layers=1), engine__speculation="mtp"))
    assert fields == ["--model.family"]
    monkeypatch.setattr(upstream, "applies", lambda *names: "show_draft_model" not in names)
    assert fields_of(make(DRAFTING, engine__speculation="mtp")) == ["--engine.speculation"]


@pytest.mark.parametrize("field", ["top_p", "top_k", "min_p"])
def test_truncation_needs_a_version_of_vllm_that_reports_kept_entries(monkeypatch, field):
    cfg = make(**{f"sampling__{field}": 1 if field == "top_k" else 0.5})
    assert fields_of(cfg) == []
    monkeypatch.setattr(upstream, "applies", lambda *names: "report_kept_entries" not in names)
    assert fields_of(cfg) == [f"--sampling.{field}"] and fields_of(make()) == []


@pytest.mark.parametrize(
    ("prompt", "completion", "field", "most"), [(90, 60, "completion", 38), (200, 60, "prompt", 68)]
)
def test_the_length_that_does_not_fit_is_named(prompt, completion, field, most):
    """A model of 128 positions."""
    cfg = make(
        replace(DENSE, max_position_embeddings=128),
        sampling__max_prompt_tokens=prompt,
        sampling__max_completion_tokens=completion,
    )
    errors = [error for error in check(cfg, accelerator="cpu") if error.field.startswith("--sampling")]
    assert [error.field for error in errors] == [f"--sampling.max_{field}_tokens"]
    assert errors[0].remedy.startswith(f"Lower it to {most} or less, or lower --sampling.max_")


def test_a_run_does_not_write_into_the_folder_of_its_model(tmp_path):
    cfg = make(model__hf_path=str(tmp_path / "model"))
    for folder, count in (("model/runs", 1), ("runs", 0)):
        errors = check(replace(cfg, output_dir=str(tmp_path / folder)), accelerator="cpu")
        assert sum(error.field == "--output_dir" for error in errors) == count
