"""Memory by part against arithmetic done by hand."""

from dataclasses import replace

import pytest

from megatron_fp8rl.config import (
    EngineConfig,
    GdnConfig,
    LoraConfig,
    MlaConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RouterConfig,
    RunConfig,
    SamplingConfig,
)
from megatron_fp8rl.names.layouts import EngineLayout, TrainerLayout
from megatron_fp8rl.precision import parameters
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.kernel_choice import KernelChoice, TrainerKernels
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.preflight import engine_memory, trainer_memory
from megatron_fp8rl.preflight.activations import LayerBytes, Tokens, layer_bytes
from megatron_fp8rl.preflight.memory import GIB, GPUS
from megatron_fp8rl.preflight.weights import on_engine_worker, on_trainer_rank, published_bytes
from megatron_fp8rl.rollout import vllm_args
from megatron_fp8rl.weight_sync.plan import plan
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from model_configs.deepseek import deepseek_v3
from model_configs.qwen3 import qwen3_8b, qwen3_30b_a3b
from tests.helpers.models import small_model

H200 = GPUS["h200"]
BF16 = PrecisionConfig(trainer="bf16", rollout="bf16")
DENSE = small_model((4, 512, 8, 4, 64, 1024), ffn=1024, family="llama")


def run(model: ModelConfig = DENSE, precision: PrecisionConfig | None = None, **changes) -> RunConfig:
    optim = OptimConfig(max_tokens_per_microbatch=4096)
    sampling = SamplingConfig(max_prompt_tokens=64, max_completion_tokens=448)
    cfg = RunConfig(name="run", model=model, optim=optim, sampling=sampling, precision=precision or PrecisionConfig())
    for path, value in changes.items():
        section, _, field = path.partition("__")
        cfg = replace(cfg, **{section: replace(getattr(cfg, section), **{field: value}) if field else value})
    return cfg


def kernels(cfg: RunConfig) -> TrainerKernels:
    return KernelChoice.of(cfg, Hardware("hopper")).trainer


def layer(cfg: RunConfig, imbalance: float = 1.0) -> LayerBytes:
    return layer_bytes(cfg, 0, Tokens.of(cfg, imbalance), kernels(cfg))


def part(cfg: RunConfig, name: str) -> int:
    return trainer_memory.worst_rank(cfg, H200, H200.memory_bytes).part(name).num_bytes


def test_states_of_qwen3_8b_on_one_rank():
    """16 bytes a parameter and 2 of FP8 copies; DeepGEMM's BF16 matrices are in the memory of their gradients."""
    cfg = run(qwen3_8b())
    total = 8_190_735_360
    matrices = 36 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 12288)
    assert part(cfg, "weights") == 2 * total + 2 * (total - matrices)  # embedding, head and norms are elsewhere, too
    assert part(cfg, "gradients") == (4 - 2) * total
    assert part(cfg, "FP8 copies") == int(2 * (1 + 4 / 128**2) * matrices)
    cfg = run(qwen3_8b(), PrecisionConfig(kernels={"linears": "te"}))
    assert part(cfg, "weights") == 2 * total
    assert part(cfg, "gradients") == 4 * total
    assert part(cfg, "optimizer states") == 12 * total
    assert part(cfg, "FP8 copies") == int(2 * (1 + 4 / 128**2) * matrices)
    # Known figure: AdamW in mixed precision takes 16 bytes a parameter with BF16 gradients (arXiv:1910.02054), and two
    # more with gradients in FP32.
    assert part(cfg, "weights") + part(cfg, "gradients") + part(cfg, "optimizer states") == 18 * total


def test_fp8_parameters_take_two_bytes_where_there_were_four():
    cfg = run(qwen3_8b(), PrecisionConfig(kernels={"linears": "te"}))  # as FP8 parameters ask for
    alone = run(qwen3_8b(), replace(cfg.precision, params="fp8"))
    total, matrices = 8_190_735_360, 36 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 12288)
    per = 1 + 4 / 128**2  # a byte, and a scale for each block, in rows; once more in columns
    assert part(alone, "weights") == pytest.approx(2 * (total - matrices) + per * matrices, abs=1)
    assert part(alone, "FP8 copies") == int(per * matrices)
    for name in ("gradients", "optimizer states", "activations", "temporaries"):
        assert part(alone, name) == part(cfg, name)
    reference = replace(alone, algo=replace(alone.algo, kl_coef=0.1))
    assert part(reference, "reference model") == 2 * total + int(matrices)  # stays BF16, with a copy in rows


