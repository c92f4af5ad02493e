"""Weights on one trainer rank and on one engine worker, summed over the plan of a publication. Pure; no torch.

An engine's shards are those of ``weight_sync/plan.py``, a trainer's those of ``names/slicing.py``. One expert of each
layer is planned and multiplied by the number of experts on a rank.
"""

import functools
import math
from dataclasses import dataclass, replace

from megatron_fp8rl.config import LoraConfig, ModelConfig, ParallelConfig, RunConfig
from megatron_fp8rl.names import blocks, registry, slicing
from megatron_fp8rl.names.adapted import is_adapted
from megatron_fp8rl.names.layouts import EngineLayout, TrainerLayout
from megatron_fp8rl.precision.formats import ITEM_BYTES
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.precision.matmul_shapes import fits_deep_gemm
from megatron_fp8rl.precision.parameters import Entry, entries
from megatron_fp8rl.weight_sync.plan import plan_weights


@dataclass(frozen=True, kw_only=True)
class RankWeights:
    """Elements on one trainer rank, including padding of the vocabulary."""

    dense: int  # outside routed experts, with gradients
    expert: int
    frozen: int = 0  # without gradients: under adapters all weights
    fp8: int  # of both, those that the trainer multiplies in FP8
    fp8_expert: int  # of these, experts
    fp8_fitting: int  # and others, in matrices that DeepGEMM multiplies
    buffers: int  # FP32, without gradients

    @property
    def trained(self) -> int:
        return self.dense + self.expert

    def divided(self, parallel: ParallelConfig) -> float:
        """Of these, the elements whose optimizer states the rank keeps: its share of what all its copies train."""
        return self.dense / (parallel.data * parallel.context) + self.expert / expert_copies(parallel)


