"""BF16 weights of FP8 linears in the memory of their gradients: they are never needed at the same time.

Applies if DeepGEMM reads only FP8 copies of the weights, and saves 2 of 20 bytes per weight. No collectives.

    while gradients are computed    FP32 gradients. GEMMs read FP8 copies of weights, made before the first gradient
    otherwise                       BF16 weights in the first half: for publications, checkpoints and forward passes

An optimizer step reads all gradients before it overwrites them with new weights, as Megatron-Core does for MXFP8
parameters (``reuse_grad_buf_for_mxfp8_param_ag``). Weights there that are read in BF16 are copied elsewhere. Gradients
without a step overwrite the weights; ``Optimizer.rebuild_parameters`` restores them from FP32 masters.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn

from megatron_fp8rl.trainer.model.experts import GroupedExperts
from megatron_fp8rl.trainer.model.linear import QuantizableLinear

_ALIGNMENT = 64  # elements between the starts of weights that move, as in Megatron-Core's buffers


class SharedMemory:
    """The weights of some chunks that share memory with gradients, and the modules that read copies of them."""

    def __init__(self, chunks: Sequence[DistributedDataParallel]) -> None:
        self.holds_gradients = False
        self._readers: list[GroupedExperts | QuantizableLinear] = []
        self._written: list[Tensor] = []  # by the optimizer, of weights that are read elsewhere
        self._read: list[Tensor] = []
        for chunk in chunks:
            readers = [module for module in chunk.modules() if getattr(module, "reads_copies", False)]
            copied = {weight for reader in readers for weight in reader.weights}
            shared: set[nn.Parameter] = set()
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                if buffer.param_dtype == torch.bfloat16 and not copied.isdisjoint(buffer.params):
                    self._share(buffer, copied)
                    shared.update(buffer.params)
            self._readers += [reader for reader in readers if not shared.isdisjoint(reader.weights)]

    def take_gradients(self) -> None:
        """Make the FP8 copies that GEMMs read. The weights are invalid until :meth:`take_weights`."""
        if self._readers and not self.holds_gradients:
            for reader in self._readers:
                reader.keep_copies()
            self.holds_gradients = True

    def take_weights(self) -> None:
        """Use the new weights: drop copies of old ones."""
        for target, source in zip(self._read, self._written, strict=True):
            target.copy_(source)
        for reader in self._readers:
            reader.drop_copies()
        self.holds_gradients = False

    @torch.no_grad()
    def _share(self, buffer: Any, copied: Collection[nn.Parameter]) -> None:
        """Move the weights of a buffer into its gradient memory, which contains zeros. Weights outside ``copied`` are
        also copied to separate memory, in the same order."""
        weights: Tensor = buffer.grad_data.view(buffer.param_dtype)[: buffer.numel]
        weights.copy_(buffer.param_data)
        for bucket in buffer.buckets:
            bucket.param_data = weights[bucket.offset : bucket.offset + bucket.param_data.numel()]
        buffer.param_data = weights
        starts = {parameter: buffer.param_index_map[parameter][0] for parameter in buffer.params}
        places = {p: weights[start : start + p.numel()].view(p.shape) for p, start in starts.items()}
        others = sorted((p for p in buffer.params if p not in copied), key=starts.__getitem__)
        sizes = [-(-p.numel() // _ALIGNMENT) * _ALIGNMENT for p in others]
        separate = weights.new_empty(sum(sizes)).split(sizes)
        for parameter, memory in zip(others, separate, strict=True):
            place = memory[: parameter.numel()].view(parameter.shape).copy_(places[parameter])
            self._written.append(places[parameter])
            self._read.append(place)
            places[parameter] = place
        for parameter, place in places.items():
            parameter.data = place


def bytes_of_weights(buffers: Sequence[Any]) -> dict[int, int]:
    """For gradient memory that starts with weights: number of weight bytes, by address."""
    shared = [b for b in buffers if b.param_data is not None and _address(b.param_data) == _address(b.grad_data)]
    return {_address(buffer.grad_data): buffer.param_data.nbytes for buffer in shared}


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
