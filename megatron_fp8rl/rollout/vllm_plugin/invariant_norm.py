"""vLLM's batch-invariant RMSNorm also where it follows a residual sum.

vLLM 0.25.1 sends these norms to a kernel that takes 1024 threads for fewer than 256 tokens and 256 for more
(``fused_add_rms_norm`` in csrc/libtorch_stable/layernorm_kernels.cu), so that a row's sum of squares has another order
in another batch. Here the sum is rounded as that kernel rounds it, and normalized by vLLM's own batch-invariant kernel.
To be removed when the kernel's number of threads no longer depends on the tokens.

Runs in every process of a rollout engine under ``rollout.batch_invariant`` on a GPU; the trainer computes the same
norm in ``kernels/triton/batch_invariant.py``.
"""

from __future__ import annotations

from torch import Tensor


def register() -> None:
    """Put the norm in vLLM's place. Raises ImportError when this vLLM has no batch-invariant norm to begin with."""
    from vllm.model_executor.layers import layernorm

    plain = layernorm.rms_norm_batch_invariant

    def rms_norm(
        input: Tensor, weight: Tensor, eps: float = 1e-6, residual: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return plain(input, weight, eps)
        stream = input + residual
        return plain(stream, weight, eps), stream

    layernorm.rms_norm_batch_invariant = rms_norm
