"""Number formats of weights and activations: blocks, scales, tensors on the wire, bytes. Pure; imports no torch.

A format describes a matrix [N, K] whose values share scales in blocks:

    blockwise    E4M3 values, one FP32 scale per 128x128 block of a weight and per 1x128 block of an activation
    mxfp8        E4M3 values, one E8M0 scale (a power of two in one byte) per 32 values of a row
    delayed,     E4M3 values, one FP32 scale per tensor; trainer only
    tensorwise
    bf16, fp32   no scales

A new format needs an entry below, a quantizer in ``quantizers.py``, rows in the kernel table, and a recipe.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_fp8rl.config import PrecisionConfig
from megatron_fp8rl.kernels.types import BLOCK, ScaleKind, Scales

SCALE_SUFFIX = "_scale_inv"  # of the tensor of scales, after the name of its weight; of most formats
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1, "uint8": 1}

Range = tuple[int, int]  # [start, stop)


@dataclass(frozen=True, slots=True)
class WireTensor:
    """One whole tensor on the wire and in checkpoints."""

    name: str
    dtype: str  # a key of ITEM_BYTES
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class QuantFormat:
    """The format of a weight and of the activations that it multiplies. Blocks are (rows, columns)."""

    name: str
    element: str  # dtype of the values, a key of ITEM_BYTES
    weight_block: tuple[int, int] | None = None  # None: no block; a scale, if there is one, is for the whole tensor
    activation_block: tuple[int, int] | None = None
    scale_dtype: str | None = None  # None: no scales
    scale_kind: ScaleKind | None = None  # of blocks
    scale_suffix: str = SCALE_SUFFIX
    tile: int = 1  # both sides of a shard must be multiples of the tile if the weight is sharded
    has_partial_tiles: bool = False  # whether the last tile of an axis that is not sharded may be shorter
    hf: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # of quantization_config
    hf_ignored: str = "modules_to_not_convert"  # key of quantization_config for the modules that stay BF16

    @property
    def is_quantized(self) -> bool:
        """Whether values have scales."""
        return self.scale_dtype is not None

    @property
    def bytes_per_value(self) -> float:
        """Bytes of a large weight with its scales, per value."""
        return self._bytes_per_value(self.weight_block)

    @property
    def activation_bytes_per_value(self) -> float:
        """Bytes of a large activation with its scales, per value."""
        return self._bytes_per_value(self.activation_block)

    def _bytes_per_value(self, block: tuple[int, int] | None) -> float:
        scale_bytes = ITEM_BYTES[self.scale_dtype] / math.prod(block) if self.scale_dtype and block else 0
        return ITEM_BYTES[self.element] + scale_bytes

    def block_size(self, axis: int) -> int:
        """Rows (axis 0) or columns (axis 1) of a block of a weight; 1 without blocks."""
        return self.weight_block[axis] if self.weight_block else 1

    def blocks(self, part: Range, axis: int) -> Range:
        """The blocks that a part of an axis of a weight covers."""
        size = self.block_size(axis)
        return part[0] // size, -(-part[1] // size)

    def cuts_no_block(self, parts: Sequence[Range], axis: int, end: int) -> bool:
        """Whether parts of an axis that ends at ``end`` can be quantized separately: their edges are block edges."""
        size = self.block_size(axis)
        return all(edge % size == 0 or edge == end for part in parts for edge in part)

    def scale_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the scales of a weight; a shorter last block counts."""
        if self.weight_block is None:
            return ()
        return tuple(-(-n // size) for n, size in zip(shape, self.weight_block, strict=True))

    def scale_name(self, name: str) -> str:
        """Name of the scales of the weight ``name``."""
        return f"{name}{self.scale_suffix}"

    def wire_tensors(self, name: str, shape: tuple[int, ...]) -> Iterator[WireTensor]:
        """The wire tensors of a weight: its values, then its scales if any."""
        yield WireTensor(name, self.element, shape)
        if self.scale_dtype is not None:
            yield WireTensor(self.scale_name(name), self.scale_dtype, self.scale_shape(shape))

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a weight with its scales."""
        return sum(tensor.num_bytes for tensor in self.wire_tensors("", shape))

    def hf_quantization_config(self, ignored: Sequence[str]) -> dict[str, Any]:
        """The ``quantization_config`` of config.json, with ``ignored``, the names of the modules that stay BF16. Raises
        ValueError if checkpoints do not support this format."""
        if not self.hf:
            raise ValueError(f"format {self.name}: no quantization_config describes it; choose blockwise or mxfp8")
        return {**self.hf, self.hf_ignored: list(ignored)}


def _blockwise(scales: Scales) -> QuantFormat:
    return QuantFormat(
        name=f"blockwise_{scales}",
        element="float8_e4m3fn",
        weight_block=(BLOCK, BLOCK),
        activation_block=(1, BLOCK),
        scale_dtype="float32",
        scale_kind=scales,
        tile=BLOCK,
        has_partial_tiles=True,
        hf={"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]},
    )


BLOCKWISE_POW2, BLOCKWISE_FP32 = _blockwise("pow2"), _blockwise("fp32")
# Checkpoints are those of compressed-tensors. vLLM's "mxfp8" would also take mlp.gate_up_proj for an ignored mlp.gate.
_GROUPS_OF_32 = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}
_GROUPS_OF_32 |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
MXFP8 = QuantFormat(
    name="mxfp8",
    element="float8_e4m3fn",
    weight_block=(1, 32),
    activation_block=(1, 32),
    scale_dtype="uint8",
    scale_kind="e8m0",
    scale_suffix="_scale",
    tile=32,
    hf={
        "quant_method": "compressed-tensors",
        "format": "mxfp8-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**_GROUPS_OF_32, "dynamic": False},
                "input_activations": {**_GROUPS_OF_32, "dynamic": True},
            }
        },
    },
    hf_ignored="ignore",
)
BF16 = QuantFormat(name="bf16", element="bfloat16")
FP32 = QuantFormat(name="fp32", element="float32")
# Tensor cores multiply FP8 matrices whose sides are multiples of 16.
DELAYED = QuantFormat(name="delayed", element="float8_e4m3fn", scale_dtype="float32", tile=16)
TENSORWISE = QuantFormat(name="tensorwise", element="float8_e4m3fn", scale_dtype="float32", tile=16)

FORMATS = {f.name: f for f in (BLOCKWISE_POW2, BLOCKWISE_FP32, MXFP8, BF16, FP32, DELAYED, TENSORWISE)}
UNQUANTIZED = {f.element: f for f in (BF16, FP32)}
SCALE_SUFFIXES = tuple(sorted({f.scale_suffix for f in FORMATS.values()}, reverse=True))


def weight_of_scales(name: str) -> str | None:
    """The name of the weight whose scales have this name; None for another tensor."""
    return next((name.removesuffix(suffix) for suffix in SCALE_SUFFIXES if name.endswith(f".weight{suffix}")), None)


def blockwise_format(scales: Scales) -> QuantFormat:
    """The blockwise format with these scales."""
    return FORMATS[f"blockwise_{scales}"]


def trainer_format(precision: PrecisionConfig) -> QuantFormat:
    """The format of the trainer's quantized weights; BF16 if it has none."""
    return _format(precision.trainer, precision)


def rollout_format(precision: PrecisionConfig) -> QuantFormat:
    """The wire format of quantized weights; BF16 if no weight is quantized."""
    return _format(precision.rollout, precision)


def engine_format(precision: PrecisionConfig) -> QuantFormat:
    """The format in an engine's quantization config. A BF16 engine lists every module as an exception."""
    return _format("blockwise" if precision.rollout == "bf16" else precision.rollout, precision)


def _format(recipe: str, precision: PrecisionConfig) -> QuantFormat:
    return blockwise_format(precision.scales) if recipe == "blockwise" else FORMATS[recipe]