def test_adapters_alone_have_gradients_and_optimizer_states():
    """Weights as loaded, which are also the reference, are in host memory."""
    cfg = run(qwen3_8b(), lora=LoraConfig(rank=16), algo__kl_coef=0.1)
    total = 8_190_735_360
    # Of stacked linears (q, k and v; gate and up) there is one A.
    adapters = 16 * 36 * ((4096 + 6144) + (4096 + 4096) + (4096 + 2 * 12288) + (12288 + 4096))
    assert part(cfg, "weights") == 2 * (total + adapters)
    assert part(cfg, "gradients") == 4 * adapters
    assert part(cfg, "optimizer states") == 12 * adapters
    estimate = trainer_memory.worst_rank(cfg, H200, H200.memory_bytes)
    assert "reference model" not in [each.name for each in estimate.parts]
    attention = run(qwen3_8b(), lora=LoraConfig(rank=16, targets=("attention",)))
    assert part(attention, "gradients") == 4 * 16 * 36 * (4096 + 6144 + 4096 + 4096)
    moe = qwen3_30b_a3b()
    parallel = ParallelConfig(world_size=4, expert=4)
    experts = run(moe, lora=LoraConfig(rank=16, targets=("experts",)), parallel=parallel)
    assert part(experts, "gradients") == 4 * 16 * 48 * 128 // 4 * ((2048 + 2 * 768) + (768 + 2048))


def test_optimizer_states_are_sharded_over_data_and_context_ranks():
    cfg = run(qwen3_30b_a3b(), parallel=ParallelConfig(world_size=16, tensor=2, context=2, expert=4))
    weights = on_trainer_rank(cfg, 0)
    expert = 48 * 128 * 3 * 2048 * 768
    assert weights.expert == expert // 4
    router_and_norms = 48 * (128 * 2048 + 2 * 2048 + 2 * 128) + 2048
    divided = 48 * (2 * 4096 * 2048 + 2 * 512 * 2048) + 2 * 151936 * 2048
    assert weights.dense == router_and_norms + divided // 2
    # dense over dp 4 x cp 2; experts over 16 / (ep 4 x etp 1)
    assert part(cfg, "optimizer states") == int(12 * (weights.dense / 8 + weights.expert / 4))


def test_parameters_by_precision():
    """FP32 parameters are master weights, BF16 layers have no FP8 copies, a reference model has all weights."""
    cfg, everything = run(precision=replace(BF16, params="fp32")), on_trainer_rank(run(), 0)
    total = everything.trained
    assert (part(cfg, "weights"), part(cfg, "optimizer states"), part(cfg, "FP8 copies")) == (4 * total, 8 * total, 0)
    edges = run(precision=PrecisionConfig(bf16_first_layers=1, bf16_last_layers=1))
    assert on_trainer_rank(edges, 0).fp8 == everything.fp8 // 2
    assert part(run(precision=BF16, algo__kl_coef=0.1), "reference model") == part(run(precision=BF16), "weights")


@pytest.mark.parametrize(
    ("recipe", "gpu", "per_weight"),
    [
        ("blockwise", "h200", 2 * (1 + 4 / 16384)),
        ("delayed", "h200", 2),
        ("tensorwise", "b200", 1),
        ("bf16", "h200", 0),
    ],
)
def test_fp8_copies_by_recipe_and_generation(recipe, gpu, per_weight):
    cfg = run(precision=PrecisionConfig(trainer=recipe, rollout="bf16"))
    assert trainer_memory.fp8_copy_bytes(cfg, GPUS[gpu]) == per_weight


H, Q, KV, F, FP8 = 512, 512, 256, 1024, 1 + 4 / 128  # widths, and bytes of an FP8 value with its scale


