"""Whether FP8 scales tile every matrix on every rank of the trainer and of the engines, and the degrees that do. Pure.

If a block crossed a shard boundary, the bytes that the trainer multiplies would differ from the engine's. So shard
boundaries are multiples of 128 for blockwise scales, of 32 for MXFP8, and of 16 for per-tensor scales, as FP8 tensor
cores require. All answers come from the rows of ``names/``, sliced as the trainer and vLLM slice them.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megatron_fp8rl.config import ModelConfig, RunConfig
from megatron_fp8rl.names import slicing
from megatron_fp8rl.names.layouts import EngineLayout
from megatron_fp8rl.names.registry import FAMILIES
from megatron_fp8rl.names.table import Weight, fill, rows_of, sizes
from megatron_fp8rl.precision.formats import BLOCKWISE_POW2, QuantFormat, rollout_format, trainer_format
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.preflight.findings import Checks
from megatron_fp8rl.weight_sync.plan import engine_slices, fills_blocks

_MAX_DEGREE = 64


@dataclass(frozen=True, eq=False)  # compared by identity, so that the caches below are fast
class Kind:
    """One kind of quantizable matrix: a part of a Megatron weight, the same in many layers and experts."""

    name: str  # Hugging Face name with * for layer and expert
    count: int  # summed over layers and experts
    weight: Weight  # of one layer and expert
    part: int  # index into ``weight.parts``
    keys: tuple[str, ...]  # of the shape, as ``names.table.sizes`` knows them
    model: ModelConfig

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.parts[self.part][1]

    def divided_by(self, ranks: int) -> str:
        """Key of the dimension that ``ranks`` trainer ranks divide; ranks that share a query group divide all rows."""
        if self.weight.join == "qkv" and ranks > self.model.num_key_value_heads:
            return "qkv"
        return self.keys[self.weight.axis]


@functools.lru_cache(maxsize=8)
def kinds(model: ModelConfig, first_fp8_layer: int = 0, end_fp8_layer: int | None = None) -> tuple[Kind, ...]:
    end = model.num_layers if end_fp8_layer is None else end_fp8_layer
    table = LayerTable(model.num_layers, first_fp8_layer, end, BLOCKWISE_POW2, BLOCKWISE_POW2)
    result = []
    for row in FAMILIES[model.family].rows(model):
        row_layers = [i for i, kind in enumerate(model.layers) if rows_of([row], kind)]
        experts = model.num_experts if "{expert}" in row.mcore else 1
        for part, (name, keys) in enumerate(row.hf):
            fp8 = [i for i in row_layers if table.is_quantizable(name.format(layer=i, expert=0))]
            if fp8:
                weight = fill(row, model, layer=fp8[0], expert=0)
                result.append(Kind(_pattern(weight.parts[part][0]), len(fp8) * experts, weight, part, keys, model))
    return tuple(result)


def _pattern(name: str) -> str:
    name = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")[2]
    return re.sub(r"\.experts\.\d+\.", ".experts.*.", name)


@dataclass(frozen=True)
class Shard:
    """The largest shard of a matrix, and whether tiles cover the shards of all ranks."""

    shape: tuple[int, ...]
    tiles: bool


@functools.lru_cache(maxsize=1 << 13)
def on_trainer(kind: Kind, ranks: int, fmt: QuantFormat) -> Shard:
    """A Hugging Face part of a Megatron weight on ``ranks`` tensor-parallel (for experts: expert-tensor) ranks."""
    weight, axis, shape = kind.weight, kind.weight.axis, list(kind.shape)
    if weight.cut == "none":
        return Shard(kind.shape, _covers(kind.shape, kind.shape, fmt))
    if slicing.problem(weight, kind.model, ranks) is not None:
        shape[axis] = -(-shape[axis] // ranks)
        return Shard(tuple(shape), False)
    ranges = [slicing.part_range(weight, kind.model, kind.part, ranks, rank) for rank in range(ranks)]
    shape[axis] = max(stop - start for start, stop in ranges)
    if not fmt.has_partial_tiles:
        rows = slicing.shard_shape(weight, kind.model, ranks)[0]  # of the fused matrix
        return Shard(tuple(shape), _covers(tuple(shape), kind.shape, fmt) and rows % fmt.tile == 0)
    edges = itertools.chain(*ranges)
    return Shard(tuple(shape), all(edge % fmt.tile == 0 or edge == kind.shape[axis] for edge in edges))


@functools.lru_cache(maxsize=1 << 13)
def on_engine(kind: Kind, ranks: int, fmt: QuantFormat) -> Shard:
    weight, model, shape = kind.weight, kind.model, list(kind.shape)
    name = weight.parts[kind.part][0]
    kept = [part for part in engine_slices(name, weight, kind.shape, model, EngineLayout(tensor=ranks)) if part]
    shape[weight.axis] = max(stop - start for start, stop in kept)
    divides = True
    if name.endswith((".k_proj.weight", ".v_proj.weight")):
        divides = model.num_key_value_heads % ranks == 0 or ranks % model.num_key_value_heads == 0
    elif weight.cut != "none":
        is_of_heads = weight.unit[0] == "heads" or weight.join == "qkv"
        divides = kind.shape[weight.axis] % ranks == 0 and not (is_of_heads and model.num_attention_heads % ranks)
    return Shard(tuple(shape), divides and fills_blocks(name, weight, kind.shape, fmt, kept))


def _covers(shard: tuple[int, ...], whole: tuple[int, ...], fmt: QuantFormat) -> bool:
    """Whether shard boundaries are tile boundaries. An undivided dimension may end in a partial tile if the format has
    them, because both ends round it alike."""
    sizes = zip(shard, whole, strict=True)
    return all(size % fmt.tile == 0 for size, total in sizes if not fmt.has_partial_tiles or size != total)


@dataclass(frozen=True)
class _End:
    name: str
    fmt: QuantFormat
    divide: Callable[[Kind, int, QuantFormat], Shard]
    tensor: tuple[str, int]  # option that divides matrices, and its value
    experts: tuple[str, int]  # the same for routed experts; ("", 1) if they stay whole

    @property
    def tile(self) -> int:
        return self.fmt.tile

    def degree(self, kind: Kind) -> tuple[str, int]:
        return ("", 1) if kind.weight.cut == "none" else self.experts if kind.weight.is_expert else self.tensor

    def shard(self, kind: Kind) -> Shard:
        return self.divide(kind, self.degree(kind)[1], self.fmt)

    def degrees(self, kind: Kind) -> Iterator[int]:
        if kind.weight.is_expert and not self.experts[0]:  # expert parallel workers
            return (n for n in range(1, _MAX_DEGREE + 1) if kind.model.num_experts % n == 0)
        return (
            n
            for n in range(1, _MAX_DEGREE + 1)
            if (kind.model.num_attention_heads % n == 0 or (kind.weight.is_expert and self.divide is not on_engine))
            and self.divide(kind, n, self.fmt).tiles
        )


def _ends(cfg: RunConfig) -> tuple[_End, _End]:
    parallel, engine = cfg.parallel, ("engine.tensor", cfg.engine.tensor)
    experts = engine if cfg.engine.data == 1 else ("engine.data", cfg.engine.ranks)
    trainer = ("parallel.tensor", parallel.tensor), ("parallel.expert_tensor", parallel.expert_tensor)
    whole = cfg.engine.expert > 1  # whole experts, or parts of each
    return (
        _End("trainer", trainer_format(cfg.precision), on_trainer, *trainer),
        _End("engine", rollout_format(cfg.precision), on_engine, engine, ("", 1) if whole else experts),
    )


def _fp8_kinds(cfg: RunConfig) -> tuple[Kind, ...]:
    precision = cfg.precision
    return kinds(cfg.model, precision.bf16_first_layers, cfg.model.num_layers - precision.bf16_last_layers)


@dataclass(frozen=True)
class Dimension:
    """The meaning of a shape key of ``names/`` in terms of the configuration."""

    matrices: str
    formula: str  # how the size follows from the model
    field: str  # of ModelConfig


def _dimension(model: ModelConfig, key: str) -> Dimension | None:
    """None for the rows of kv_a_proj_with_mqa: every rank has all of them, and the last block may be partial."""
    heads, mla = "num_attention_heads", model.mla
    ffn = "rows of gate_proj and up_proj, columns of down_proj"
    queries = "q_proj" if mla is None or mla.q_lora_rank is None else "q_b_proj"
    q = Dimension("rows of q_proj and columns of o_proj", f"{heads} x head_dim", heads)
    if mla is not None:
        q = Dimension(f"rows of {queries}", f"{heads} x qk_head_dim", heads)
    fused = "(num_attention_heads + 2 x num_key_value_heads) x head_dim"
    kv = "num_key_value_heads"
    shared = "num_shared_experts x moe_ffn_hidden_size"
    known = {
        "hidden": Dimension("inputs of q/k/v, gate and up; outputs of o and down", "hidden_size", "hidden_size"),
        "q": q,
        "q_and_gate": Dimension("rows of q_proj with its gates", f"2 x {heads} x head_dim", heads),
        "gdn_qkvz": Dimension("rows of in_proj_qkvz", "2 x (key and value heads) x their sizes", "gdn.num_key_heads"),
        "gdn_v": Dimension(
            "columns of linear_attn.out_proj", "num_value_heads x value_head_dim", "gdn.num_value_heads"
        ),
        "kv": Dimension("rows of k_proj and v_proj", f"{kv} x head_dim", kv),
        "qkv": Dimension("rows of q_proj, k_proj and v_proj in one matrix, group by group", fused, kv),
        "expert_ffn": Dimension(f"{ffn} of every expert", "moe_ffn_hidden_size", "moe_ffn_hidden_size"),
        "shared_ffn": Dimension(f"{ffn} of the shared experts", shared, "moe_ffn_hidden_size"),
        "ffn": Dimension(f"{ffn} of the first layers" if model.is_moe else ffn, "ffn_hidden_size", "ffn_hidden_size"),
        "k_nope_and_v": Dimension("rows of kv_b_proj", f"{heads} x (nope + v)_head_dim", heads),
        "v": Dimension("columns of o_proj", f"{heads} x v_head_dim", heads),
        "kv_latent": Dimension("columns of kv_b_proj", "kv_lora_rank", "mla.kv_lora_rank"),
        "q_latent": Dimension("rows of q_a_proj, columns of q_b_proj", "q_lora_rank", "mla.q_lora_rank"),
    }
    return known.get(key)


def check_tiling(checks: Checks) -> None:
    """Refuse dimensions and degrees that do not tile. Degrees must already divide what they split."""
    cfg, all_kinds = checks.cfg, _fp8_kinds(checks.cfg)
    ends = [end for end in _ends(cfg) if end.tile > 1]
    untiled: set[str] = set()
    for end in ends:
        for key in dict.fromkeys(key for kind in all_kinds for key in kind.keys):
            size, dimension = sizes(cfg.model)[key], _dimension(cfg.model, key)
            if dimension is not None and size % end.tile and key not in untiled:
                untiled.add(key)
                _refuse_size(checks, key, dimension, size, end.tile)
    for end in ends:
        # Without partial tiles, a shard of an untiled size tiles in no layout, whatever axis is divided.
        _check_shards(
            checks,
            [k for k in all_kinds if not untiled & (_divided(k) if end.fmt.has_partial_tiles else {*k.keys})],
            end,
        )


def _divided(kind: Kind) -> set[str]:
    return {kind.keys[0], "kv"} if kind.weight.join == "qkv" else {kind.keys[kind.weight.axis]}


def _refuse_size(checks: Checks, key: str, dimension: Dimension, size: int, tile: int) -> None:
    model = checks.cfg.model
    if key == "ffn" and model.is_moe:
        remedy = f"Set --precision.bf16_first_layers {model.first_dense_layers}"
    elif model.mla is None and model.gdn is None and model.hf_path is not None:
        remedy = f"Widen the model: python -m checkpoint_tools widen {model.hf_path} FOLDER"
    elif dimension.field.endswith("_heads"):
        remedy = f"Choose a model with heads whose product is {-(-size // tile) * tile}"
    else:
        remedy = f"Choose a model with a multiple of {tile}"
    remedy += ", or --precision.trainer bf16 --precision.rollout bf16"
    problem = f"{dimension.matrices} count {dimension.formula} = {size}, no multiple of the FP8 tile {tile}"
    checks.refuse(f"model.{dimension.field}", problem, remedy, code="untiled_size")


def _check_shards(checks: Checks, listed: Sequence[Kind], end: _End) -> None:
    """Report one violation per option of one end, however many matrices it affects."""
    by_option: dict[str, list[Kind]] = {}
    for kind in listed:
        if end.degree(kind)[0]:
            by_option.setdefault(end.degree(kind)[0], []).append(kind)
    for option, divided in by_option.items():
        texts = {}
        for kind in divided:
            if not (shard := end.shard(kind)).tiles:
                ranks = end.degree(kind)[1]
                key = kind.divided_by(ranks) if end.name == "trainer" else kind.keys[kind.weight.axis]
                texts[key] = _shard_text(kind, key, ranks, shard)
        if texts:
            degrees = sorted(set.intersection(*(set(end.degrees(kind)) for kind in divided)))
            listed_degrees = ", ".join(map(str, degrees))
            remedy = f"Degrees that tile: {listed_degrees}" if degrees else f"No degree tiles at {end.tile}"
            problem = f"FP8 tiles of {end.tile} do not cover a rank of the {end.name} evenly "
            problem += f"({'; '.join(texts.values())})"
            checks.refuse(option, problem, remedy, degrees, code="untiled_shard")


def _shard_text(kind: Kind, key: str, ranks: int, shard: Shard) -> str:
    size = kind.weight.shape[0] if key == "qkv" else kind.shape[kind.weight.axis]
    rank = f"{size / ranks:g}" if size % ranks or key == "qkv" else str(shard.shape[kind.weight.axis])
    dimension = _dimension(kind.model, key)
    assert dimension is not None  # every divided dimension has an entry
    return f"{dimension.matrices}: {dimension.formula} = {size}, and one rank has {rank}"


@dataclass(frozen=True, kw_only=True)
class Matrix:
    name: str
    count: int
    shape: tuple[int, ...]
    trainer_shape: tuple[int, ...]  # on one rank
    trainer_tile: int  # 1: BF16
    trainer_tiles: bool
    trainer_degrees: tuple[int, ...]  # of its option, that tile
    trainer_option: str  # that divides it; empty if none does
    engine_shape: tuple[int, ...]
    engine_tile: int
    engine_tiles: bool
    engine_degrees: tuple[int, ...]  # of engine.tensor, that tile


def matrices(cfg: RunConfig) -> list[Matrix]:
    """All kinds of matrices that either end keeps in FP8, in the order of a layer."""
    trainer, engine = _ends(cfg)
    if trainer.tile == engine.tile == 1:
        return []
    return [
        Matrix(
            name=kind.name,
            count=kind.count,
            shape=kind.shape,
            trainer_shape=trainer.shard(kind).shape,
            trainer_tile=trainer.tile,
            trainer_tiles=trainer.shard(kind).tiles,
            trainer_degrees=tuple(trainer.degrees(kind)) if kind.weight.cut != "none" else (),
            trainer_option=trainer.degree(kind)[0],
            engine_shape=engine.shard(kind).shape,
            engine_tile=engine.tile,
            engine_tiles=engine.shard(kind).tiles,
            engine_degrees=tuple(engine.degrees(kind)),
        )
        for kind in _fp8_kinds(cfg)
    ]


def common_degrees(listed: Sequence[Matrix]) -> dict[str, list[int]]:
    """For each option, the degrees with which every matrix it divides tiles."""
    common: dict[str, set[int]] = {}
    for matrix in listed:
        if matrix.trainer_option:
            by_option = {matrix.trainer_option: matrix.trainer_degrees, "engine.tensor": matrix.engine_degrees}
            for option, degrees in by_option.items():
                common[option] = common.get(option, set(degrees)) & set(degrees)
    return {option: sorted(degrees) for option, degrees in common.items()}
