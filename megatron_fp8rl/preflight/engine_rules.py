"""Rules for the placement of engines, for sharing GPU memory with the trainer, and for what is sampled ahead. Pure."""

from __future__ import annotations

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.precision.hardware import Generation, Hardware
from megatron_fp8rl.precision.kernel_choice import is_invariant
from megatron_fp8rl.preflight.findings import Findings


def check_engines(found: Findings, accelerator: Generation) -> None:
    """Check placement, transport, expert parallelism, sleeping, offloading and batch invariance of the engines."""
    _check_placement(found, accelerator)
    _check_transport(found, accelerator)
    _check_expert_parallel(found)
    _check_memory_turns(found)
    _check_batch_invariance(found, accelerator)


def _check_placement(found: Findings, accelerator: str) -> None:
    cfg, engine = found.cfg, found.cfg.engine
    wanted = engine.num_replicas * engine.ranks
    if accelerator == "cpu" or engine.placement != "colocated" or found.cfg.sampling.replay is not None:
        return
    if wanted > cfg.parallel.world_size >= 1:
        fitting = cfg.parallel.world_size // max(1, engine.ranks)
        lower = f"Lower it to {fitting}" if fitting else "Lower --engine.tensor"
        found.refuse(
            "engine.num_replicas",
            f"colocated replicas of {engine.ranks} take {wanted} GPUs together, and the trainer has "
            f"{cfg.parallel.world_size}",
            f"{lower}, or --engine.placement separate",
            choices=[fitting] if fitting else (),
        )


def _check_transport(found: Findings, accelerator: str) -> None:
    engine, weight_sync = found.cfg.engine, found.cfg.weight_sync
    if engine.placement == "remote" and weight_sync.transport == "ipc" and found.cfg.sampling.replay is None:
        found.refuse(
            "weight_sync.transport",
            "travels through memory of one host, and engine.placement = 'remote' puts the engines on others",
            "Choose auto, which takes gloo without GPUs and nccl between them",
            choices=["auto"],
        )
    elif weight_sync.transport == "nccl" and accelerator == "cpu":
        found.refuse(
            "weight_sync.transport",
            "travels between GPUs, and this machine has none",
            "Choose auto, ipc or gloo",
            choices=["auto"],
        )
    elif weight_sync.transport == "nccl" and engine.placement == "colocated":
        found.refuse(
            "weight_sync.transport",
            "NCCL does not take two processes on one GPU, and the engines are colocated with the trainer",
            "Choose ipc, gloo across hosts, or --engine.placement separate",
            choices=("ipc", "gloo"),
        )


def _check_expert_parallel(found: Findings) -> None:
    engine, model = found.cfg.engine, found.cfg.model
    if not found.in_range("engine.expert", "engine.data", "engine.tensor"):
        return
    if engine.data > 1 and not model.is_moe:
        found.refuse(
            "engine.data",
            "repeats attention beside experts that are spread over all ranks, and the model is dense",
            "Set 1, and --engine.num_replicas higher: replicas of a dense model share nothing",
            choices=[1],
        )
    if engine.data > 1 and engine.sleep_level:
        found.refuse("engine.sleep_level", "is not tested with engines of several data-parallel ranks", "Set 0")
    if engine.expert == 1:
        return
    if not model.is_moe:
        found.refuse("engine.expert", "divides experts, and the model is dense", "Set 1")
    elif engine.expert != engine.ranks:
        found.refuse(
            "engine.expert",
            f"vLLM spreads whole experts over all data x tensor = {engine.ranks} ranks of a replica, or cuts each",
            f"Set {engine.ranks} or 1",
            choices=(engine.ranks, 1),
        )
    elif model.num_experts % engine.expert:
        found.refuse("engine.expert", f"does not divide {model.num_experts} experts", "Set 1")


