"""Report every mistake of a configuration at once, before anything starts.

In: a ``RunConfig``. Out: a list of :class:`Violation`, empty if the run can start; each names the option as it is
typed (``--parallel.tensor``), its value, the problem and the remedy. Reads the file system, changes nothing and imports
nothing heavy, so it runs on a login node and in every trainer process.

Consequences of a mistake are not reported as further mistakes: if a degree does not divide the number of heads, for
example, the matrices that it divides are not checked.
"""

from __future__ import annotations

import importlib.util
import math
import string
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from megatron_fp8rl.algo import load_function
from megatron_fp8rl.config import KERNELS, EnvironmentConfig, RunConfig, Violation
from megatron_fp8rl.data import run_folder
from megatron_fp8rl.envs import sandbox
from megatron_fp8rl.envs.rewards import configured as rewards
from megatron_fp8rl.envs.source_kind import files_of, has_rows, kind_of
from megatron_fp8rl.precision.hardware import Generation, Hardware, generation_of
from megatron_fp8rl.precision.kernel_choice import refusals
from megatron_fp8rl.preflight.engine_rules import check_engines, check_session, check_window, too_long
from megatron_fp8rl.preflight.findings import Findings
from megatron_fp8rl.preflight.shapes import check_degrees, check_model, check_source
from megatron_fp8rl.preflight.tiling import check_tiling
from megatron_fp8rl.rollout.vllm_args import kv_token_bytes


def check(cfg: RunConfig, *, accelerator: Generation | None = None) -> list[Violation]:
    """All mistakes of ``cfg``. ``accelerator`` is the hardware the trainer will run on; None: that of this machine."""
    found = Findings(cfg)
    accelerator = accelerator or local_accelerator()
    _check_run(found)
    model_is_sound = check_model(found)
    degrees_are_sound = check_degrees(found, model_is_sound)
    _check_precision(found)
    found.violations += refusals(cfg, Hardware(accelerator))
    if model_is_sound and degrees_are_sound:
        check_tiling(found)
    _check_optim(found)
    _check_rollout(found, accelerator)
    check_engines(found, accelerator)
    check_window(found)
    check_session(found)
    _check_algo(found)
    _check_data(found)
    _check_storage(found)
    return found.violations


