"""Models and layouts of plans of publication."""

from megatron_fp8rl.config import ModelConfig, PrecisionConfig
from megatron_fp8rl.names.layouts import TrainerLayout
from megatron_fp8rl.precision.layer_table import LayerTable
from tests.helpers.models import small_model

DENSE = small_model((4, 256, 8, 4, 64, 96), ffn=512)
MOE = small_model((4, 256, 8, 4, 64, 96), experts=(4, 2, 256))
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
