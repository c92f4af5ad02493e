"""The trained policy: a Megatron-Core model, its optimizer, log-probabilities and updates.

In: a :class:`TrainBatch` of packed microbatches. Out: the same batch with the current log-probabilities
(:meth:`Policy.with_old_logprobs`), or new weights and metrics (:meth:`Policy.update`). Runs on: every trainer rank;
every method is a collective over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import InitVar, dataclass, field, replace

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.kernels.compat import expand_segments
from megatron_fp8rl.trainer import kv_scales, router_replay
from megatron_fp8rl.trainer.forward import Forward, LossFn, MicrobatchResult, is_token
from megatron_fp8rl.trainer.model.build import (
    build_chunks,
    finish_fp8_step,
    load_hf,
    named_global_parameters,
    named_global_tensors,
)
from megatron_fp8rl.trainer.model.lora import add_adapters, base_digest, without_adapters
from megatron_fp8rl.trainer.model.packed_sequences import Routes
from megatron_fp8rl.trainer.optimizer.fp8_params import quantize_parameters
from megatron_fp8rl.trainer.optimizer.offload import HostMemory, Offload
from megatron_fp8rl.trainer.optimizer.optimizer import NonFiniteError, Optimizer, learning_rate, wrap_chunks
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.types import KVScales, Microbatch, Prompt, TrainBatch


@dataclass(kw_only=True)
class Policy:
    """The trained model on this rank. Create it with :meth:`build`."""

    cfg: RunConfig
    parallel: Parallel
    chunks: list[DistributedDataParallel]  # this rank's model chunks; more than one with virtual pipeline stages
    optimizer: Optimizer
    reference: list[torch.nn.Module] | None  # frozen copy of the initial weights; None without algo.kl_coef, or with
    # adapters, whose base is the reference
    has_reference: bool = True  # False: the caller sets ``ref_logprobs_T``, or the loss does not read it
    base_digest: int = 0  # of the frozen weights under adapters; 0 without adapters
    step: int = 0  # optimizer updates so far, across resumes
    host: InitVar[HostMemory | None] = None  # pinned memory for offloading
    offload: Offload = field(init=False, repr=False)  # tracks which parts of the policy are in GPU memory
    _forward: Forward = field(init=False, repr=False)
    _kv_amax: Tensor | None = field(default=None, init=False, repr=False)  # since the last call to kv_scales
    _kv_scales: KVScales | None = field(default=None, init=False, repr=False)
    _agreement_L2: Tensor | None = field(default=None, init=False, repr=False)  # since the last call to router_metrics

    def __post_init__(self, host: HostMemory | None) -> None:
        self._forward = Forward(self.cfg, self.parallel)
        self.offload = Offload(
            self.chunks,
            self.optimizer,
            self.reference or (),
            parts=self.cfg.optim.offload,
            device=self.parallel.device,
            memory=host,
        )

    @classmethod
    def build(
        cls, cfg: RunConfig, parallel: Parallel, host: HostMemory | None = None, *, has_reference: bool = True
    ) -> Policy:
        """Collective: build the model from ``cfg.model.hf_path`` or with random weights, its adapters if configured,
        and the optimizer. If ``algo.kl_coef`` > 0 and there are no adapters, also a reference model: a second copy of
        these weights without gradients. ``has_reference`` False: the caller sets ``ref_logprobs_T``."""
        if cfg.optim.offload and parallel.device.type == "cuda":
            expand_segments()  # otherwise small resident tensors pin the segments of offloaded ones
        models = build_chunks(cfg, parallel)
        if cfg.model.hf_path is not None:
            load_hf(models, cfg.model.hf_path, cfg.model, parallel)
        reference, base = None, 0
        if cfg.lora.rank:
            add_adapters(models, cfg, parallel)
            base = base_digest(models, parallel)
        elif cfg.algo.kl_coef > 0 and has_reference:
            reference = _frozen_copy(models, cfg, parallel)
        if cfg.precision.params == "fp8":
            quantize_parameters(models, parallel)
        chunks = wrap_chunks(models, cfg.optim, cfg.precision)
        for chunk in chunks:
            chunk.train()
        return cls(
            cfg=cfg,
            parallel=parallel,
            chunks=chunks,
            optimizer=Optimizer(chunks, cfg.optim, cfg.precision, parallel, cfg.model),
            reference=reference,
            has_reference=has_reference,
            base_digest=base,
            host=host,
        )

    @property
    def models(self) -> list[torch.nn.Module]:
        """The chunks without their gradient buffers."""
        return [chunk.module for chunk in self.chunks]

    @property
    def num_updates(self) -> int:
        """Total optimizer updates of the run; the learning rate decays over them."""
        return self.cfg.num_steps * self.cfg.algo.updates_per_step

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters under their global names."""
        return named_global_parameters(self.models, self.parallel)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's parameters and router biases under their global names: everything published and saved."""
        self.require_weights()
        return named_global_tensors(self.models, self.parallel)

    def require_weights(self) -> None:
        """Raise RuntimeError if weights are not in memory: after :meth:`accumulate_gradients`, until an update ends."""
        if not self.optimizer.has_weights:
            raise RuntimeError("gradients have replaced the weights; call policy.optimizer.rebuild_parameters() first")

    def with_old_logprobs(
        self, batch: TrainBatch, *, are_rollout: bool = False, are_of_update: bool = False
    ) -> TrainBatch:
        """Collective: add ``old_logprobs_T`` to the batch, and ``ref_logprobs_T`` if there is a reference model.

        FP32 [T] on the device of each microbatch's tokens, on every rank of the data-parallel replica, at
        ``sampling.temperature``; 0 outside the loss mask. Computed with the training recipe; neither weights nor FP8
        scaling history change. ``algo.router_replay`` = "old" sets ``routed_experts_T`` to this pass's experts.

        Args:
            are_rollout: copy the engine's log-probabilities, which are bitwise equal, instead of computing them.
            are_of_update: leave ``old_logprobs_T`` None; :meth:`update` computes it.
        """
        self.offload.require("params")
        old: Sequence[Tensor | None]
        if are_rollout:
            old = tuple(mb.rollout_logprobs_T for mb in batch.microbatches)
        elif are_of_update:
            old = (None,) * len(batch.microbatches)
        else:
            routes = self._routes(batch.microbatches)
            old = self._logprobs(batch.microbatches, routes)
            if self.cfg.algo.router_replay == "old":
                batch = replace(batch, microbatches=self._with_own_experts(batch.microbatches, routes))
        filled = [
            replace(mb, old_logprobs_T=None if values is None else values.to(mb.tokens_T.device))
            for mb, values in zip(batch.microbatches, old, strict=True)
        ]
        if self.cfg.algo.kl_coef > 0 and self.has_reference and (self.reference or self.cfg.lora.rank):
            with nullcontext() if self.reference else without_adapters(self.chunks):
                ref = self._forward.logprobs(self.reference or self.chunks, batch.microbatches)
            filled = [
                replace(mb, ref_logprobs_T=values.to(mb.tokens_T.device))
                for mb, values in zip(filled, ref, strict=True)
            ]
        return replace(batch, microbatches=tuple(filled))

    def calibrate_kv(self, prompts: Sequence[Prompt]) -> None:
        """Collective: measure the KV cache amax on prompts before any log-probabilities have been computed."""
        self.offload.require("params")
        for batch in kv_scales.calibration_batches(self.cfg, prompts, data_rank=self.parallel.dp_rank):
            self._logprobs(batch.microbatches)

    def kv_scales(self) -> KVScales | None:
        """Collective: scales for the engines' FP8 KV cache, measured since the last call; None for BF16 caches.

        :meth:`with_old_logprobs`, :meth:`calibrate_kv` and, without a pass for old log-probabilities, :meth:`update`
        measure. If none has run, returns the last scales. Later forward passes round keys and values by them. Raises
        ValueError on all ranks if a query, key or value was not finite.
        """
        if self._kv_amax is not None:
            amax = kv_scales.max_over_ranks(self._kv_amax, self.parallel.world_size)
            self._kv_amax, self._kv_scales = None, kv_scales.scales(amax)
            kv_scales.set_scales([*self.chunks, *(self.reference or ())], self._kv_scales, self.parallel.device)
        return self._kv_scales

    def router_metrics(self) -> dict[str, float]:
        """Collective: agreement of the trainer's experts, before replay, with the engine's since the last call; empty
        without a record. :meth:`with_old_logprobs` measures it."""
        counts, self._agreement_L2 = self._agreement_L2, None
        return {} if counts is None else router_replay.agreement_metrics(counts, self.parallel.world_size)

    def _routes(self, microbatches: Sequence[Microbatch]) -> list[Routes | None]:
        if self._agreement_L2 is None and any(mb.routed_experts_T is not None for mb in microbatches):
            shape = (self.cfg.model.num_layers, 2)
            self._agreement_L2 = torch.zeros(shape, dtype=torch.int64, device=self.parallel.device)
        counts = self._agreement_L2
        return [router_replay.for_old_logprobs(self.cfg.algo, self.parallel, mb, counts) for mb in microbatches]

    def _with_own_experts(self, microbatches: Sequence[Microbatch], routes: Sequence[Routes]) -> tuple[Microbatch, ...]:
        """Collective: set ``routed_experts_T`` of the microbatches to the routers' choice."""
        chosen = [
            router_replay.recorded(route, mb.tokens_T.numel(), self.cfg.model, self.parallel)
            for route, mb in zip(routes, microbatches, strict=True)
        ]
        return tuple(
            replace(mb, routed_experts_T=experts_TLK.to(mb.tokens_T.device))
            for mb, experts_TLK in zip(microbatches, chosen, strict=True)
        )

    def _logprobs(
        self, microbatches: Sequence[Microbatch], routes: Sequence[Routes | None] | None = None
    ) -> tuple[Tensor, ...]:
        """Collective: log-probabilities of the current weights; with an FP8 KV cache, also records its amax values."""
        with self._kv_measured():
            return self._forward.logprobs(self.chunks, microbatches, routes)

    @contextmanager
    def _kv_measured(self) -> Iterator[None]:
        if self.cfg.engine.kv_cache_dtype != "fp8" or self.cfg.sampling.replay is not None:
            yield
            return
        with kv_scales.measure_amax(self.chunks, self.cfg.model.num_layers, self.parallel.device) as amax:
            yield
        self._kv_amax = amax if self._kv_amax is None else torch.maximum(self._kv_amax, amax)

    def update(
        self, batch: TrainBatch, loss_fn: LossFn, *, inspect: Callable[[TrainBatch], None] | None = None
    ) -> dict[str, float]:
        """Collective: run one optimizer update; returns metrics that are equal on all ranks.

        ``inspect``, a collective that may raise, is called before the weights change with the batch whose
        ``old_logprobs_T`` are the log-probabilities of this forward pass.

        ``train/loss/mean`` is the loss of the global batch, ``train/entropy/mean`` the mean entropy at loss tokens in
        nats, ``train/grad_norm/max`` the norm before clipping. The suffix of a loss metric's key selects its reduction.
        Raises NonFiniteError on all ranks, leaving the weights unchanged, if the loss or a gradient is not finite.
        """
        self.offload.require("params", "gradients")
        try:
            return self._update(batch, loss_fn, inspect)
        except NonFiniteError:
            if not self.optimizer.has_weights:
                with self.offload.resident("optimizer"):
                    self.optimizer.rebuild_parameters()
            raise

    def _update(
        self, batch: TrainBatch, loss_fn: LossFn, inspect: Callable[[TrainBatch], None] | None
    ) -> dict[str, float]:
        with nullcontext() if inspect is None else self._kv_measured():  # no pass for old log-probabilities
            results = self.accumulate_gradients(batch, loss_fn)
        if inspect is not None:
            logprobs = self._forward.logprobs_of(results, batch.microbatches)
            pairs = zip(batch.microbatches, logprobs, strict=True)
            inspect(replace(batch, microbatches=tuple(replace(mb, old_logprobs_T=x.cpu()) for mb, x in pairs)))
        metrics = self._reduce(results, batch)
        self._require_finite_loss(metrics["train/loss/mean"], results, batch.microbatches)
        lr = learning_rate(self.cfg.optim, self.step + 1, self.num_updates)
        with self.offload.streamed():
            metrics["train/grad_norm/max"] = self.optimizer.step(lr)
        finish_fp8_step(self.chunks, self.parallel)
        metrics["train/lr/mean"] = lr
        self.step += 1
        return metrics

    def accumulate_gradients(self, batch: TrainBatch, loss_fn: LossFn) -> list[MicrobatchResult]:
        """Collective: write a batch's gradients to the buffers of all chunks; returns ``Forward.gradients``'s results.

        If no step follows, call ``optimizer.rebuild_parameters`` before weights are read."""
        for chunk in self.chunks:
            chunk.train()
        self.optimizer.zero_gradients()
        self._scale_auxiliary_loss(batch.microbatches)
        return self._forward.gradients(self.chunks, batch, loss_fn)

    def _scale_auxiliary_loss(self, microbatches: Sequence[Microbatch]) -> None:
        """Collective if the model has a load-balancing loss: normalize it to a mean over the global batch's tokens
        without padding. Megatron-Core multiplies a microbatch's loss by its tokens and does not divide."""
        if not self.cfg.optim.moe_aux_loss_coef:
            return
        num_tokens = float(sum(int(is_token(mb).sum()) for mb in microbatches))
        scale = 1.0 / self.parallel.sum_over_data({"tokens": num_tokens})["tokens"]
        for chunk in self.chunks:
            get_model_config(chunk).moe_grad_scale_func = lambda: scale

    def _reduce(self, results: list[MicrobatchResult], batch: TrainBatch) -> dict[str, float]:
        """Collective: reduce over microbatches and data-parallel ranks, then share with all pipeline stages."""
        sums: dict[str, float] = {}
        maxima: dict[str, float] = {}
        if self.parallel.is_last_stage:
            sums, maxima = _local_totals(results)
        if self.parallel.pp_size > 1:
            totals = [(sums, maxima)]
            group = self.parallel.pp_group
            dist.broadcast_object_list(totals, src=dist.get_global_rank(group, self.parallel.pp_size - 1), group=group)
            sums, maxima = totals[0]
        sums, maxima = self.parallel.sum_over_data(sums), self.parallel.max_over_data(maxima)
        loss = sums.pop("train/loss/mean")
        means = {key: value / max(batch.num_loss_tokens, 1) for key, value in sums.items()}
        return {"train/loss/mean": loss, **means, **maxima}

    def _require_finite_loss(
        self, loss: float, results: list[MicrobatchResult], microbatches: Sequence[Microbatch]
    ) -> None:
        """Collective only if the loss is not finite: every rank then raises the same error."""
        if math.isfinite(loss):
            return
        sources = [
            f"microbatch {result.index} of rank {self.parallel.rank} (loss {result.loss.item()}), sequences "
            + ", ".join(name for name in microbatches[result.index].names if name)
            for result in results
            if not torch.isfinite(result.loss)
        ]
        everywhere: list[list[str]] = [[] for _ in range(self.parallel.world_size)]
        dist.all_gather_object(everywhere, sources)
        lines = "\n  ".join(line for part in everywhere for line in part)
        raise NonFiniteError(
            f"the loss is {loss}; the update was not applied. Its sources:\n  {lines}\n{_remedy(self.cfg.algo.loss)}"
        )


