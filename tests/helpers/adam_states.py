"""An Adam with gradients, whose states can be offloaded without a model."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from megatron_fp8rl.trainer.optimizer.offload import Offload


class CountingAdam(torch.optim.Optimizer):
    """Counts updates in its groups, like Transformer Engine's FusedAdam."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                mean, square = self.state[p].values()
                mean.lerp_(p.grad, 0.1)
                square.lerp_(p.grad**2, 0.05)
                p -= group["lr"] * (mean / (1 - 0.9 ** group["step"])) / (square / (1 - 0.95 ** group["step"]) + 1e-8)


def make_adam(
    kind: Callable[..., torch.optim.Optimizer], sizes: Sequence[int], device: str = "cpu"
) -> tuple[torch.optim.Optimizer, Offload]:
    """An Adam over parameters of ``sizes`` in two groups, and the Offload of its states."""
    generator = torch.Generator(device=device).manual_seed(3)
    params = [torch.randn(size, generator=generator, device=device) for size in sizes]
    for parameter in params:
        parameter.grad = torch.randn(parameter.shape, generator=generator, device=device)
    adam = kind([{"params": params[:2]}, {"params": params[2:], "lr": 3e-3}], lr=1e-3)
    optimizer = SimpleNamespace(megatron=SimpleNamespace(optimizer=adam), may_step_in_pieces=True)
    return adam, Offload([], optimizer, [], parts=["optimizer"], device=torch.device(device))


def states_of(adam: torch.optim.Optimizer) -> list[Tensor]:
    params = [parameter for group in adam.param_groups for parameter in group["params"]]
    states = [value for parameter in params for value in adam.state[parameter].values()]
    return [x for x in (*params, *states) if isinstance(x, Tensor)]
