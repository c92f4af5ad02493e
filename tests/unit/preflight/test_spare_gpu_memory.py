"""How a ``grpo`` job uses the memory that its layout leaves: engines in place, and longer microbatches."""

import pytest

from megatron_fp8rl import cli
from megatron_fp8rl.config import EngineConfig, OptimConfig, ParallelConfig, RunConfig, SamplingConfig
from megatron_fp8rl.preflight import auto_layout, findings
from megatron_fp8rl.preflight.assessment import DoctorOptions, assess
from megatron_fp8rl.preflight.step_time import step_seconds
from model_configs.qwen3 import qwen3_30b_a3b
from model_configs.small import small_qwen3

# 28 layers of the widths of Qwen3-1.7B.
LAYERS_28 = dict(model__num_layers=28, model__hidden_size=2048, model__ffn_hidden_size=6144, model__head_dim=128)
LAYERS_28 |= dict(model__num_attention_heads=16, model__num_key_value_heads=8)
LENGTHS = dict(
    model__max_position_embeddings=8192, sampling__max_prompt_tokens=256, sampling__max_completion_tokens=1024
)
LENGTHS |= dict(parallel__world_size=1, engine__num_replicas=1, engine__kv_cache_bytes=None)
LENGTHS |= dict(engine__max_num_sequences=64, optim__offload=(), optim__max_tokens_per_microbatch=8192)


def change(cfg, **fields):
    return findings.apply(cfg, tuple((path.replace("__", "."), value) for path, value in fields.items()))


@pytest.mark.parametrize(
    ("gib", "tokens", "sleeps", "recompute", "size"),
    [
        (140, 2048, False, "none", 2048),
        (40, 2048, True, "none", 2048),
        (56, 8192, True, "none", 8192),
        (48, 8192, True, "none", 4096),
        (42, 8192, True, "selective", 8192),
        (24, 2048, None, "", 0),
    ],
)
def test_what_shares_a_gpu_moves_as_little_as_fits(gib, tokens, sleeps, recompute, size):
    """``sleeps``: None where weights or states would have to be offloaded."""
    options = DoctorOptions(num_gpus=1, memory_gib=gib)
    cfg = change(colocated(tokens), precision__kernels__linears="te")
    proposed = auto_layout.in_place(cfg, options)
    after = findings.apply(cfg, proposed)
    assert bool(proposed) == (sleeps is not None)
    if proposed:
        assert (after.engine.sleep_level > 0) == sleeps and not after.optim.offload
        assert (after.optim.recompute, after.optim.max_tokens_per_microbatch) == (recompute, size)
        assert not assess(after, options).errors


def test_the_layers_of_a_mixture_are_recomputed_before_microbatches_are_shorter():
    experts = dict(model__family="qwen3_moe", model__ffn_hidden_size=0, model__num_experts=16)
    experts |= dict(model__experts_per_token=4, model__moe_ffn_hidden_size=768, model__num_layers=12)
    cfg = change(colocated(8192), **experts)
    chosen = set()
    for gib in (28, 32, 36):
        after = findings.apply(cfg, auto_layout.in_place(cfg, DoctorOptions(num_gpus=1, memory_gib=gib)))
        chosen.add((after.optim.recompute, after.optim.max_tokens_per_microbatch))
    assert ("selective", 8192) in chosen and ("none", 4096) not in chosen


def colocated(tokens):
    """28 layers on one GPU, which an engine shares; ``tokens`` of a microbatch."""
    placement = dict(engine__placement="colocated", engine__sleep_level=2, engine__gpu_memory_utilization=0.85)
    return change(small_qwen3(), **LENGTHS | LAYERS_28 | placement | dict(optim__max_tokens_per_microbatch=tokens))


