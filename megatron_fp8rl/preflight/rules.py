"""Report every mistake of a configuration at once, before anything starts.

The checks read the file system, change nothing and import nothing heavy, so they run on a login node and in every
trainer process. Consequences of a mistake are not reported: if a degree does not divide the number of heads, the
matrices that it divides are not checked.
"""

import dataclasses
import importlib.util
import json
import math
import string
import tempfile
from pathlib import Path
from typing import Any

from megatron_fp8rl import upstream
from megatron_fp8rl.algo import load_function
from megatron_fp8rl.config import KERNELS, AlgoConfig, EngineConfig, EnvironmentConfig, RunConfig, Violation
from megatron_fp8rl.data import run_folder
from megatron_fp8rl.envs import agent_function, sandbox
from megatron_fp8rl.envs.rewards import configured as rewards
from megatron_fp8rl.envs.source_kind import CLASS, VERIFIERS, files_of, has_rows, is_supervised, kind_of
from megatron_fp8rl.kernels.compile_cache import gpus
from megatron_fp8rl.names import adapted
from megatron_fp8rl.precision.hardware import Generation, Hardware, generation_of
from megatron_fp8rl.precision.kernel_choice import is_invariant, refusals, resolved
from megatron_fp8rl.precision.kernel_support import invariant_nccl
from megatron_fp8rl.preflight import teachers
from megatron_fp8rl.preflight.findings import Checks
from megatron_fp8rl.preflight.shapes import (
    check_checkpoint,
    check_combined_matrices,
    check_degrees,
    check_delta_nets,
    check_model,
)
from megatron_fp8rl.preflight.tiling import check_tiling
from megatron_fp8rl.rollout.vllm_args import ADAPTER_RANKS, cpu_cache_bytes, kv_token_bytes


def check(cfg: RunConfig, *, accelerator: Generation | None = None) -> list[Violation]:
    """All mistakes of ``cfg``. ``accelerator`` is the hardware the trainer will run on; None: that of this machine."""
    checks = Checks(cfg)
    accelerator = accelerator or local_accelerator()
    if cfg.name in ("", ".", "..") or "/" in cfg.name or cfg.name != cfg.name.strip():
        checks.refuse("name", "cannot name a folder", "Use a plain word without slashes")
    checks.in_range("")
    model_is_valid = check_model(checks)
    degrees_are_valid = check_degrees(checks, model_is_valid)
    check_delta_nets(checks, accelerator)
    check_combined_matrices(checks)
    _check_precision(checks)
    checks.violations += refusals(cfg, Hardware(accelerator))
    if model_is_valid and degrees_are_valid:
        check_tiling(checks)
    _check_lora(checks, model_is_valid)
    _check_optim(checks)
    _check_sampling(checks)
    _check_lengths(checks, accelerator)
    _check_engines(checks, accelerator)
    _check_transport(checks, accelerator)
    _check_sleep_and_offload(checks)
    _check_window(checks)
    _check_session(checks)
    _check_algo(checks)
    _check_data(checks)
    _check_storage(checks)
    return checks.violations


def local_accelerator() -> Generation:
    """The GPU generation of this machine, as reported by ``nvidia-smi``; "cpu" if there is no GPU."""
    return generation_of(int(float((gpus("compute_cap") or ["0"])[0])))


def _check_precision(checks: Checks) -> None:
    cfg, precision = checks.cfg, checks.cfg.precision
    for role, kernel in precision.kernels.items():
        if role not in KERNELS:
            checks.refuse("precision.kernels", f"{role!r} is no role", f"Use one of {', '.join(KERNELS)}")
        elif kernel not in KERNELS[role]:
            checks.refuse(f"precision.kernels.{role}", "is no kernel of this role", choices=KERNELS[role])
    edges = precision.bf16_first_layers + precision.bf16_last_layers
    if checks.in_range("precision") and edges > (layers := cfg.model.num_layers):
        path = max(("precision.bf16_first_layers", "precision.bf16_last_layers"), key=checks.value)
        problem = f"together the BF16 edges count {edges} layers and the model has {layers}"
        most = max(0, layers - (edges - checks.value(path)))
        checks.refuse(path, problem, f"Lower the two to {layers} layers at most", [most])