@cache
def local_accelerator() -> Generation:
    """The GPU generation of this machine, as reported by ``nvidia-smi``; "cpu" if there is no GPU."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "cpu"
    return generation_of(int(float(answer[0])) if answer else 0)


def _check_run(found: Findings) -> None:
    cfg = found.cfg
    if cfg.name in ("", ".", "..") or "/" in cfg.name or cfg.name != cfg.name.strip():
        found.refuse("name", "cannot name a folder", "Use a plain word without slashes")
    found.in_range("")


def _check_precision(found: Findings) -> None:
    cfg, precision = found.cfg, found.cfg.precision
    for role, kernel in precision.kernels.items():
        if role not in KERNELS:
            remedy = f"Use one of {', '.join(KERNELS)}"
            found.refuse("precision.kernels", f"{role!r} is no role", remedy)
        elif kernel not in KERNELS[role]:
            choices = KERNELS[role]
            remedy = f"Choose one of {', '.join(choices)}"
            found.refuse(f"precision.kernels.{role}", "is no kernel of this role", remedy, choices=choices)
    if found.in_range("precision"):
        edges = precision.bf16_first_layers + precision.bf16_last_layers
        if edges > cfg.model.num_layers:
            path = max(("precision.bf16_first_layers", "precision.bf16_last_layers"), key=found.value)
            found.refuse(
                path,
                f"together the BF16 edges count {edges} layers and the model has {cfg.model.num_layers}",
                f"Lower the two to {cfg.model.num_layers} layers at most",
                choices=[max(0, cfg.model.num_layers - (edges - found.value(path)))],
            )


def _check_optim(found: Findings) -> None:
    optim = found.cfg.optim
    found.in_range("optim")
    if 0 < optim.lr < optim.min_lr:
        found.refuse("optim.min_lr", f"exceeds the learning rate {optim.lr}", "Lower it")
    model = found.cfg.model
    parts = {
        "core_attn": True,
        "mlp": not model.is_moe or model.first_dense_layers > 0,
        "moe": model.is_moe,
        "shared_experts": model.num_shared_experts > 0,
    }
    if optim.recompute == "selective" and not any(parts[name] for name in optim.recompute_modules):
        has = " or ".join(name for name, is_there in parts.items() if is_there)
        found.refuse("optim.recompute_modules", "names no part of this model", f"Use {has}, or --optim.recompute none")
    if optim.moe_aux_loss_coef > 0 and not model.is_moe:
        found.refuse("optim.moe_aux_loss_coef", "balances experts, and the model is dense", "Set 0")


def _check_rollout(found: Findings, accelerator: Generation) -> None:
    cfg, engine, sampling, model = found.cfg, found.cfg.engine, found.cfg.sampling, found.cfg.model
    found.in_range("engine", "sampling", "weight_sync", "scoring", "warm_start")
    if any(not text for text in sampling.stop_strings):
        found.refuse("sampling.stop_strings", "holds an empty string, which stops at once", "Remove it")
    if wrong := [token for token in sampling.stop_token_ids if not 0 <= token < model.vocab_size]:
        found.refuse(
            "sampling.stop_token_ids", f"{wrong} are not in the vocabulary of {model.vocab_size}", "Remove them"
        )
    if engine.record_routed_experts and not model.is_moe:
        found.refuse("engine.record_routed_experts", "records a router, and the model is dense", "Set False")
    if engine.kv_cache_dtype == "fp8" and model.mla is not None:
        found.refuse(
            "engine.kv_cache_dtype",
            "latent attention caches one vector for keys and values, for which no scales are measured",
            "Set auto",
        )
    if not found.in_range("sampling", "optim.max_tokens_per_microbatch"):
        return
    longest = cfg.max_sequence_tokens
    if longest > model.max_sequence_tokens:
        limit = "positions" if model.max_sequence_tokens == model.max_position_embeddings else "tokens in its window"
        path, problem, remedy, choice = too_long(cfg, f"the model has {model.max_sequence_tokens} {limit}")
        found.refuse(path, problem, remedy, choices=[choice])
    elif longest > found.cfg.optim.max_tokens_per_microbatch:
        found.refuse(
            "optim.max_tokens_per_microbatch",
            f"cannot hold one sequence of {longest} tokens (max_prompt_tokens + max_completion_tokens, or "
            "session.max_tokens)",
            f"Set it to {longest} or more",
            choices=[longest],
        )
    if engine.kv_cache_bytes is not None:
        per_token = kv_token_bytes(cfg.model, cfg.engine, cpu=accelerator == "cpu")
        if engine.kv_cache_bytes < longest * per_token:
            found.refuse(
                "engine.kv_cache_bytes",
                f"cannot hold one sequence of {longest} tokens at {per_token} bytes each",
                f"Set it to {longest * per_token} or more; many sequences need a multiple of that",
                choices=[longest * per_token],
            )
    num_rollouts = sampling.prompts_per_step * sampling.completions_per_prompt
    if 1 <= num_rollouts < cfg.algo.updates_per_step:
        found.refuse(
            "algo.updates_per_step",
            f"splits the {num_rollouts} rollouts of a step into empty batches",
            f"Set it to {num_rollouts} or less",
            choices=[num_rollouts],
        )


def _check_algo(found: Findings) -> None:
    cfg, algo = found.cfg, found.cfg.algo
    if 1 <= cfg.sampling.completions_per_prompt < 2:
        found.refuse(
            "sampling.completions_per_prompt",
            "leaves nothing to compare within a group, so every advantage is 0",
            "Set it to 2 or more; 8 is usual",
            choices=(2, 8),
        )
    found.violations += load_function.errors(algo)
    is_unbounded = algo.clip_low == 1 and load_function.may_lack_lower_clip(algo)
    found.within("algo.clip_low", "(0, 1]" if is_unbounded else "(0, 1)")
    found.in_range("algo")
    dual_clip = algo.loss_options.get("dual_clip")
    is_valid = dual_clip is None or (isinstance(dual_clip, int | float) and dual_clip > 1 + algo.clip_high)
    if ":" not in algo.loss and not is_valid:
        found.refuse(
            "algo.loss_options.dual_clip",
            f"has to lie above 1 + clip_high = {1 + algo.clip_high:g}, where the ordinary clip ends",
            "Set 3.0, as its authors did, or None",
            value=dual_clip,
        )
    _check_correction(found)
    _check_recording(found)
    _check_router_replay(found)
    if algo.overlong == "mask" and found.cfg.sampling.max_completion_tokens == 1:
        problem = "leaves out what ends at the limit, and every completion of one token does"
        found.refuse("algo.overlong", problem, "Raise --sampling.max_completion_tokens")
    if algo.overlong == "penalty":
        limit = cfg.sampling.max_completion_tokens
        if not 1 <= algo.overlong_buffer_tokens <= limit:
            found.refuse(
                "algo.overlong_buffer_tokens",
                "the penalty has to begin within the completion",
                f"Choose 1 to {limit} tokens before the limit of {limit}",
                choices=(1, limit),
            )
    elif algo.overlong_buffer_tokens > 0:
        found.refuse(
            "algo.overlong_buffer_tokens", "has no effect", "Set --algo.overlong penalty, or 0 here", choices=[0]
        )


def _check_recording(found: Findings) -> None:
    """Check that there is what a replay reads."""
    cfg, folder = found.cfg, found.cfg.sampling.replay
    if folder is None:
        return
    from megatron_fp8rl.observe import recording

    missing = set(range(1, cfg.num_steps + 1)) - set(steps := recording.steps_of(folder))
    if not steps:
        found.refuse("sampling.replay", "holds no recorded steps", "Name the folder rollouts of an earlier run")
    elif missing:
        problem = f"holds no step {min(missing)}, and num_steps = {cfg.num_steps}"
        found.refuse("sampling.replay", problem, f"Set --num_steps {min(missing) - 1}, or name a longer recording")
    if cfg.observe.eval_every:
        found.refuse("observe.eval_every", "has no effect: a replay samples nothing", "Set 0", choices=[0])
    if steps and cfg.model.is_moe and cfg.algo.router_replay == "rollout" and recording.lacks_experts(folder):
        found.refuse(
            "sampling.replay",
            "holds no routed experts, which algo.router_replay = rollout replays",
            "Name a run with --engine.record_routed_experts True, or set --algo.router_replay old or off",
        )


def _check_router_replay(found: Findings) -> None:
    """Check that there is a router, and that "rollout" has the engine's experts to replay."""
    cfg, mode = found.cfg, found.cfg.algo.router_replay
    if mode == "off":
        return
    if not cfg.model.is_moe:
        found.refuse("algo.router_replay", "replays a router, and the model is dense", "Set off", choices=["off"])
    elif mode == "rollout" and cfg.sampling.replay is None and not cfg.engine.record_routed_experts:
        found.refuse(
            "algo.router_replay",
            "replays the engines' experts, which they do not record",
            "Set --engine.record_routed_experts True, or old or off here",
            choices=("old", "off"),
        )


