"""The reinforcement-learning loop, run identically by every trainer rank.

In: a RunConfig whose ``model.hf_path`` names the initial weights, and engines that may still be starting (None for a
replay). Out: a trained policy, and all files that the observer writes to the run's folder.

There is only one loop: asynchronous training is handled inside the rollout stream (``rollout.max_staleness``), a replay
is a stream that reads a file, and a larger cluster changes only numbers in the configuration.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_fp8rl.algo.load_function import load_advantage, load_loss
from megatron_fp8rl.algo.mismatch import InexactError, mismatch_metrics, require_exact
from megatron_fp8rl.algo.old_pass import needs_old_pass
from megatron_fp8rl.algo.samples import to_samples
from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.data.packing import build_for, divide_for, pack_for
from megatron_fp8rl.data.prompts import PromptStream
from megatron_fp8rl.data.tokenizer import load_tokenizer
from megatron_fp8rl.envs.scoring import ScorePool
from megatron_fp8rl.observe.observer import Observer, StepLog
from megatron_fp8rl.observe.spans import span
from megatron_fp8rl.precision.hardware import here
from megatron_fp8rl.precision.kernel_choice import KernelChoice, choose
from megatron_fp8rl.rollout.fleet import Fleet
from megatron_fp8rl.rollout.stream import RolloutStream
from megatron_fp8rl.runtime.colocation import ColocatedMemory
from megatron_fp8rl.runtime.gc_pause import gc_paused
from megatron_fp8rl.runtime.stop import StopRequest
from megatron_fp8rl.trainer import checkpoint, warm_up
from megatron_fp8rl.trainer.kv_scales import as_samples
from megatron_fp8rl.trainer.kv_scales import metrics as kv_metrics
from megatron_fp8rl.trainer.optimizer.offload import HostMemory
from megatron_fp8rl.trainer.optimizer.optimizer import adam_name
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from megatron_fp8rl.types import RolloutGroup, Sample, TrainBatch
from megatron_fp8rl.weight_sync.publish import WeightExporter
from megatron_fp8rl.weight_sync.save_hf import save_hf

CHECKPOINTS, FINAL_HF = "checkpoints", "hf"
Explain = Callable[[Policy, Fleet, Sequence[int]], str]  # why trainer and engine differ on these tokens


def run(
    cfg: RunConfig,
    parallel: Parallel,
    tokenizer_dir: Path,
    fleet: Fleet | None,
    stop: StopRequest | None = None,
    explain: Explain | None = None,
    host: HostMemory | None = None,
) -> None:
    """Collective: train from ``cfg.model.hf_path``, or from the run's newest checkpoint, to ``cfg.num_steps``.

    ``fleet`` exists on rank 0 only. An error on any rank ends the run on all. A run that ``stop`` asks to end saves and raises
    RunStopped. ``explain`` adds to the error of an exact run that is not; ``host`` is memory for what the policy offloads.
    """
    stop, is_driver, checkpoints = stop or StopRequest(), parallel.rank == 0, Path(cfg.run_dir) / CHECKPOINTS
    with ExitStack() as stack:
        observer = stack.enter_context(Observer(cfg, is_writer=is_driver))
        stack.enter_context(stop.errors_noted())
        learn = _learner(cfg, partial(_explain, explain, fleet))
        scorers = stack.enter_context(ScorePool.build(cfg.data)) if is_driver else None
        prompts = PromptStream(cfg, load_tokenizer(str(tokenizer_dir)), log=is_driver)
        with span("start_model"):
            policy = Policy.build(cfg, parallel, host)
            kernels = _note_kernels(cfg, observer)
            step, record, is_complete = _resume(policy, prompts, checkpoints, observer)
        stop.at_boundary(parallel, step)
        exporter = _exporter(policy, fleet, stack)  # planned while engines start
        if not is_complete:
            _wait_for_engines(policy, prompts, fleet, kernels, observer)
        rollouts = stack.enter_context(RolloutStream(cfg, fleet, prompts, scorers, parallel))
        colocated = ColocatedMemory(cfg, policy, fleet)
        publish = _publisher(exporter, policy, rollouts, colocated)
        saver = stack.enter_context(closing(checkpoint.Saver(checkpoints, policy)))
        save = partial(_save, cfg, saver, parallel, rollouts, _Minutes(cfg, parallel))
        on_request = partial(_save_on_request, save, rollouts, colocated)

        if not is_complete:
            with observer.prelude(step, record) as log:
                _calibrate_kv(cfg, policy, prompts, colocated)
                publish(step, log)
                _evaluate(cfg, rollouts, prompts, step, log)
                _resume_unfinished(rollouts, step, observer)
        while step < cfg.num_steps:
            stop.at_boundary(parallel, step, on_request)
            step += 1
            with observer.step(step) as log:
                groups = _next_groups(rollouts, stop, parallel, step, on_request)
                saver.poll()
                colocated.train()
                log.groups(groups)
                if not learn(policy, groups, log):
                    observer.warn(
                        f"step {step}: every group was dropped, so there is nothing to learn from{_why(groups)}"
                    )
                save(step, log)
                publish(step, log)
                _evaluate(cfg, rollouts, prompts, step, log)
            saver.poll()  # the step's line is on disk
        saver.finish()
        if cfg.checkpoint.export_hf:
            colocated.train()
            save_hf(policy, Path(cfg.run_dir) / FINAL_HF, tokenizer_dir)


def _exporter(policy: Policy, fleet: Fleet | None, stack: ExitStack) -> WeightExporter | None:
    """Collective: closed by ``stack``; None in a replayed run, which has no engines to update."""
    if policy.cfg.rollout.replay is not None:
        return None
    exporter = WeightExporter(policy, fleet, policy.cfg)
    stack.callback(exporter.close)
    return exporter


def _publisher(
    exporter: WeightExporter | None, policy: Policy, rollouts: RolloutStream, colocated: ColocatedMemory
) -> Callable[[int, StepLog], None]:
    """What publishes a version, also in the middle of a step."""
    if exporter is None:
        return partial(_count_version, rollouts)
    rollouts.republish = partial(_publish_again, exporter, policy, rollouts, colocated)
    return partial(_publish, exporter, policy, rollouts, colocated)


def _next_groups(
    rollouts: RolloutStream,
    stop: StopRequest,
    parallel: Parallel,
    step: int,
    on_request: Callable[[int], Path | None],
) -> tuple[RolloutGroup, ...]:
    """Collective: the groups of a step, on rank 0; raises RunStopped when the run is asked to stop while they are
    sampled."""
    while (groups := rollouts.next_groups(stop.is_asked)) is None:
        rollouts.abandon()  # nothing of this step has changed the policy
        stop.at_boundary(parallel, step - 1, on_request)
    return groups


def _resume_unfinished(rollouts: RolloutStream, step: int, observer: Observer) -> None:
    """Take up the groups that an earlier run finished of the next step."""
    if kept := rollouts.resume_unfinished():
        observer.message(f"{kept} groups of step {step + 1} were sampled before the run was stopped")


def _learner(cfg: RunConfig, explain: Callable[..., str]) -> Callable[..., bool]:
    """:func:`_learn` with the loss and the advantages of the configuration."""
    loss = load_loss(cfg.algo)
    sample = partial(to_samples, advantage_fn=load_advantage(cfg.algo), cfg=cfg)
    return partial(_learn, loss=loss, sample=sample, explain=explain)


def _note_kernels(cfg: RunConfig, observer: Observer) -> KernelChoice:
    """The kernels of both ends; those of the trainer are recorded."""
    kernels = choose(cfg, here(), "trainer")
    observer.note({**kernels.record(), "trainer kernel, optimizer": adam_name()})
    return kernels


def _wait_for_engines(
    policy: Policy, prompts: PromptStream, fleet: Fleet | None, kernels: KernelChoice, observer: Observer
) -> None:
    """Collective: warm the trainer up meanwhile. Rank 0: record the kernels that the engines report, and warn about each
    that is not the chosen one."""
    cfg = policy.cfg
    if warm_up.pays(cfg, policy.parallel.device.type):
        with span("start_warm_up"):
            warm_up.warm_up(policy, prompts.upcoming(cfg.rollout.prompts_per_step))
    if fleet is None:
        return
    with span("start_engines"):
        fleet.wait_until_ready()
    in_use = fleet.kernels()
    observer.note({f"engine kernel, {role}": ", ".join(names) for role, names in in_use.items()})
    for disagreement in kernels.disagreements(in_use):
        observer.warn(disagreement)


def _learn(
    policy: Policy,
    groups: tuple[RolloutGroup, ...],
    log: StepLog,
    *,
    loss: Callable[..., Any],
    sample: Callable[..., list[Sample]],
    explain: Callable[..., str],
) -> bool:
    """Collective: train the policy, at version ``log.step`` - 1, on the groups, which rank 0 has; False if no sample
    remains."""
    cfg, samples, shares = policy.cfg, [], None
    with span("pack"), gc_paused():  # of many objects, all of which stay
        if policy.parallel.rank == 0:
            samples = sample(groups, version=log.step - 1)
            log.samples(samples)
            shares = divide_for(cfg, samples, num_updates=cfg.algo.updates_per_step)
        batches = build_for(cfg, policy.parallel.scatter_over_data(shares))
    if not batches:
        return False
    exact = cfg.precision.exact
    in_update = exact or not needs_old_pass(cfg)
    with span("old_logprobs"):
        batches = [policy.with_old_logprobs(batch, are_rollout=exact, are_of_update=in_update) for batch in batches]
    if not in_update:
        with span("mismatch"):
            log.update(policy.router_metrics())
            log.mismatch(mismatch_metrics(batches, cfg.algo, policy.parallel))
    with span("update"):
        # The first update alone is on-policy.
        inspect = partial(_inspect, cfg, policy.parallel, log, partial(explain, policy, samples)) if in_update else None
        updates = [policy.update(batch, loss, inspect=inspect if i == 0 else None) for i, batch in enumerate(batches)]
        log.updates(updates, batches)
    return True


def _why(groups: Sequence[RolloutGroup]) -> str:
    """How many completions have no score, and why the first has none; empty if all have one."""
    details = [rollout.detail for group in groups for rollout in group.rollouts if rollout.status == "score_failed"]
    return f"; {len(details)} completions were not scored, the first because {details[0]}" if details else ""


def _inspect(
    cfg: RunConfig, parallel: Parallel, log: StepLog, explain: Callable[[str], str], batch: TrainBatch
) -> None:
    """Collective: measure the mismatch of the training pass itself; in an exact run raise InexactError if there is any."""
    report = mismatch_metrics([batch], cfg.algo, parallel)
    log.mismatch(report)
    if not cfg.precision.exact:
        return
    try:
        require_exact(report)
    except InexactError as error:
        raise InexactError(f"{error}. {explain(report.worst[0].label)}") from None


def _explain(explain: Explain | None, fleet: Fleet | None, policy: Policy, samples: list[Sample], name: str) -> str:
    """Collective: what rank 0 finds out about the sample of that name; empty without ``explain``."""
    found = ""
    if explain is not None and fleet is not None:
        found = explain(policy, fleet, next(sample.token_ids for sample in samples if sample.name == name))
    return policy.parallel.broadcast_object(found)


def _publish(
    exporter: WeightExporter,
    policy: Policy,
    rollouts: RolloutStream,
    colocated: ColocatedMemory,
    version: int,
    log: StepLog,
) -> None:
    """Collective: send the current weights to the engines, as policy ``version``."""
    rollouts.before_update()
    with colocated.publication(), span("publish"):
        scales = policy.kv_scales()
        log.publish(exporter.publish(version, scales))
    if scales is not None:
        log.update(kv_metrics(scales))
    rollouts.after_update(version)
    log.update(colocated.take_metrics())
    log.update(rollouts.take_metrics())


def _publish_again(
    exporter: WeightExporter, policy: Policy, rollouts: RolloutStream, colocated: ColocatedMemory
) -> None:
    """Collective: resend the current version to restarted replicas after all were lost in the middle of a step."""
    with colocated.publication():
        exporter.publish(rollouts.version, policy.kv_scales())


def _count_version(rollouts: RolloutStream, version: int, log: StepLog) -> None:
    """Advance the version in a replayed run."""
    rollouts.after_update(version)


def _calibrate_kv(cfg: RunConfig, policy: Policy, prompts: PromptStream, colocated: ColocatedMemory) -> None:
    """Collective: calibrate the FP8 KV cache scales on the first prompts, before any log-probabilities are computed."""
    if cfg.rollout.kv_cache_dtype != "fp8" or cfg.rollout.replay is not None:
        return
    colocated.train()
    with span("calibrate_kv"):
        first = as_samples(prompts.upcoming(cfg.rollout.prompts_per_step))
        for batch in pack_for(cfg, first, data_rank=policy.parallel.dp_rank):
            policy.calibrate_kv(batch)


def _evaluate(cfg: RunConfig, rollouts: RolloutStream, prompts: PromptStream, step: int, log: StepLog) -> None:
    """Collective: sample the held-out problems at the start, at the end, and every ``observe.eval_every`` steps."""
    is_due = step in (0, cfg.num_steps) or (cfg.observe.eval_every and step % cfg.observe.eval_every == 0)
    if not is_due or not cfg.observe.eval_prompts or cfg.rollout.replay is not None:
        return
    held_out = prompts.eval_prompts(cfg.observe.eval_prompts)
    if not held_out:  # rows without held-out ones
        return
    log.evaluation(rollouts.sample(held_out, num_completions=cfg.observe.eval_completions))


def _resume(
    policy: Policy, prompts: PromptStream, checkpoints: Path, observer: Observer
) -> tuple[int, dict[str, Any], bool]:
    """Collective: restore the newest checkpoint; returns its step (0 for a new run), the step's record until then, and
    whether the run is at its end: one that was killed after its last checkpoint may lack that step's line."""
    found = checkpoint.resume(checkpoints, policy, observer.message)
    if found is None:
        return 0, {}, policy.cfg.num_steps == 0
    step, extra = found
    if policy.parallel.device.type == "cuda":
        torch.cuda.empty_cache()  # reading holds parts of the state twice, and engines share this GPU
    prompts.position = extra["prompt_position"]
    record = extra.get("record", {})
    lacks_line = policy.parallel.broadcast_object(bool(record) and observer.lacks(step))
    return step, record, step >= policy.cfg.num_steps and not lacks_line