def _check_lora(checks: Checks, model_is_valid: bool) -> None:
    cfg, lora = checks.cfg, checks.cfg.lora
    if not checks.in_range("lora"):
        return
    if not lora.rank:
        for name in (field.name for field in dataclasses.fields(lora) if getattr(lora, field.name) != field.default):
            checks.refuse(f"lora.{name}", "has no effect without adapters", "Set --lora.rank, such as 16")
        return
    if len(set(lora.targets)) != len(lora.targets):
        checks.refuse("lora.targets", "names a target twice", "Name each once")
    if unknown := sorted(set(lora.targets) - set(adapted.TARGETS)):
        checks.refuse("lora.targets", f"{', '.join(unknown)} is no target", choices=adapted.TARGETS)
    if unknown or not model_is_valid:
        return
    present = adapted.targets_in(cfg.model)
    if missing := [target for target in lora.targets if target not in present]:
        problem = f"names {', '.join(missing)}, and the model has no such linear"
        checks.refuse("lora.targets", problem, f"Choose from {', '.join(present)}", present)
    elif not lora.merge:
        _check_unmerged(checks, present)


def _check_unmerged(checks: Checks, present: tuple[str, ...]) -> None:
    """What engines with vLLM's adapters do not support."""
    cfg, otherwise = checks.cfg, "or --lora.merge True"
    most, targets = ADAPTER_RANKS[-1], cfg.lora.targets or present
    if cfg.lora.rank > most:
        checks.refuse("lora.rank", f"exceeds {most}, the limit of vLLM", f"Set {most} or less, {otherwise}", [most])
    if "experts" in targets:
        others = [target for target in targets if target != "experts"]
        problem = f"includes experts{'' if cfg.lora.targets else ' by default'}, whose adapters vLLM cannot add in FP8"
        checks.refuse("lora.targets", problem, f"Set {' '.join(others) or 'attention'}, {otherwise}", others)
    if cfg.model.has("mla"):
        problem = "vLLM folds a factor of latent attention into other products, without its adapter"
        checks.refuse("lora.merge", problem, "Set True", [True])
    if cfg.weight_sync.spare_weights != "none":
        problem = "has no effect, because engines keep the base (lora.merge)"
        checks.refuse("weight_sync.spare_weights", problem, f"Set none, {otherwise}", ["none"])
    if cfg.engine.speculation != "none":
        problem = "drafts of engines with adapters are not tested (lora.merge)"
        checks.refuse("engine.speculation", problem, f"Set none, {otherwise}", ["none"])
    if cfg.engine.sleep_level == 2:
        problem = "discards the base, which is sent only once (lora.merge)"
        checks.refuse("engine.sleep_level", problem, f"Set 1, {otherwise}", [1])


def _check_optim(checks: Checks) -> None:
    optim, model = checks.cfg.optim, checks.cfg.model
    checks.in_range("optim")
    if 0 < optim.lr < optim.min_lr:
        checks.refuse("optim.min_lr", f"exceeds the learning rate {optim.lr}", "Lower it")
    if optim.optimizer == "muon" and checks.cfg.lora.rank:
        checks.refuse("optim.optimizer", "trains matrices, and adapters are factors of matrices", choices=["adam"])
    elif optim.optimizer == "muon" and checks.cfg.precision.params == "fp8":
        remedy = "Set --precision.params bf16, or --optim.optimizer adam"
        checks.refuse("optim.optimizer", "is not tested with FP8 parameters", remedy, ["adam"])
    if optim.states != "fp32":
        _check_states(checks)
    parts = {
        "core_attn": True,
        "mlp": model.has("dense"),
        "moe": model.is_moe,
        "shared_experts": model.num_shared_experts > 0,
    }
    if optim.recompute == "selective" and not any(parts[name] for name in optim.recompute_modules):
        names = " or ".join(name for name, exists in parts.items() if exists)
        remedy = f"Use {names}, or --optim.recompute none"
        checks.refuse("optim.recompute_modules", "names no part of this model", remedy)
    if optim.moe_aux_loss_coef > 0 and not model.is_moe:
        checks.refuse("optim.moe_aux_loss_coef", "balances experts, and the model is dense", choices=[0])


def _check_states(checks: Checks) -> None:
    """A moment that rounding returns to its old value never decays: below half a unit in the last place."""
    optim = checks.cfg.optim
    if optim.optimizer == "muon":
        checks.refuse("optim.states", "reduces Adam's moments, and Muon needs its momentum in FP32", choices=["fp32"])
    half_units = {"bf16": 2**-8, "fp8": 2**-4}
    for name, kind in (("beta1", optim.states), ("beta2", "bf16")):
        half = half_units[kind]
        if not 1 - getattr(optim, name) > half:
            problem = f"is so near 1 that a moment in {kind.upper()} never decays (optim.states = {optim.states!r})"
            checks.refuse(f"optim.{name}", problem, f"Set less than {1 - half:.4g}, or --optim.states fp32", [])


