"""Logits of the trainer's model against transformers, in float32, for packed ragged sequences in every layout."""

import re
from pathlib import Path

import pytest

from megatron_fp8rl.config import ModelConfig, ParallelConfig, RunConfig
from megatron_fp8rl.trainer.model.build import _open_checkpoint, build_chunks, load_hf, named_global_parameters
from megatron_fp8rl.trainer.parallel import Parallel
from tests.helpers.dist import run_ranks
from tests.helpers.logits import assert_logits_equal, reference_logits, trainer_logits
from tests.tolerances import LOGITS_FLOAT32

_COMMON = dict(
    num_layers=4,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=96,
    max_position_embeddings=128,
)
MODELS = {
    "dense": ModelConfig(family="qwen3", ffn_hidden_size=96, **_COMMON),
    "tied": ModelConfig(family="qwen3", ffn_hidden_size=96, tie_embeddings=True, **_COMMON),
    "moe": ModelConfig(family="qwen3_moe", num_experts=4, experts_per_token=2, moe_ffn_hidden_size=48, **_COMMON),
}
LAYOUTS = [
    ("dense", dict(world_size=1)),
    ("dense", dict(world_size=2, tensor=2)),
    ("dense", dict(world_size=2, context=2)),
    ("dense", dict(world_size=2, pipeline=2)),
    ("tied", dict(world_size=2, pipeline=2, virtual_stages=2)),
    ("tied", dict(world_size=2, tensor=2)),
    ("moe", dict(world_size=1)),
    ("moe", dict(world_size=2, expert=2)),
    ("moe", dict(world_size=2, tensor=2)),
    ("moe", dict(world_size=2, tensor=2, expert=2)),
    ("moe", dict(world_size=2, tensor=2, expert_tensor=2)),
    ("moe", dict(world_size=2, context=2, expert=2)),
    ("moe", dict(world_size=2, pipeline=2, virtual_stages=2)),
    ("moe", dict(world_size=4, tensor=2, pipeline=2, expert=2)),
]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    made = {}

    def get(kind: str):
        if kind not in made:
            folder = str(tmp_path_factory.mktemp(kind))
            made[kind] = folder, run_ranks(1, reference_logits, MODELS[kind], folder)[0]
        return made[kind]

    return get


def _name(value) -> str:
    if isinstance(value, str):
        return value
    return "-".join(f"{k}{v}" for k, v in value.items() if k != "world_size") or "one"


@pytest.mark.parametrize("kind, layout", LAYOUTS, ids=_name)
def test_logits_equal_transformers(kind, layout, references):
    folder, expected = references(kind)
    ranks = run_ranks(layout["world_size"], trainer_logits, MODELS[kind], layout, folder)
    on_last_stage = [result for result in ranks if result is not None]
    assert len(on_last_stage) == layout["world_size"] // layout.get("pipeline", 1)
    for result in on_last_stage:
        assert_logits_equal(result, expected, **LOGITS_FLOAT32)


def test_random_weights_do_not_depend_on_the_layout():
    layouts = [dict(world_size=1), dict(world_size=2, tensor=2, expert=2), dict(world_size=2, pipeline=2)]
    seen = []
    for layout in layouts:
        pieces: dict[str, list] = {}
        for rank in run_ranks(layout["world_size"], _weight_sums, MODELS["moe"], layout):
            for name, value in rank.items():
                pieces.setdefault(name, []).append(value)
        seen.append(pieces)
    whole = {name: value[0] for name, value in seen[0].items()}
    assert whole == {name: value[0] for name, value in seen[2].items()}
    for name, parts in seen[1].items():
        divided = len(parts) == 2 and "norm" not in name and "router" not in name
        total = sum(parts) if divided else parts[0]
        assert total == pytest.approx(whole[name], rel=1e-9), name


def _weight_sums(model: ModelConfig, layout: dict) -> dict[str, float]:
    cfg = RunConfig(name="init", model=model, parallel=ParallelConfig(**layout), seed=5)
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    chunks = build_chunks(cfg, parallel)
    return {name: p.double().pow(2).sum().item() for name, p in named_global_parameters(chunks, parallel)}


def _load_broken(model: ModelConfig, folder: str, how: str) -> str:
    cfg = RunConfig(name="broken", model=model)
    parallel = Parallel.init(cfg.parallel)
    chunks = build_chunks(cfg, parallel)
    get = _open_checkpoint(Path(folder))
    sources = {
        "missing": lambda name: get("model.layers.9.mlp.gate.weight" if "layers.2.mlp.gate." in name else name),
        "shape": lambda name: get(name)[1:] if "layers.1.self_attn.k_proj" in name else get(name),
        "folder": folder + "/nowhere",
    }
    try:
        load_hf(chunks, sources[how], cfg.model, parallel)
    except (KeyError, ValueError, FileNotFoundError) as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


@pytest.mark.parametrize(
    "how, message",
    [
        ("missing", "KeyError: .*model.layers.9.mlp.gate.weight: not in the checkpoint"),
        ("shape", r"ValueError: model.layers.1.self_attn.k_proj.weight: shape \(63, 64\).*\(64, 64\)"),
        ("folder", "CheckpointError: .*nowhere:\n  neither model.safetensors nor"),
    ],
)
def test_a_broken_checkpoint_is_refused_by_tensor_name(how, message, references):
    folder, _ = references("moe")
    assert re.match(message, run_ranks(1, _load_broken, MODELS["moe"], folder, how)[0])
