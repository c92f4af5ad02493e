"""Every model family against transformers, in float32: logits of odd-sized models in every layout.

One set of ranks builds all families one after another, so that a layout costs one start.
"""

import math

import pytest

from megatron_fp8rl.config import MlaConfig, ModelConfig, RopeScaling, RouterConfig
from tests.helpers.dist import run_ranks
from tests.helpers.logits import assert_logits_equal, reference_logits, trainer_logits
from tests.tolerances import LOGITS_FLOAT32

# Sizes that nothing has in common: three layers, an odd vocabulary, heads unrelated to the hidden size.
_COMMON = dict(
    num_layers=3, hidden_size=40, num_attention_heads=4, num_key_value_heads=2, head_dim=20, vocab_size=131,
    ffn_hidden_size=56, max_position_embeddings=64,
)  # fmt: skip
_MOE = dict(num_experts=6, experts_per_token=3, moe_ffn_hidden_size=24)
_DEEPSEEK = _COMMON | _MOE | dict(family="deepseek_v3", num_key_value_heads=4, num_shared_experts=2)
_YARN = RopeScaling(kind="yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=1.3)
MODELS = {
    "llama": ModelConfig(
        family="llama",
        rope_theta=1e4,
        rope_scaling=RopeScaling(kind="llama3", factor=8.0, original_max_position_embeddings=16),
        **_COMMON | dict(num_key_value_heads=1, tie_embeddings=True),
    ),
    "mistral": ModelConfig(family="mistral", rope_theta=1e4, **_COMMON),
    "qwen2": ModelConfig(family="qwen2", qkv_bias=True, **_COMMON),
    "qwen2-one-group": ModelConfig(family="qwen2", qkv_bias=True, **_COMMON | dict(num_key_value_heads=1)),
    "mixtral": ModelConfig(family="mixtral", **_COMMON | _MOE | dict(ffn_hidden_size=0)),
    "glm4_moe": ModelConfig(
        family="glm4_moe",
        qkv_bias=True,
        qk_norm=True,
        rotary_fraction=0.5,
        num_shared_experts=1,
        first_dense_layers=1,
        router=RouterConfig(score="sigmoid", correction_bias=True, scaling_factor=1.7),
        **_COMMON | _MOE,
    ),
    # Yarn, latent queries, values larger than keys, and groups of which two are chosen for three experts.
    "deepseek_v3": ModelConfig(
        rope_scaling=_YARN,
        rope_theta=1e4,
        mla=MlaConfig(q_lora_rank=28, kv_lora_rank=36, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=22),
        first_dense_layers=1,
        router=RouterConfig(
            score="sigmoid", correction_bias=True, num_groups=3, groups_per_token=2, scaling_factor=2.5
        ),
        **_DEEPSEEK | dict(head_dim=20),
    ),
    "deepseek_v3-direct-queries": ModelConfig(
        rope_theta=1e4,
        mla=MlaConfig(q_lora_rank=None, kv_lora_rank=18, qk_nope_head_dim=6, qk_rope_head_dim=10, v_head_dim=14),
        first_dense_layers=2,
        router=RouterConfig(score="sigmoid", correction_bias=True, normalize=False),
        **_DEEPSEEK | dict(head_dim=16, tie_embeddings=True),
    ),
}
LAYOUTS = [
    dict(world_size=1),
    dict(world_size=2, tensor=2),
    dict(world_size=2, pipeline=2),
    dict(world_size=2, context=2),
    dict(world_size=2, expert=2),
    dict(world_size=2, tensor=2, expert=2),
    dict(world_size=2, tensor=2, expert_tensor=2),
]


def _fits(model: ModelConfig, layout: dict) -> bool:
    return model.is_moe or not {"expert", "expert_tensor"} & set(layout)


def _all_references(folder: str) -> dict[str, list]:
    return {kind: reference_logits(model, f"{folder}/{kind}") for kind, model in MODELS.items()}


def _all_logits(layout: dict, folder: str) -> dict[str, list | None]:
    from megatron_fp8rl.config import ParallelConfig
    from megatron_fp8rl.trainer.parallel import Parallel

    parallel = Parallel.init(ParallelConfig(**layout), deadline_s=60)
    fitting = {kind: model for kind, model in MODELS.items() if _fits(model, layout)}
    return {kind: trainer_logits(model, layout, f"{folder}/{kind}", parallel) for kind, model in fitting.items()}


def _name(layout: dict) -> str:
    return "-".join(f"{k}{v}" for k, v in layout.items() if k != "world_size") or "one"


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> tuple[str, dict[str, list]]:
    folder = str(tmp_path_factory.mktemp("families"))
    return folder, run_ranks(1, _all_references, folder)[0]


@pytest.fixture(scope="module")
def logits(references):
    """Logits of all families in a layout, from the ranks of the last stage; computed once."""
    made: dict[str, list] = {}

    def get(layout: dict) -> list[dict]:
        if _name(layout) not in made:
            made[_name(layout)] = run_ranks(layout["world_size"], _all_logits, layout, references[0])
        return made[_name(layout)]

    return get


@pytest.mark.parametrize("layout", LAYOUTS, ids=_name)
@pytest.mark.parametrize("kind", MODELS)
def test_logits_equal_transformers(kind, layout, references, logits):
    if not _fits(MODELS[kind], layout):
        pytest.skip("a dense model has no experts to divide")
    results = [rank[kind] for rank in logits(layout) if rank[kind] is not None]
    assert len(results) == layout["world_size"] // layout.get("pipeline", 1)
    for result in results:
        assert_logits_equal(result, references[1][kind], **LOGITS_FLOAT32)


@pytest.mark.parametrize("kind", MODELS)
def test_references_spread(kind, references):
    """Logits of unit size: a tolerance of 1e-4 would say nothing about much smaller ones."""
    spread = [sequence.std().item() for pack in references[1][kind] for sequence in pack]
    assert all(math.isfinite(std) and std > 0.3 for std in spread), spread
