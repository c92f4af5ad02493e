"""Sums over the ranks of an engine in rank order, as in the trainer (``kernels/ordered_sum.py``), under exactness.

Runs in every worker of an engine whose ranks, or whose trainer's, add more than two partial sums. Collectives add in an
order that depends on the number of ranks and the size of the tensor. Here every rank gathers all parts and adds them.
For R ranks and B bytes of a tensor, a rank receives (R - 1) B bytes instead of the 2 (R - 1) / R B of a ring. The same
code runs on CPUs and GPUs. Not measured on GPUs yet.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.fused_moe.runner import moe_runner
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from megatron_fp8rl.kernels.ordered_sum import add_in_order
from megatron_fp8rl.upstream import patches


@patches(
    "vllm",
    why="replaces RowParallelLinear.forward, a communicator's reduce_scatterv and MoERunner's reductions, which add "
    "shared and routed experts of a rank before they are rounded: orders that no trainer has",
    remove_when="vLLM has collectives with a fixed order of sums",
    optional=True,
)
def add_in_rank_order(num_parts: int) -> None:
    """Divide each row-parallel product into ``num_parts``, over all ranks, and add parts in order; experts alike."""
    runner = moe_runner.MoERunner
    combine, is_reduced = runner._maybe_combine, runner._fused_output_is_reduced.fget
    row_linear = RowParallelLinear.forward
    communicator = resolve_obj_by_qualname(current_platform.get_device_communicator_cls())

    def forward(self: Any, x: Tensor) -> Tensor | tuple[Tensor, None]:
        if self.bias is not None or not self.input_is_parallel:
            return row_linear(self, x)
        y = _all_reduced(torch.stack(_products(self, x, num_parts // self.tp_size)))
        return (y, None) if self.return_bias else y

    def combined(self: Any, shared: Tensor | None, routed: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        result = combine(self, shared, routed)
        routed = result[-1] if isinstance(result, tuple) else result
        if not self.moe_config.is_sequence_parallel and not is_reduced(self):
            routed = _all_reduced(routed[None])
        return routed if shared is None else (shared, routed)

    def reduce_scatterv(self: Any, x: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
        assert dim == 0, "rows are tokens"
        sizes = sizes or [len(x) // self.world_size] * self.world_size
        start = sum(sizes[: self.rank_in_group])
        parts = self.all_gather(x, 0).unflatten(0, (self.world_size, len(x)))
        return add_in_order(parts[:, start : start + sizes[self.rank_in_group]])

    RowParallelLinear.forward = forward
    runner._maybe_combine = combined
    runner._fused_output_is_reduced = property(lambda self: True)
    runner._maybe_reduce_shared_expert_output = lambda self, shared: shared  # its row-parallel linear has
    communicator.reduce_scatterv = reduce_scatterv


def _all_reduced(parts: Tensor) -> Tensor:
    """The sum of parts [P, ...] of all tensor-parallel ranks, in rank order."""
    group = get_tp_group()
    return add_in_order(group.all_gather(parts, 0) if group.world_size > 1 else parts)


def _products(layer: Any, x: Tensor, num_parts: int) -> list[Tensor]:
    """This rank's ``num_parts`` partial products; several only on a CPU, whose methods read one matrix."""
    if num_parts == 1:
        return [layer.quant_method.apply(layer, x)]
    name = "dequantized_weight" if hasattr(layer, "dequantized_weight") else "weight"
    matrices = getattr(layer, name).chunk(num_parts, 1)
    pairs = zip(matrices, x.chunk(num_parts, -1), strict=True)
    return [layer.quant_method.apply(SimpleNamespace(**{name: matrix}), part) for matrix, part in pairs]
