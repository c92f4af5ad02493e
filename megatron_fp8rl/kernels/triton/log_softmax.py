"""Log-softmax of a chunk of BF16 logits on a GPU, and its gradient.

Each logit is read once for the sums, and read and written once for the gradient. The sum of exponentials is the
order-independent one of ``kernels/exact_logprobs.py``; everything else except input and output is FP32.

Shapes: n = tokens of the chunk, V = vocabulary rows of this rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_fp8rl.kernels.triton.bits import HARDWARE, rounded_to_bf16
from megatron_fp8rl.kernels.types import UNIT

_BLOCK = 4096  # logits of a token that are read at a time


@triton.jit(do_not_specialize=["num_tokens"])
def _sum_rows(
    logits,
    max_n,
    targets,
    exp_sums,
    others,
    num_tokens,
    num_columns,
    stride,
    first_token,
    temperature,
    DIVIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Program t: the sum of exponentials of token t, and the other two values in rows 0 and 1 of ``others`` [2, n]."""
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    largest = tl.load(max_n + token)
    exp_sum, weighted = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < num_columns
        z = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
        z = (tl.div_rn(z, temperature + tl.zeros_like(z)) if DIVIDE else z) - largest
        exp = tl.where(inside, tl.exp(z), 0.0)
        exp_sum += (exp * UNIT).to(tl.int64)
        weighted += tl.where(inside, exp * z, 0.0)
    target = tl.load(targets + token) - first_token
    is_here = (target >= 0) & (target < num_columns)
    at_target = tl.load(row + target, mask=is_here, other=0.0).to(tl.float32)
    at_target = tl.div_rn(at_target, temperature) if DIVIDE else at_target
    tl.store(exp_sums + token, tl.sum(exp_sum, axis=0))
    tl.store(others + token, tl.sum(weighted, axis=0))
    tl.store(others + num_tokens + token, tl.where(is_here, at_target - largest, 0.0))


@triton.jit
def _gradient(
    logits,
    targets,
    log_norm,
    entropy,
    grad_logprobs,
    grad_entropy,
    num_columns,
    first_token,
    temperature,
    ENTROPY: tl.constexpr,
    DIVIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    """Program (t, b) turns block b of the logits of token t into their gradient."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    place = logits + token * num_columns + column
    z = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    log_p = (tl.div_rn(z, temperature + tl.zeros_like(z)) if DIVIDE else z) - tl.load(log_norm + token)
    on_logprob = tl.load(grad_logprobs + token)
    factor = on_logprob + tl.zeros_like(z)
    if ENTROPY:
        factor += (log_p + tl.load(entropy + token)) * tl.load(grad_entropy + token)
    grad = -tl.exp(log_p) * factor
    grad += tl.where(column == tl.load(targets + token) - first_token, on_logprob, 0.0)
    grad = tl.div_rn(grad, temperature + tl.zeros_like(grad)) if DIVIDE else grad
    tl.store(place, rounded_to_bf16(grad, HARDWARE), mask=inside)


def sums(
    logits_nV: Tensor, max_n: Tensor, targets_n: Tensor, first_token: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """(int64 [n], float32 [2, n]) of z = logits / temperature, for BF16 or float32 logits with adjacent columns.

    The sum of exp(z - max) in units of 1 / UNIT; then sum exp(z - max) * (z - max), and z[target] - max, which is 0 if
    the target is not in this shard. ``max_n`` is float32.
    """
    num, num_columns = logits_nV.shape
    exp_sums = torch.empty(num, dtype=torch.int64, device=logits_nV.device)
    others = torch.empty(2, num, dtype=torch.float32, device=logits_nV.device)
    with torch.cuda.device_of(logits_nV):
        _sum_rows[(num,)](
            logits_nV,
            max_n,
            targets_n.contiguous(),
            exp_sums,
            others,
            num,
            num_columns,
            logits_nV.stride(0),
            first_token,
            float(temperature),
            DIVIDE=temperature != 1,
            BLOCK=_BLOCK,
            UNIT=UNIT,
            num_warps=8,
        )
    return exp_sums, others


def gradient(
    logits_nV: Tensor,
    targets_n: Tensor,
    first_token: int,
    temperature: float,
    *,
    log_norm: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """The logits, overwritten with the gradient of the loss with respect to them, BF16 [n, V]."""
    num, num_columns = logits_nV.shape
    rows = [log_norm, entropy, grad_logprobs, grad_logprobs if grad_entropy is None else grad_entropy]
    with torch.cuda.device_of(logits_nV):
        _gradient[(num, triton.cdiv(num_columns, _BLOCK))](
            logits_nV,
            targets_n.contiguous(),
            *(row.float().contiguous() for row in rows),
            num_columns,
            first_token,
            float(temperature),
            ENTROPY=grad_entropy is not None,
            DIVIDE=temperature != 1,
            BLOCK=_BLOCK,
            HARDWARE=HARDWARE,
            num_warps=8,
        )
    return logits_nV
