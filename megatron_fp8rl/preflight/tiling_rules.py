"""Whether FP8 scales tile every matrix, on every rank of the trainer and of the engines.

In: the model, the degrees and the recipes. Out: violations that name the matrix, its dimension on one rank and the
degrees that would do. Pure, and part of :func:`megatron_fp8rl.preflight.rules.check`.

A block that crosses the edge of a shard would get another scale on each side than the whole matrix has, and the bytes
that the trainer multiplies would not be the bytes that the engine holds. So the edges of all shards have to fall on the
edges of blocks: 128 for blockwise scales, and 16 for one scale per tensor, which is what FP8 tensor
cores ask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_fp8rl.config import FP8_BLOCK, MlaConfig, ModelConfig
from megatron_fp8rl.preflight.findings import Findings

_TILE = {"delayed": 16, "tensorwise": 16, "blockwise": FP8_BLOCK}


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One dimension of a group of matrices, in the terms of the configuration."""

    matrices: str
    size: int
    formula: str  # how the size follows from the model
    field: str  # of ModelConfig; the one to change when no degree helps
    degree: str | None  # "tensor" or "expert_tensor" when it is split over ranks
    heads: int | None = None  # a shard holds whole heads; None where any split will do

    def per_rank(self, ranks: int) -> int | None:
        """Size on one of ``ranks`` ranks; None where it cannot be split so. Fewer heads than ranks are copied."""
        if self.heads is not None:
            if self.heads % ranks and ranks % self.heads:
                return None
            return self.size // self.heads * max(1, self.heads // ranks)
        return self.size // ranks if self.size % ranks == 0 else None


def check_tiling(found: Findings) -> None:
    """Refuse what does not tile. Degrees have to divide what they split already."""
    cfg = found.cfg
    if cfg.precision.bf16_first_layers + cfg.precision.bf16_last_layers >= cfg.model.num_layers:
        return  # no matrix is FP8
    trainer = {"tensor": cfg.parallel.tensor, "expert_tensor": cfg.parallel.expert_tensor}
    engine = {
        "tensor": cfg.rollout.tensor,
        "expert_tensor": 1 if cfg.rollout.expert > 1 else cfg.rollout.tensor,  # whole experts, or parts of each
    }  # an engine splits experts like the rest
    option = {"tensor": "parallel.tensor", "expert_tensor": "parallel.expert_tensor"}
    ends = []
    if cfg.precision.trainer != "bf16":
        ends.append(("trainer", _TILE[cfg.precision.trainer], trainer, option.__getitem__))
    if cfg.precision.rollout != "bf16":
        ends.append(("engine", _TILE[cfg.precision.rollout], engine, lambda _: "rollout.tensor"))

    dimensions = fp8_dimensions(cfg.model, cfg.precision.bf16_first_layers)
    refused_fields: set[str] = set()
    for _, tile, _, _ in ends:
        for dimension in dimensions:
            if dimension.size % tile and dimension.field not in refused_fields:
                refused_fields.add(dimension.field)
                _refuse_size(found, dimension, tile)
    whole = [d for d in dimensions if all(d.size % tile == 0 for _, tile, _, _ in ends)]
    for end, tile, degrees, option_of in ends:
        fused = _fused_rows(cfg.model) if end == "trainer" and len(whole) == len(dimensions) else []
        _check_shards(found, whole + fused, end, tile, degrees, option_of)


def fp8_dimensions(model: ModelConfig, first_fp8_layer: int = 0) -> list[Dimension]:
    """Both dimensions of every matrix that ``precision/layer_table.py`` lists; equal ones are named together."""
    hidden = Dimension(
        matrices="inputs of q/k/v, gate and up; outputs of o and down",
        size=model.hidden_size,
        formula="hidden_size",
        field="hidden_size",
        degree=None,
    )
    dimensions = [hidden, *_attention_dimensions(model)]
    names = "rows of gate_proj and up_proj, columns of down_proj"
    if model.is_moe:
        experts = Dimension(
            matrices=f"{names} of every expert",
            size=model.moe_ffn_hidden_size,
            formula="moe_ffn_hidden_size",
            field="moe_ffn_hidden_size",
            degree="expert_tensor",
        )
        dimensions.append(experts)
    if not model.is_moe or model.first_dense_layers > first_fp8_layer:
        where = " of the first layers" if model.is_moe else ""
        dense = Dimension(
            matrices=f"{names}{where}",
            size=model.ffn_hidden_size,
            formula="ffn_hidden_size",
            field="ffn_hidden_size",
            degree="tensor",
        )
        dimensions.append(dense)
    return dimensions


