"""Exchange of tokens between data-parallel ranks on a CPU, which vLLM's CPU communicator lacks.

In: rows of this rank's tokens; the number of tokens of every rank. Out: the rows of all ranks, or this rank's rows of
the sum over all. Runs in vLLM's workers on a machine without a GPU.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp8rl.upstream import patches


@patches(
    "vllm",
    why="experts of data-parallel ranks gather tokens and scatter their sums, which CpuCommunicator inherits as "
    "NotImplementedError (all_gatherv, reduce_scatterv)",
    remove_when="CpuCommunicator has all_gatherv and reduce_scatterv",
)
def exchange_tokens_on_cpu() -> None:
    """Give vLLM's CPU communicator ``all_gatherv`` and ``reduce_scatterv``, over gloo."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    def all_gatherv(
        self: CpuCommunicator, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None
    ) -> Tensor | list[Tensor]:
        if isinstance(input_, list):
            return [all_gatherv(self, tensor, dim, sizes) for tensor in input_]
        assert dim == 0, "rows are tokens"
        sizes = sizes or [input_.shape[0]] * self.world_size
        padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=self.device_group)
        return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])

    def reduce_scatterv(self: CpuCommunicator, input_: Tensor, dim: int = -1, sizes: list[int] | None = None) -> Tensor:
        assert dim == 0, "rows are tokens"
        # In FP32 and in rank order on every rank: a sum of BF16 terms would round between them.
        gathered = [torch.empty_like(input_) for _ in range(self.world_size)]
        dist.all_gather(gathered, input_.contiguous(), group=self.device_group)
        total = sum(rows.float() for rows in gathered).to(input_.dtype)
        sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
        start = sum(sizes[: self.rank_in_group])
        return total[start : start + sizes[self.rank_in_group]].contiguous()

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