def _remedy(loss: str) -> str:
    remedy = "Look at the recorded rollouts of these sequences, or lower optim.lr and resume from the last checkpoint"
    if ":" in loss:
        remedy = (
            f"Check the function of --algo.loss = {loss!r} first: a logarithm of 0, a division by 0, or "
            f"padding that is not masked before exp. {remedy}"
        )
    return remedy


def _local_totals(results: list[MicrobatchResult]) -> tuple[dict[str, float], dict[str, float]]:
    """(sums, maxima) over this rank's microbatches, with a single device-to-host transfer."""
    results = sorted(results, key=lambda result: result.index)
    rows = [
        {"train/loss/mean": result.loss, "train/entropy/mean": result.entropy_sum, **result.metrics}
        for result in results
    ]
    keys = list(rows[0])
    table: Tensor = torch.stack([torch.stack([row[key].detach().double() for key in keys]) for row in rows])
    for key in keys:
        if not key.endswith(("/mean", "/max")):
            raise ValueError(f"loss metric {key!r}: keys of loss functions end in /mean or /max")
    totals = dict(zip(keys, table.sum(0).tolist(), strict=True))
    maxima = dict(zip(keys, table.amax(0).tolist(), strict=True))
    return (
        {key: value for key, value in totals.items() if key.endswith("/mean")},
        {key: value for key, value in maxima.items() if key.endswith("/max")},
    )


def _frozen_copy(models: Sequence[torch.nn.Module], cfg: RunConfig, parallel: Parallel) -> list[torch.nn.Module]:
    """Collective: build the model again with the same weights and without gradients."""
    copies = build_chunks(cfg, parallel)
    for copy, model in zip(copies, models, strict=True):
        copy.load_state_dict(model.state_dict())
        copy.requires_grad_(False)
        copy.eval()
    return copies
