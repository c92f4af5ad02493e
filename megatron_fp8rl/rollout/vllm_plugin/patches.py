"""Patches of vLLM and uses of its private names, for the engine's processes.

Each records the versions it was tested with; :mod:`megatron_fp8rl.upstream` lists them. For other versions, a required
patch stops the start of an engine, and an optional patch is skipped. Further patches are in ``cpu/cpu_layers.py``
(layers) and ``server.py`` (startup).
"""

import asyncio
import functools
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron_fp8rl.kernels import exact_logprobs as exact
from megatron_fp8rl.kernels.latent import NORM_EPS
from megatron_fp8rl.kernels.types import BLOCK, block_scales
from megatron_fp8rl.precision.formats import QuantFormat
from megatron_fp8rl.upstream import patches


@patches(
    "vllm",
    why="log-softmax sums exponentials in another order than the trainer, so the last bit differs "
    "(compute_token_logprobs of the V2 runner, batch_invariant.log_softmax of the V1 runner); the V2 runner divides by "
    "a temperature approximately, and rounds the quotients to BF16 (apply_temperature)",
    remove_when="vLLM has a hook for the log-probabilities of sampled tokens",
    optional=True,
)
def make_logprobs_order_independent() -> None:
    """Compute log-probabilities with ``kernels/exact_logprobs.py``, for batch-invariant engines on GPUs."""
    from vllm.v1.worker.gpu.sample import logprob, sampler, states

    from megatron_fp8rl.rollout.vllm_plugin import vllm_imports

    def log_softmax(input: Tensor, dim: int = -1) -> Tensor:
        rows = input.reshape(-1, input.shape[-1])
        return exact.log_softmax(rows).reshape(input.shape)

    process = sampler.Sampler.apply_sampling_params

    def apply_sampling_params(self: Any, logits: Tensor, mapping: Tensor, requests: Any, *others: Any, **more: Any):
        temperatures = self.sampling_states.temperature.np[requests]
        if ((temperatures != 0) & (temperatures != 1)).any():
            logits = logits.float()
        return process(self, logits, mapping, requests, *others, **more)

    def apply_temperature(logits: Tensor, mapping: Tensor, temperature: Tensor) -> None:
        divisors = temperature[mapping.long()].float()
        logits.copy_(exact.divided(logits, divisors.masked_fill(divisors == 0, 1.0)[:, None]))  # 0: greedy

    sampler.Sampler.apply_sampling_params, states.apply_temperature = apply_sampling_params, apply_temperature
    vllm_imports.batch_invariant().log_softmax = log_softmax
    logprob.compute_token_logprobs = lambda logits, ids: exact.token_logprobs(logits, ids.long())


_libraries: list[torch.library.Library] = []  # kept, because garbage collection of a library removes its kernels


