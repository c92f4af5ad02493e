"""The GEMM shapes of a trainer rank in a full microbatch, for benchmarks and for the choice of ``auto``."""

import math
from dataclasses import dataclass
from typing import Literal

from megatron_fp8rl.config import ModelConfig, OptimConfig, ParallelConfig, RunConfig
from megatron_fp8rl.kernels.types import BLOCK
from megatron_fp8rl.names import slicing
from megatron_fp8rl.names.registry import FAMILIES
from megatron_fp8rl.names.table import Weight, fill, rows_of
from megatron_fp8rl.precision.layer_table import LayerTable

Field = Literal["linears", "experts"]  # of PrecisionConfig

_OPERATIONS = 3 * 2  # per weight and token: forward, and the two GEMMs of backward


def fits_deep_gemm(rows: int, columns: int) -> bool:
    """Whether DeepGEMM multiplies an FP8 matrix [rows, columns]: whole blocks of columns, whole and half blocks of
    rows."""
    return rows % (BLOCK // 2) == 0 and columns % BLOCK == 0


@dataclass(frozen=True)
class Experts:
    """The experts of one rank and their tokens in one microbatch."""

    experts: int
    tokens: int  # routed: a token counts once for each of its experts
    hidden: int
    width: int  # features between the two linears

    @property
    def num_operations(self) -> int:
        """Operations of the three forward GEMMs (gate, up, down) and the six of backward."""
        return 3 * _OPERATIONS * self.tokens * self.hidden * self.width


@dataclass(frozen=True)
class Linear:
    """A linear [rows, columns] = [N, K]; for an MLP (``mlp``: gate, up and down), N = H and K = F."""

    what: Literal["linear", "mlp"]
    tokens: int
    rows: int
    columns: int

    @property
    def num_operations(self) -> int:
        """Operations of the forward GEMMs and twice as many in backward."""
        return (3 if self.what == "mlp" else 1) * _OPERATIONS * self.tokens * self.rows * self.columns


@dataclass(frozen=True)
class Use:
    """One kind of linear in a model, and the number of layers that have it."""

    name: str  # Megatron-Core's name
    shape: Linear
    num_layers: int


@dataclass(frozen=True)
class Range:
    """When DeepGEMM is faster: tokens multiplied by one matrix in a full microbatch, bounds included."""

    first: float
    last: float = math.inf
    smallest_side: int = BLOCK  # of the matrix, rows or columns

    def contains(self, tokens: float, *sides: int) -> bool:
        return self.first <= tokens <= self.last and min(sides) >= self.smallest_side


# All thresholds, by field and trainer recipe; DeepGEMM supports no other recipes. Measured on H200s in November 2026;
# `benchmarks.experts` and `benchmarks.linears` repeat the measurement.
DEEP_GEMM_IS_FASTER: dict[tuple[Field, str], Range] = {
    # Four layers of Qwen3-8B, and only its MLP.
    ("linears", "blockwise"): Range(2048),
    # 8 to 256 experts with 1 to 8,192 tokens each, with and without host time.
    ("experts", "blockwise"): Range(0),
    # 1 to 1,024 tokens per expert. At 2,048, single layers were faster with Transformer Engine's loop over experts.
    # Whole updates (11 layers, EP2, uneven routing) took 3.3 s, and 4.7 s with the loop (run E).
    ("experts", "bf16"): Range(0, last=2048),
}


def experts_of(model: ModelConfig, parallel: ParallelConfig, optim: OptimConfig) -> Experts | None:
    """The GEMM shapes of a rank's experts under balanced routing; None for a dense model."""
    if not model.is_moe:
        return None
    return Experts(
        experts=model.num_experts // parallel.expert,
        tokens=_tokens_per_rank(parallel, optim) * model.experts_per_token * parallel.expert_tensor,
        hidden=model.hidden_size,
        width=model.moe_ffn_hidden_size // parallel.expert_tensor,
    )


def linears_of(cfg: RunConfig) -> list[Use]:
    """Linears outside experts that are or could be FP8; an MLP's linears count as one."""
    model, table = cfg.model, LayerTable.build(cfg.model, cfg.precision)
    in_fp8 = range(table.first_fp8_layer, table.end_fp8_layer)
    num_layers_of: dict[tuple[str, Linear], int] = {}
    for kind in dict.fromkeys(model.layers[layer] for layer in in_fp8):
        layers = [layer for layer in in_fp8 if model.layers[layer] == kind]
        for name, weight in _linears_of_layer(model, layers[0]):
            if table.is_quantizable(weight.parts[0][0]) and not name.endswith("linear_fc2"):
                key = name, _shape(model, cfg.parallel, cfg.optim, name, weight)
                num_layers_of[key] = num_layers_of.get(key, 0) + len(layers)
    return [Use(name, shape, num_layers) for (name, shape), num_layers in num_layers_of.items()]


def deciding_work(name: str, cfg: RunConfig) -> tuple[float, tuple[int, ...]]:
    """(tokens of a full microbatch, sides) that the choice depends on; no sides if there is no such matrix."""
    if name == "experts":
        experts = experts_of(cfg.model, cfg.parallel, cfg.optim)
        assert experts is not None  # the model has experts
        return experts.tokens / experts.experts, (experts.hidden, experts.width)
    shapes = [use.shape for use in linears_of(cfg)]
    if not shapes:
        return 0, ()
    largest = max(shapes, key=lambda shape: shape.num_operations)
    return largest.tokens, (largest.rows, largest.columns)


def _linears_of_layer(model: ModelConfig, layer: int) -> list[tuple[str, Weight]]:
    """(name within its layer, weight) of the matrices outside routed experts."""
    linears = []
    for row in rows_of(FAMILIES[model.family].rows(model), model.layers[layer]):
        if "{expert}" not in row.mcore:
            weight = fill(row, model, layer=layer, expert=-1)
            if len(weight.shape) == 2:
                linears.append((row.mcore.partition("{layer}.")[2].removesuffix(".weight"), weight))
    return linears


def _shape(model: ModelConfig, parallel: ParallelConfig, optim: OptimConfig, name: str, weight: Weight) -> Linear:
    """Number of tokens of a linear: a tensor-parallel rank's share if the linear is replicated, else all."""
    rows, columns = slicing.shard_shape(weight, model, parallel.tensor)
    tokens = _tokens_per_rank(parallel, optim) * (1 if weight.cut == "none" else parallel.tensor)
    if name.endswith("linear_fc1"):
        return Linear("mlp", tokens, columns, rows // 2)
    return Linear("linear", tokens, rows, columns)


def _tokens_per_rank(parallel: ParallelConfig, optim: OptimConfig) -> int:
    return math.ceil(optim.max_tokens_per_microbatch / (parallel.tensor * parallel.context))
