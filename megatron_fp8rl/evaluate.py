"""Evaluate checkpoints: accuracy and pass@k on held-out problems.

    python -m megatron_fp8rl eval CONFIG --checkpoint PATH [PATH ...] --num_problems 200 --num_completions 8 --ks 1 4 8

In: a configuration and checkpoints of its model: Hugging Face folders, folders converted by checkpoint_tools,
checkpoints of a run, or run folders. The same engines evaluate all on the same problems and compare them with the
first, problem by problem. Out, under ``<run>/evaluations/<checkpoint>``:

    eval.json        accuracy and pass@k with intervals, by environment and over all problems
    problems.jsonl   every problem with its completions and rewards
    logs/            logs of the engines that this program started

The run's report shows the results. Trainer ranks load the weights and publish them to engines as in training, with
verification, so the policy is measured in rollout precision. :func:`plan` needs no torch; the rest runs on every
trainer rank.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fp8rl.config import (
    ConfigError,
    DataConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    ObserveConfig,
    RunConfig,
    Violation,
)
from megatron_fp8rl.data.checkpoint_dir import STATE_FILE, latest, missing_part
from megatron_fp8rl.data.checkpoint_error import CheckpointError
from megatron_fp8rl.data.gguf_folder import model_folder
from megatron_fp8rl.preflight.folder_check import check_folder
from megatron_fp8rl.preflight.shapes import differences

if TYPE_CHECKING:
    from megatron_fp8rl.rollout.fleet import Fleet
    from megatron_fp8rl.runtime.stop import StopRequest
    from megatron_fp8rl.trainer.parallel import Parallel
    from megatron_fp8rl.types import Prompt, PublishReport, RolloutGroup

EVALUATIONS, RESULT, PROBLEMS = "evaluations", "eval.json", "problems.jsonl"
_CHECKPOINTS, _FINAL_HF, _MODEL_DIR = "checkpoints", "hf", "model"  # within a run's folder
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_completion_tokens")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_ROUNDS_IN_FLIGHT = 4  # requests in flight, as a multiple of the engines' concurrent sequences


@dataclass(frozen=True, kw_only=True)
class EvalOptions:
    """Options of the eval command."""

    # Folders with weights, FILE.gguf, or run folders: the newest checkpoint of each, or hf/ if it has none.
    checkpoint: tuple[str, ...] = ()
    num_problems: int | None = None  # held-out problems; None: observe.eval_prompts
    num_completions: int = 8  # completions sampled per problem
    ks: tuple[int, ...] = ()  # values of k for pass@k; empty: 1, 2, 4, ... up to num_completions


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A validated evaluation, built by :func:`plan`."""

    cfg: RunConfig
    checkpoints: tuple[Path, ...]
    model_dir: Path | None  # folder with the first one's config.json and tokenizer; None: from the configuration
    num_problems: int
    num_completions: int
    ks: tuple[int, ...]

    def config_of(self, checkpoint: Path) -> RunConfig:
        return replace(self.cfg, model=replace(self.cfg.model, hf_path=str(checkpoint)))

    def folder_of(self, checkpoint: Path) -> Path:
        return Path(self.cfg.run_dir) / EVALUATIONS / label(checkpoint, Path(self.cfg.run_dir))


def plan(cfg: RunConfig, options: EvalOptions) -> Evaluation:
    """Validate the options; only reads the file system. Raises ConfigError with all mistakes in the options."""
    from megatron_fp8rl.algo.pass_at_k import powers_of_two

    checkpoints, violations = _find_all(options.checkpoint)

    def refuse(option: str, value: Any, problem: str, remedy: str) -> None:
        violations.append(Violation(f"--{option}", value, problem, remedy))

    num_problems = cfg.observe.eval_prompts if options.num_problems is None else options.num_problems
    if num_problems < 1:
        refuse("num_problems", num_problems, "is below 1", "Use at least one problem; some hundreds are usual")
    if options.num_completions < 1:
        refuse("num_completions", options.num_completions, "is below 1", "Sample at least one completion per problem")
    elif bad := [k for k in options.ks if not 1 <= k <= options.num_completions]:
        problem = f"pass@{bad[0]} cannot be estimated from {options.num_completions} completions per problem"
        refuse("ks", options.ks, problem, f"Choose k from 1 to {options.num_completions}, or raise --num_completions")
    if cfg.sampling.replay is not None:
        refuse("sampling.replay", cfg.sampling.replay, "an evaluation samples by itself", "Leave it out")
    model_dirs = []
    for checkpoint in checkpoints:
        model_dir, errors = _model_dir(cfg.model, cfg.data, checkpoint)
        violations += errors
        model_dirs.append(model_dir)
        if (file := _other_tokenizer(model_dirs[0], model_dir)) is not None:
            refuse("checkpoint", checkpoint, f"{file} differs from that of {checkpoints[0]}", "Evaluate it by itself")
    if violations:
        raise ConfigError(violations)
    return Evaluation(
        cfg=replace(
            cfg,
            model=replace(cfg.model, hf_path=str(checkpoints[0])),
            engine=replace(cfg.engine, record_routed_experts=False),
            weight_sync=replace(cfg.weight_sync, verify_every=1),
            algo=replace(cfg.algo, router_replay="off"),
            lora=LoraConfig(),  # a folder of weights has merged adapters
        ),
        checkpoints=checkpoints,
        model_dir=model_dirs[0],
        num_problems=num_problems,
        num_completions=options.num_completions,
        ks=tuple(sorted(set(options.ks))) or powers_of_two(options.num_completions),
    )