def _check_sampling(checks: Checks) -> None:
    engine, sampling, model = checks.cfg.engine, checks.cfg.sampling, checks.cfg.model
    checks.in_range("engine", "sampling", "weight_sync", "scoring", "warm_start")
    if not all(sampling.stop_strings):
        checks.refuse("sampling.stop_strings", "contains an empty string, which stops at once", "Remove it")
    if wrong := [token for token in sampling.stop_token_ids if not 0 <= token < model.vocab_size]:
        problem = f"{wrong} are not in the vocabulary of {model.vocab_size}"
        checks.refuse("sampling.stop_token_ids", problem, "Remove them")
    if (
        sampling.truncates
        and sampling.replay is None
        and not upstream.applies("report_kept_entries", "TensorsWithKept")
    ):
        truncating = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
        path = next(f"sampling.{name}" for name, is_set in truncating.items() if is_set)
        problem = "needs the patch report_kept_entries, which was not tested with the installed version of vLLM"
        checks.refuse(path, problem, "Sample from the whole vocabulary, or install the version that is pinned")
    _check_speculation(checks)
    if engine.record_routed_experts and not model.is_moe:
        checks.refuse("engine.record_routed_experts", "records a router, and the model is dense", choices=[False])


def _check_speculation(checks: Checks) -> None:
    engine, default = checks.cfg.engine, EngineConfig()
    if engine.speculation == "none":
        for name in ("draft_tokens", "lookup_min", "lookup_max"):
            if getattr(engine, name) != getattr(default, name):
                checks.refuse(f"engine.{name}", "has no effect without drafts", "Set --engine.speculation ngram")
        return
    if not upstream.applies("verify_in_order"):
        problem = "needs the patch verify_in_order, which was not tested with the installed version of vLLM"
        checks.refuse("engine.speculation", problem, "Set none, or install the version that is pinned", ["none"])
    if engine.speculation == "mtp":
        _check_draft_layer(checks)
    elif engine.lookup_min > engine.lookup_max:
        problem = f"exceeds engine.lookup_max = {engine.lookup_max}"
        checks.refuse("engine.lookup_min", problem, f"Set {engine.lookup_max} or less", [engine.lookup_max])
    if engine.data > 1:
        problem = "is not tested with drafts (engine.speculation)"
        checks.refuse("engine.data", problem, "Set 1, or --engine.speculation none", [1])
    if checks.cfg.sampling.min_p > 0:
        problem = "vLLM does not apply min-p to drafts (engine.speculation)"
        checks.refuse("sampling.min_p", problem, "Set 0, or --engine.speculation none", [0])


def _check_draft_layer(checks: Checks) -> None:
    """Check a run whose drafts are of the model's multi-token prediction layer."""
    cfg, default, otherwise = checks.cfg, EngineConfig(), "or --engine.speculation none"
    if not upstream.applies("show_draft_model"):
        problem = "needs the patch show_draft_model, which was not tested with the installed version of vLLM"
        checks.refuse("engine.speculation", problem, "Set none, or install the version that is pinned", ["none"])
    if not cfg.model.num_mtp_layers:
        problem = "needs a multi-token prediction layer, and the model has none (model.num_mtp_layers is 0)"
        remedy = "Set --model.num_mtp_layers 1 if config.json has num_nextn_predict_layers, else ngram or none"
        checks.refuse("engine.speculation", problem, remedy, ["ngram", "none"])
    elif cfg.model.num_mtp_layers > 1:
        checks.refuse("model.num_mtp_layers", "more than one layer is not supported", f"Set 1, {otherwise}", [1])
    for name in ("lookup_min", "lookup_max"):
        if getattr(cfg.engine, name) != getattr(default, name):
            checks.refuse(f"engine.{name}", "is of n-grams, and engine.speculation is mtp", "Leave it out")
    for path, allowed, problem in (
        ("parallel.tensor", (1,), "the multi-token prediction layer is not divided over ranks"),
        ("parallel.pipeline", (1,), "the multi-token prediction layer reads the embedding, which the first stage has"),
        ("parallel.context", (1,), "the multi-token prediction layer reads the next token, which another rank has"),
        ("engine.tensor", (1,), "is not tested with multi-token prediction"),
        ("engine.sleep_level", (0, 1), "discards what the multi-token prediction layer computes once"),
        ("lora.rank", (None,), "is not tested with multi-token prediction"),
    ):
        if cfg.value(path) not in allowed:
            remedy = "Leave it out" if allowed == (None,) else f"Set {allowed[-1]}"
            checks.refuse(path, f"{problem} (engine.speculation is mtp)", f"{remedy}, {otherwise}", allowed)


