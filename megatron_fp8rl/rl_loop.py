"""The reinforcement-learning loop, run identically by every trainer rank.

In: a RunConfig whose ``model.hf_path`` names the initial weights, and engines that may still be starting (None for a
replay). Out: a trained policy, and all files that the observer writes to the run's folder. The rollout stream handles
asynchronous training (``sampling.max_staleness``) and replays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from megatron_fp8rl.algo.load_function import load_advantage, load_loss
from megatron_fp8rl.algo.mismatch import mismatch_metrics, require_exact, with_measured_bounds
from megatron_fp8rl.algo.old_pass import needs_old_pass, old_are_rollout
from megatron_fp8rl.algo.samples import to_samples
from megatron_fp8rl.config import AlgoConfig, RunConfig
from megatron_fp8rl.data.packing import build_for, divide_for
from megatron_fp8rl.data.prompts import PromptStream
from megatron_fp8rl.data.tokenizer import load_tokenizer
from megatron_fp8rl.envs.scoring import ScorePool
from megatron_fp8rl.observe.observer import StepLog
from megatron_fp8rl.observe.spans import span
from megatron_fp8rl.precision.hardware import local_hardware
from megatron_fp8rl.precision.kernel_choice import resolved
from megatron_fp8rl.rollout.fleet import Fleet
from megatron_fp8rl.rollout.stream import RolloutStream
from megatron_fp8rl.rollout.vllm_args import padded_rank
from megatron_fp8rl.runtime.colocation import ColocatedMemory
from megatron_fp8rl.runtime.gc_pause import gc_paused
from megatron_fp8rl.runtime.stop import StopRequest
from megatron_fp8rl.trainer import kv_scales, warm_up
from megatron_fp8rl.trainer.optimizer.offload import HostMemory
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from megatron_fp8rl.training_loop import TrainingLoop
from megatron_fp8rl.types import RolloutGroup, Sample, TrainBatch
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.publish import WeightExporter
from megatron_fp8rl.weight_sync.publish_adapter import AdapterFolders

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
    job: type[Trainer] | None = None,
) -> None:
    """Collective: train from ``cfg.model.hf_path``, or from the run's newest checkpoint, to ``cfg.num_steps``.

    Args:
        tokenizer_dir: folder of the tokenizer, copied beside the final weights.
        fleet: the engines, on rank 0 only; None in a replay.
        stop: on a stop request, the run saves a checkpoint and raises RunStopped.
        explain: adds detail to the error if exact mode finds a mismatch.
        host: pinned host memory for offloading.
        job: a subclass of :class:`Trainer` to run in its place.
    """
    cfg = parallel.broadcast_object(resolved(cfg, local_hardware()))  # one choice, even if ranks differ
    with ExitStack() as stack:
        how = {"stop": stop or StopRequest(), "host": host, "stack": stack}
        (job or Trainer)(cfg, parallel, tokenizer_dir, fleet=fleet, explain=explain, **how).run()


class Trainer(TrainingLoop):
    """One run on this rank. Every method is a collective over the trainer ranks.

    One step; engines sample the next groups after ``publish``, in asynchronous runs during the whole step:

        prompts --> rollouts --groups--> learn --> save --> publish --> evaluate
                       ^                (policy)               |
                       +------------ new weights --------------+
    """

    says_exactness: ClassVar[bool] = True

    def __init__(self, cfg: RunConfig, parallel: Parallel, tokenizer_dir: Path, *, fleet, explain, **how: Any) -> None:
        """Build the policy, resume from a checkpoint, and wait for engines; ``stack`` closes all resources."""
        self.fleet: Fleet | None = fleet
        self.explain: Explain | None = explain
        super().__init__(cfg, parallel, tokenizer_dir, **how)

    def open_data(self, stack: ExitStack) -> None:
        cfg, is_driver = self.cfg, self.parallel.rank == 0
        self.loss, self.advantage = load_loss(cfg.algo), load_advantage(cfg.algo)
        self.scorers = stack.enter_context(ScorePool.build(cfg.scoring, cfg.data.environments)) if is_driver else None
        self.data = PromptStream(cfg, load_tokenizer(str(self.tokenizer_dir)), log=is_driver)

    def connect(self, stack: ExitStack) -> None:
        """Plan the publication and wait for the engines."""
        cfg = self.cfg
        self.exporter = None  # stays None in a replay, which has no engines to update
        if cfg.sampling.replay is None:  # planned while engines start
            adapters = None
            if cfg.lora.rank and not cfg.lora.merge:
                adapters = AdapterFolders(self.policy, padded_rank(cfg.lora.rank))
            self.exporter = WeightExporter(self.policy, self.fleet, PlanInputs.of(cfg), adapters)
            stack.callback(self.exporter.close)
        if not self.is_complete:
            self._wait_for_engines()
            self.stop.at_boundary(self.parallel, self.step)  # the start of engines takes minutes
        self.rollouts = stack.enter_context(RolloutStream(cfg, self.fleet, self.data, self.scorers, self.parallel))
        self.rollouts.republish = None if self.exporter is None else self.republish
        self.colocated = ColocatedMemory(cfg, self.policy, self.fleet)

    def begin(self, log: StepLog) -> None:
        self._calibrate_kv()
        self.end_step(log)
        if num_kept := self.rollouts.resume_unfinished():
            text = f"{num_kept} groups of step {self.step + 1} were sampled before the run was stopped"
            self.observer.message(text)

    def train(self, log: StepLog) -> None:
        """Take the groups of the next step and learn from them."""
        groups = self._next_groups()
        self.step += 1
        self.saver.poll()
        self.colocated.train()
        log.groups(groups)
        if not self.learn(groups, log):
            text = f"step {self.step}: every group was dropped, so there is nothing to learn from"
            self.observer.warn(text + _reason_without_scores(groups))

    def end_step(self, log: StepLog) -> None:
        self.publish(log)
        self.evaluate(log)

    def end(self) -> None:
        self.rollouts.require_scores()
        if self.cfg.checkpoint.export_hf:
            self.colocated.train()

    def position(self) -> Any:
        return self.rollouts.position

    def release(self) -> None:
        self.rollouts.abandon()
        self.colocated.train()

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
        in_update, are_rollout = not needs_old_pass(cfg), old_are_rollout(cfg)
        with span("old_logprobs"):
            batches = [
                policy.with_old_logprobs(batch, are_rollout=are_rollout, are_of_update=in_update) for batch in batches
            ]
        batches, algo = self.with_reference(samples, batches), cfg.algo
        if not in_update:
            with span("mismatch"):
                algo = with_measured_bounds(batches, algo, self.parallel)
                log.update(policy.router_metrics())
                self._inspect(samples, log, algo, *batches)
        with span("update"):
            inspect = partial(self._inspect, samples, log, algo) if in_update else None
            # Only the first update is on-policy.
            updates = [
                policy.update(
                    batch, lambda inputs: self.loss(replace(inputs, cfg=algo)), inspect=None if i else inspect
                )
                for i, batch in enumerate(batches)
            ]
            log.updates(updates, batches)
        return True

    def with_reference(self, samples: Sequence[Sample], batches: Sequence[TrainBatch]) -> Sequence[TrainBatch]:
        """Set ``ref_logprobs_T`` if another model than the initial one is the reference; rank 0 has the samples."""
        return batches

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
        observe = self.cfg.observe
        if not self.evaluation_is_due() or self.cfg.sampling.replay is not None:
            return
        if held_out := self.data.eval_prompts(observe.eval_prompts):  # rows may have no held-out problems
            log.evaluation(self.rollouts.sample(held_out, num_completions=observe.eval_completions))

    def _next_groups(self) -> tuple[RolloutGroup, ...]:
        """The groups of the next step, on rank 0; raises RunStopped if the run is asked to stop meanwhile."""
        while (groups := self.rollouts.next_groups(self.stop.is_asked)) is None:
            self.rollouts.abandon()  # the policy has not changed since the last finished step
            self.stop.at_boundary(self.parallel, self.step, self.save_early)
        return groups

    def _inspect(self, samples: Sequence[Sample], log: StepLog, algo: AlgoConfig, *batches: TrainBatch) -> None:
        """Measure the mismatch of a pass before the first update; raise InexactError if an exact run has any."""
        report = mismatch_metrics(batches, algo, self.parallel)
        log.mismatch(report)
        if algo.correction_quantile is not None:
            log.update({"correction/low/mean": algo.correction_low, "correction/high/mean": algo.correction_high})
        if self.cfg.precision.exact is True:  # resolved by run
            if self.cfg.sampling.max_staleness:
                log.update({"mismatch/not_compared/mean": report.fraction_stale})
            explain = self.explain and partial(self.explain, self.policy, self.fleet, samples)
            require_exact(report, explain)

    def _calibrate_kv(self) -> None:
        """Measure the FP8 KV cache scales on the first prompts, before any log-probabilities are computed."""
        sampling = self.cfg.sampling
        if self.cfg.engine.kv_cache_dtype == "fp8" and sampling.replay is None:
            self.colocated.train()
            with span("calibrate_kv"):
                self.policy.calibrate_kv(self.data.upcoming(sampling.prompts_per_step))

    def _wait_for_engines(self) -> None:
        """Warm up the trainer, then wait for the engines; rank 0 compares their kernels with the plan."""
        if warm_up.is_worthwhile(self.cfg.precision, self.cfg.engine, self.cfg.sampling, self.parallel.device.type):
            with span("start_warm_up"):
                warm_up.warm_up(self.policy, self.data.upcoming(self.cfg.sampling.prompts_per_step))
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
