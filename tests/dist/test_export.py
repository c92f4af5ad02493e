"""What is published does not depend on the trainer's layout, follows the parameters, and fails on all ranks alike."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_fp8rl.config import (
    MlaConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    RolloutConfig,
    RouterConfig,
    RunConfig,
)
from megatron_fp8rl.kernels.blockwise import quantize_weight
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.weight_sync.wire import BucketInfo, read_file, unpack
from megatron_fp8rl.types import PublishReport
from megatron_fp8rl.names import registry as names
from megatron_fp8rl.weight_sync.digest import combine, digests, widened
from tests.helpers.dist import run_ranks
from tests.helpers.training import continue_training, full_weights, run_config, weight_pieces

_COMMON = dict(num_layers=4, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, vocab_size=62)
# Tensor parallel 2 leaves a rank of the dense models 128 query rows (quantized there), 64 key rows and 192 feed-forward
# rows (gathered first). The MoE model goes to an engine that is tensor parallel itself, so its parts fill blocks.
MODELS = {
    "dense": ModelConfig(family="qwen3", ffn_hidden_size=384, head_dim=64, **_COMMON),
    "tied": ModelConfig(family="qwen3", ffn_hidden_size=384, head_dim=64, tie_embeddings=True, **_COMMON),
    "moe": ModelConfig(
        family="qwen3_moe", num_experts=4, experts_per_token=2, moe_ffn_hidden_size=256, head_dim=128, **_COMMON
    ),
    # 96 rows of kv_a_proj_with_mqa fill a part of a block; tensor parallel 2 leaves 64 columns of o_proj.
    "latent": ModelConfig(
        family="deepseek_v3", ffn_hidden_size=256, num_experts=4, experts_per_token=2, moe_ffn_hidden_size=128,
        num_shared_experts=2, first_dense_layers=1, head_dim=64, **_COMMON | dict(num_layers=3, num_key_value_heads=4),
        mla=MlaConfig(q_lora_rank=128, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32),
        router=RouterConfig(score="sigmoid", correction_bias=True),
    ),
}
ENGINE_TENSOR = {"dense": 1, "tied": 1, "moe": 2, "latent": 1}
LAYOUTS = [
    ("dense", dict(world_size=2, tensor=2)),
    ("dense", dict(world_size=2, pipeline=2, virtual_stages=2)),
    ("tied", dict(world_size=2, pipeline=2)),
    ("tied", dict(world_size=2, tensor=2)),
    ("moe", dict(world_size=2, tensor=2)),
    ("moe", dict(world_size=2, expert=2)),
    ("moe", dict(world_size=2, tensor=2, expert_tensor=2)),
    ("moe", dict(world_size=2, pipeline=2)),
    ("moe", dict(world_size=2, pipeline=2, virtual_stages=2)),
    ("moe", dict(world_size=2, context=2)),
    ("moe", dict(world_size=2)),
    ("moe", dict(world_size=2, tensor=2, expert=2)),
    ("moe", dict(world_size=4, tensor=2, pipeline=2, expert=2)),
    ("latent", dict(world_size=2, pipeline=2)),
    ("latent", dict(world_size=2, tensor=2, expert=2)),
]


def config(kind: str, layout: dict[str, int]) -> RunConfig:
    """Edge layers in BF16; more than one bucket."""
    return RunConfig(
        name="export",
        model=MODELS[kind],
        parallel=ParallelConfig(**layout),
        precision=PrecisionConfig(bf16_last_layers=1),
        rollout=RolloutConfig(tensor=ENGINE_TENSOR[kind], bucket_bytes=200_000, update_deadline_s=60.0),
    )


def digests_of(held: dict[str, torch.Tensor]) -> dict[str, str]:
    """As an engine worker takes them."""
    return dict(zip(held, digests(map(widened, held.values()))))


def report_of(rank: int, version: int | None, held: dict[str, str]) -> dict:
    """Of an engine worker."""
    return {"rank": rank, "version": version, "combined": combine(held), "digests": held}


class Engine:
    """An engine that keeps what it receives and reports it as its tensor-parallel workers would."""

    name = "rollout-0"

    def __init__(self, cfg: RunConfig):
        self.tensors: dict[str, torch.Tensor] = {}
        self.version = None
        self.calls: list[str] = []
        self.size = cfg.rollout.tensor

    async def init_transfer(self, info) -> None:
        self.calls.append("init")

    async def pause(self, mode) -> None:
        self.calls.append("pause")

    async def start_update(self) -> None:
        self.calls.append("start")
        self.tensors.clear()

    async def update_weights(self, info) -> None:
        info = dict(info)
        buffer = read_file(info.pop("path"), info["num_bytes"])
        self.tensors |= {name: tensor.clone() for name, tensor in unpack(buffer, BucketInfo(**info))}

    async def finish_update(self, version) -> None:
        self.version = version

    async def weight_digests(self, *, names: bool = True) -> list[dict]:
        return [report_of(rank, self.version, self.digests(rank)) for rank in range(self.size)]

    def digests(self, rank: int) -> dict[str, str]:
        """vLLM's slices, from its rules: column-parallel by rows, row-parallel by columns, vocabulary padded to 64."""
        held = {}
        for name, tensor in self.tensors.items():
            if self.size == 1 or "norm" in name or ".mlp.gate." in name:
                held[name] = tensor
            elif "embed_tokens" in name or "lm_head" in name:
                held[name] = tensor[32 * rank : 32 * rank + 32]
            else:
                held[name] = tensor.chunk(2, dim=1 if "o_proj" in name or "down_proj" in name else 0)[rank]
        return digests_of(held)

    async def resume(self) -> None:
        self.calls.append("resume")