def _check_lengths(checks: Checks, accelerator: Generation) -> None:
    cfg, engine, sampling, model = checks.cfg, checks.cfg.engine, checks.cfg.sampling, checks.cfg.model
    if not checks.in_range("sampling", "optim.max_tokens_per_microbatch"):
        return
    longest, most = cfg.max_sequence_tokens, model.max_sequence_tokens
    if longest > most:
        by_factor = "positions by the factor of its rope_scaling, which engines do not exceed"
        limit = "positions" if most == model.max_position_embeddings else by_factor
        if (cfg.session.max_tokens or 0) > most:
            problem = f"sessions reach {cfg.session.max_tokens} tokens, the model has {most} {limit}"
            checks.refuse("session.max_tokens", problem, f"Lower it to {most}", [most])
        else:
            problem = f"prompt and completion reach {longest} tokens, the model has {most} {limit}"
            fitting, field, other = most - sampling.max_prompt_tokens, "max_completion_tokens", "max_prompt_tokens"
            if fitting < 1:  # the prompts alone are too long
                fitting, field, other = max(1, most - sampling.max_completion_tokens), other, field
            remedy = f"Lower it to {fitting} or less, or lower --sampling.{other}"
            checks.refuse(f"sampling.{field}", problem, remedy, [fitting])
    elif longest > cfg.optim.max_tokens_per_microbatch:
        problem = f"cannot hold one sequence of {longest} tokens (max_prompt_tokens + max_completion_tokens, or "
        problem += "session.max_tokens)"
        checks.refuse("optim.max_tokens_per_microbatch", problem, f"Set it to {longest} or more", [longest])
    if engine.kv_cache_bytes is not None:
        is_expanded = accelerator == "cpu" and cfg.precision.exact is False
        per_token = kv_token_bytes(cfg.model, engine, expanded=is_expanded)
        least = max(longest * per_token, cpu_cache_bytes(cfg, 1) if model.has("gdn") else 0)
        if engine.kv_cache_bytes < least:
            problem = f"cannot hold one sequence of {longest} tokens at {per_token} bytes each"
            problem += ", and its states" if model.has("gdn") else ""
            remedy = f"Set it to {least} or more; many sequences need a multiple of that"
            checks.refuse("engine.kv_cache_bytes", problem, remedy, [least])
    num_rollouts = sampling.prompts_per_step * sampling.completions_per_prompt
    if num_rollouts < cfg.algo.updates_per_step:
        problem = f"splits the {num_rollouts} rollouts of a step into empty batches"
        checks.refuse("algo.updates_per_step", problem, f"Set it to {num_rollouts} or less", [num_rollouts])


def _check_engines(checks: Checks, accelerator: Generation) -> None:
    cfg, engine, model, world = checks.cfg, checks.cfg.engine, checks.cfg.model, checks.cfg.parallel.world_size
    if engine.kv_cache_dtype == "fp8" and model.has("mla") and (accelerator != "cpu" or cfg.precision.exact is False):
        problem = "latent attention caches one vector for keys and values; only exact runs on CPUs measure its scale"
        checks.refuse("engine.kv_cache_dtype", problem, choices=["auto"])
    total = engine.num_replicas * engine.ranks
    shares_gpus = accelerator != "cpu" and engine.placement == "colocated" and cfg.sampling.replay is None
    if shares_gpus and total > world >= 1:
        fitting = world // max(1, engine.ranks)
        lower = f"Lower it to {fitting}" if fitting else "Lower --engine.tensor"
        problem = f"colocated replicas of {engine.ranks} take {total} GPUs together, and the trainer has {world}"
        remedy = f"{lower}, or --engine.placement separate"
        checks.refuse("engine.num_replicas", problem, remedy, [fitting] if fitting else ())
    if not checks.in_range("engine.expert", "engine.data", "engine.tensor"):
        return
    if engine.data > 1 and not model.is_moe:
        problem = "copies attention for experts that are divided over all ranks, and the model is dense"
        checks.refuse("engine.data", problem, "Set 1 and raise --engine.num_replicas", [1])
    if engine.data > 1 and engine.sleep_level:
        problem = "is not tested with engines of several data-parallel ranks"
        checks.refuse("engine.sleep_level", problem, choices=[0])
    if engine.expert == 1:
        return
    if not model.is_moe:
        checks.refuse("engine.expert", "divides experts, and the model is dense", choices=[1])
    elif engine.expert != engine.ranks:
        problem = f"vLLM spreads whole experts over all data x tensor = {engine.ranks} ranks of a replica, or cuts each"
        checks.refuse("engine.expert", problem, choices=(engine.ranks, 1))
    elif model.num_experts % engine.expert:
        checks.refuse("engine.expert", f"does not divide {model.num_experts} experts", choices=[1])