def _check_correction(found: Findings) -> None:
    """Check the bounds of the importance weight, which is 1 where trainer and engine agree."""
    algo = found.cfg.algo
    if algo.correction == "off":
        return
    if algo.correction.endswith("mask") and algo.correction_low >= algo.correction_high:
        found.refuse(
            "algo.correction_low",
            f"is not below correction_high = {algo.correction_high}, so that every token would be masked",
            "Choose bounds on both sides of 1, such as 0.5 and 2.0",
        )
    elif algo.correction_high < 1:
        found.refuse(
            "algo.correction_high",
            "is below 1, the weight of a token on which trainer and engine agree",
            "Set it above 1; 2.0 is usual",
        )
    elif algo.correction.endswith("mask") and algo.correction_low > 1:
        found.refuse(
            "algo.correction_low",
            "is above 1, the weight of a token on which trainer and engine agree",
            "Set it below 1; 0.5 is usual",
        )


def _check_data(found: Findings) -> None:
    data = found.cfg.data
    if not data.environments:
        found.refuse("data.environments", "there is nothing to learn", "Name at least one EnvironmentConfig")
    for index, environment in enumerate(data.environments):
        path = f"data.environments.{index}"
        if not 0 < environment.weight < math.inf:
            found.refuse(f"{path}.weight", "is not a number above 0", "Set a positive share", value=environment.weight)
        if not environment.dataset:
            found.refuse(
                f"{path}.dataset", "names nothing", "Name a file, or a generator such as chain_sum", value="''"
            )
        _check_source(found, path, environment)
        try:
            fields = {name for _, name, _, _ in string.Formatter().parse(environment.template) if name is not None}
        except ValueError as error:
            found.refuse(f"{path}.template", str(error), "Write literal braces twice", value=environment.template)
            continue
        if not fields:
            problem = "mentions no field, so that every prompt is the same"
            found.refuse(f"{path}.template", problem, "Use {question}", value=environment.template)
    if data.tokenizer != "character" and not Path(data.tokenizer).is_dir():
        found.refuse("data.tokenizer", "is not a directory", 'Name a tokenizer\'s directory, or "character"')
    if data.chat_template and not _has_chat_template(found.cfg.model.hf_path or data.tokenizer):
        problem = f"the tokenizer {found.cfg.model.hf_path or data.tokenizer} has no chat template"
        found.refuse("data.chat_template", problem, "Set False, or add chat_template.jinja to its folder")
    found.in_range("data")
    if found.cfg.warm_start.stop_pass_rate is not None and found.cfg.observe.eval_prompts == 0:
        found.refuse(
            "warm_start.stop_pass_rate",
            "is measured on held-out problems, of which observe.eval_prompts = 0 asks none",
            "Set --observe.eval_prompts, or None here",
        )