def check(evaluation: Evaluation) -> None:
    """Compare the checkpoints with the model of the configuration, before anything starts. Raises ConfigError with the
    first differences of config.json, or missing, damaged and unexpected tensors."""
    for checkpoint in evaluation.checkpoints:
        config, model = checkpoint / "config.json", evaluation.config_of(checkpoint).model
        if config.is_file() and (problem := differences(config, model)):
            remedy = "Name the configuration of its run"
            raise ConfigError([Violation("--checkpoint", model.hf_path, f"is of another model: {problem}", remedy)])
        if ignored := check_folder(model, evaluation.model_dir, field="--checkpoint"):
            _say(evaluation.cfg.observe, ignored)


def label(checkpoint: Path, run_dir: Path) -> str:
    """Name of a checkpoint's evaluation: ``step_00000040`` or ``warm_start_hf``; another run's name comes first."""
    path, home = checkpoint.absolute(), run_dir.absolute()
    parts = path.relative_to(home).parts if path.is_relative_to(home) else path.parts[-3:]
    return "_".join(part for part in parts if part not in (_CHECKPOINTS, path.anchor))


def run(evaluation: Evaluation, *, deadline_s: float) -> None:
    """Collective: evaluate; rank 0 writes and prints the result. ``deadline_s``: longest wait between ranks. Ends
    between two batches of problems on a stop request; a restart begins from scratch."""
    from megatron_fp8rl.trainer.compat import megatron_on_cpu

    megatron_on_cpu.install()
    from megatron_fp8rl.data.model_dir import write_model_dir
    from megatron_fp8rl.data.prompts import PromptStream
    from megatron_fp8rl.data.tokenizer import load_tokenizer
    from megatron_fp8rl.envs.scoring import ScorePool
    from megatron_fp8rl.rollout.fleet import Fleet
    from megatron_fp8rl.rollout.stream import RolloutStream
    from megatron_fp8rl.runtime.colocation import wait_and_sleep
    from megatron_fp8rl.runtime.stop import StopRequest
    from megatron_fp8rl.trainer.parallel import Parallel

    cfg, started_s = evaluation.cfg, time.monotonic()
    stop = StopRequest.install()  # before starting anything that a signal to the whole job could kill
    with ExitStack() as stack:
        stack.enter_context(stop.watched(cfg.engine, deadline_s))
        stack.enter_context(stop.errors_noted())
        parallel = Parallel.init(cfg.parallel, deadline_s=deadline_s)
        stack.callback(parallel.close)
        model_dir, fleet, scorers = evaluation.model_dir, None, None
        if parallel.rank == 0:
            known = None if model_dir is None else str(model_dir)
            model_dir = write_model_dir(replace(cfg, model=replace(cfg.model, hf_path=known)))
            # Endpoint files of engines on other nodes are in the run's folder; local engines get a separate folder.
            local = evaluation.folder_of(evaluation.checkpoints[0])
            engine_dir = cfg.run_dir if cfg.engine.placement == "remote" else local
            fleet = stack.enter_context(Fleet.start(cfg, model_dir, engine_dir, wait=False))
            scorers = stack.enter_context(ScorePool.build(cfg.scoring, cfg.data.environments))
        model_dir = parallel.broadcast_object(model_dir)
        stream = PromptStream(cfg, load_tokenizer(str(model_dir)))
        prompts = stream.eval_prompts(evaluation.num_problems)
        if not prompts:
            raise ValueError("no source has held-out problems; name rows by --data.environments.0.eval")
        first: Mapping[str, float] = {}
        for number, checkpoint in enumerate(evaluation.checkpoints):
            with ExitStack() as weights:
                if fleet is not None:
                    wait_and_sleep(cfg.engine, fleet, stop.is_asked)
                stop.at_start(parallel)
                of_checkpoint = evaluation.config_of(checkpoint)
                published, republish = _publish(of_checkpoint, number, parallel, fleet, prompts, weights, stop)
                ready_s = time.monotonic()
                source = stream if parallel.rank == 0 else None
                rollouts = weights.enter_context(RolloutStream(cfg, fleet, source, scorers, parallel))
                rollouts.version, rollouts.republish = number, republish
                groups: list[RolloutGroup] = []
                for part in _rounds(cfg.engine, prompts, evaluation.num_completions):
                    stop.at_boundary(parallel, 0)
                    groups += rollouts.sample(part, num_completions=evaluation.num_completions)
                    if parallel.rank == 0:
                        seconds_so_far = f"{time.monotonic() - ready_s:.0f} s"
                        _say(cfg.observe, f"{len(groups)} of {len(prompts)} problems, {seconds_so_far}")
                rollouts.require_scores()
                if parallel.rank == 0:
                    seconds = {"start": ready_s - started_s, "sample": time.monotonic() - ready_s}
                    rates = _finish(evaluation, checkpoint, groups, published, seconds, first)
                    first, started_s = first or rates, time.monotonic()


