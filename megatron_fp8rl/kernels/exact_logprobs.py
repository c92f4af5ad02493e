"""Log-softmax of sampled tokens whose bits depend neither on the order of the sum nor on how it is divided.

Trainer and engine use different kernels, dtypes of logits, and whole rows or vocabulary shards. Floating-point sums in
different orders differ in the last bit. Here integers are added: exponentials rounded down to multiples of 1 / UNIT:

    logprob(target) = (z[target] - max) - log(sum_v floor(exp(z[v] - max) UNIT) / UNIT)

The sum is at least 1, so the error is at most vocabulary / UNIT (9e-9 for 151,936 tokens), below the rounding of the
result to float32. The logarithm is taken in float64 and rounded once.

Shapes: n = tokens, V = vocabulary, k = requested tokens.
"""

import torch
from torch import Tensor

from megatron_fp8rl.kernels.backend import runs_triton
from megatron_fp8rl.kernels.types import UNIT


def divided(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """float32 quotients, rounded as IEEE 754 does; a divisor per row [n, 1] or one for all. A divisor that is a number
    would not do: on a GPU PyTorch multiplies by its reciprocal."""
    if not isinstance(temperature, Tensor):
        temperature = torch.full((1,), temperature, dtype=torch.float32, device=logits.device)
    return logits.float() / temperature


def log_of_sum(exp_sums: Tensor) -> Tensor:
    """float32 logarithm of int64 sums in units of 1 / UNIT."""
    return exp_sums.double().div_(UNIT).log_().float()


def exp_sum(shifted_nV: Tensor) -> Tensor:
    """int64 [n]: the sum of exp(``shifted_nV``) in units of 1 / UNIT; float32 arguments of at most 0."""
    return shifted_nV.exp().mul_(UNIT).long().sum(-1)


def token_logprobs(logits_nV: Tensor, token_ids_nk: Tensor) -> Tensor:
    """Log-probabilities of ids int64 [n, k], float32 [n, k]; logits BF16 or float32, possibly -inf."""
    return _normalized(logits_nV.gather(1, token_ids_nk), logits_nV)


def log_softmax(logits_nV: Tensor) -> Tensor:
    """Log-probabilities of all tokens, float32 [n, V]; see :func:`token_logprobs`."""
    return _normalized(logits_nV, logits_nV)


def _normalized(chosen_nk: Tensor, logits_nV: Tensor) -> Tensor:
    """float32 [n, k]: some of the logits of each token as log-probabilities."""
    max_n = logits_nV.amax(-1).float()
    if runs_triton(logits_nV):
        from megatron_fp8rl.kernels.triton import log_softmax as kernels  # imports Triton

        exp_sums, _ = kernels.sums(logits_nV, max_n, torch.zeros_like(max_n, dtype=torch.int64), 0, 1.0)
    else:
        exp_sums = exp_sum(logits_nV.float() - max_n[:, None])
    return (chosen_nk.float() - max_n[:, None]).sub_(log_of_sum(exp_sums)[:, None])