def _check_transport(checks: Checks, accelerator: Generation) -> None:
    cfg, placement, transport = checks.cfg, checks.cfg.engine.placement, checks.cfg.weight_sync.transport
    path = "weight_sync.transport"
    if placement == "remote" and transport == "ipc" and cfg.sampling.replay is None:
        problem = "uses memory of one host, and engine.placement = 'remote' puts the engines on others"
        checks.refuse(path, problem, "Choose auto, which takes gloo without GPUs and nccl between them", ["auto"])
    elif transport == "nccl" and accelerator == "cpu":
        checks.refuse(path, "connects GPUs, and this machine has none", "Choose auto, ipc or gloo", ["auto"])
    elif transport == "nccl" and placement == "colocated":
        problem = "NCCL does not take two processes on one GPU, and the engines are colocated with the trainer"
        checks.refuse(path, problem, "Choose ipc, gloo across hosts, or --engine.placement separate", ("ipc", "gloo"))
    hardware = Hardware(accelerator)
    if is_invariant(cfg.engine, resolved(cfg, hardware).precision, hardware):
        checks.violations += filter(None, [invariant_nccl(cfg, hardware)])


def _check_sleep_and_offload(checks: Checks) -> None:
    """Sleeping and offloading need phases in which only the trainer or only the engines work."""
    cfg, engine, offload = checks.cfg, checks.cfg.engine, checks.cfg.optim.offload
    if cfg.weight_sync.spare_weights != "none" and engine.sleep_level:
        problem = "is for engines that sample while weights arrive, and with engine.sleep_level they sleep meanwhile"
        checks.refuse("weight_sync.spare_weights", problem, choices=["none"])
    if engine.sleep_level and engine.placement != "colocated":
        checks.refuse("engine.sleep_level", "frees memory of GPUs on which only engines work", choices=[0])
    if len(set(offload)) != len(offload):
        checks.refuse("optim.offload", "names a part twice", "Name each once")
    if cfg.sampling.max_staleness > 0:
        reason = "engines sample while the trainer works (sampling.max_staleness > 0)"
        if engine.sleep_level:
            checks.refuse("engine.sleep_level", f"{reason}, and cannot sleep", choices=[0])
        if offload:
            checks.refuse("optim.offload", f"{reason}, so that its state is always needed", "Leave it empty")
    if engine.sleep_level == 2 and cfg.model.has("mla"):
        problem = "drops tensors that latent attention computes from its weights once, and no update restores them"
        checks.refuse("engine.sleep_level", problem, choices=[1])


def _check_window(checks: Checks) -> None:
    sampling, path = checks.cfg.sampling, "sampling.window_groups"
    groups, most = sampling.prompts_per_step, (sampling.max_staleness + 1) * sampling.prompts_per_step
    if not sampling.window_groups:
        return
    if not sampling.max_staleness:
        problem = "takes groups out of order, and a synchronous run is reproducible bit for bit"
        checks.refuse(path, problem, "Set --sampling.max_staleness 1 or more, or 0 here", [0])
    elif sampling.window_groups < groups:
        checks.refuse(path, f"is smaller than a step of {groups} groups", f"Set {groups} or more", [groups])
    elif sampling.window_groups > most:
        problem = f"exceeds the groups of {sampling.max_staleness + 1} steps: complete groups would become too old"
        checks.refuse(path, problem, f"Set {most} or less, or raise max_staleness", [most])


def _check_session(checks: Checks) -> None:
    cfg, prompt = checks.cfg, checks.cfg.sampling.max_prompt_tokens
    checks.in_range("session")
    host, _, port = cfg.session.endpoint.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        remedy = "Write an address and a port of 0 to 65535, 0 for any"
        checks.refuse("session.endpoint", "is not HOST:PORT", remedy)
    if cfg.session.max_tokens is not None and cfg.session.max_tokens <= prompt:
        problem = f"leaves no token to sample after a prompt of {prompt}"
        checks.refuse("session.max_tokens", problem, "Raise it above --sampling.max_prompt_tokens")
    if cfg.algo.advantage_unit == "turn" and not any(source.agent for source in cfg.data.environments):
        problem = "has no effect: no source has an agent"
        checks.refuse("algo.advantage_unit", problem, "Set trajectory, or name an agent", ["trajectory"])