class Fleet:
    def __init__(self, engine: Engine):
        self.clients = (engine,)

    def admit(self):
        return self.clients

    def lost(self, clients):
        return False

    def sync(self, coroutine, deadline_s):
        return asyncio.run(asyncio.wait_for(coroutine, deadline_s))


def build(cfg: RunConfig):
    from megatron_fp8rl.trainer.parallel import Parallel
    from megatron_fp8rl.trainer.policy import Policy

    return Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))


def publish(kind: str, layout: dict[str, int]) -> tuple[PublishReport, dict[str, torch.Tensor], list[str]]:
    """Runs on a rank: (report, what the engine holds, calls that the engine saw); the engine lives on rank 0."""
    from megatron_fp8rl.weight_sync.publish import WeightExporter

    cfg = config(kind, layout)
    policy = build(cfg)
    engine = Engine(cfg)
    exporter = WeightExporter(policy, Fleet(engine) if policy.parallel.rank == 0 else None, cfg)
    exporter.publish(1)
    report = exporter.publish(2)
    exporter.close()
    return report, engine.tensors, engine.calls


@pytest.fixture(scope="module")
def one_rank():
    made = {}

    def get(kind: str):
        if kind not in made:
            made[kind] = run_ranks(1, publish, kind, dict(world_size=1))[0]
        return made[kind]

    return get


def layout_name(value) -> str:
    return value if isinstance(value, str) else "-".join(f"{key}{n}" for key, n in value.items())


def timeless(report: PublishReport) -> PublishReport:
    return replace(report, seconds=0, pause_s=0, pack_s=0, send_s=0, load_s=0, verify_s=0)


@pytest.mark.parametrize(("kind", "layout"), LAYOUTS, ids=layout_name)
def test_every_layout_publishes_the_same_bytes(kind, layout, one_rank):
    expected_report, expected, _ = one_rank(kind)
    ranks = run_ranks(layout["world_size"], publish, kind, layout)
    reports = [report for report, _, _ in ranks]
    assert all(report == reports[0] for report in reports)
    assert reports[0].checksum == expected_report.checksum
    assert timeless(reports[0]) == timeless(expected_report)
    _, received, calls = ranks[0]
    assert list(received) == list(expected)
    for name, tensor in received.items():
        assert torch.equal(tensor.view(torch.uint8), expected[name].view(torch.uint8)), name
    # The first publication goes twice: through the loaders, and straight into the kernels' tensors.
    assert calls == ["init", "pause", "start", "start", "resume", "pause", "start", "resume"]