def _attention_dimensions(model: ModelConfig) -> list[Dimension]:
    """Whole heads go to a rank; the projections into a latent space are whole on every rank."""

    def of_heads(matrices: str, field: str, head_dim: int, formula: str) -> Dimension:
        heads = getattr(model, field)
        return Dimension(
            matrices=matrices, size=heads * head_dim, formula=formula, field=field, degree="tensor", heads=heads
        )

    if model.mla is not None:
        return _latent_dimensions(model.mla, of_heads)
    return [
        of_heads(
            "rows of q_proj and columns of o_proj",
            "num_attention_heads",
            model.head_dim,
            "num_attention_heads x head_dim",
        ),
        of_heads("rows of k_proj and v_proj", "num_key_value_heads", model.head_dim, "num_key_value_heads x head_dim"),
    ]


def _fused_rows(model: ModelConfig) -> list[Dimension]:
    """Rows of Megatron's matrix of queries, keys and values.

    More ranks than query groups share the rows of a group evenly, so that their edges may lie anywhere in it. Up to as
    many ranks as groups the rows of q, k and v alone say whether they tile.
    """
    if model.mla is not None:
        return []
    return [
        Dimension(
            matrices="rows of q_proj, k_proj and v_proj in one matrix, group by group",
            size=(model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim,
            formula="(num_attention_heads + 2 x num_key_value_heads) x head_dim",
            field="num_key_value_heads",
            degree="tensor",
        )
    ]


def _latent_dimensions(mla: MlaConfig, of_heads: Callable[[str, str, int, str], Dimension]) -> list[Dimension]:
    """kv_a_proj_with_mqa is not among them: it is whole on every rank, where its last block may be cut short."""

    def latent(matrices: str, field: str, size: int) -> Dimension:
        return Dimension(matrices=matrices, size=size, formula=field, field=f"mla.{field}", degree=None)

    heads = "num_attention_heads"
    queries = "q_proj" if mla.q_lora_rank is None else "q_b_proj"
    found = [
        of_heads(f"rows of {queries}", heads, mla.qk_head_dim, f"{heads} x qk_head_dim"),
        of_heads("rows of kv_b_proj", heads, mla.qk_nope_head_dim + mla.v_head_dim, f"{heads} x (nope + v)_head_dim"),
        of_heads("columns of o_proj", heads, mla.v_head_dim, f"{heads} x v_head_dim"),
        latent("columns of kv_b_proj", "kv_lora_rank", mla.kv_lora_rank),
    ]
    if mla.q_lora_rank is not None:
        found.append(latent("rows of q_a_proj, columns of q_b_proj", "q_lora_rank", mla.q_lora_rank))
    return found


def _refuse_size(found: Findings, dimension: Dimension, tile: int) -> None:
    up = -(-dimension.size // tile) * tile
    remedy = f"Choose a multiple of {tile}" if dimension.heads is None else f"Choose heads whose product is {up}"
    found.refuse(
        f"model.{dimension.field}",
        f"{dimension.matrices} count {dimension.formula} = {dimension.size}, no multiple of the FP8 tile {tile}",
        f"{remedy}, or --precision.trainer bf16 --precision.rollout bf16",
    )


def _check_shards(
    found: Findings,
    dimensions: Sequence[Dimension],
    end: str,
    tile: int,
    degrees: dict[str, int],
    option_of: Callable[[str], str],
) -> None:
    """One violation per option of one end, however many matrices it spoils."""
    spoiled: dict[str, list[Dimension]] = {}
    for dimension in dimensions:
        if dimension.degree is None:
            continue
        size = dimension.per_rank(degrees[dimension.degree])
        if size is None or size % tile:
            spoiled.setdefault(option_of(dimension.degree), []).append(dimension)
    for option, bad in spoiled.items():
        concerned = [d for d in dimensions if d.degree is not None and option_of(d.degree) == option]
        largest = max(dimension.size for dimension in concerned) // tile
        fitting = [
            ranks
            for ranks in range(1, largest + 1)
            if all((size := d.per_rank(ranks)) is not None and size % tile == 0 for d in concerned)
            and (option == "parallel.expert_tensor" or found.cfg.model.num_attention_heads % ranks == 0)
        ]
        remedy = f"Degrees that tile: {', '.join(map(str, fitting))}" if fitting else f"No degree tiles at {tile}"
        details = "; ".join(
            f"{d.matrices}: {d.formula} = {d.size}, of which one rank has {_shown(d, degrees)}" for d in bad
        )
        found.refuse(option, f"FP8 tiles of {tile} do not cover a rank of the {end} evenly ({details})", remedy)


def _shown(dimension: Dimension, degrees: dict[str, int]) -> str:
    ranks = degrees[dimension.degree or ""]
    size = dimension.per_rank(ranks)
    return f"{dimension.size / ranks:g}" if size is None else str(size)
