"""The reinforcement-learning loop, run identically by every trainer rank.

In: a RunConfig whose ``model.hf_path`` names the initial weights, and engines that may still be starting (None for a
replay). Out: a trained policy, and all files that the observer writes to the run's folder. The rollout stream handles
asynchronous training (``sampling.max_staleness``) and replays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_fp8rl.algo.load_function import load_advantage, load_loss
from megatron_fp8rl.algo.mismatch import mismatch_metrics, require_exact
from megatron_fp8rl.algo.old_pass import needs_old_pass
from megatron_fp8rl.algo.samples import to_samples
from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.data.packing import build_for, divide_for
from megatron_fp8rl.data.prompts import PromptStream
from megatron_fp8rl.data.tokenizer import load_tokenizer
from megatron_fp8rl.envs.scoring import ScorePool
from megatron_fp8rl.observe.observer import Observer, StepLog
from megatron_fp8rl.observe.spans import span
from megatron_fp8rl.precision.hardware import local_hardware
from megatron_fp8rl.precision.kernel_choice import choose, resolved
from megatron_fp8rl.rollout.fleet import Fleet
from megatron_fp8rl.rollout.stream import RolloutStream
from megatron_fp8rl.runtime.colocation import ColocatedMemory
from megatron_fp8rl.runtime.gc_pause import gc_paused
from megatron_fp8rl.runtime.stop import StopRequest
from megatron_fp8rl.trainer import checkpoint, kv_scales, warm_up
from megatron_fp8rl.trainer.checkpoint_schedule import CheckpointSchedule
from megatron_fp8rl.trainer.optimizer.offload import HostMemory
from megatron_fp8rl.trainer.optimizer.optimizer import adam_name
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from megatron_fp8rl.types import RolloutGroup, Sample, TrainBatch
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.publish import WeightExporter
from megatron_fp8rl.weight_sync.save_hf import save_hf

CHECKPOINTS, FINAL_HF = "checkpoints", "hf"
# Collective: why trainer and engine differ on the sample of this name; rank 0 has the fleet and the samples.
Explain = Callable[[Policy, Fleet | None, Sequence[Sample], str], str]


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

    Args:
        tokenizer_dir: folder of the tokenizer, copied beside the final weights.
        fleet: the engines, on rank 0 only; None in a replay.
        stop: on a stop request, the run saves a checkpoint and raises RunStopped.
        explain: adds detail to the error if exact mode finds a mismatch.
        host: pinned host memory for offloading.
    """
    cfg = parallel.broadcast_object(resolved(cfg, local_hardware()))  # one choice, even if ranks differ
    with ExitStack() as stack:
        Trainer(cfg, parallel, tokenizer_dir, fleet, stop or StopRequest(), explain, host, stack).run()