def _has_chat_template(tokenizer: str) -> bool:
    """As far as its files tell; a folder that is missing is refused elsewhere."""
    folder = Path(tokenizer)
    if not folder.is_dir():
        return tokenizer != "character"
    config = folder / "tokenizer_config.json"
    return any(folder.glob("*chat_template*")) or (config.is_file() and b'"chat_template"' in config.read_bytes())


def _check_source(found: Findings, path: str, environment: EnvironmentConfig) -> None:
    """The files of rows, and what scores them."""
    is_rows = has_rows(environment.dataset)
    for field in ("dataset", "eval"):
        name = getattr(environment, field)
        try:
            if name and kind_of(name) == "rows":
                files_of(name)
        except FileNotFoundError as error:
            problem = str(error).removeprefix(f"{name}: ").rstrip("?")
            found.refuse(f"{path}.{field}", problem, "Name other files", value=name)
    if is_rows and not environment.rewards:
        remedy = f"Set --{path}.rewards to exact, number, choice, math, code or FILE.py:function"
        found.refuse(f"{path}.rewards", f"nothing scores the answers to {environment.dataset}", remedy, value=())
    if not is_rows:
        for field in ("eval", "rewards", "prompt_column", "answer_column"):
            if value := getattr(environment, field):
                problem = f"is of rows, and {environment.dataset} makes and scores its own problems"
                found.refuse(f"{path}.{field}", problem, "Leave it out", value=value)
    for index, reward in enumerate(environment.rewards):
        if problem := rewards.problem(reward):
            found.refuse(f"{path}.rewards.{index}.function", problem.rstrip("?"), "Mend it", value=reward.function)
        elif rewards.needs_sandbox(reward) and (reason := sandbox.problem()):
            found.refuse(f"{path}.rewards.{index}.function", reason, "Or choose another reward", value=reward.function)


def _can_be_written(folder: Path) -> bool:
    """By writing: root may write anywhere as far as permissions tell."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _check_storage(found: Findings) -> None:
    """Check folders that must exist or be writable, and the packages that logging needs."""
    cfg = found.cfg
    check_source(found)
    try:
        run_dir = Path(cfg.run_dir)
    except (KeyError, IndexError, ValueError):
        found.refuse("output_dir", "may hold {name} and no other braces", "Use runs/{name}")
    else:
        existing = next(folder for folder in (run_dir, *run_dir.absolute().parents) if folder.exists())
        if not _can_be_written(existing):
            found.refuse("output_dir", f"{existing} is not a folder that can be written", "Name another")
        else:
            found.violations += run_folder.violations(cfg)
    model, tokenizer = cfg.model.hf_path, cfg.data.tokenizer
    if model is not None and tokenizer != "character" and Path(tokenizer).absolute() != Path(model).absolute():
        remedy = f"Leave it out, or put its files into {model}"
        found.refuse("data.tokenizer", "is not used: the run takes the tokenizer of model.hf_path", remedy)
    found.in_range("checkpoint", "observe")
    if cfg.observe.wandb_project is not None and importlib.util.find_spec("wandb") is None:
        found.refuse("observe.wandb_project", "the package wandb is not installed", "Install it, or set None")
