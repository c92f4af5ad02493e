"""Mistakes in where engines run, which kernels they use, and who has the GPUs' memory when. Pure."""

from __future__ import annotations

from megatron_fp8rl.preflight.findings import Findings


def check_engines(found: Findings, accelerator: str) -> None:
    """Placement, expert parallelism, transport, sleeping, offloading and kernels of the engines."""
    _check_placement(found, accelerator)
    _check_transport(found, accelerator)
    _check_expert_parallel(found)
    _check_memory_turns(found)
    _check_kernels(found, accelerator)


def _check_placement(found: Findings, accelerator: str) -> None:
    cfg, rollout = found.cfg, found.cfg.rollout
    if rollout.max_replica_restarts < 0:
        found.refuse("rollout.max_replica_restarts", "counts restarts", "Set 0 to end the run with its replicas")
    wanted = rollout.num_replicas * rollout.tensor
    if accelerator == "cpu" or rollout.placement != "colocated" or rollout.replay is not None:
        return
    if wanted > cfg.parallel.world_size >= 1:
        fitting = cfg.parallel.world_size // max(1, rollout.tensor)
        lower = f"Lower it to {fitting}" if fitting else "Lower --rollout.tensor"
        found.refuse(
            "rollout.num_replicas",
            f"colocated replicas of {rollout.tensor} take {wanted} GPUs together, and the trainer has "
            f"{cfg.parallel.world_size}",
            f"{lower}, or --rollout.placement separate",
        )


def _check_transport(found: Findings, accelerator: str) -> None:
    rollout = found.cfg.rollout
    if rollout.placement == "remote" and rollout.transport == "ipc" and rollout.replay is None:
        found.refuse(
            "rollout.transport",
            "travels through memory of one host, and rollout.placement = 'remote' puts the engines on others",
            "Choose auto, which takes gloo without GPUs and nccl between them",
        )
    elif rollout.transport == "nccl" and accelerator == "cpu":
        found.refuse("rollout.transport", "travels between GPUs, and this machine has none", "Choose auto, ipc or gloo")
    elif rollout.transport == "nccl" and rollout.placement == "colocated":
        found.refuse(
            "rollout.transport",
            "NCCL does not take two processes on one GPU, and the engines are colocated with the trainer",
            "Choose ipc, gloo across hosts, or --rollout.placement separate",
        )


def _check_expert_parallel(found: Findings) -> None:
    rollout, model = found.cfg.rollout, found.cfg.model
    if not found.at_least(1, "rollout.expert") or rollout.expert == 1:
        return
    if not model.is_moe:
        found.refuse("rollout.expert", "divides experts, and the model is dense", "Set 1")
    elif rollout.expert != rollout.tensor:
        found.refuse(
            "rollout.expert",
            f"vLLM divides experts over all {rollout.tensor} ranks of a replica or over none",
            f"Set {rollout.tensor} or 1",
        )
    elif model.num_experts % rollout.expert:
        found.refuse("rollout.expert", f"does not divide {model.num_experts} experts", "Set 1")


def _check_memory_turns(found: Findings) -> None:
    """Sleeping and offloading take turns, which needs times when only one side works."""
    rollout, offload = found.cfg.rollout, found.cfg.optim.offload
    if len(set(offload)) != len(offload):
        found.refuse("optim.offload", "names a part twice", "Name each once")
    if rollout.max_staleness > 0:
        whose = "engines sample while the trainer works (rollout.max_staleness > 0)"
        if rollout.sleep_level:
            found.refuse("rollout.sleep_level", f"{whose}, and cannot sleep", "Set 0")
        if offload:
            found.refuse("optim.offload", f"{whose}, so that its state is always needed", "Leave it empty")
    if rollout.sleep_level == 2 and found.cfg.model.mla is not None:
        found.refuse(
            "rollout.sleep_level",
            "drops what latent attention computes from its weights once, and no update brings back",
            "Set 1",
        )


def _check_kernels(found: Findings, accelerator: str) -> None:
    cfg, rollout, precision = found.cfg, found.cfg.rollout, found.cfg.precision
    is_fp8 = precision.rollout != "bf16"
    is_pow2_on_gpu = is_fp8 and precision.scales == "pow2" and accelerator != "cpu"
    if rollout.linear_backend in ("cutlass", "triton") and is_pow2_on_gpu:
        found.refuse(
            "rollout.linear_backend",
            "does not round the scales of activations to powers of two, as the trainer does",
            "Set deep_gemm, or --precision.scales fp32",
        )
    if rollout.moe_backend != "auto" and not cfg.model.is_moe:
        found.refuse("rollout.moe_backend", "multiplies experts, and the model is dense", "Set auto")
    elif rollout.moe_backend == "flashinfer_cutlass":
        found.refuse(
            "rollout.moe_backend",
            "keeps gate and up in the other order than they are sent, so that updates and proofs would miss them",
            "Set triton or deep_gemm",
        )
    elif rollout.moe_backend == "deep_gemm":
        edges = precision.bf16_last_layers
        edges += any(cfg.model.is_moe_layer(i) for i in range(min(precision.bf16_first_layers, cfg.model.num_layers)))
        if not is_fp8 or edges:
            found.refuse("rollout.moe_backend", "multiplies FP8 alone, and there are experts in BF16", "Set triton")
    head_dim = cfg.model.head_dim
    if precision.attention == "engine" and accelerator != "cpu" and cfg.model.mla is None and not 96 < head_dim <= 128:
        found.refuse(
            "precision.attention",
            f"is there for the engine's bits, and with heads of {head_dim} features its kernel sums a decoded token's "
            "keys in other blocks than a sequence's: it has the same bits for heads of 97 to 128",
            "Choose auto",
        )
    if rollout.batch_invariant:
        if accelerator == "cpu":
            found.refuse("rollout.batch_invariant", "chooses GPU kernels, and there is no GPU", "Leave it out")
        if rollout.moe_backend == "deep_gemm" and precision.scales == "fp32":
            found.refuse(
                "rollout.moe_backend",
                "takes Triton's kernels for small batches where scales are not powers of two: it is not batch-invariant",
                "Set triton, or --precision.scales pow2",
            )
        if rollout.transport == "nccl" or (rollout.transport == "auto" and rollout.placement == "remote"):
            found.refuse(
                "rollout.transport",
                "takes NCCL, for which vLLM gives batch-invariant engines an algorithm and a protocol of their own; ranks "
                "that differ in these may wait for each other for ever",
                "Set gloo, or ipc on one host",
            )
    if rollout.attention_backend == "FLASHINFER" and rollout.kv_cache_dtype == "fp8":
        found.refuse(
            "rollout.attention_backend",
            "reads the scales of an FP8 KV cache once, when it starts, so that new ones would have no effect",
            "Set auto or FLASH_ATTN",
        )