class Trainer:
    """One run on this rank. Every method is a collective over the trainer ranks.

    One step; engines sample the next groups after ``publish``, in asynchronous runs during the whole step:

        prompts --> rollouts --groups--> learn --> save --> publish --> evaluate
                       ^                (policy)               |
                       +------------ new weights --------------+
    """

    def __init__(
        self,
        cfg: RunConfig,
        parallel: Parallel,
        tokenizer_dir: Path,
        fleet: Fleet | None,
        stop: StopRequest,
        explain: Explain | None,
        host: HostMemory | None,
        stack: ExitStack,
    ) -> None:
        """Build the policy, resume from a checkpoint, and wait for engines; ``stack`` closes all resources."""
        is_driver, checkpoints = parallel.rank == 0, Path(cfg.run_dir) / CHECKPOINTS
        self.cfg, self.parallel, self.fleet, self.stop, self.explain = cfg, parallel, fleet, stop, explain
        self.tokenizer_dir = tokenizer_dir
        self.observer = stack.enter_context(Observer(cfg, is_writer=is_driver))
        stack.enter_context(stop.errors_noted())
        self.loss, self.advantage = load_loss(cfg.algo), load_advantage(cfg.algo)
        scorers = stack.enter_context(ScorePool.build(cfg.scoring, cfg.data.environments)) if is_driver else None
        self.prompts = PromptStream(cfg, load_tokenizer(str(tokenizer_dir)), log=is_driver)
        with span("start_model"):
            self.policy = Policy.build(cfg, parallel, host)
            self.kernels = choose(cfg, local_hardware(), "trainer")
            self.observer.message(f"precision.exact: {self.kernels.exact_text()}")
            self.observer.note({**self.kernels.record(), "trainer kernel, optimizer": adam_name()})
            # Number of finished steps, metrics of the last step so far, and whether the run is complete.
            self.step, self.record, self.is_complete = self._resume(checkpoints)
        stop.at_boundary(parallel, self.step)
        self.exporter = None  # stays None in a replay, which has no engines to update
        if cfg.sampling.replay is None:  # planned while engines start
            self.exporter = WeightExporter(self.policy, fleet, PlanInputs.of(cfg))
            stack.callback(self.exporter.close)
        if not self.is_complete:
            self._wait_for_engines()
            stop.at_boundary(parallel, self.step)  # the start of engines takes minutes
        self.rollouts = stack.enter_context(RolloutStream(cfg, fleet, self.prompts, scorers, parallel))
        self.rollouts.republish = None if self.exporter is None else self.republish
        self.colocated = ColocatedMemory(cfg, self.policy, fleet)
        self.saver = stack.enter_context(closing(checkpoint.Saver(checkpoints, self.policy)))
        self.schedule = CheckpointSchedule(cfg.checkpoint, cfg.num_steps, parallel)

    def run(self) -> None:
        """Train to ``cfg.num_steps``, then export the weights."""
        if not self.is_complete:
            with self.observer.prelude(self.step, self.record) as log:
                self._calibrate_kv()
                self.publish(log)
                self.evaluate(log)
                if num_kept := self.rollouts.resume_unfinished():
                    text = f"{num_kept} groups of step {self.step + 1} were sampled before the run was stopped"
                    self.observer.message(text)
        while self.step < self.cfg.num_steps:
            self.stop.at_boundary(self.parallel, self.step, self.save_early)
            with self.observer.step(self.step + 1) as log:
                groups = self._next_groups()
                self.step += 1
                self.saver.poll()
                self.colocated.train()
                log.groups(groups)
                if not self.learn(groups, log):
                    text = f"step {self.step}: every group was dropped, so there is nothing to learn from"
                    self.observer.warn(text + _reason_without_scores(groups))
                self.save(log)
                self.publish(log)
                self.evaluate(log)
            self.saver.poll()  # after the step's line is on disk
        self.saver.finish()
        self.rollouts.require_scores()
        if self.cfg.checkpoint.export_hf:
            self.colocated.train()
            save_hf(self.policy, Path(self.cfg.run_dir) / FINAL_HF, self.tokenizer_dir)

    def learn(self, groups: tuple[RolloutGroup, ...], log: StepLog) -> bool:
        """Update the policy from the groups, which rank 0 has; False if no sample remains."""
        cfg, policy, samples, shares = self.cfg, self.policy, [], None
        with span("pack"), gc_paused():  # creates many long-lived objects
            if self.parallel.rank == 0:
                samples = to_samples(groups, self.advantage, cfg.algo, cfg.sampling, self.step - 1)
                log.samples(samples)
                shares = divide_for(cfg, samples, num_updates=cfg.algo.updates_per_step)
            batches = build_for(cfg.parallel, self.parallel.scatter_over_data(shares))
        if not batches:
            return False
        exact = cfg.precision.exact is True  # resolved by run
        in_update = exact or not needs_old_pass(cfg)
        with span("old_logprobs"):
            batches = [policy.with_old_logprobs(batch, are_rollout=exact, are_of_update=in_update) for batch in batches]
        if not in_update:
            with span("mismatch"):
                log.update(policy.router_metrics())
                log.mismatch(mismatch_metrics(batches, cfg.algo, self.parallel))
        with span("update"):
            inspect = partial(self._inspect, samples, log) if in_update else None
            # Only the first update is on-policy.
            updates = [
                policy.update(batch, self.loss, inspect=None if i else inspect) for i, batch in enumerate(batches)
            ]
            log.updates(updates, batches)
        return True

    def publish(self, log: StepLog) -> None:
        """Send the current weights to the engines, as policy version ``step``; a replay only counts the version."""
        if self.exporter is None:
            self.rollouts.after_update(self.step)
            return
        self.rollouts.before_update()
        with self.colocated.publication(), span("publish"):
            scales = self.policy.kv_scales()
            log.publish(self.exporter.publish(self.step, scales))
        if scales is not None:
            log.update(kv_scales.metrics(scales))
        self.rollouts.after_update(self.step)
        log.update(self.colocated.take_metrics())
        log.update(self.rollouts.take_metrics())

    def republish(self) -> None:
        """Send the current version again, after all replicas were lost during a step and restarted."""
        with self.colocated.publication():
            self.exporter.publish(self.rollouts.version, self.policy.kv_scales())

    def evaluate(self, log: StepLog) -> None:
        """Sample the held-out problems at the start, at the end, and every ``observe.eval_every`` steps."""
        observe, step = self.cfg.observe, self.step
        is_due = step in (0, self.cfg.num_steps) or (observe.eval_every and step % observe.eval_every == 0)
        if not is_due or not observe.eval_prompts or self.cfg.sampling.replay is not None:
            return
        if held_out := self.prompts.eval_prompts(observe.eval_prompts):  # rows may have no held-out problems
            log.evaluation(self.rollouts.sample(held_out, num_completions=observe.eval_completions))

    def save(self, log: StepLog) -> None:
        """Begin a checkpoint if one is due."""
        if self.schedule.is_due(self.step):
            self._begin_save(log.record())

    def save_early(self, step: int) -> Path | None:
        """Finish the checkpoint of a run that ends early; finished groups of the next step are kept."""
        self.rollouts.abandon()
        self.colocated.train()
        if self.schedule.is_missing(step):
            self._begin_save({})
        return self.saver.finish()

    def _begin_save(self, record: dict[str, Any]) -> None:
        self.schedule.begin(self.step)
        with span("checkpoint"):
            position = self.parallel.broadcast_object(self.rollouts.position)
            # If the run is killed before it writes the step's line to metrics.jsonl, it writes the line on resume.
            record = self.parallel.broadcast_object(record)
            extra = {"prompt_position": position, "record": record, "rows": self.prompts.row_identities}
            self.saver.begin(self.step, extra)

    def _next_groups(self) -> tuple[RolloutGroup, ...]:
        """The groups of the next step, on rank 0; raises RunStopped if the run is asked to stop meanwhile."""
        while (groups := self.rollouts.next_groups(self.stop.is_asked)) is None:
            self.rollouts.abandon()  # the policy has not changed since the last finished step
            self.stop.at_boundary(self.parallel, self.step, self.save_early)
        return groups

    def _inspect(self, samples: Sequence[Sample], log: StepLog, batch: TrainBatch) -> None:
        """Measure the mismatch of the training pass; raise InexactError if an exact run has any."""
        report = mismatch_metrics([batch], self.cfg.algo, self.parallel)
        log.mismatch(report)
        if self.cfg.precision.exact:
            explain = self.explain and partial(self.explain, self.policy, self.fleet, samples)
            require_exact(report, explain)

    def _calibrate_kv(self) -> None:
        """Measure the FP8 KV cache scales on the first prompts, before any log-probabilities are computed."""
        sampling = self.cfg.sampling
        if self.cfg.engine.kv_cache_dtype == "fp8" and sampling.replay is None:
            self.colocated.train()
            with span("calibrate_kv"):
                self.policy.calibrate_kv(self.prompts.upcoming(sampling.prompts_per_step))

    def _resume(self, checkpoints: Path) -> tuple[int, dict[str, Any], bool]:
        """Restore the newest checkpoint: (its step or 0, the step's record, whether the run is complete).

        A run that lacks the line of its last step, because it was killed, is not complete.
        """
        resumed = checkpoint.resume(checkpoints, self.policy, self.observer.message)
        if resumed is None:
            return 0, {}, self.cfg.num_steps == 0
        step, extra = resumed
        if self.parallel.device.type == "cuda":
            torch.cuda.empty_cache()  # reading allocates parts of the state twice, and engines share this GPU
        self.prompts.position = extra["prompt_position"]
        for key, before in extra.get("rows", {}).items():
            if (now := self.prompts.row_identities.get(key, before)) != before:
                self.observer.message(f"changed since then: the data of {key} were {before}, now {now}")
        record = extra.get("record", {})
        lacks_line = self.parallel.broadcast_object(bool(record) and self.observer.lacks(step))
        return step, record, step >= self.cfg.num_steps and not lacks_line

    def _wait_for_engines(self) -> None:
        """Warm up the trainer, then wait for the engines; rank 0 compares their kernels with the plan."""
        if warm_up.is_worthwhile(self.cfg.precision, self.cfg.engine, self.cfg.sampling, self.parallel.device.type):
            with span("start_warm_up"):
                warm_up.warm_up(self.policy, self.prompts.upcoming(self.cfg.sampling.prompts_per_step))
        if self.fleet is None:
            return
        with span("start_engines"):
            if not self.fleet.wait_until_ready(self.stop.is_asked):
                return
        in_use = self.fleet.kernels()
        self.observer.note({f"engine kernel, {role}": ", ".join(names) for role, names in in_use.items()})
        for disagreement in self.kernels.disagreements(in_use):
            self.observer.warn(disagreement)


def _reason_without_scores(groups: Sequence[RolloutGroup]) -> str:
    """The number of completions without a score, and the first reason; empty if all have a score."""
    details = [rollout.detail for group in groups for rollout in group.rollouts if rollout.status == "score_failed"]
    return f"; {len(details)} completions were not scored, the first because {details[0]}" if details else ""