def _check_memory_turns(found: Findings) -> None:
    """Sleeping and offloading need phases in which only the trainer or only the engines work."""
    engine, offload = found.cfg.engine, found.cfg.optim.offload
    if found.cfg.weight_sync.spare_weights != "none" and engine.sleep_level:
        found.refuse(
            "weight_sync.spare_weights",
            "is for engines that sample while weights arrive, and these sleep until they have (engine.sleep_level)",
            "Set none",
        )
    if engine.sleep_level and engine.placement != "colocated":
        found.refuse("engine.sleep_level", "frees memory of GPUs on which only engines work", "Set 0")
    if len(set(offload)) != len(offload):
        found.refuse("optim.offload", "names a part twice", "Name each once")
    if found.cfg.sampling.max_staleness > 0:
        whose = "engines sample while the trainer works (sampling.max_staleness > 0)"
        if engine.sleep_level:
            found.refuse("engine.sleep_level", f"{whose}, and cannot sleep", "Set 0")
        if offload:
            found.refuse("optim.offload", f"{whose}, so that its state is always needed", "Leave it empty")
    if engine.sleep_level == 2 and found.cfg.model.mla is not None:
        found.refuse(
            "engine.sleep_level",
            "drops what latent attention computes from its weights once, and no update brings back",
            "Set 1",
        )


def _check_batch_invariance(found: Findings, accelerator: Generation) -> None:
    weight_sync = found.cfg.weight_sync
    if not is_invariant(found.cfg, Hardware(accelerator)):
        return
    if weight_sync.transport == "nccl" or (weight_sync.transport == "auto" and found.cfg.engine.placement == "remote"):
        found.refuse(
            "weight_sync.transport",
            "takes NCCL, for which vLLM gives batch-invariant engines an algorithm and a protocol of their own; ranks "
            "that differ in these may wait for each other for ever",
            "Set gloo, or ipc on one host",
            choices=("gloo", "ipc"),
        )


def too_long(cfg: RunConfig, limit: str) -> tuple[str, str, str, int]:
    """(field, problem, remedy, value to try) of sequences longer than the model's."""
    most = cfg.model.max_sequence_tokens
    if (cfg.session.max_tokens or 0) > most:
        problem = f"sessions reach {cfg.session.max_tokens} tokens, {limit}"
        return "session.max_tokens", problem, f"Lower it to {most}", most
    problem = f"prompt and completion reach {cfg.max_sequence_tokens} tokens, {limit}"
    fitting = max(1, most - cfg.sampling.max_prompt_tokens)
    remedy = f"Lower it to {fitting} or less, or lower --sampling.max_prompt_tokens"
    return "sampling.max_completion_tokens", problem, remedy, fitting


def check_window(found: Findings) -> None:
    """Check the window of groups that are sampled ahead."""
    sampling = found.cfg.sampling
    most = (sampling.max_staleness + 1) * sampling.prompts_per_step
    if not sampling.window_groups:
        return
    if not sampling.max_staleness:
        problem = "takes groups out of order, which a synchronous run, reproducible bit for bit, does not"
        found.refuse(
            "sampling.window_groups", problem, "Set --sampling.max_staleness 1 or more, or 0 here", choices=[0]
        )
    elif sampling.window_groups < sampling.prompts_per_step:
        problem = f"is smaller than a step of {sampling.prompts_per_step} groups"
        found.refuse(
            "sampling.window_groups",
            problem,
            f"Set {sampling.prompts_per_step} or more",
            choices=[sampling.prompts_per_step],
        )
    elif sampling.window_groups > most:
        problem = (
            f"is larger than the groups of {sampling.max_staleness + 1} steps: complete groups would become too old"
        )
        found.refuse("sampling.window_groups", problem, f"Set {most} or less, or raise max_staleness", choices=[most])


def check_session(found: Findings) -> None:
    """Check the limits of sessions, and what only sessions use."""
    cfg = found.cfg
    found.in_range("session")
    host, _, port = cfg.session.endpoint.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        found.refuse("session.endpoint", "is not HOST:PORT", "Write an address and a port of 0 to 65535, 0 for any")
    if cfg.session.max_tokens is not None and cfg.session.max_tokens <= cfg.sampling.max_prompt_tokens:
        found.refuse(
            "session.max_tokens",
            f"leaves no token to sample after a prompt of {cfg.sampling.max_prompt_tokens}",
            "Raise it above --sampling.max_prompt_tokens",
        )
    if cfg.algo.advantage_unit == "turn" and not any(one.agent for one in cfg.data.environments):
        found.refuse("algo.advantage_unit", "has no effect: no source has an agent", "Set trajectory, or name an agent")