def _check_algo(checks: Checks) -> None:
    cfg, algo, limit = checks.cfg, checks.cfg.algo, checks.cfg.sampling.max_completion_tokens
    checks.violations += teachers.violations(cfg)
    if cfg.sampling.completions_per_prompt == 1 and not any(source.teacher for source in cfg.data.environments):
        problem = "leaves nothing to compare within a group, so every advantage is 0"
        checks.refuse("sampling.completions_per_prompt", problem, "Set it to 2 or more; 8 is usual", (2, 8))
    checks.violations += load_function.errors(algo)
    if algo.loss == "dpo" and not is_supervised(cfg):
        checks.refuse("algo.loss", "learns pairs of rows without rewards", "Use the command dpo, or another loss")
    if algo.loss == "dpo" and cfg.model.hf_path is None:
        checks.refuse("model.hf_path", "dpo starts from a trained model, its reference", "Name its folder")
    is_unbounded = algo.clip_low == 1 and load_function.may_lack_lower_clip(algo)
    checks.within("algo.clip_low", "(0, 1]" if is_unbounded else "(0, 1)")
    checks.in_range("algo")
    dual_clip = algo.loss_options.get("dual_clip")
    is_valid = dual_clip is None or (isinstance(dual_clip, int | float) and dual_clip > 1 + algo.clip_high)
    if ":" not in algo.loss and not is_valid:
        problem = f"has to lie above 1 + clip_high = {1 + algo.clip_high:g}, where the ordinary clip ends"
        checks.refuse("algo.loss_options.dual_clip", problem, "Set 3.0 (its authors' value) or None", value=dual_clip)
    _check_correction(checks)
    _check_replay(checks)
    _check_router_replay(checks)
    buffer = "algo.overlong_buffer_tokens"
    if algo.overlong == "mask" and limit == 1:
        problem = "masks completions that end at the limit, and every completion of one token does"
        checks.refuse("algo.overlong", problem, "Raise --sampling.max_completion_tokens")
    if algo.overlong == "penalty" and not 1 <= algo.overlong_buffer_tokens <= limit:
        remedy = f"Choose 1 to {limit} tokens before the limit of {limit}"
        checks.refuse(buffer, "the penalty has to begin within the completion", remedy, (1, limit))
    if algo.overlong != "penalty" and algo.overlong_buffer_tokens > 0:
        checks.refuse(buffer, "has no effect", "Set --algo.overlong penalty, or 0 here", [0])


def _check_replay(checks: Checks) -> None:
    """Check that the recording has everything that a replay reads."""
    cfg, folder = checks.cfg, checks.cfg.sampling.replay
    if folder is None:
        return
    from megatron_fp8rl.observe import recording

    missing = set(range(1, cfg.num_steps + 1)) - set(steps := recording.steps_of(folder))
    if not steps:
        checks.refuse("sampling.replay", "holds no recorded steps", "Name the folder rollouts of an earlier run")
    elif missing:
        problem = f"holds no step {min(missing)}, and num_steps = {cfg.num_steps}"
        remedy = f"Set --num_steps {min(missing) - 1}, or name a longer recording"
        checks.refuse("sampling.replay", problem, remedy)
    if cfg.observe.eval_every:
        checks.refuse("observe.eval_every", "has no effect: a replay samples nothing", choices=[0])
    if (
        steps
        and cfg.model.is_moe
        and cfg.algo.router_replay == "rollout"
        and recording.lacks(folder, "routed_experts_layout")
    ):
        problem = "holds no routed experts, which algo.router_replay = rollout replays"
        remedy = "Name a run with --engine.record_routed_experts True, or set --algo.router_replay old or off"
        checks.refuse("sampling.replay", problem, remedy)
    if steps and cfg.sampling.truncates and recording.lacks(folder, "kept"):
        problem = "holds no kept entries, which sampling.top_p, top_k and min_p need"
        remedy = "Name a run that sampled with them, or set --sampling.top_p 1, top_k 0 and min_p 0"
        checks.refuse("sampling.replay", problem, remedy)


def _check_router_replay(checks: Checks) -> None:
    """Check that there is a router, and that "rollout" has the engine's experts to replay."""
    cfg, mode = checks.cfg, checks.cfg.algo.router_replay
    if mode != "off" and not cfg.model.is_moe:
        checks.refuse("algo.router_replay", "replays a router, and the model is dense", choices=["off"])
    elif mode == "rollout" and cfg.sampling.replay is None and not cfg.engine.record_routed_experts:
        problem = "replays the engines' experts, which they do not record"
        remedy = "Set --engine.record_routed_experts True, or old or off here"
        checks.refuse("algo.router_replay", problem, remedy, ("old", "off"))