def expert_copies(parallel: ParallelConfig) -> int:
    """Trainer ranks that hold the same routed experts."""
    return max(1, parallel.world_size // (parallel.pipeline * parallel.expert * parallel.expert_tensor))


def on_trainer_rank(cfg: RunConfig, stage: int) -> RankWeights:
    """Weights of a rank of pipeline stage ``stage``. All ranks of a stage hold equal amounts."""
    model, parallel = cfg.model, cfg.parallel
    layout = TrainerLayout.from_config(parallel)
    table = LayerTable.build(model, cfg.precision)
    degrees = (parallel.tensor, parallel.expert, parallel.expert_tensor)
    elements = _rank_elements(model, table, cfg.lora, *degrees)
    rows = [sums for entry, sums in elements if _is_on_stage(entry, model, layout, stage)]
    dense, expert, fp8, buffers, fp8_expert, fp8_fitting, *adapters = map(sum, zip(*rows, strict=True))
    frozen = 0
    if cfg.lora.rank:
        frozen, (dense, expert) = dense + expert, adapters
    of_fp8 = {"fp8": fp8, "fp8_expert": fp8_expert, "fp8_fitting": fp8_fitting}
    return RankWeights(dense=dense, expert=expert, frozen=frozen, buffers=buffers, **of_fp8)


@functools.lru_cache(maxsize=256)
def _rank_elements(
    model: ModelConfig, table: LayerTable, lora: LoraConfig, tensor: int, expert: int, expert_tensor: int
) -> list[tuple[Entry, tuple[int, ...]]]:
    """(entry, elements on a rank: dense, expert, fp8, buffers, FP8 experts, other FP8 matrices for DeepGEMM,
    adapters of others than experts, adapters of experts). A layer's weights are summed under the first."""
    groups: dict[int | Entry, tuple[Entry, list[int]]] = {}
    for entry in entries(model):
        weight = entry.weight
        ranks = expert_tensor if weight.is_expert else tensor
        shape = slicing.shard_shape(weight, model, ranks)
        numel = math.prod(shape) * entry.num_experts
        numel //= expert if weight.is_expert else 1
        _, sums = groups.setdefault(entry.layer if entry.layer >= 0 else entry, (entry, [0] * 8))
        sums[1 if weight.is_expert else 3 if entry.is_buffer else 0] += numel
        if table.trainer_format(weight.parts[0][0]).is_quantized:
            sums[2] += numel
            sums[4] += numel if weight.is_expert else 0
            sums[5] += numel if not weight.is_expert and fits_deep_gemm(shape[0], shape[1]) else 0
        if lora.rank and is_adapted(weight.name, lora):
            sums[7 if weight.is_expert else 6] += lora.rank * numel // shape[0] + lora.rank * numel // shape[1]
    return [(entry, (*sums,)) for entry, sums in groups.values()]


def _is_on_stage(entry: Entry, model: ModelConfig, layout: TrainerLayout, stage: int) -> bool:
    last = layout.pipeline - 1
    if 0 <= entry.layer < model.num_layers:
        return layout.stage(entry.layer, model.num_layers) == stage
    if entry.weight.name == blocks.EMBEDDING:
        # A tied head is the embedding's copy on the last stage, where multi-token prediction needs one as well.
        return stage == 0 or (stage == last and (model.tie_embeddings or model.num_mtp_layers > 0))
    return stage == last


@dataclass(frozen=True, kw_only=True)
class WorkerWeights:
    """Bytes of weights on one engine worker."""

    fp8: int
    scales: int
    bf16: int  # and FP32 buffers of routers
    absorbed: int  # BF16 copies that vLLM makes of kv_b_proj for latent attention

    @property
    def sent(self) -> int:
        return self.fp8 + self.scales + self.bf16

    @property
    def total(self) -> int:
        return self.sent + self.absorbed


def on_engine_worker(cfg: RunConfig) -> WorkerWeights:
    """Weight bytes of the first worker of a replica. The others hold as much, or a few rows of the vocabulary less."""
    layout = EngineLayout.from_config(cfg.engine)
    if cfg.model.num_experts % layout.expert:  # refused elsewhere
        layout = replace(layout, expert=1)
    return _worker_weights(cfg.model, LayerTable.build(cfg.model, cfg.precision), layout)


def published_bytes(cfg: RunConfig) -> int:
    """Bytes that an engine worker receives in each step: its weights, or unmerged adapters."""
    if not cfg.lora.rank or cfg.lora.merge:
        return on_engine_worker(cfg).sent
    return ITEM_BYTES["bfloat16"] * cfg.lora.rank * _sides_of_adapted(cfg.model, cfg.lora)


@functools.lru_cache(maxsize=16)
def _sides_of_adapted(model: ModelConfig, lora: LoraConfig) -> int:
    """The sum of rows and columns over all matrices with adapters, as the model's files divide them."""
    shapes = registry.hf_tensors(model)
    chosen = (weight for weight in registry.weights(model).values() if is_adapted(weight.name, lora))
    return sum(sum(shapes[name]) for weight in chosen for name, _ in weight.parts)


@functools.lru_cache(maxsize=256)
def _worker_weights(model: ModelConfig, table: LayerTable, layout: EngineLayout) -> WorkerWeights:
    fp8 = scales = bf16 = absorbed = 0
    for entry in entries(model):
        count = entry.num_experts // layout.expert if entry.weight.is_expert else 1
        for transfer in plan_weights([entry.weight], model, table, TrainerLayout(), layout)[0]:
            if transfer.name in entry.weight.copies:
                continue
            data, *scale = (count * tensor.num_bytes for tensor in transfer.wire_tensors(engine_rank=0))
            scales += sum(scale)
            if transfer.is_fp8:
                fp8 += data
            else:
                bf16 += data
            if transfer.name.endswith(".kv_b_proj.weight"):
                absorbed += 2 * data if transfer.is_fp8 else data
    return WorkerWeights(fp8=fp8, scales=scales, bf16=bf16, absorbed=absorbed)