def test_activations_of_a_layer_by_hand():
    """Bytes per token; an FP8 linear keeps an FP8 copy of its input."""
    stream = 2 * H * 2  # inputs of two norms
    attention = H * 2 + (Q + 2 * KV) * 2 + Q * 2 + 8 * 4  # normed; rotated q and k, v; output, sums
    feed_forward = H * 2 + 4 * F * 2 + F * 2  # normed; gate, up, silu(gate), up + 0; their product
    bf16 = layer(run(precision=BF16))
    assert (bf16.kept, bf16.recomputed) == (4096 * (stream + attention + feed_forward), 0)
    attention = H * FP8 + (Q + 2 * KV) * 2 + Q * 2 + 8 * 4 + Q * FP8
    feed_forward = H * FP8 + 4 * F * 2 + F * FP8
    te = layer(run(precision__kernels={"linears": "te"}))
    assert te.kept == 4096 * (stream + attention + feed_forward)
    # With DeepGEMM gate and up are kept between the linears of the feed-forward part, and nothing else.
    assert kernels(run()).linears == "deep_gemm"
    assert te.kept - layer(run()).kept == 4096 * F * (2 * 2 + FP8)
    assert layer(run()).workspace == 4096 * (F * (2 + 5 * FP8) + H * (2 + FP8))
    assert layer(run(replace(DENSE, qk_norm=True))).kept - layer(run()).kept == 4096 * (Q + KV) * 2
    # With sequence parallelism everything is divided (Korthikanti et al., equation 4).
    assert layer(run(parallel=ParallelConfig(world_size=2, tensor=2))).kept == layer(run()).kept / 2


def test_activations_of_a_gated_delta_net_by_hand():
    """2 key heads of 128 and 4 value heads of 64 in place of attention: 256 keys, 256 values, 768 channels."""
    gdn = GdnConfig(num_key_heads=2, num_value_heads=4, key_head_dim=128, value_head_dim=64)
    model = replace(DENSE, family="qwen3_5_text", qk_norm=True, layer_types=("linear_attention",) * 4, gdn=gdn)
    mixer = (768 + 256 + 2 * 4) * 2  # inputs of a checkpoint: of the convolution, gates, write strengths and decays
    attention = (Q + 2 * KV) * 2 + Q * 2 + 8 * 4
    bf16, dense = (layer(run(each, precision=BF16)) for each in (model, DENSE))
    assert bf16.kept - dense.kept == 4096 * (mixer + 256 * 2 - attention)
    fp8, dense = (layer(run(each)) for each in (model, DENSE))  # one projection is BF16 and keeps a copy of its own
    assert fp8.kept - dense.kept == 4096 * (H * 2 + mixer + 256 * FP8 - attention - Q * FP8)
    # Inside the checkpoint, FP32: of keys, of keys for every value head, of values, rows of matrices, and states.
    inside = 12 * 256 + 3 * 512 + 10.5 * 256 + 5 * 64 * (2 + 4) + 1.5 * 256 * 128 / 64
    assert (bf16.recomputed, dense.recomputed) == (4096 * 4 * inside, 0)
    assert bf16.workspace == 4096 * 4 * (2 * 256 + 3 * 512 + 4 * 64) > dense.workspace
    full = layer(run(model, precision=BF16, optim__recompute="full"))
    assert full.kept + full.recomputed == bf16.kept + bf16.recomputed


def test_recompute_keeps_the_input_of_a_module():
    whole, full = layer(run()).kept, layer(run(optim__recompute="full"))
    assert full.kept == 4096 * H * 2 and full.kept + full.recomputed == whole
    selective = {"optim__recompute": "selective"}
    mlp = layer(run(precision=BF16, **selective, optim__recompute_modules=("mlp",)))
    inside = 4096 * (H * 2 + 5 * F * 2)
    assert (mlp.recomputed, mlp.kept) == (inside, layer(run(precision=BF16)).kept - inside + 4096 * H * 2)
    # Core attention keeps rotated q and k and a copy of v; its checkpoint keeps q, and the projection of k and v.
    core = layer(run(**selective, optim__recompute_modules=("core_attn",)))
    assert core.recomputed == 4096 * ((Q + 2 * KV) * 2 + 8 * 4 + Q * 2)
    assert core.kept - (whole - core.recomputed) == 4096 * (Q + Q + 2 * KV) * 2


