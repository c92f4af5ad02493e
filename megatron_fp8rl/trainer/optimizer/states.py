"""Adam's moments in fewer bytes between steps (``optim.states``); master weights stay FP32. No collectives.

    bf16    both moments in BF16. Transformer Engine's FusedAdam reads and writes them; torch's AdamW reads FP32
    fp8     the first moment in E4M3, with a power-of-two scale for each block of 128 elements of this rank's shard;
            BF16 during a step. The second moment in BF16, because E4M3 has too small a range

By its source, FusedAdam 2.16.1 makes NaN of FP8 moments of zeros, whose scale is infinite, and Megatron-Core 0.19.2
restores FP8 moments with another scale. Checkpoints here contain FP32 moments, whatever the states. Rounded values are
restored to the same bits: a block may get a smaller scale, at which all its values are representable.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fp8rl import upstream
from megatron_fp8rl.trainer.compat.megatron import without_fp32_copies

BLOCK = 128
_ROWS = 1 << 17  # blocks that are encoded at a time: temporaries of 32 MiB
_MOMENTS, _SCALES = ("exp_avg", "exp_avg_sq"), "exp_avg_scales"


class ReducedStates:
    """Rounds the moments of ``optimizers``, which are between steps as ``states`` says."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], states: str, *, is_fused: bool) -> None:
        self._optimizers = optimizers if states != "fp32" else ()
        self._is_fp8 = states == "fp8"
        self._in_step = torch.bfloat16 if is_fused else torch.float32
        if is_fused and upstream.applies("without_fp32_copies"):
            for optimizer in optimizers:
                without_fp32_copies(optimizer)

    @property
    def converts(self) -> bool:
        """Whether :meth:`expanded` makes other tensors of the moments."""
        return bool(self._optimizers) and (self._is_fp8 or self._in_step != torch.bfloat16)

    @contextlib.contextmanager
    def expanded(self) -> Iterator[None]:
        """In the block, moments have the type that the optimizer reads; Megatron-Core may save or load them."""
        for parameter, state in self._states():
            if (scales := state.pop(_SCALES, None)) is not None:
                state["exp_avg"] = decoded(state["exp_avg"], scales, parameter.numel())
            state |= {key: state[key].to(self._in_step) for key in _MOMENTS}
        try:
            yield
        finally:
            for _, state in self._states():
                state |= {key: state[key].to(torch.bfloat16) for key in _MOMENTS}
                if self._is_fp8:
                    state["exp_avg"], state[_SCALES] = encoded(state["exp_avg"])

    def _states(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        for optimizer in self._optimizers:
            yield from ((parameter, state) for parameter, state in optimizer.state.items() if "exp_avg" in state)


def encoded(values: Tensor) -> tuple[Tensor, Tensor]:
    """(E4M3 [blocks, 128], BF16 scales [blocks, 1]) of BF16 ``values``: the smallest powers of two that fit them."""
    codes = values.new_empty(-(-len(values) // BLOCK), BLOCK, dtype=torch.float8_e4m3fn)
    scales = values.new_empty(len(codes), 1)
    for part, of_codes, of_scales in zip(
        values.split(_ROWS * BLOCK), codes.split(_ROWS), scales.split(_ROWS), strict=True
    ):
        missing = of_codes.numel() - len(part)
        blocks = (F.pad(part, (0, missing)) if missing else part).view_as(of_codes)
        low, high = torch.aminmax(blocks, dim=1, keepdim=True)
        fraction, exponent = torch.frexp(torch.maximum(-low, high).float())  # fraction in [0.5, 1)
        exponent = (exponent - 9 + (fraction > 448 / 512)).clamp_(min=-126)
        of_scales.copy_(torch.ldexp(torch.ones_like(fraction), exponent))
        of_codes.copy_(blocks / of_scales)
    return codes, scales


def decoded(codes: Tensor, scales: Tensor, size: int) -> Tensor:
    """BF16 [size]: the values that :func:`encoded` rounded to; exact."""
    return codes.to(torch.bfloat16).mul_(scales).view(-1)[:size]