def _check_correction(checks: Checks) -> None:
    """Check the bounds of the importance weight, which is 1 where trainer and engine agree."""
    algo = checks.cfg.algo
    is_mask, weight = algo.correction.endswith("mask"), "the weight of a token on which trainer and engine agree"
    if algo.correction_quantile is not None:
        if algo.correction == "off":
            remedy = "Set --algo.correction truncate, or None here"
            checks.refuse("algo.correction_quantile", "has no effect with algo.correction = off", remedy, [None])
        for name in ("correction_low", "correction_high"):
            if getattr(algo, name) != (default := getattr(AlgoConfig, name)):
                problem = f"has no effect, because correction_quantile = {algo.correction_quantile} sets the bounds"
                checks.refuse(f"algo.{name}", problem, f"Set {default}, or --algo.correction_quantile None", [default])
        return
    if algo.correction == "off":
        return
    if is_mask and algo.correction_low >= algo.correction_high:
        problem = f"is not below correction_high = {algo.correction_high}, so that every token would be masked"
        checks.refuse("algo.correction_low", problem, "Choose bounds on both sides of 1, such as 0.5 and 2.0")
    elif algo.correction_high < 1:
        checks.refuse("algo.correction_high", f"is below 1, {weight}", "Set it above 1; 2.0 is usual")
    elif is_mask and algo.correction_low > 1:
        checks.refuse("algo.correction_low", f"is above 1, {weight}", "Set it below 1; 0.5 is usual")


def _check_data(checks: Checks) -> None:
    cfg, data = checks.cfg, checks.cfg.data
    if not data.environments:
        checks.refuse("data.environments", "there is nothing to learn", "Name at least one EnvironmentConfig")
    checks.violations += check_sources(cfg)
    if data.tokenizer != "character" and not Path(data.tokenizer).is_dir():
        checks.refuse("data.tokenizer", "is not a directory", 'Name a tokenizer\'s directory, or "character"')
    if data.chat_template and not _has_chat_template(tokenizer := cfg.model.hf_path or data.tokenizer):
        problem = f"the tokenizer {tokenizer} has no chat template"
        checks.refuse("data.chat_template", problem, "Set False, or add chat_template.jinja to its folder", [False])
    names = _named_templates(cfg.model.hf_path or data.tokenizer)
    if names and data.chat_template is not False and "chat_template" not in data.chat_template_arguments:
        problem = f"the tokenizer has the chat templates {', '.join(names)}, and none has the name default"
        remedy = f'Choose one by --data.chat_template_arguments \'{{"chat_template": "{names[0]}"}}\''
        checks.refuse("data.chat_template_arguments", problem, remedy)
    unread = Path(cfg.model.hf_path or data.tokenizer, "chat_template.json")
    if data.chat_template is not False and unread.is_file() and not _has_chat_template(str(unread.parent)):
        problem = f"{unread} is the template of a processor, which no tokenizer reads"
        remedy = "Write its text to chat_template.jinja, or set False to train without a template"
        checks.refuse("data.chat_template", problem, remedy, [False])
    checks.in_range("data")
    if cfg.warm_start.stop_pass_rate is not None and cfg.observe.eval_prompts == 0:
        problem = "is measured on held-out problems, and observe.eval_prompts = 0 asks for none"
        checks.refuse("warm_start.stop_pass_rate", problem, "Set --observe.eval_prompts, or None here")


def _has_chat_template(tokenizer: str) -> bool:
    """Whether a tokenizer's files have a chat template. A missing folder is refused elsewhere."""
    folder = Path(tokenizer)
    if not folder.is_dir():
        return tokenizer != "character"
    config = folder / "tokenizer_config.json"
    files = (folder / "chat_template.jinja", folder / "additional_chat_templates")
    return any(file.exists() for file in files) or (config.is_file() and b'"chat_template"' in config.read_bytes())


def check_sources(cfg: RunConfig) -> list[Violation]:
    """All mistakes of the data sources and their rewards, whatever the model is."""
    checks = Checks(cfg)
    for index, environment in enumerate(cfg.data.environments):
        _check_environment(checks, f"data.environments.{index}", environment)
    return checks.violations


def _named_templates(tokenizer: str) -> list[str]:
    """The names of a tokenizer's chat templates if none of them is the default; else empty."""
    folder = Path(tokenizer)
    names = sorted(file.stem for file in folder.glob("additional_chat_templates/*.jinja"))
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        templates = config.get("chat_template") if isinstance(config, dict) else None
        names += [entry["name"] for entry in templates] if isinstance(templates, list) else []
    except (OSError, ValueError, TypeError, KeyError):
        return []  # loading the tokenizer names the error
    is_default = "default" in names or isinstance(templates, str) or (folder / "chat_template.jinja").is_file()
    return [] if is_default else names


