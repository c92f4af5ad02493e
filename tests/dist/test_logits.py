"""Logits of the trainer's model against transformers, in float32, for packed ragged sequences in every layout."""

import re
from pathlib import Path

import pytest
import torch

from megatron_fp8rl.config import ModelConfig, ParallelConfig, PrecisionConfig, RunConfig
from tests.helpers.dist import run_ranks
from tests.tolerances import LOGITS_FLOAT32

_COMMON = dict(
    num_layers=4, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32, vocab_size=96,
    max_position_embeddings=128,
)  # fmt: skip
MODELS = {
    "dense": ModelConfig(family="qwen3", ffn_hidden_size=96, **_COMMON),
    "tied": ModelConfig(family="qwen3", ffn_hidden_size=96, tie_embeddings=True, **_COMMON),
    "moe": ModelConfig(
        family="qwen3_moe", num_experts=4, experts_per_token=2, moe_ffn_hidden_size=48, **_COMMON
    ),
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
LENGTHS = ((11, 30, 7, 1), (5, 16))  # of the sequences of two microbatches
ALIGNMENT = 8  # every sequence is padded to a multiple, as the widest layout here needs


def _sequences() -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [[torch.randint(0, 96, (n,), generator=generator) for n in lengths] for lengths in LENGTHS]


def _reference(model: ModelConfig, folder: str) -> list[list[torch.Tensor]]:
    """Save random weights as a Hugging Face checkpoint; transformers' logits of each sequence alone."""
    import transformers

    from megatron_fp8rl.weights import names

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**names.to_hf_config(model))
    config._attn_implementation = "eager"
    reference = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            # Norm weights away from 1 and logits of unit size, so that no mistake can hide.
            parameter.normal_(1.0, 0.2) if "norm" in name else parameter.normal_(0.0, 0.1)
        reference.save_pretrained(folder)
        return [[reference(tokens[None]).logits[0] for tokens in pack] for pack in _sequences()]


def _pack(sequences: list[torch.Tensor]):
    from megatron.core.packed_seq_params import PackedSeqParams

    padded = [-(-s.numel() // ALIGNMENT) * ALIGNMENT for s in sequences]
    tokens = torch.cat([torch.nn.functional.pad(s, (0, n - s.numel())) for s, n in zip(sequences, padded)])
    cu_seqlens = torch.tensor([0, *padded]).cumsum(0).int()
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(padded), max_seqlen_kv=max(padded),
    )  # fmt: skip
    return tokens, packed


def _local_positions(packed, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Packed positions of a context-parallel rank: chunks r and 2 * cp - 1 - r of each sequence."""
    parts = []
    for start, end in zip(packed.cu_seqlens_q, packed.cu_seqlens_q[1:]):
        chunks = torch.arange(int(start), int(end)).chunk(2 * cp_size)
        parts += [chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]] if cp_size > 1 else chunks
    return torch.cat(parts)


def _logits(model: ModelConfig, layout: dict, folder: str) -> list[torch.Tensor] | None:
    """Packed logits [T, vocab] of each microbatch, on ranks of the last stage; load_hf and the schedules included."""
    import torch.distributed as dist
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    from megatron_fp8rl.trainer.model import build_chunks, load_hf
    from megatron_fp8rl.trainer.parallel import Parallel

    cfg = RunConfig(
        name="logits", model=model, parallel=ParallelConfig(**layout),
        precision=PrecisionConfig(trainer="bf16", rollout="bf16", params="fp32"),
    )  # fmt: skip
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    chunks = build_chunks(cfg, parallel)
    load_hf(chunks, folder, cfg, parallel)
    packs = [_pack(sequences) for sequences in _sequences()]

    def step(iterator, chunk):
        tokens, packed = next(iterator)
        mine = _local_positions(packed, parallel.cp_size, parallel.cp_rank)
        out = chunk(tokens[mine][None], mine[None], None, packed_seq_params=packed)
        return out, lambda logits, non_loss_data: gather_from_tensor_model_parallel_region(logits)[0]

    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=step, data_iterator=[iter(packs) for _ in chunks], model=chunks,
            num_microbatches=len(packs), seq_length=packs[0][0].numel(), micro_batch_size=1, forward_only=True,
            collect_non_loss_data=True,
        )  # fmt: skip
    if not parallel.is_last_stage:
        return None
    whole = []
    for logits, (tokens, packed) in zip(outputs, packs):
        shards = [torch.empty_like(logits) for _ in range(parallel.cp_size)]
        dist.all_gather(shards, logits.contiguous(), group=parallel.cp_group)
        full = torch.empty(tokens.numel(), logits.shape[-1])
        for rank, shard in enumerate(shards):
            full[_local_positions(packed, parallel.cp_size, rank)] = shard
        whole.append(full)
    return whole


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    made = {}

    def get(kind: str):
        if kind not in made:
            folder = str(tmp_path_factory.mktemp(kind))
            made[kind] = folder, run_ranks(1, _reference, MODELS[kind], folder)[0]
        return made[kind]

    return get


def _name(value) -> str:
    return value if isinstance(value, str) else "-".join(f"{k}{v}" for k, v in value.items() if k != "world_size") or "one"


@pytest.mark.parametrize("kind, layout", LAYOUTS, ids=_name)
def test_logits_equal_transformers(kind, layout, references):
    folder, expected = references(kind)
    ranks = run_ranks(layout["world_size"], _logits, MODELS[kind], layout, folder)
    on_last_stage = [result for result in ranks if result is not None]
    assert len(on_last_stage) == layout["world_size"] // layout.get("pipeline", 1)
    for result in on_last_stage:
        for full, pack in zip(result, expected):
            starts = torch.tensor([0] + [-(-s.shape[0] // ALIGNMENT) * ALIGNMENT for s in pack]).cumsum(0)
            for start, logits in zip(starts, pack):
                torch.testing.assert_close(full[start : start + len(logits)], logits, **LOGITS_FLOAT32)


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
    from megatron_fp8rl.trainer.model import build_chunks, named_global_parameters
    from megatron_fp8rl.trainer.parallel import Parallel

    cfg = RunConfig(name="init", model=model, parallel=ParallelConfig(**layout), seed=5)
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    chunks = build_chunks(cfg, parallel)
    return {name: p.double().pow(2).sum().item() for name, p in named_global_parameters(chunks, parallel)}


def _load_broken(model: ModelConfig, folder: str, how: str) -> str:
    from megatron_fp8rl.trainer.model import _open_checkpoint, build_chunks, load_hf
    from megatron_fp8rl.trainer.parallel import Parallel

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
        load_hf(chunks, sources[how], cfg, parallel)
    except (KeyError, ValueError, FileNotFoundError) as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


@pytest.mark.parametrize(
    "how, message",
    [
        ("missing", "KeyError: .*model.layers.9.mlp.gate.weight: not in the checkpoint"),
        ("shape", r"ValueError: model.layers.1.self_attn.k_proj.weight: shape \(63, 64\).*\(64, 64\)"),
        ("folder", "FileNotFoundError: .*nowhere: neither model.safetensors nor"),
    ],
)
def test_a_broken_checkpoint_is_refused_by_tensor_name(how, message, references):
    folder, _ = references("moe")
    assert re.match(message, run_ranks(1, _load_broken, MODELS["moe"], folder, how)[0])
