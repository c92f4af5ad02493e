"""Models of 1 to 2 million parameters that learn arithmetic on two CPU cores in a few minutes.

They exercise everything that the large ones do: FP8 matrices at both ends (every one a multiple of 128, also at tensor
parallel 2), grouped-query attention with q/k norms, and a router with eight experts.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_fp8rl.config import (
    AlgoConfig,
    CheckpointConfig,
    DataConfig,
    EngineConfig,
    EnvironmentConfig,
    GdnConfig,
    ModelConfig,
    ObserveConfig,
    OptimConfig,
    RouterConfig,
    RunConfig,
    SamplingConfig,
    WarmStartConfig,
)


def tiny_qwen3_moe() -> RunConfig:
    """Qwen3-MoE with 8 experts, 2 of them per token: 2.0 M parameters, sums and differences of one-digit numbers."""
    return RunConfig(
        name="tiny_qwen3_moe",
        model=ModelConfig(
            family="qwen3_moe",
            num_layers=2,
            hidden_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=128,
            vocab_size=128,
            num_experts=8,
            experts_per_token=2,
            moe_ffn_hidden_size=256,
            max_position_embeddings=256,
        ),
        optim=OptimConfig(lr=8e-4, warmup_steps=5, decay="linear"),
        sampling=SamplingConfig(
            prompts_per_step=64, completions_per_prompt=8, max_prompt_tokens=32, max_completion_tokens=8
        ),
        engine=EngineConfig(kv_cache_bytes=64 << 20, graphs="none"),
        data=DataConfig(
            environments=(
                EnvironmentConfig(
                    dataset="chain_sum",
                    options={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
                    template="{expression} = ",
                ),
            )
        ),
        warm_start=WarmStartConfig(steps=800, batch_size=128, lr=4e-3, wrong_answers=0.45),
        algo=AlgoConfig(clip_high=0.28),
        checkpoint=CheckpointConfig(every_steps=40),
        observe=ObserveConfig(eval_prompts=128),
        num_steps=80,
    )


def tiny_qwen3() -> RunConfig:
    """The same task with a dense Qwen3 of 0.8 M parameters."""
    moe = tiny_qwen3_moe()
    dense = replace(
        moe.model, family="qwen3", num_experts=0, experts_per_token=0, moe_ffn_hidden_size=0, ffn_hidden_size=512
    )
    return replace(moe, name="tiny_qwen3", model=dense)


def tiny_glm4_moe() -> RunConfig:
    """GLM-4.5 with 8 experts of 256, a shared one, and a multi-token prediction layer that drafts for the engine."""
    cfg = tiny_qwen3_moe()
    model = replace(
        cfg.model,
        family="glm4_moe",
        num_shared_experts=1,
        rotary_fraction=0.5,
        router=RouterConfig(score="sigmoid", correction_bias=True),
        num_mtp_layers=1,
    )
    return replace(
        cfg, name="tiny_glm4_moe", model=model, engine=replace(cfg.engine, speculation="mtp", draft_tokens=2)
    )


def tiny_qwen3_next() -> RunConfig:
    """The same task with Qwen3-Next: three gated delta nets and one gated attention, 8 experts beside a shared one."""
    moe = tiny_qwen3_moe()
    model = replace(
        moe.model,
        family="qwen3_next",
        num_layers=4,
        layer_types=(*["linear_attention"] * 3, "full_attention"),
        gdn=GdnConfig(num_key_heads=2, num_value_heads=4, key_head_dim=64, value_head_dim=64),
        num_shared_experts=1,
        qk_norm=True,
        rotary_fraction=0.25,
    )
    return replace(moe, name="tiny_qwen3_next", model=model)


def tiny_qwen3_5_moe() -> RunConfig:
    """The same task with Qwen3.5-MoE's text model: the layers of tiny_qwen3_next with four projections."""
    base = tiny_qwen3_next()
    model = replace(base.model, family="qwen3_5_moe_text", ffn_hidden_size=0)
    return replace(base, name="tiny_qwen3_5_moe", model=model)


def demo() -> RunConfig:
    """What `make demo` runs: tiny_qwen3_moe sorts four digits, up or down; 20,000 questions, 512 of them held out."""
    base = tiny_qwen3_moe()
    digits = "".join(f"{{original_numbers[{i}][0]}}" for i in range(4))
    sorting = EnvironmentConfig(
        dataset="number_sorting",
        options={
            "min_numbers": 4,
            "max_numbers": 4,
            "min_decimals": 0,
            "max_decimals": 0,
            "min_value": 0,
            "max_value": 9,
        },
        template="{direction[0]}" + digits + "=",
    )
    return replace(
        base,
        name="demo",
        sampling=replace(base.sampling, prompts_per_step=16, max_completion_tokens=36),
        data=replace(base.data, environments=(sorting,)),
        warm_start=replace(base.warm_start, steps=320, batch_size=64, lr=3e-3),
        observe=replace(base.observe, eval_prompts=512, eval_every=9),
        num_steps=36,
    )