def _save(
    cfg: RunConfig,
    saver: checkpoint.Saver,
    parallel: Parallel,
    rollouts: RolloutStream,
    minutes: _Minutes,
    step: int,
    log: StepLog | None = None,
    *,
    is_asked: bool = False,
) -> Path | None:
    """Collective: begin a checkpoint every ``checkpoint.every_steps`` steps and ``every_minutes``, and after the last step.

    On request the checkpoint of the step is finished too, and returned.
    """
    every = cfg.checkpoint.every_steps
    is_due = step == cfg.num_steps or (every > 0 and step % every == 0)
    # On request: unless the end of the step has begun it.
    begins = not is_due and minutes.step != step if is_asked else is_due or minutes.are_over()
    if begins:
        minutes.begin(step)
        with span("checkpoint"):
            position = parallel.broadcast_object(rollouts.position)
            # A run killed between here and the step's line in metrics.jsonl writes the line when it goes on.
            record = parallel.broadcast_object(log.record() if log is not None else {})
            saver.begin(step, {"prompt_position": position, "record": record})
    return saver.finish() if is_asked else None


class _Minutes:
    """The trigger of ``checkpoint.every_minutes``, by the clock of rank 0."""

    def __init__(self, cfg: RunConfig, parallel: Parallel) -> None:
        self._every_s, self._parallel = 60.0 * cfg.checkpoint.every_minutes, parallel
        self.begin(-1)

    def begin(self, step: int) -> None:
        """Count from now, when the checkpoint of a step begins."""
        self.step, self._begin_s = step, time.monotonic()

    def are_over(self) -> bool:
        """Collective: whether a checkpoint is due."""
        is_over = time.monotonic() > self._begin_s + self._every_s
        return self._every_s > 0 and self._parallel.broadcast_object(is_over)


def _save_on_request(
    save: Callable[..., Path | None], rollouts: RolloutStream, colocated: ColocatedMemory, step: int
) -> Path | None:
    """Collective: save the checkpoint of a run that ends early. Engines already sample for the next step, of which
    finished groups are kept."""
    rollouts.abandon()
    colocated.train()
    return save(step, is_asked=True)
