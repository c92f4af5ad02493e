"""FP8 KV cache scales, measured while the trainer computes log-probabilities.

In: model chunks that run forward. Out: for every layer of the model, the factors by which an engine divides queries,
keys and values before rounding them to E4M3. Runs on: every trainer rank.

Amax is measured on sampled tokens without padding, after rotary embedding, where the engine quantizes. The weights are
one update older than the next published ones.

    scale = the smallest power of two of at least MARGIN * amax / 448

E4M3 has constant relative precision over 15 binades. A margin of 2 to 4 costs only one or two binades at the bottom,
where values are 2^-13 of the maximum. Later tokens above the measured maximum are then not clipped. Scales measured on
other tokens are valid, because a scale only affects how the cache is written and read.

The trainer's attention rounds keys and values by the engines' current scales (:func:`set_scales`), and queries if the
engine's kernel does. Division by a power of two is exact, so both ends round equally (``kernels/kv_rounding.py``).

Shapes: NUM_LAYERS x 3 = layers of the whole model x (query, key, value).
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.data.packing import pack_for
from megatron_fp8rl.kernels.types import E4M3_MAX
from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.trainer.model.attention import PackedAttention
from megatron_fp8rl.types import KVScales, Prompt, Sample, Segment, TrainBatch

MARGIN = 2.0
_TENSORS = ("query", "key", "value")


@contextmanager
def measure_amax(chunks: Sequence[nn.Module], num_layers: int, device: torch.device) -> Iterator[Tensor]:
    """Record the amax of all forward passes in the block: FP32 [num_layers, 3] on ``device``, updated in place. Covers
    this rank's layers, heads and tokens; 0 for layers of other pipeline stages. Never synchronizes the device."""
    amax = torch.zeros(num_layers, len(_TENSORS), device=device)
    layers = [layer for layer in _layers(chunks) if layer.layer < num_layers]
    for layer in layers:
        layer.amax = amax[layer.layer]
    try:
        yield amax
    finally:
        for layer in layers:
            layer.amax = None


def max_over_ranks(amax: Tensor, world_size: int) -> list[list[float]]:
    """Collective over all trainer ranks: amax over the whole model and batch, by one max-reduction in every layout.
    Ranks have zeros for layers of other stages."""
    if world_size > 1:
        dist.all_reduce(amax, op=dist.ReduceOp.MAX)
    return amax.tolist()


def scales(amax: list[list[float]]) -> KVScales:
    """Scales per layer. Raises ValueError naming the layer and tensor whose amax is not finite."""
    for layer, row in enumerate(amax):
        for name, value in zip(_TENSORS, row, strict=True):
            if not math.isfinite(value):
                raise ValueError(
                    f"the largest {name} of layer {layer} is {value}, so the FP8 KV cache has no scale for it; lower "
                    "optim.lr and resume from the last checkpoint"
                )
    rows = torch.tensor(amax) * (MARGIN / E4M3_MAX)  # FP32, as in the engines
    rows = torch.where(rows > 0, rows.log2().ceil().exp2(), 1.0)  # all zeros: any scale works
    return {layer: tuple(row) for layer, row in enumerate(rows.tolist())}


def set_scales(chunks: Sequence[nn.Module], by_layer: KVScales, device: torch.device) -> None:
    """Round keys and values of later forward passes by these cache scales, and queries if the engine's kernel does."""
    for layer in (layer for layer in _layers(chunks) if layer.layer in by_layer):
        layer.cache_scales = torch.tensor(by_layer[layer.layer], device=device)


def metrics(by_layer: KVScales) -> dict[str, float]:
    """The largest key and the largest value that any layer's cache can hold."""
    keys, values = (max(row[i] for row in by_layer.values()) * E4M3_MAX for i in (1, 2))
    return {"publish/kv_amax_key/max": keys, "publish/kv_amax_value/max": values}


def _layers(chunks: Sequence[nn.Module]) -> list[PackedAttention]:
    modules = (m for chunk in chunks for m in chunk.modules())
    return [m for m in modules if isinstance(m, PackedAttention) and m.is_cached]


def calibration_batches(cfg: RunConfig, prompts: Sequence[Prompt], *, data_rank: int) -> list[TrainBatch]:
    """Packed prompts for a forward pass of one data-parallel rank; the last token of each counts as its completion."""
    samples = []
    for prompt in prompts:
        tokens = TokenArray.from_ids(prompt.token_ids if len(prompt.token_ids) > 1 else prompt.token_ids * 2)
        segments = Segment(tokens[:-1]), Segment(tokens[-1:], is_trained=True)
        samples.append(Sample(name=prompt.prompt_id, environment=prompt.environment, segments=segments))
    return pack_for(cfg, samples, data_rank=data_rank)