@pytest.mark.parametrize(
    ("gib", "sequences", "size"),
    [(140, 2048, 32768), (100, 2048, 16384), (68, 2048, 12288), (60, 2048, 8192), (140, 64, 16384), (140, 16, 8192)],
)
def test_microbatches_are_as_long_as_memory_and_their_number_allow(gib, sequences, size):
    fields = dict(sampling__prompts_per_step=sequences // 16, sampling__completions_per_prompt=16)
    fields |= dict(engine__placement="separate", engine__gpu_memory_utilization=0.5, model__vocab_size=151936)
    cfg = change(small_qwen3(), **LENGTHS, **LAYERS_28, **fields)
    machines = DoctorOptions(num_gpus=2, memory_gib=gib)
    after = findings.apply(cfg, auto_layout.longer_microbatches(cfg, machines))
    assert after.optim.max_tokens_per_microbatch == size and after.optim.logprob_chunk_tokens == max(size, 8192)
    assert after.engine.gpu_memory_utilization == 0.5 and assess(after, machines).works


def test_what_does_not_work_is_left_as_it_is():
    """The user sees the mistake of the configuration: here there is not even one data-parallel rank."""
    cfg = change(small_qwen3(), parallel__world_size=2, parallel__pipeline=3)
    assert auto_layout.longer_microbatches(cfg, DoctorOptions(num_gpus=4, memory_gib=80)) == ()


def test_engines_give_up_cache_that_no_sequence_needs_for_longer_microbatches():
    fields = dict(engine__placement="colocated", engine__sleep_level=0, engine__gpu_memory_utilization=0.5)
    fields |= dict(sampling__prompts_per_step=64, sampling__completions_per_prompt=16, optim__recompute="none")
    cfg = change(small_qwen3(), **LENGTHS, **fields)
    machines = DoctorOptions(num_gpus=1, memory_gib=48)
    after = findings.apply(cfg, auto_layout.longer_microbatches(cfg, machines))
    assert after.optim.max_tokens_per_microbatch > 8192 and after.engine.gpu_memory_utilization < 0.5
    assert assess(after, machines).engine.full_sequences >= 64


def _fastest(gpus, *args):
    """The layout that ``grpo`` chooses for Qwen3-30B-A3B on so many H200s."""
    cfg = RunConfig(
        name="job",
        model=qwen3_30b_a3b(),
        parallel=ParallelConfig(world_size=gpus),
        engine=EngineConfig(placement="colocated", num_replicas=gpus, sleep_level=2),
        sampling=SamplingConfig(
            prompts_per_step=16, completions_per_prompt=16, max_prompt_tokens=512, max_completion_tokens=1024
        ),
        optim=OptimConfig(max_tokens_per_microbatch=8192),
    )
    override = cli.overriding(list(args))
    return auto_layout.fastest(override(cfg), DoctorOptions(gpu="h200", num_gpus=gpus), override)


def test_experts_are_divided_where_steps_are_fastest():
    """On eight GPUs, EP8 in FP8 needs no offloading; EP2, which is nearer to data parallel, does."""
    cfg, change, how = _fastest(8)
    assert cfg.parallel.expert == 8 and not cfg.optim.offload and cfg.optim.recompute == "none"
    assert dict(change)["parallel.expert"] == 8 and how.startswith("fastest by the arithmetic of plan")
    of_user, change, how = _fastest(8, "--parallel.expert", "2")
    assert of_user.parallel.expert == 2 and of_user.optim.offload and "parallel.expert" not in dict(change)
    assert how.startswith("nearest to data parallel")
    step_s = step_seconds
    assert step_s(cfg, DoctorOptions(num_gpus=8)) < 0.9 * step_s(of_user, DoctorOptions(num_gpus=8))


def test_four_gpus_hold_all_of_a_mixture_of_thirty_billion():
    cfg, _, _ = _fastest(4)
    result = assess(cfg, DoctorOptions(gpu="h200", num_gpus=4))
    assert result.works and not result.num_layout_warnings
    assert cfg.optim.offload and cfg.optim.recompute == "none" and cfg.optim.max_tokens_per_microbatch >= 16384