def expected_wire(cfg: RunConfig, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What full Megatron weights have to become on the wire, tensor by tensor."""
    table = LayerTable.build(cfg.model, cfg.precision)
    wire = {}
    for name in names.weights(cfg.model):
        for hf_name, tensor in names.to_hf(name, weights[name], cfg.model):
            if table.rollout_fp8(hf_name):
                wire[hf_name], wire[f"{hf_name}_scale_inv"] = quantize_weight(tensor, cfg.precision.scales)
            else:
                wire[hf_name] = tensor
    return wire


def train_and_publish(cfg: RunConfig):
    """Runs on a rank: (what the engine holds before and after an update, checksums, the weights after it)."""
    from megatron_fp8rl.weight_sync.publish import WeightExporter

    policy = build(cfg)
    engine = Engine(cfg)
    exporter = WeightExporter(policy, Fleet(engine) if policy.parallel.rank == 0 else None, cfg)
    first = exporter.publish(1).checksum
    continue_training(policy, 1)
    second = exporter.publish(2).checksum
    exporter.close()
    return engine.tensors, (first, second), weight_pieces(policy)


def test_a_publication_carries_the_current_parameters():
    cfg = run_config(model=MODELS["moe"], trainer="blockwise", params="bf16", world_size=2, tensor=2, expert=2)
    cfg = replace(cfg, rollout=replace(cfg.rollout, tensor=2))
    ranks = run_ranks(2, train_and_publish, cfg)
    received, (first, second), _ = ranks[0]
    assert first != second
    wire = expected_wire(cfg, full_weights(cfg.model, [pieces for _, _, pieces in ranks]))
    assert received.keys() == wire.keys()
    for name, tensor in wire.items():
        assert torch.equal(tensor.contiguous().view(torch.uint8), received[name].view(torch.uint8)), name


def fail(kind_of_failure: str):
    """Runs on a rank: (type and text of the error that publish raised, whether a second engine call came after)."""
    from megatron_fp8rl.weight_sync.publish import WeightExporter

    cfg = config("moe", dict(world_size=2, tensor=2, expert=2))
    policy = build(cfg)
    rank = policy.parallel.rank
    engine = Engine(cfg)
    exporter = WeightExporter(policy, Fleet(engine) if rank == 0 else None, cfg)
    exporter.publish(1)
    parameters = dict(policy.named_parameters())
    if kind_of_failure == "engine" and rank == 0:

        async def refuse(info):
            if info["bucket"] == 2:
                raise ConnectionError("rollout-0 died with exit code -9")

        engine.update_weights = refuse
    elif kind_of_failure == "hang" and rank == 0:

        async def sleep(info):
            await asyncio.sleep(60)

        engine.update_weights = sleep
        exporter._engines._deadline_s = 3.0
    elif kind_of_failure == "rank" and rank == 1:
        exporter._gather.parameters["decoder.layers.2.mlp.experts.3.linear_fc2.weight"] = torch.zeros(3, 3)
    elif kind_of_failure == "nan" and rank == 1:
        with torch.no_grad():
            parameters["decoder.layers.1.mlp.experts.2.linear_fc1.weight"][5, 7] = float("nan")
    elif kind_of_failure == "lie" and rank == 0:

        async def lie(names=True):
            return [report_of(r, 2, engine.digests(0)) for r in range(2)]

        engine.weight_digests = lie
    try:
        exporter.publish(2)
    except Exception as error:
        return type(error).__name__, str(error), engine.calls
    finally:
        exporter.close()
    return None


@pytest.mark.parametrize(
    ("kind", "error", "texts"),
    [
        ("engine", "TransportError", ["bucket 3 of", "replica 0", "exit code -9"]),
        ("hang", "TransportError", ["bucket 1 of", "rollout.update_deadline_s"]),
        ("rank", "ValueError", ["decoder.layers.2.mlp.experts.3.linear_fc2.weight: shape (3, 3)"]),
        ("nan", "ValueError", ["model.layers.1.mlp.experts.2.gate_proj.weight", "NaN"]),
        ("lie", "WeightMismatch", ["model.embed_tokens.weight in replica 0 rank 1: corrupted"]),
    ],
)
def test_all_ranks_raise_the_same_error(kind, error, texts):
    ranks = run_ranks(2, fail, kind, deadline_s=300)
    for raised, message, _ in ranks:
        assert raised == error
        assert all(text in message for text in texts), message
    assert ranks[0][1] == ranks[1][1]
    assert ranks[0][2].count("resume") == 1  # the engines stay paused after the failure


def save(kind: str, layout: dict[str, int], folder: Path, tokenizer: Path):
    """Runs on a rank: save twice over, in shards and whole; this rank's pieces of the weights."""
    from megatron_fp8rl.weight_sync.publish import save_hf

    policy = build(config(kind, layout))
    save_hf(policy, folder / "sharded", tokenizer, max_shard_bytes=300_000)
    for _ in range(2):  # the second replaces the first
        save_hf(policy, folder / "whole", tokenizer)
    return weight_pieces(policy)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("tied", dict(world_size=2, pipeline=2)), ("moe", dict(world_size=2, tensor=2, expert=2))],
    ids=layout_name,
)
def test_saved_checkpoint_is_the_policy(kind, layout, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from megatron_fp8rl.data.tokenizer import character_tokenizer

    character_tokenizer().save_pretrained(tmp_path / "tokenizer")
    ranks = run_ranks(2, save, kind, layout, tmp_path, tmp_path / "tokenizer")
    model = MODELS[kind]
    weights = full_weights(model, ranks) if kind == "moe" else None
    logits = []
    for name in ("sharded", "whole"):
        folder = tmp_path / name
        assert names.from_hf_config(json.loads((folder / "config.json").read_text())) == replace(model, hf_path=None)
        loaded, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        with torch.no_grad():
            logits.append(loaded(torch.arange(3, 40)[None]).logits)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.decode(tokenizer.encode("12+3", add_special_tokens=False)) == "12+3"
        assert loaded.config.eos_token_id == tokenizer.eos_token_id
    assert len(list((tmp_path / "sharded").glob("model-*-of-*.safetensors"))) > 1
    assert (tmp_path / "whole" / "model.safetensors").is_file()
    assert torch.equal(*logits) and logits[0].isfinite().all()
    assert not list(tmp_path.glob(".*"))  # nothing partial is left
    if weights is not None:
        down = loaded.model.layers[2].mlp.experts.down_proj[3]
        assert torch.equal(down, weights["decoder.layers.2.mlp.experts.3.linear_fc2.weight"])
        gate_up = loaded.model.layers[2].mlp.experts.gate_up_proj[3]
        assert torch.equal(gate_up, weights["decoder.layers.2.mlp.experts.3.linear_fc1.weight"])