def _publish(
    cfg: RunConfig,
    version: int,
    parallel: Parallel,
    fleet: Fleet | None,
    prompts: Sequence[Prompt],
    stack: ExitStack,
    stop: StopRequest,
) -> tuple[PublishReport, Callable[[], None] | None]:
    """Collective: load the checkpoint and publish it to the engines, which can sample afterwards.

    Returns the report, and a function that publishes again to restarted replicas; None if the engines' KV caches reuse
    the trainer's memory.
    """
    import torch

    from megatron_fp8rl.trainer.frozen import FrozenPolicy
    from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
    from megatron_fp8rl.weight_sync.publish import WeightExporter

    policy = FrozenPolicy.build(cfg, parallel)
    scales = policy.kv_scales(prompts[: cfg.sampling.prompts_per_step])
    exporter = WeightExporter(policy, fleet, PlanInputs.of(cfg))
    if fleet is not None:
        fleet.wait_until_ready(stop.is_asked)
    stop.at_start(parallel)
    if fleet is not None and cfg.engine.sleep_level:
        fleet.wake("weights")
    if not cfg.engine.sleep_level:
        stack.callback(exporter.close)
        return exporter.publish(version, scales), lambda: exporter.publish(version, scales)  # noqa: F821  the `del` is on another path
    try:
        published = exporter.publish(version, scales)
    finally:
        exporter.close()
    del exporter, policy
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    parallel.barrier("weights published")
    if fleet is not None:
        fleet.wake()
    return published, None


