"""vLLM's experts on DeepGEMM also in a batch-invariant engine.

vLLM 0.25.1 refuses them there, as it does all but Triton's, for they change to Triton's kernels in small batches. With
power-of-two scales they never do. What is left computes a token alone: quantization of its row, DeepGEMM's products,
which add in one order whatever rows lie beside, and the weighted sum of its experts, slot after slot. To be removed
when vLLM accepts them.

Runs in every process of a rollout engine under ``rollout.batch_invariant`` with ``rollout.moe_backend = deep_gemm``.
"""

from __future__ import annotations


def register() -> None:
    """Have vLLM accept them, where scales are powers of two. Raises ImportError when this vLLM has no such experts."""
    from vllm.model_executor.layers.fused_moe.experts.triton_deep_gemm_moe import TritonOrDeepGemmExperts
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    TritonOrDeepGemmExperts._supports_batch_invariance = staticmethod(is_deep_gemm_e8m0_used)
