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
    cfg, rollout = found.cfg, found.cfg.rollout
    wanted = rollout.num_replicas * rollout.ranks
    if accelerator == "cpu" or rollout.placement != "colocated" or rollout.replay is not None:
        return
    if wanted > cfg.parallel.world_size >= 1:
        fitting = cfg.parallel.world_size // max(1, rollout.ranks)
        lower = f"Lower it to {fitting}" if fitting else "Lower --rollout.tensor"
        found.refuse(
            "rollout.num_replicas",
            f"colocated replicas of {rollout.ranks} take {wanted} GPUs together, and the trainer has "
            f"{cfg.parallel.world_size}",
            f"{lower}, or --rollout.placement separate",
            choices=[fitting] if fitting else (),
        )


def _check_transport(found: Findings, accelerator: str) -> None:
    rollout = found.cfg.rollout
    if rollout.placement == "remote" and rollout.transport == "ipc" and rollout.replay is None:
        found.refuse(
            "rollout.transport",
            "travels through memory of one host, and rollout.placement = 'remote' puts the engines on others",
            "Choose auto, which takes gloo without GPUs and nccl between them",
            choices=["auto"],
        )
    elif rollout.transport == "nccl" and accelerator == "cpu":
        found.refuse(
            "rollout.transport",
            "travels between GPUs, and this machine has none",
            "Choose auto, ipc or gloo",
            choices=["auto"],
        )
    elif rollout.transport == "nccl" and rollout.placement == "colocated":
        found.refuse(
            "rollout.transport",
            "NCCL does not take two processes on one GPU, and the engines are colocated with the trainer",
            "Choose ipc, gloo across hosts, or --rollout.placement separate",
            choices=("ipc", "gloo"),
        )


def _check_expert_parallel(found: Findings) -> None:
    rollout, model = found.cfg.rollout, found.cfg.model
    if not found.in_range("rollout.expert", "rollout.data", "rollout.tensor"):
        return
    if rollout.data > 1 and not model.is_moe:
        found.refuse(
            "rollout.data",
            "repeats attention beside experts that are spread over all ranks, and the model is dense",
            "Set 1, and --rollout.num_replicas higher: replicas of a dense model share nothing",
            choices=[1],
        )
    if rollout.data > 1 and rollout.sleep_level:
        found.refuse("rollout.sleep_level", "is not tested with engines of several data-parallel ranks", "Set 0")
    if rollout.expert == 1:
        return
    if not model.is_moe:
        found.refuse("rollout.expert", "divides experts, and the model is dense", "Set 1")
    elif rollout.expert != rollout.ranks:
        found.refuse(
            "rollout.expert",
            f"vLLM spreads whole experts over all data x tensor = {rollout.ranks} ranks of a replica, or cuts each",
            f"Set {rollout.ranks} or 1",
            choices=(rollout.ranks, 1),
        )
    elif model.num_experts % rollout.expert:
        found.refuse("rollout.expert", f"does not divide {model.num_experts} experts", "Set 1")


def _check_memory_turns(found: Findings) -> None:
    """Sleeping and offloading need phases in which only the trainer or only the engines work."""
    rollout, offload = found.cfg.rollout, found.cfg.optim.offload
    if rollout.spare_weights != "none" and rollout.sleep_level:
        found.refuse(
            "rollout.spare_weights",
            "is for engines that sample while weights arrive, and these sleep until they have (rollout.sleep_level)",
            "Set none",
        )
    if rollout.sleep_level and rollout.placement != "colocated":
        found.refuse("rollout.sleep_level", "frees memory of GPUs on which only engines work", "Set 0")
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


def _check_batch_invariance(found: Findings, accelerator: Generation) -> None:
    rollout = found.cfg.rollout
    if not is_invariant(found.cfg, Hardware(accelerator)):
        return
    if rollout.transport == "nccl" or (rollout.transport == "auto" and rollout.placement == "remote"):
        found.refuse(
            "rollout.transport",
            "takes NCCL, for which vLLM gives batch-invariant engines an algorithm and a protocol of their own; ranks "
            "that differ in these may wait for each other for ever",
            "Set gloo, or ipc on one host",
            choices=("gloo", "ipc"),
        )


def too_long(cfg: RunConfig, limit: str) -> tuple[str, str, str, int]:
    """(field, problem, remedy, value to try) of sequences longer than the model's."""
    rollout, most = cfg.rollout, cfg.model.max_sequence_tokens
    if (cfg.session.max_tokens or 0) > most:
        problem = f"sessions reach {cfg.session.max_tokens} tokens, {limit}"
        return "session.max_tokens", problem, f"Lower it to {most}", most
    problem = f"prompt and completion reach {cfg.max_sequence_tokens} tokens, {limit}"
    fitting = max(1, most - rollout.max_prompt_tokens)
    remedy = f"Lower it to {fitting} or less, or lower --rollout.max_prompt_tokens"
    return "rollout.max_completion_tokens", problem, remedy, fitting


def check_window(found: Findings) -> None:
    """Check the window of groups that are sampled ahead."""
    rollout = found.cfg.rollout
    most = (rollout.max_staleness + 1) * rollout.prompts_per_step
    if not rollout.window_groups:
        return
    if not rollout.max_staleness:
        problem = "takes groups out of order, which a synchronous run, reproducible bit for bit, does not"
        found.refuse("rollout.window_groups", problem, "Set --rollout.max_staleness 1 or more, or 0 here", choices=[0])
    elif rollout.window_groups < rollout.prompts_per_step:
        problem = f"is smaller than a step of {rollout.prompts_per_step} groups"
        found.refuse(
            "rollout.window_groups",
            problem,
            f"Set {rollout.prompts_per_step} or more",
            choices=[rollout.prompts_per_step],
        )
    elif rollout.window_groups > most:
        problem = (
            f"is larger than the groups of {rollout.max_staleness + 1} steps: complete groups would become too old"
        )
        found.refuse("rollout.window_groups", problem, f"Set {most} or less, or raise max_staleness", choices=[most])


def check_session(found: Findings) -> None:
    """Check the limits of sessions, and what only sessions use."""
    cfg = found.cfg
    found.in_range("session")
    if cfg.session.max_tokens is not None and cfg.session.max_tokens <= cfg.rollout.max_prompt_tokens:
        found.refuse(
            "session.max_tokens",
            f"leaves no token to sample after a prompt of {cfg.rollout.max_prompt_tokens}",
            "Raise it above --rollout.max_prompt_tokens",
        )
    if cfg.algo.advantage_unit == "turn" and not any(one.agent for one in cfg.data.environments):
        found.refuse("algo.advantage_unit", "has no effect: no source has an agent", "Set trajectory, or name an agent")