def _check_environment(checks: Checks, path: str, environment: EnvironmentConfig) -> None:
    def refuse(field: str, problem: str, remedy: str) -> None:
        value: Any = environment
        for name in field.split("."):
            value = value[int(name)] if name.isdigit() else getattr(value, name)
        checks.refuse(f"{path}.{field}", problem, remedy, value=value)

    if not 0 < environment.weight < math.inf:
        refuse("weight", "is not a number above 0", "Set a positive share")
    if not environment.dataset:
        refuse("dataset", "names nothing", "Name a file, or a generator such as chain_sum")
    if environment.dataset.startswith(VERIFIERS):
        remedy = "Copy the source that `grpo --data " + environment.dataset + " --dry-run` prints"
        refuse("dataset", "is a name for the command line", remedy)
    elif ":" in environment.dataset and kind_of(environment.dataset) == "class":
        if (wrong := agent_function.class_problem(environment.dataset.removeprefix(CLASS))) is not None:
            refuse(wrong.field, wrong.text, wrong.remedy)
    for field in ("dataset", "eval"):
        name = getattr(environment, field)
        try:
            if name and kind_of(name) == "rows":
                files_of(name)
        except FileNotFoundError as error:
            refuse(field, str(error).removeprefix(f"{name}: ").rstrip("?"), "Name other files")
    is_rows = has_rows(environment.dataset)
    has_scores = environment.rewards or environment.agent or environment.teacher
    if is_rows and not has_scores and not is_supervised(checks.cfg):
        remedy = f"Set --{path}.rewards to exact, number, choice, math, code or FILE.py:function"
        refuse("rewards", f"nothing scores the answers to {environment.dataset}", remedy)
    for field in () if is_rows else ("eval", "rewards", "prompt_column", "answer_column"):
        if getattr(environment, field):
            refuse(field, f"is of rows, and {environment.dataset} makes and scores its problems itself", "Leave it out")
    if environment.agent:
        has_scores = bool(environment.rewards) or not is_rows
        wrong = agent_function.problem(environment.agent, environment.agent_options, has_scores=has_scores)
        if wrong is not None:
            refuse(wrong.field, wrong.text, wrong.remedy)
    elif environment.agent_options:
        refuse("agent_options", "has no effect: the source has no agent", "Name an agent, or leave the options out")
    for field in ("options", "agent_options"):
        try:
            json.dumps(getattr(environment, field))
        except (TypeError, ValueError) as error:
            refuse(field, f"cannot be passed to another process: {error}", "Use numbers, texts, lists and dicts")
    for index, reward in enumerate(environment.rewards):
        if problem := rewards.problem(reward):
            refuse(f"rewards.{index}.function", problem.rstrip("?"), "Fix it")
        elif reward.function in [r.function for r in environment.rewards[:index] if rewards.says_what_is_right(r)]:
            refuse(f"rewards.{index}.function", "is named twice, and the pass rate uses one", "Leave one out")
        elif rewards.needs_sandbox(reward) and (reason := sandbox.problem()):
            refuse(f"rewards.{index}.function", reason, "Or choose another reward")
    try:
        fields = {name for _, name, _, _ in string.Formatter().parse(environment.template) if name is not None}
    except ValueError as error:
        refuse("template", str(error), "Write literal braces twice")
    else:
        if not fields:
            refuse("template", "mentions no field, so that every prompt is the same", "Use {question}")


def _can_be_written(folder: Path) -> bool:
    """Whether a file can be written; root may write anywhere as far as permissions tell."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _check_storage(checks: Checks) -> None:
    cfg = checks.cfg
    check_checkpoint(checks)
    try:
        run_dir = Path(cfg.run_dir)
    except (KeyError, IndexError, ValueError):
        checks.refuse("output_dir", "may hold {name} and no other braces", "Use runs/{name}")
    else:
        existing = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.exists())
        if not _can_be_written(existing):
            problem = f"{existing} is not a folder that can be written"
            checks.refuse("output_dir", problem, "Name another", value=str(run_dir))
        elif cfg.model.hf_path is not None and Path(cfg.model.hf_path).resolve() in run_dir.resolve().parents:
            checks.refuse("output_dir", "is inside the folder of the model", "Name another", value=str(run_dir))
        else:
            checks.violations += run_folder.violations(cfg)
    model, tokenizer = cfg.model.hf_path, cfg.data.tokenizer
    if model is not None and tokenizer != "character" and Path(tokenizer).absolute() != Path(model).absolute():
        remedy = f"Leave it out, or put its files into {model}"
        checks.refuse("data.tokenizer", "is not used: the run takes the tokenizer of model.hf_path", remedy)
    checks.in_range("checkpoint", "observe")
    if cfg.observe.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        checks.refuse("observe.wandb_project", "the package wandb is not installed", "Install it, or set None")
