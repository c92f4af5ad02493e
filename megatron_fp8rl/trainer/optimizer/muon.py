"""Muon (``optim.optimizer = "muon"``): updates of matrices have orthogonal rows or columns; Adam updates the rest.

A matrix of n x k weights with gradient g, momentum m and learning rate lr is updated by (Jordan et al. 2024,
https://kellerjordan.github.io/posts/muon/; the scale of Liu et al., arXiv 2502.16982, keeps AdamW's learning rates):

    m <- 0.95 m + g;    w <- (1 - lr * weight_decay) w - lr * 0.2 * sqrt(max(n, k)) * orthogonalized(g + 0.95 m)

Each matrix of the Hugging Face checkpoint is orthogonalized by itself: q, k, v, gate, up, every expert. Embeddings, the
output head, routers, norms and biases are Adam's. Momentum is in the place of Adam's first moment, sharded like it; the
second moment of a matrix stays 0. Data-parallel ranks divide the matrices among them: a rank gets the shards of a
whole one, orthogonalizes it, and broadcasts it. Tensor-parallel shards are gathered first, so a layout changes only
rounding. FP32 on a CPU, BF16 on a GPU, as its authors do.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names import registry, slicing
from megatron_fp8rl.trainer.model.build import named_global_parameters
from megatron_fp8rl.trainer.parallel import Parallel

MOMENTUM = 0.95
_SCALE = 0.2  # the root mean square of AdamW's updates
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # of x, x^3 and x^5
_ITERATIONS = 5
_OF_ADAM = ("embedding.", "output_layer.", ".router.")


def orthogonalized(matrix_NK: Tensor) -> Tensor:
    """A matrix with the singular vectors of ``matrix_NK`` and singular values near 1, FP32."""
    x = matrix_NK.bfloat16() if matrix_NK.is_cuda else matrix_NK.float()
    x = x.t() if x.shape[0] > x.shape[1] else x
    x = x / (x.norm() + 1e-7)
    a, b, c = _NEWTON_SCHULZ
    for _ in range(_ITERATIONS):
        square = x @ x.t()
        x = a * x + (b * square + c * square @ square) @ x
    return (x.t() if matrix_NK.shape[0] > matrix_NK.shape[1] else x).float()


class Muon:
    """Updates the matrices of ``part``, one of Megatron-Core's distributed optimizers, before Adam's step."""

    def __init__(self, part: Any, chunks: Sequence[nn.Module], model: ModelConfig, parallel: Parallel) -> None:
        self._part, self._model, self._parallel = part, model, parallel
        members = set() if part.is_stub_optimizer else {p for buffer in part.buffers for p in buffer.params}
        named = [pair for pair in named_global_parameters(chunks, parallel) if pair[1] in members]
        self._matrices = [
            (name, p) for name, p in named if min(p.shape) > 1 == p.ndim - 1 and not any(x in name for x in _OF_ADAM)
        ]

    @torch.no_grad()
    def step(self) -> None:
        """Collective: update the matrices, and take their gradients from Adam."""
        if not self._matrices:
            return
        group = self._part.data_parallel_group
        ranks = dist.get_process_group_ranks(group)
        for block in itertools.batched(self._matrices, len(ranks)):
            updates = [self._advanced(parameter) for _, parameter in block]
            for owner, update in zip(ranks, updates, strict=False):
                dist.reduce(update, dst=owner, group=group)  # every element is on one rank, and 0 on all others
            if group.rank() < len(block):
                name, parameter = block[group.rank()]
                update = updates[group.rank()]
                update.copy_(self._orthogonalized(name, update.view(parameter.shape)).flatten())
            for owner, update, (_, parameter) in zip(ranks, updates, block, strict=False):
                dist.broadcast(update, src=owner, group=group)
                self._apply(parameter, update)

    def _advanced(self, parameter: nn.Parameter) -> Tensor:
        """FP32, flat: the gradient plus the new momentum in this rank's range of the matrix, 0 elsewhere."""
        update = torch.zeros(parameter.numel(), device=parameter.device)
        if (found := self._shard(parameter)) is not None:
            shard, part, _ = found
            state = self._part.optimizer.state[shard]
            if "exp_avg" not in state:
                state |= {"exp_avg": torch.zeros_like(shard), "exp_avg_sq": torch.zeros_like(shard)}
                if isinstance(self._part.optimizer, torch.optim.AdamW):  # others count in the group
                    state["step"] = torch.zeros(())
            if "step" in state:
                state["step"] += 1
            momentum = state["exp_avg"].mul_(MOMENTUM).add_(shard.grad)
            update[part] = shard.grad + MOMENTUM * momentum
        return update

    def _apply(self, parameter: nn.Parameter, update: Tensor) -> None:
        if (found := self._shard(parameter)) is not None:
            shard, part, group = found
            shard.mul_(1 - group["lr"] * group["weight_decay"]).add_(update[part], alpha=-group["lr"])
            shard.grad = None

    def _shard(self, parameter: nn.Parameter) -> tuple[Tensor, slice, dict[str, Any]] | None:
        """(this rank's master weights of the matrix, their range in it, their group); None if it has none."""
        if (place := self._part.model_param_group_index_map.get(parameter)) is None:
            return None
        buffer, dtype, bucket = self._part.model_param_gbuf_map[parameter]
        inside = self._part.gbuf_ranges[buffer][dtype][bucket]["param_map"][parameter]["param"]
        group = self._part.optimizer.param_groups[place[0]]
        return group["params"][place[1]], slice(inside.start, inside.end), group

    def _orthogonalized(self, name: str, shard: Tensor) -> Tensor:
        """Collective over tensor-parallel ranks: this rank's shard of the matrix's scaled update."""
        weight, parallel = registry.weight(name, self._model), self._parallel
        group, size, rank = parallel.tp_group, parallel.tp_size, parallel.tp_rank
        if registry.is_expert(name):
            group, size, rank = parallel.etp_group, parallel.etp_size, parallel.etp_rank
        if weight.cut == "none":
            size, rank = 1, 0
        shards = [shard]
        if size > 1:
            shards = [torch.empty_like(shard) for _ in range(size)]
            dist.all_gather(shards, shard.contiguous(), group=group)
        pieces = [slicing.split(weight, self._model, x, size, i) for i, x in enumerate(shards)]
        wholes = [torch.cat(parts, dim=weight.axis) for parts in zip(*pieces, strict=True)]
        scaled = [_SCALE * max(whole.shape) ** 0.5 * orthogonalized(whole) for whole in wholes]
        return registry.shard(name, slicing.join(weight, self._model, scaled), self._model, size, rank)
