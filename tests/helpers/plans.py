"""Models and layouts of plans of publication."""

from megatron_fp8rl.config import ModelConfig, PrecisionConfig
from megatron_fp8rl.names.layouts import TrainerLayout
from megatron_fp8rl.precision.layer_table import LayerTable

DENSE = ModelConfig(
    family="qwen3",
    num_layers=4,
    hidden_size=256,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=96,
    ffn_hidden_size=512,
)
MOE = ModelConfig(
    family="qwen3_moe",
    num_layers=4,
    hidden_size=256,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=96,
    num_experts=4,
    experts_per_token=2,
    moe_ffn_hidden_size=256,
)
TIED = ModelConfig(**{**DENSE.__dict__, "tie_embeddings": True})
TABLES = {
    "bf16": PrecisionConfig(trainer="bf16", rollout="bf16"),
    "fp8": PrecisionConfig(),
    "edges": PrecisionConfig(bf16_first_layers=1, bf16_last_layers=1),
}
LAYOUTS = [
    TrainerLayout(),
    TrainerLayout(world_size=2, tensor=2),
    TrainerLayout(world_size=4, tensor=4),
    TrainerLayout(world_size=2, pipeline=2),
    TrainerLayout(world_size=2, pipeline=2, virtual_stages=2),
    TrainerLayout(world_size=2, context=2),
    TrainerLayout(world_size=2),
    TrainerLayout(world_size=2, expert=2),
    TrainerLayout(world_size=4, tensor=2, expert=4),
    TrainerLayout(world_size=4, tensor=2, expert=2, expert_tensor=2),
    TrainerLayout(world_size=4, expert_tensor=2),
    TrainerLayout(world_size=8, tensor=2, pipeline=2, expert=2, virtual_stages=2),
]


def table(model: ModelConfig, key: str) -> LayerTable:
    return LayerTable.build(model, TABLES[key])