def test_experts_keep_every_copy_of_a_token():
    experts = {"ffn_hidden_size": 0, "num_experts": 8, "experts_per_token": 2, "moe_ffn_hidden_size": 256}
    model = replace(DENSE, family="qwen3_moe", qk_norm=True, **experts)
    recompute = dict(optim__recompute="selective", optim__recompute_modules=("moe",))
    te = layer(run(model, replace(BF16, kernels={"experts": "te"}), **recompute), 1.5)
    copies = 4096 * 2 * 1.5
    assert te.recomputed == 4096 * 8 * 16 + copies * (24 + 512 * 4 + 4 * 256 * 2)
    assert te.workspace == copies * 512 * 3 * 4 + 2 * 4096 * 512 * 2
    # Padding of an expert: half a block, or, where counts stay on the GPU, a row less than a block.
    for precision, operand, factors, padding in ((BF16, 2, 0, 64), (PrecisionConfig(), FP8, 4 * FP8, 127)):
        cfg = run(model, precision, **recompute)
        assert kernels(cfg).experts == "deep_gemm"
        grouped, rows = layer(cfg, 1.5), copies + 8 * padding
        assert grouped.recomputed == 4096 * 8 * 16 + rows * (24 + 512 * operand + 2 * 256 * 2)
        per_copy = 512 * (2 + operand) + 256 * (2 + factors + operand)
        assert grouped.workspace == rows * per_copy + 2 * 4096 * 512 * 2


def test_the_last_stage_keeps_inputs_of_the_last_norm_and_of_the_head():
    cfg = run(parallel=ParallelConfig(world_size=2, pipeline=2))
    first, last = (trainer_memory.estimate_stage(cfg, H200, H200.memory_bytes, 1.0, stage) for stage in (0, 1))
    assert last.part("activations").num_bytes == first.part("activations").num_bytes // 2 + 2 * 4096 * 512 * 2


@pytest.mark.parametrize(
    ("stage", "virtual", "layers", "expected"),
    [(0, 1, 4, 16), (3, 1, 4, 4), (0, 2, 4, 2 * (2 * 3 + 4 + 1)), (3, 2, 4, 2 * (0 + 4 + 1))],
)
def test_microbatches_in_flight(stage, virtual, layers, expected):
    """1F1B: as many as stages behind, and itself; interleaved: warm-up chunks of Megatron-Core's schedule, and one."""
    model = replace(DENSE, num_layers=16)
    cfg = run(model, parallel=ParallelConfig(world_size=4, pipeline=4, virtual_stages=virtual))
    assert trainer_memory.num_microbatches(cfg) == 32  # 32 x 8 sequences of 512 tokens, in microbatches of 4096
    assert trainer_memory.layers_in_flight(cfg, stage, layers) == expected


@pytest.mark.parametrize(
    ("tied", "chunk", "expected"),
    [
        # A chunk of logits in BF16, of at most the tokens of a microbatch; the head's gradient goes to its buffer ...
        (False, 1024, 2 * 1024 * 1024),
        (False, 8192, 2 * 4096 * 1024),
        # ... or is summed in FP32, beside a chunk of logits or its own copy in BF16, whichever is larger.
        (True, 1024, 4 * 1024 * 512 + 2 * 1024 * 1024),
        (True, 128, 4 * 1024 * 512 + 2 * 1024 * 512),
    ],
)
def test_logits_follow_the_code_that_makes_them(tied, chunk, expected):
    cfg = run(replace(DENSE, tie_embeddings=tied), precision=BF16, optim__logprob_chunk_tokens=chunk)
    assert trainer_memory.head_bytes(cfg, Tokens.of(cfg, 1.0)) == expected + 4096 * 512 * 2