def _rounds(engine: EngineConfig, prompts: Sequence[Prompt], num_completions: int) -> Iterator[Sequence[Prompt]]:
    """Batches of problems large enough to keep the engines busy, small enough that no request times out in a queue."""
    at_once = _ROUNDS_IN_FLIGHT * engine.max_num_sequences * engine.num_replicas
    size = max(1, at_once // num_completions)
    return (prompts[start : start + size] for start in range(0, len(prompts), size))


def result_of(groups: Sequence[RolloutGroup], ks: Sequence[int]) -> dict[str, Any]:
    """Pure: estimates over scored groups of equal size. Keys of "pass_at" are strings, as in JSON. Without a meaning of
    passing (``observe.groups.passes``), "accuracy" is None and "pass_at" empty."""
    from megatron_fp8rl.algo.pass_at_k import accuracy, pass_at_ks
    from megatron_fp8rl.observe.groups import has_pass_rate, pass_counts

    counts = pass_counts(groups)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    has_rate = has_pass_rate(groups)
    return {
        "num_problems": len(groups),
        "num_completions": len(rollouts),
        "num_passed": sum(passed for _, passed in counts) if has_rate else None,
        "accuracy": asdict(accuracy(counts)) if has_rate else None,
        "pass_at": {str(k): asdict(estimate) for k, estimate in pass_at_ks(counts, ks).items()} if has_rate else {},
        "mean_reward": statistics.fmean(rollout.reward for rollout in rollouts),
        "mean_length_tokens": statistics.fmean(rollout.num_sampled_tokens for rollout in rollouts),
        "truncated": statistics.fmean(
            rollout.status == "truncated" or rollout.finish_reason == "length" for rollout in rollouts
        ),
        "not_scored": statistics.fmean(rollout.status == "score_failed" for rollout in rollouts),
    }


def summarize(groups: Sequence[RolloutGroup], ks: Sequence[int]) -> dict[str, Any]:
    """Pure: :func:`result_of` over all groups and for each environment."""
    names = sorted({group.prompt.environment for group in groups})
    by_name = {name: [group for group in groups if group.prompt.environment == name] for name in names}
    return {
        "overall": result_of(groups, ks),
        "environments": {name: result_of(part, ks) for name, part in by_name.items()},
    }


def table(summary: Mapping[str, Any]) -> str:
    """The result as a text table: one row per environment, and a total row if there are several."""
    from megatron_fp8rl.observe.display import interval_text, text_table

    rows = dict(summary["environments"])
    if len(rows) > 1:
        rows["all problems"] = summary["overall"]
    ks = list(summary["overall"]["pass_at"])
    has_rewards = any(row["accuracy"] is None for row in rows.values())  # shown where accuracy has no meaning
    header = ["", "problems", "completions", "accuracy", *(f"pass@{k}" for k in ks), *["reward"] * has_rewards]
    lines = [header]
    for name, row in rows.items():
        estimates = [row["accuracy"], *(row["pass_at"].get(k) for k in ks)]
        cells = ["-" if estimate is None else interval_text(estimate) for estimate in estimates]
        cells += [f"{row['mean_reward']:.3f}"] * has_rewards
        lines.append([name, str(row["num_problems"]), str(row["num_completions"]), *cells])
    return "\n".join(text_table(lines))


def _finish(
    evaluation: Evaluation,
    checkpoint: Path,
    groups: Sequence[RolloutGroup],
    published: PublishReport,
    seconds: Mapping[str, float],
    first: Mapping[str, float],
) -> dict[str, float]:
    """Write the result and the problems, and print the table. Returns the pass rate of each problem by its id, or
    nothing where passing has no meaning; ``first`` has those of the first checkpoint."""
    from megatron_fp8rl.algo.pass_at_k import difference
    from megatron_fp8rl.observe.display import interval_text
    from megatron_fp8rl.observe.groups import pass_rates
    from megatron_fp8rl.observe.records import write_json, write_text

    cfg, folder, problems = evaluation.cfg, evaluation.folder_of(checkpoint), [_problem(group) for group in groups]
    rates, state = pass_rates(problems), _state(checkpoint)
    change = (
        difference([list(first.values())], [list(rates.values())]) if first and first.keys() == rates.keys() else None
    )
    summary = {
        "name": folder.name,
        "checkpoint": str(checkpoint),
        "step": None if state.get("weights_only") else state.get("step"),
        "precision": cfg.precision.rollout,
        "seed": cfg.seed,
        "sampling": {name: getattr(cfg.sampling, name) for name in _SAMPLING},
        "intervals": "95 %: accuracy by Wilson's score, pass@k by bootstrap over problems",
        **summarize(groups, evaluation.ks),
        "compared_with": None if change is None else {"checkpoint": str(evaluation.checkpoints[0]), **asdict(change)},
        "weights_checksum": published.checksum,
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "finished_unix_s": time.time(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / PROBLEMS, "".join(json.dumps(problem) + "\n" for problem in problems))
    write_json(folder / RESULT, summary)
    if len(groups) < evaluation.num_problems:
        available = f"{len(groups)} of {evaluation.num_problems}"
        _say(cfg.observe, f"the environments have only {available} different held-out problems")
    if failed := [rollout for group in groups for rollout in group.rollouts if rollout.status == "score_failed"]:
        which = f"{len(failed)} of {summary['overall']['num_completions']} completions"
        _say(cfg.observe, f"{which} got no score and count as wrong, the first because {failed[0].detail}")
    print(f"\n{checkpoint}, rollouts in {cfg.precision.rollout}, temperature {cfg.sampling.temperature:g}")
    print(table(summary))
    if change is not None:
        print(f"difference from {evaluation.checkpoints[0]}: {interval_text(asdict(change))}")
    print(folder / RESULT, flush=True)
    return rates


def _problem(group: RolloutGroup) -> dict[str, Any]:
    from megatron_fp8rl.observe.groups import has_pass_rate, pass_counts

    ((_, num_passed),) = pass_counts([group])
    return {
        "prompt_id": group.prompt.prompt_id,
        "environment": group.prompt.environment,
        "num_completions": len(group.rollouts),
        "num_passed": num_passed if has_pass_rate([group]) else None,
        "prompt": group.prompt.text,
        "answer": group.prompt.answer,
        "completions": [
            {
                "text": "".join(branch.text for branch in rollout.branches[-1:]),
                "reward": rollout.reward,
                "num_tokens": rollout.num_sampled_tokens,
                "status": rollout.status,
                "seed": rollout.seed,
                **({"detail": rollout.detail} if rollout.detail else {}),
            }
            for rollout in group.rollouts
        ],
    }


def _find_all(checkpoints: Sequence[str]) -> tuple[tuple[Path, ...], list[Violation]]:
    """(folders with weights, violations)."""
    pairs = [_find(checkpoint) for checkpoint in checkpoints or ("",)]
    found = tuple(path for path, _ in pairs if path is not None)
    violations = [violation for _, errors in pairs for violation in errors]
    if twice := sorted({str(path) for path in found if found.count(path) > 1}):
        violations.append(Violation("--checkpoint", twice[0], "is named twice", "Name each checkpoint once"))
    return found, violations


def _other_tokenizer(first: Path | None, other: Path | None) -> str | None:
    """The first file of the tokenizer that differs between two folders; problems are tokenized once for all."""
    for name in _TOKENIZER_FILES if first and other else ():
        files = [folder / name for folder in (first, other)]
        if all(file.is_file() for file in files) and files[0].read_bytes() != files[1].read_bytes():
            return name
    return None


def _find(checkpoint: str) -> tuple[Path | None, list[Violation]]:
    """(folder with weights or None, violations)."""
    path = Path(checkpoint)

    def refuse(problem: str, remedy: str) -> tuple[None, list[Violation]]:
        return None, [Violation("--checkpoint", checkpoint, problem, remedy)]

    if not checkpoint:
        return refuse("is empty", "Name a Hugging Face or converted folder, a checkpoint of a run, or a run's folder")
    try:
        path = model_folder(path)
    except CheckpointError as error:
        return refuse("; ".join(error.problems), "Name another checkpoint")
    if not path.is_dir():
        return refuse("is not a folder", "Check the spelling; the folder must be on a file system of this machine")
    if not _has_weights(path):
        newest = latest(path / _CHECKPOINTS) or latest(path)
        path = newest or path / _FINAL_HF
        if newest is None and not _has_weights(path):
            return refuse(
                "contains no weights, and neither a complete checkpoint nor hf/ as a run's folder does",
                "Name a folder with *.safetensors or .metadata, or a run that has saved a checkpoint",
            )
    if (path / STATE_FILE).is_file() and (missing := missing_part(path)) is not None:
        return refuse(f"is incomplete: {missing}", "Choose another checkpoint, or convert it again")
    return path, []


def _has_weights(folder: Path) -> bool:
    """Whether the folder is in Hugging Face format or a Megatron-Core distributed checkpoint."""
    is_hf = (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))
    return is_hf or (folder / ".metadata").is_file()


def _state(checkpoint: Path) -> dict[str, Any]:
    file = checkpoint / STATE_FILE
    return json.loads(file.read_text()) if file.is_file() else {}


def _model_dir(model: ModelConfig, data: DataConfig, checkpoint: Path) -> tuple[Path | None, list[Violation]]:
    """(folder with the checkpoint's config.json and tokenizer, violations if it cannot be determined).

    Searches the weights' folder, the run's initial weights and the run's folder. None for a run from random weights,
    whose configuration is sufficient.
    """
    recorded = _state(checkpoint).get("config", {})
    initial = recorded.get("model", {}).get("hf_path")
    run_dir = checkpoint.parent.parent if checkpoint.parent.name == _CHECKPOINTS else checkpoint.parent
    candidates = [checkpoint, *(Path(folder) for folder in (initial, model.hf_path) if folder), run_dir / _MODEL_DIR]
    model_dir = next((folder for folder in candidates if (folder / "config.json").is_file()), None)
    if model_dir is None and initial is not None:
        problem = f"is unknown for this checkpoint: its run started from {initial}, which does not exist here"
        return None, [Violation("--model.hf_path", model.hf_path, problem, "Name the folder with its tokenizer")]
    tokenizer = recorded.get("data", {}).get("tokenizer", data.tokenizer)
    if model_dir is None and tokenizer != data.tokenizer:
        problem = f"is not the checkpoint's tokenizer, {tokenizer!r}"
        return None, [Violation("--data.tokenizer", data.tokenizer, problem, f"Pass --data.tokenizer {tokenizer}")]
    return model_dir, []


def _say(observe: ObserveConfig, text: str) -> None:
    if observe.display != "none":
        print(f"eval: {text}", flush=True)