@patches(
    "vllm",
    why="its compiler fuses norms or activations with quantization into kernels that ignore power-of-two scales "
    "(vllm-project/vllm#51477), so a compiled engine would quantize differently from the trainer; its FP32 scales of "
    "experts are products with a rounded 1 / 448, ours are correctly rounded quotients; its kernel of rows treats a "
    "block's maximum as at least 1e-10, and was compared for 128 x 4,096 normal values only, which were equal",
    remove_when="the fused kernels use the requested scales, and round to BF16 before; FP32 scales are quotients, and "
    "tests/gpu/test_engine_quantization_gpu.py compares rows of zeros, small values, and 1 to 8,192 rows",
)
def quantize_activations_as_the_trainer(fmt: QuantFormat) -> None:
    """Replace vLLM's two fused operators by kernels of ``kernels/triton``, and with FP32 scales the quantization alone
    and that of experts, too. Raises AttributeError if this vLLM has others."""
    scales = block_scales(fmt)
    from vllm import _custom_ops as _operators  # noqa: F401  loads vLLM's kernels, which must not replace ours

    from megatron_fp8rl.kernels.triton.norm import norm_quantize
    from megatron_fp8rl.kernels.triton.quantize_activations import quantize_rows, swiglu_quantize

    def norm(
        result: Tensor,
        input: Tensor,
        weight: Tensor,
        scale: Tensor,
        epsilon: float,
        scale_ub: Tensor | None,
        residual: Tensor | None,
        group_size: int,
        is_scale_transposed: bool,
    ) -> None:
        _require_blocks(group_size, scale_ub)
        norm_quantize(input, weight, epsilon, result, scale, scales, residual)

    def swiglu(
        out: Tensor, input: Tensor, scale: Tensor, group_size: int, scale_ub: Tensor | None, is_scale_transposed: bool
    ) -> None:
        _require_blocks(group_size, scale_ub)
        swiglu_quantize(input, out, scale, scales)

    library = torch.library.Library("_C", "IMPL")
    library.impl(torch.ops._C.rms_norm_per_block_quant.default, norm, "CUDA")
    library.impl(torch.ops._C.silu_and_mul_per_block_quant.default, swiglu, "CUDA")
    _libraries.append(library)
    if scales != "fp32":
        return

    def rows(input: Tensor, output_q: Tensor, output_s: Tensor, group_size: int, *_: Any) -> None:
        _require_blocks(group_size, None)
        quantize_rows(input, output_q, output_s, scales)

    def of_experts(
        input: Tensor, output: Tensor, clamp_limit: float | None, group_size: int, alpha: float, beta: float, **_: bool
    ) -> tuple[Tensor, Tensor]:
        _require_blocks(group_size, clamp_limit)
        if (alpha, beta) != (1, 0):
            raise ValueError(
                f"SwiGLU is quantized as in the trainer, but these experts have alpha {alpha}, beta {beta}"
            )
        scale = torch.empty(output.shape[1] // BLOCK, len(output), device=input.device).t()
        swiglu_quantize(input, output, scale, scales)
        return output, scale

    from vllm.model_executor.layers.fused_moe.experts import deep_gemm_moe

    library.impl(torch.ops._C.per_token_group_fp8_quant.default, rows, "CUDA")
    deep_gemm_moe.silu_mul_per_token_group_quant_fp8_colmajor = of_experts


def _require_blocks(group_size: int, upper_bound: Tensor | None) -> None:
    if group_size != BLOCK or upper_bound is not None:
        raise ValueError(
            f"blocks of {BLOCK} without an upper bound are quantized, not of {group_size} with {upper_bound}"
        )


@patches(
    "vllm",
    why="a batch-invariant engine rejects experts on DeepGEMM, because with FP32 scales they switch to Triton's "
    "kernels in small batches",
    remove_when="vLLM accepts them, and never switches in batch-invariant engines",
    optional=True,
)
def accept_deep_gemm_experts() -> None:
    """Make a batch-invariant engine accept experts on DeepGEMM, and use no other kernels for them.

    Quantization by row, DeepGEMM's products and the weighted sum of experts compute each token independently. Raises
    ImportError if this vLLM has no such experts.
    """
    from vllm.model_executor.layers.fused_moe.experts import triton_deep_gemm_moe as experts

    experts.TritonOrDeepGemmExperts._supports_batch_invariance = staticmethod(lambda: True)
    experts.is_deep_gemm_e8m0_used = lambda: True  # asked there only to choose kernels by batch


@patches(
    "vllm",
    why="ep_gather of experts on DeepGEMM computes blocks of min(hidden size, 1024) columns; blocks must be powers of "
    "two that divide the hidden size, so an engine with 640 or 2,944 ends while it starts",
    remove_when="ep_gather accepts every multiple of 128",
)
def gather_any_hidden_size() -> None:
    """Split the columns of the gather: multiples of 1,024 first, then powers of two. Each column is computed alone."""
    from vllm.model_executor.layers.fused_moe import deep_gemm_utils

    gather = deep_gemm_utils.ep_gather

    def ep_gather(input_tensor: Tensor, output_tensor: Tensor, **routing: Any) -> None:
        """``input_tensor`` [rows of all experts, hidden], BF16; ``output_tensor`` [tokens, hidden], which is written.
        vLLM names its arguments."""
        hidden, start = input_tensor.shape[1], 0
        for width in (hidden // 1024 * 1024, *(1 << bit for bit in reversed(range(10)) if hidden >> bit & 1)):
            if width:
                columns = slice(start, start := start + width)
                gather(input_tensor=input_tensor[:, columns], output_tensor=output_tensor[:, columns], **routing)

    deep_gemm_utils.ep_gather = ep_gather


@patches(
    "vllm",
    why="MoERunner multiplies the sum of a token's experts by the router's factor; the trainer multiplies the router "
    "weights (_maybe_apply_routed_scale_to_output)",
    remove_when="vLLM can apply the factor to router weights in every engine",
)
def leave_routed_scale_to_the_router() -> None:
    """Return the sum of a token's experts without the factor, which the router weights of a CPU engine contain."""
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    MoERunner._maybe_apply_routed_scale_to_output = lambda runner, shared, routed: (shared, routed)


@patches(
    "vllm",
    why="AsyncLLM reads until after the engine ends, and often reports a dead engine (output_handler); with "
    "data-parallel ranks, a collective call returns only the first rank's answer (_call_utility_async)",
    remove_when="AsyncLLM.shutdown stops its reader first, and collective_rpc returns the answers of all ranks",
)
def engine_class() -> type:
    """Return an AsyncLLM that stops reading before the engine ends and returns answers of all data-parallel ranks."""
    from vllm.utils.async_utils import cancel_task_threadsafe
    from vllm.v1.engine.async_llm import AsyncLLM

    class Engine(AsyncLLM):
        async def collective_rpc(
            self, method: str, timeout: float | None = None, args: tuple = (), kwargs: dict | None = None
        ) -> list[Any]:
            core = self.engine_core
            ranks = getattr(core, "core_engines", None) or []
            if len(ranks) < 2:
                return await super().collective_rpc(method, timeout, args, kwargs)
            calls = (
                core._call_utility_async("collective_rpc", method, timeout, args, kwargs, engine=rank) for rank in ranks
            )
            return [answer for answers in await asyncio.gather(*calls) for answer in answers]

        def shutdown(self, timeout: float | None = None) -> None:
            cancel_task_threadsafe(getattr(self, "output_handler", None))
            super().shutdown(timeout)

    return Engine


@patches(
    "vllm",
    why="a worker cannot start an update while another is in progress, and has no call that cancels one "
    "(Worker._weight_update_active)",
    remove_when="vLLM has a call that cancels an update",
)
def allow_new_update(worker: Any) -> None:
    """Reset a worker's record of an update in progress."""
    worker._weight_update_active = False


@patches(
    "vllm",
    why="cancelling a layerwise reload must restore the kernel tensors of partly loaded modules (get_layerwise_info)",
    remove_when="vLLM has a call that cancels a layerwise reload",
)
def discard_loaded_weights(modules: Iterable[nn.Module]) -> None:
    """Make ``finalize_layerwise_reload`` treat each module as if it received nothing."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for module in modules:
        info = get_layerwise_info(module)
        info.loaded_weights.clear()
        info.load_numel = 0


@patches(
    "vllm",
    why="after a reload, the kernels of FP8 experts read scales of a copy of the layer, which a direct update would "
    "not change (moe_quant_config._w1, _w2)",
    remove_when="a reload keeps the scales that captured graphs read",
)
def expert_scale_descriptions(module: nn.Module) -> Sequence[Any]:
    """Return the scale descriptions of w13 and w2, whose ``scale`` the kernels read, or nothing."""
    config = getattr(module.quant_method, "moe_quant_config", None)
    return () if config is None else (config._w1, config._w2)


@patches(
    "vllm",
    why="a reload reads __name__ of every weight loader, and that of MiniMax-M2's norms is a functools.partial",
    remove_when="_wrap_parameters_weight_loader accepts any callable",
)
def name_loaders_of_norms() -> None:
    from vllm.model_executor.layers.minimax_rms_norm import rms_norm_tp

    class Loader(functools.partial):
        __name__ = "weight_loader"

    rms_norm_tp.partial = Loader


@patches(
    "vllm",
    why="scales of a KV cache are private buffers of an attention layer for GPU kernels, and floats for the CPU kernel "
    "(_k_scale, _k_scale_float and so on)",
    remove_when="vLLM has a call that sets the scales of a KV cache",
)
def fill_kv_scales(layer: nn.Module, query_key_value: Sequence[float]) -> list[float]:
    """Set the three scales of an attention layer; return the values in its kernels' buffers."""
    for name, value in zip(("q", "k", "v"), query_key_value, strict=True):
        getattr(layer, f"_{name}_scale").fill_(value)
        setattr(layer, f"_{name}_scale_float", value)
    return torch.stack([layer._q_scale, layer._k_scale, layer._v_scale]).tolist()


@patches(
    "vllm",
    why="the norms of latent vectors get the model's eps. The published models' code leaves 1e-6, and GLM-4.7-Flash "
    "has 1e-5 elsewhere",
    remove_when="vLLM's latent norms have the eps of transformers",
    optional=True,
)
def normalize_latents_as_published() -> None:
    from vllm.model_executor.models.deepseek_v2 import DeepseekV2Attention, DeepseekV2MLAAttention

    def build(attention: nn.Module, *args: Any, original: Callable[..., None], **kwargs: Any) -> None:
        original(attention, *args, **kwargs)
        for name in ("q_a_layernorm", "kv_a_layernorm"):
            if (norm := getattr(attention, name, None)) is not None:
                norm.variance_epsilon = NORM_EPS

    for kind in (DeepseekV2Attention, DeepseekV2MLAAttention):
        kind.__init__ = functools.partialmethod(build, original=kind.__init__)


def kv_scales_of(layer: nn.Module) -> tuple[float, float, float]:
    """Return an attention layer's scales of queries, keys and values for the CPU kernel."""
    return layer._q_scale_float, layer._k_scale_float, layer._v_scale_float


def has_kv_scales(module: nn.Module) -> bool:
    return hasattr(module, "_k_scale_float") and hasattr(module, "kv_cache_dtype")


@patches(
    "vllm",
    why="vLLM inspects a model's class in a new process, which imports everything again: 25 s of a start on an H200",
    remove_when="vLLM inspects its own classes without importing them, or in a fork",
    optional=True,
)
def inspect_classes_in_forks(deadline_s: float = 60.0) -> None:
    """Inspect a model's class in a fork, which does not initialize CUDA; after the deadline, use vLLM's method."""
    from vllm.model_executor.models import registry

    in_new_process = registry._run_in_subprocess

    def in_fork(inspect: Callable[[], Any]) -> Any:
        forked = multiprocessing.get_context("fork")
        receiver, sender = forked.Pipe(duplex=False)
        child = forked.Process(target=lambda: sender.send(inspect()), daemon=True)
        child.start()
        sender.close()
        try:
            if receiver.poll(deadline_s):
                return receiver.recv()
        except EOFError:
            pass  # vLLM's method then reports the reason
        finally:
            child.kill()
            child.join()
            receiver.close()
        return in_new_process(inspect)

    registry._run_in_subprocess = in_fork


@patches(
    "vllm",
    why="after a part of a prompt GPUModelRunner._bookkeeping_sync rewinds the generator of a request with a seed by "
    "its offset, which generators of a CPU do not have: the engine dies",
    remove_when="vLLM rewinds generators of a CPU",
)
def rewind_generators_on_cpus() -> None:
    """Restore the generators of requests whose sampled token is discarded, because their prompt is not complete."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    sample, synchronize = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync

    def sample_and_rewind(self: Any, *args: Any, **options: Any) -> Any:
        incomplete = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0]
        generators = [self.input_batch.generators.get(int(index)) for index in incomplete]
        states = [(generator, generator.get_state()) for generator in generators if generator is not None]
        output = sample(self, *args, **options)
        for generator, state in states:
            generator.set_state(state)
        return output

    def synchronize_without_generators(self: Any, *args: Any, **options: Any) -> Any:
        generators, self.input_batch.generators = self.input_batch.generators, {}
        try:
            return synchronize(self, *args, **options)
        finally:
            self.input_batch.generators = generators

    CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync = sample_and_rewind, synchronize_without_generators


def local_expert(experts: nn.Module, expert: int) -> int:
    """The number on this rank of an expert of vLLM's ``FusedMoE``; -1 if another rank has it."""
    return experts._map_global_expert_id_to_local_expert_id(expert)