@pytest.mark.parametrize("engine", [(1, 1, 1), (1, 2, 1), (1, 4, 4), (2, 2, 4), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("model", [qwen3_8b(), qwen3_30b_a3b(), deepseek_v3()], ids=lambda model: model.family)
def test_engine_weights_are_those_of_the_publication_plan(model, engine):
    """Every worker, tensor by tensor and expert by expert; (data, tensor, expert) degrees."""
    small = replace(model, num_layers=4)
    if model.is_moe:
        small = replace(small, num_experts=8, moe_ffn_hidden_size=1024)
        small = replace(small, router=replace(small.router, num_groups=1, groups_per_token=1))
    data, tensor, expert = engine
    cfg = run(small, engine__data=data, engine__tensor=tensor, engine__expert=expert if model.is_moe else 1)
    layout = EngineLayout.from_config(cfg.engine)
    weights = on_engine_worker(cfg)
    transfers = plan(small, LayerTable.build(small, cfg.precision), TrainerLayout(), layout).transfers
    for rank in range(layout.size):
        kept = [(t, tensor) for t in transfers for tensor in t.wire_tensors(rank)]
        assert weights.sent == sum(tensor.num_bytes for _, tensor in kept)
        assert weights.scales == sum(tensor.num_bytes for t, tensor in kept if tensor.name == t.scale_name)
    if layout.size == 1:
        assert weights.sent == sum(tensor.num_bytes for t in transfers for tensor in t.wire_tensors())


def test_engine_weights_of_qwen3_8b_by_hand():
    weights = on_engine_worker(run(qwen3_8b()))
    matrices = 36 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 12288)
    assert weights.fp8 == matrices
    assert weights.scales == 4 * matrices // 128**2  # every dimension is a multiple of 128
    assert weights.bf16 == 2 * (8_190_735_360 - matrices)


def test_kv_cache_of_known_models():
    """Bytes per token: Qwen3-8B 2 x 36 x 8 x 128 x 2; heads are copied beyond 8 ranks; DeepSeek-V3 576 per layer, and
    on a CPU, without latent attention, 128 heads of 192 values twice."""
    deepseek = run(deepseek_v3(), engine__tensor=8)
    assert vllm_args.kv_token_bytes(qwen3_8b(), run(qwen3_8b()).engine, expanded=False) == 147_456
    narrow = run(qwen3_8b(), engine__tensor=16, engine__kv_cache_dtype="fp8")
    assert vllm_args.kv_token_bytes(narrow.model, narrow.engine, expanded=True) == 2 * 36 * 128
    assert vllm_args.kv_token_bytes(deepseek.model, deepseek.engine, expanded=False) == 61 * 576 * 2
    assert vllm_args.kv_token_bytes(deepseek.model, deepseek.engine, expanded=True) == 61 * 2 * 16 * 192 * 2


def test_kv_cache_takes_what_is_left():
    cfg = run(qwen3_8b())
    engine = engine_memory.worker(cfg, H200.memory_bytes)
    inside = engine.estimate.total_bytes - engine.estimate.part("weight update").num_bytes
    assert inside == pytest.approx(0.85 * H200.memory_bytes, abs=2)
    kernels = {f"precision__{name}": "mxfp8" for name in ("trainer", "rollout")}
    plain, emulated = (
        engine_memory.worker(run(qwen3_8b(), **kernels, **more), H200.memory_bytes)
        for more in ({}, {"precision__kernels": {"engine_linears": "emulated"}})
    )
    copies = 2 * on_engine_worker(run(qwen3_8b(), **kernels)).fp8
    assert plain.kv_bytes - emulated.kv_bytes == copies > 10 * GIB, "BF16 copies of FP8 weights"
    fixed = engine_memory.worker(run(qwen3_8b(), engine__kv_cache_bytes=10 * GIB), H200.memory_bytes)
    assert fixed.kv_tokens == 10 * GIB // 147_456
    assert fixed.full_sequences == fixed.kv_tokens / 512


def test_latent_attention_and_its_absorbed_copies():
    mla = MlaConfig(q_lora_rank=None, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64)
    model = replace(DENSE, family="deepseek_v3", num_key_value_heads=8, head_dim=96, mla=mla)
    assert on_engine_worker(run(model, engine__tensor=2)).absorbed == 4 * (8 * 128 * 128) // 2 * 2


@pytest.mark.parametrize("params", ["bf16", "fp8"])
def test_an_optimizer_that_waits_on_the_host_comes_when_activations_have_gone(params):
    """Copies of FP8 primary weights are columns of the parameters, which stay."""
    whole = run(qwen3_8b(), PrecisionConfig(params=params))
    at_once = trainer_memory.worst_rank(whole, H200, H200.memory_bytes)
    in_turns = trainer_memory.worst_rank(
        replace(whole, optim=OptimConfig(offload=("optimizer",))), H200, H200.memory_bytes
    )
    size = {part.name: part.num_bytes for part in at_once.parts}
    assert in_turns.parts == at_once.parts and at_once.total_bytes == sum(size.values())
    before = size["activations"] + size["temporaries"] + (size["FP8 copies"] if params == "bf16" else 0)
    assert 0 < before < size["optimizer states"]
    assert in_turns.total_bytes == at_once.total_bytes - before
    # Fragments are of activations: so much memory is tight beside them, and not for an optimizer alone.
    capacity = int(in_turns.total_bytes / 0.95)
    assert not replace(in_turns, capacity_bytes=capacity).is_tight
    assert replace(at_once, capacity_bytes=int(at_once.total_bytes / 0.95)).is_tight
    assert replace(in_turns, capacity_bytes=int(in_turns.total_bytes / 0.98)).is_tight


def test_a_published_recipe_fits_the_gpu_that_it_is_published_for():
    """Qwen3-30B-A3B on 16 H100: TP1, EP16, one sequence of 4096 tokens, no recompute (Megatron-Bridge's recipe in FP8).
    It is known to fit 80 GB without much to spare; the estimate must not deny it, nor find it half empty."""
    optim = OptimConfig(max_tokens_per_microbatch=4096)
    sampling = SamplingConfig(max_prompt_tokens=512, max_completion_tokens=3584)
    cfg = run(qwen3_30b_a3b(), parallel=ParallelConfig(world_size=16, expert=16), optim=optim, sampling=sampling)
    h100 = GPUS["h100"]
    assert 0.7 < trainer_memory.worst_rank(cfg, h100, h100.memory_bytes).share <= 1.0


def test_without_merging_a_step_publishes_adapters_only():
    """Seven linears of an 8B layer: q and o of 4096 x 4096, k and v of 1024 x 4096, three of 4096 and 12288."""
    merged = run(qwen3_8b(), lora=LoraConfig(rank=16))
    unmerged = replace(merged, lora=LoraConfig(rank=16, merge=False))
    sides = 2 * (4096 + 4096) + 2 * (1024 + 4096) + 3 * (4096 + 12288)
    assert published_bytes(unmerged) == 36 * 2 * 16 * sides
    assert published_bytes(merged) == on_engine_worker(merged).sent


def test_a_layer_that_drafts_is_counted_at_both_ends():
    router = RouterConfig(score="sigmoid", correction_bias=True)
    shape = dict(family="glm4_moe", num_experts=8, experts_per_token=2, moe_ffn_hidden_size=256, num_shared_experts=1)
    plain = run(replace(DENSE, **shape, first_dense_layers=1, qkv_bias=True, router=router))
    drafting = replace(plain, model=replace(plain.model, num_mtp_layers=1), engine=EngineConfig(speculation="mtp"))
    drafting = replace(drafting, optim=replace(drafting.optim, recompute="full"))
    assert on_engine_worker(drafting).sent == PlanInputs.of(drafting).plan.num_bytes
    per_token = [vllm_args.kv_token_bytes(cfg.model, cfg.engine, expanded=False) for cfg in (plain, drafting)]
    assert per_token[1] * 4 == per_token[0] * 5
    weights = on_trainer_rank(drafting, 0)
    assert weights.dense + weights.expert + weights.buffers == parameters.count(drafting.model).total
    of_plain = replace(drafting, model=plain.model)
    parts = [
        trainer_memory.estimate_stage(cfg, H200, H200.memory_bytes, 1.0, 0).part("activations")
        for cfg in (of_plain, drafting)
    ]
    tokens = Tokens.of(drafting, 1.0)
    whole = replace(drafting, optim=replace(drafting.optim, recompute="none"))
    kept = layer_bytes(whole, 4, tokens, kernels(drafting)).kept + trainer_memory.head_bytes(drafting, tokens)
    assert parts[1].num_bytes - parts[0].num_bytes == pytest.approx(kept, abs=2)
    assert "draft layer" in parts[1].formula and "draft layer" not in parts[0].formula
