"""BF16 weights of FP8 experts in the memory of their gradients: they are never needed at the same time.

In: model chunks with gradient buffers, before they have an optimizer. Out: the same chunks; where every expert of a chunk
runs on grouped GEMMs, and one of them in FP8, its BF16 weights take no memory of their own: 2 of 18 bytes per weight.
Runs on: every trainer rank; nothing here is a collective.

    while gradients are computed    FP32 gradients. The GEMMs read FP8 copies of weights, made before the first gradient
    otherwise                       BF16 weights in the first half: for publications, checkpoints and forward passes

An optimizer step reads gradients to its end, and then writes new weights over them, as Megatron-Core does with MXFP8
parameters (``reuse_grad_buf_for_mxfp8_param_ag``). Gradients without a step cost the weights:
``Optimizer.rebuild_parameters`` makes them again from their FP32 masters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn

from megatron_fp8rl.trainer.model.experts import GroupedExperts


class SharedMemory:
    """The experts of some chunks whose weights and gradients share memory."""

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self._experts: list[GroupedExperts] = []
        for chunk in chunks:
            experts = [module for module in chunk.modules() if isinstance(module, GroupedExperts)]
            if _may_share(experts, chunk.expert_parallel_buffers):
                for buffer in chunk.expert_parallel_buffers:
                    _share(buffer)
                self._experts += experts
        self.holds_gradients = False

    def take_gradients(self) -> None:
        """Copy what GEMMs read of the weights, which are lost from here to :meth:`take_weights`."""
        if self._experts and not self.holds_gradients:
            for experts in self._experts:
                experts.keep_copies()
            self.holds_gradients = True

    def take_weights(self) -> None:
        """New weights are there: the copies are of old ones."""
        for experts in self._experts:
            experts.drop_copies()
        self.holds_gradients = False


def bytes_of_weights(buffers: Sequence[Any]) -> dict[int, int]:
    """Of each memory that gradients of ``buffers`` share with weights, by its address: the bytes at its beginning that are
    weights."""
    shared = [b for b in buffers if b.param_data is not None and _address(b.param_data) == _address(b.grad_data)]
    return {_address(buffer.grad_data): buffer.param_data.nbytes for buffer in shared}


def _may_share(experts: Sequence[GroupedExperts], buffers: Sequence[Any]) -> bool:
    known = {weight for module in experts for weight in module.weights}
    are_bf16 = all(buffer.param_dtype == torch.bfloat16 and buffer.grad_dtype == torch.float32 for buffer in buffers)
    is_any_fp8 = any(module.scales is not None for module in experts)
    return bool(buffers) and is_any_fp8 and are_bf16 and all(parameter in known for buffer in buffers for parameter in buffer.params)


@torch.no_grad()
def _share(buffer: Any) -> None:
    """Move the weights of a buffer into the memory of its gradients, which are zeros so far."""
    weights: Tensor = buffer.grad_data.view(buffer.param_dtype)[: buffer.numel]
    weights.copy_(buffer.param_data)
    for parameter in buffer.params:
        start, end, _ = buffer.param_index_map[parameter]
        parameter.data = weights[start:end].view(parameter.shape)
    for bucket in buffer.buckets:
        bucket.param_data = weights[bucket.offset : bucket.offset + bucket.param_data.numel()]
    buffer.param_data = weights


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
