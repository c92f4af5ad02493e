"""Registers this package with vLLM: weight transfer, attention, quantization, batch-invariant kernels, CPU emulation.

In: the environment that the fleet sets for a rollout engine; without :data:`FORMAT_VARIABLE`, :func:`register` does
nothing. Out: entries in vLLM's registries. Runs in each process of a rollout engine (server, engine core, workers).
vLLM calls :func:`register` through the entry point ``vllm.general_plugins``; ``rollout/vllm_plugin/server.py`` also
calls it before the engine forks its other processes.
"""

import os

from megatron_fp8rl import upstream
from megatron_fp8rl.precision.formats import FORMATS

FORMAT_VARIABLE = "MEGATRON_FP8RL_FORMAT"  # passes the name of the format to the engine's processes
KEPT_VARIABLE = "MEGATRON_FP8RL_KEPT_ENTRIES"  # 1: return the vocabulary entries from which each token was sampled
SPECULATION_VARIABLE = "MEGATRON_FP8RL_SPECULATION"  # 1: drafts are verified
DELTA_NET_VARIABLE = "MEGATRON_FP8RL_DELTA_NETS"  # 1: the model has gated delta nets, whose layers take long to import
LATENT_VARIABLE = "MEGATRON_FP8RL_LATENT"  # of latent attention: "absorbed", as in an exact trainer, or "vllm"
PARTS_VARIABLE = "MEGATRON_FP8RL_ROW_PARTS"  # number of partial sums that row-parallel linears add in order

ROUTER_VARIABLE = "MEGATRON_FP8RL_SIGMOID_ROUTER"  # 1: the model has a sigmoid router, whose layers take long to import
EXPERTS_VARIABLE = "MEGATRON_FP8RL_SINGLE_EXPERTS"  # 1: the model is gpt-oss

WEIGHT_TRANSFER_BACKEND = "fp8rl"  # for every weight_sync.transport, which the first request names

_registered = False


def register() -> None:
    """Register with vLLM once per process. Raises ValueError for an unknown format, and upstream.UntestedVersion."""
    global _registered
    if _registered or FORMAT_VARIABLE not in os.environ:
        return
    fmt = FORMATS.get(os.environ[FORMAT_VARIABLE])
    if fmt is None or fmt.scale_kind is None:
        known = ", ".join(name for name, known in FORMATS.items() if known.scale_kind is not None)
        raise ValueError(f"{FORMAT_VARIABLE} = {os.environ[FORMAT_VARIABLE]!r}: expected one of {known}")
    upstream.check()
    _registered = True

    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms import current_platform

    from megatron_fp8rl.rollout.vllm_plugin import patches, patches_fused

    WeightTransferEngineFactory.register_engine(
        WEIGHT_TRANSFER_BACKEND, "megatron_fp8rl.rollout.vllm_plugin.receiver", "TransferEngine"
    )
    if upstream.applies("Olmo2ForCausalLM"):
        ModelRegistry.register_model("Olmo2ForCausalLM", "megatron_fp8rl.rollout.vllm_plugin.olmo2:Olmo2ForCausalLM")
    if upstream.applies("Phi3ForCausalLM", "LongRope"):
        ModelRegistry.register_model("Phi3ForCausalLM", "megatron_fp8rl.rollout.vllm_plugin.phi3:Phi3ForCausalLM")
    if upstream.applies("WithStates"):
        for name in ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"):
            ModelRegistry.register_model(name, f"megatron_fp8rl.rollout.vllm_plugin.qwen3_5:{name}")
    if os.environ.get(KEPT_VARIABLE) == "1" and upstream.applies("report_kept_entries", "TensorsWithKept"):
        from megatron_fp8rl.rollout.vllm_plugin import patches_kept

        patches_kept.report_kept_entries()
    if os.environ.get(SPECULATION_VARIABLE) == "1" and upstream.applies("verify_in_order"):
        from megatron_fp8rl.rollout.vllm_plugin import patches_speculation

        patches_speculation.verify_in_order()
        patches_speculation.show_draft_model()
    patches.name_loaders_of_norms()
    if LATENT_VARIABLE in os.environ and upstream.applies("normalize_latents_as_published"):
        patches.normalize_latents_as_published()
    if os.environ.get(EXPERTS_VARIABLE) == "1":
        from megatron_fp8rl.rollout.vllm_plugin import gpt_oss

        gpt_oss.read_single_experts()
    if current_platform.is_cpu():
        from megatron_fp8rl.rollout.vllm_plugin import patches_adapters
        from megatron_fp8rl.rollout.vllm_plugin.cpu import cpu_experts, cpu_layers

        cpu_layers.register()
        patches.rewind_generators_on_cpus()
        patches_adapters.round_adapters_as_the_trainer()
        if fmt.scale_kind == "e8m0":
            from megatron_fp8rl.rollout.vllm_plugin.cpu import cpu_mxfp8  # imports modules that older versions lack

            cpu_mxfp8.register_config(fmt)
        else:
            cpu_layers.register_blocks(fmt)
        if upstream.applies("leave_out_warm_up"):
            cpu_layers.leave_out_warm_up()
        if os.environ.get(DELTA_NET_VARIABLE) == "1":
            from megatron_fp8rl.rollout.vllm_plugin.cpu import cpu_delta_net

            cpu_delta_net.compute_as_the_trainer()
        cpu_experts.exchange_tokens_on_cpu()
        if os.environ.get(LATENT_VARIABLE) == "absorbed":
            from megatron_fp8rl.rollout.vllm_plugin import latent_layers  # imports vLLM's model
            from megatron_fp8rl.rollout.vllm_plugin.cpu.cpu_latent import KeysOnlyBackend

            latent_layers.absorb_projections(KeysOnlyBackend)
        _add_in_rank_order()
        return
    from megatron_fp8rl.kernels.triton import cache

    cache.watch()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(
        AttentionBackendEnum.CUSTOM, "megatron_fp8rl.rollout.vllm_plugin.patches_attention.FP8CacheBackend"
    )
    if os.environ.get(LATENT_VARIABLE) == "absorbed":
        from megatron_fp8rl.rollout.vllm_plugin import latent_layers
        from megatron_fp8rl.rollout.vllm_plugin.patches_latent import LatentBackend

        latent_layers.absorb_projections(LatentBackend)
    if fmt.scale_kind == "e8m0":
        from megatron_fp8rl.rollout.vllm_plugin import patches_mxfp8

        patches_mxfp8.keep_scales_readable()
        patches_mxfp8.emulate_linears()
    else:
        patches.quantize_activations_as_the_trainer(fmt)
    uses_deep_gemm_experts = os.environ.get("VLLM_MOE_USE_DEEP_GEMM") == "1"
    if uses_deep_gemm_experts:
        patches.gather_any_hidden_size()
    if os.environ.get("VLLM_BATCH_INVARIANT") == "1":
        patches_fused.fuse_norms(fmt)
        if upstream.applies("fuse_heads"):
            patches_fused.fuse_heads()
        patches.make_logprobs_order_independent()
        if os.environ.get(ROUTER_VARIABLE) == "1" and upstream.applies("route_as_the_trainer"):
            from megatron_fp8rl.rollout.vllm_plugin import patches_routers

            patches_routers.route_as_the_trainer()
        if uses_deep_gemm_experts:
            patches.accept_deep_gemm_experts()
    _add_in_rank_order()


def _add_in_rank_order() -> None:
    if num_parts := int(os.environ.get(PARTS_VARIABLE, "0")):
        from megatron_fp8rl.rollout.vllm_plugin.patches_sums import add_in_rank_order

        add_in_rank_order(num_parts)
