"""The policy: a model in Megatron-Core, its optimizer, and the two things a step asks of it.

In: a :class:`TrainBatch` of packed microbatches. Out: the same batch with the log-probabilities of the current weights
(:meth:`Policy.with_old_logprobs`), or new weights and metrics (:meth:`Policy.update`). Runs on every trainer rank, and
every method is a collective over all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.trainer import kv_scales
from megatron_fp8rl.trainer.forward import Forward, LossFn, MicrobatchResult, is_token
from megatron_fp8rl.trainer.model.build import (
    build_chunks,
    finish_fp8_step,
    load_hf,
    named_global_parameters,
    named_global_tensors,
)
from megatron_fp8rl.trainer.optimizer.fp8_params import quantize_parameters
from megatron_fp8rl.trainer.optimizer.offload import Offload
from megatron_fp8rl.trainer.optimizer.optimizer import NonFiniteError, Optimizer, learning_rate, wrap_chunks
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.types import KVScales, Microbatch, TrainBatch


@dataclass(kw_only=True)
class Policy:
    """The trained model on this rank. Build it with :meth:`build`."""

    cfg: RunConfig
    parallel: Parallel
    chunks: list[DistributedDataParallel]  # this rank's model chunks; several with virtual pipeline stages
    optimizer: Optimizer
    reference: list[torch.nn.Module] | None  # frozen weights of the start; None without algo.kl_coef
    step: int = 0  # optimizer updates so far, over resumes
    offload: Offload = field(init=False, repr=False)  # what of the policy is in GPU memory now
    _forward: Forward = field(init=False, repr=False)
    _kv_amax: Tensor | None = field(default=None, init=False, repr=False)  # since the last call of kv_scales
    _kv_scales: KVScales | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._forward = Forward(self.cfg, self.parallel)
        self.offload = Offload(self)

    @classmethod
    def build(cls, cfg: RunConfig, parallel: Parallel) -> Policy:
        """Collective: build the model from ``cfg.model.hf_path``, or from random weights, with its optimizer.

        The reference model, if ``algo.kl_coef`` asks for one, is a second copy of these weights without gradients.
        """
        models = build_chunks(cfg, parallel)
        if cfg.model.hf_path is not None:
            load_hf(models, cfg.model.hf_path, cfg, parallel)
        reference = _frozen_copy(models, cfg, parallel) if cfg.algo.kl_coef > 0 else None
        if cfg.precision.params == "fp8":
            quantize_parameters(models, parallel)
        chunks = wrap_chunks(models, cfg)
        for chunk in chunks:
            chunk.train()
        return cls(
            cfg=cfg,
            parallel=parallel,
            chunks=chunks,
            optimizer=Optimizer(chunks, cfg, parallel),
            reference=reference,
        )

    @property
    def models(self) -> list[torch.nn.Module]:
        """The chunks without their gradient buffers."""
        return [chunk.module for chunk in self.chunks]

    @property
    def num_updates(self) -> int:
        """Optimizer updates of the whole run, over which the learning rate decays."""
        return self.cfg.num_steps * self.cfg.algo.updates_per_step

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters under their global names."""
        return named_global_parameters(self.models, self.parallel)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's parameters and router biases under their global names: all that is published and saved."""
        return named_global_tensors(self.models, self.parallel)

    def with_old_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Collective: the batch with ``old_logprobs_T``, and with a reference model ``ref_logprobs_T``.

        FP32 [T] beside the tokens of every microbatch, on every rank of the data-parallel replica, at
        ``rollout.temperature``; 0 outside the loss mask. They come from the current weights under the recipe that
        trains, and change no state: neither weights nor FP8 scaling history.
        """
        self.offload.require("params")
        old = self._logprobs(batch.microbatches)
        filled = [replace(mb, old_logprobs_T=values.to(mb.tokens_T.device)) for mb, values in zip(batch.microbatches, old, strict=True)]
        if self.reference is not None:
            ref = self._forward.logprobs(self.reference, batch.microbatches)
            filled = [replace(mb, ref_logprobs_T=values.to(mb.tokens_T.device)) for mb, values in zip(filled, ref, strict=True)]
        return replace(batch, microbatches=tuple(filled))

    def calibrate_kv(self, batch: TrainBatch) -> None:
        """Collective: measure keys and values of a batch before there are log-probabilities to compute."""
        self.offload.require("params")
        self._logprobs(batch.microbatches)

    def kv_scales(self) -> KVScales | None:
        """Collective: scales of the engines' FP8 KV cache, from all that ran since the last call; None for BF16 caches.

        Measured by :meth:`with_old_logprobs` and :meth:`calibrate_kv`; the last scales again when neither has run.
        Raises ValueError, on all ranks, when a query, key or value was not finite.
        """
        if self._kv_amax is not None:
            amax = kv_scales.over_all_ranks(self._kv_amax, self.parallel.world_size)
            self._kv_amax, self._kv_scales = None, kv_scales.scales(amax)
        return self._kv_scales

    def _logprobs(self, microbatches: Sequence[Microbatch]) -> tuple[Tensor, ...]:
        """Collective: of the current weights; on the way, with an FP8 KV cache, the magnitudes that it has to hold."""
        if self.cfg.rollout.kv_cache_dtype != "fp8" or self.cfg.rollout.replay is not None:
            return self._forward.logprobs(self.chunks, microbatches)
        with kv_scales.measured(self.chunks, self.cfg.model.num_layers, self.parallel.device) as amax:
            logprobs = self._forward.logprobs(self.chunks, microbatches)
        self._kv_amax = amax if self._kv_amax is None else torch.maximum(self._kv_amax, amax)
        return logprobs

    def update(self, batch: TrainBatch, loss_fn: LossFn) -> dict[str, float]:
        """Collective: one optimizer update; returns metrics, equal on all ranks.

        ``train/loss/mean`` is the loss of the global batch, ``train/entropy/mean`` the mean entropy of the policy at
        loss tokens in nats, ``train/grad_norm/max`` the norm before clipping. The loss function's own metrics are
        reduced as their keys say.

        Raises NonFiniteError on all ranks, with the weights unchanged, when the loss or a gradient is not finite.
        """
        self.offload.require("params", "gradients", "optimizer")
        for chunk in self.chunks:
            chunk.train()
        self.optimizer.zero_gradients()
        self._scale_auxiliary_loss(batch.microbatches)
        results = self._forward.gradients(self.chunks, batch, loss_fn)
        metrics = self._reduce(results, batch)
        self._require_finite_loss(metrics["train/loss/mean"], results, batch.microbatches)
        lr = learning_rate(self.cfg.optim, self.step + 1, self.num_updates)
        metrics["train/grad_norm/max"] = self.optimizer.step(lr)
        finish_fp8_step(self.chunks, self.parallel)
        metrics["train/lr/mean"] = lr
        self.step += 1
        return metrics

    def _scale_auxiliary_loss(self, microbatches: Sequence[Microbatch]) -> None:
        """Collective when the model balances its experts: weigh a microbatch's balancing loss by its share of tokens.

        Megatron-Core multiplies the balancing loss of a microbatch by its tokens and leaves it to the caller to divide
        by the tokens of the global batch. That makes it a mean over tokens, as the loss itself. Padding is no token.
        """
        if not self.cfg.optim.moe_aux_loss_coef:
            return
        num_tokens = float(sum(int(is_token(mb).sum()) for mb in microbatches))
        scale = 1.0 / self.parallel.sum_over_data({"tokens": num_tokens})["tokens"]
        for chunk in self.chunks:
            get_model_config(chunk).moe_grad_scale_func = lambda: scale

    def _reduce(self, results: list[MicrobatchResult], batch: TrainBatch) -> dict[str, float]:
        """Collective: sums and maxima over microbatches, data-parallel ranks and to all pipeline stages."""
        sums: dict[str, float] = {}
        maxima: dict[str, float] = {}
        if self.parallel.is_last_stage:
            sums, maxima = _local_totals(results)
        if self.parallel.pp_size > 1:
            carried = [(sums, maxima)]
            group = self.parallel.pp_group
            dist.broadcast_object_list(
                carried, src=dist.get_global_rank(group, self.parallel.pp_size - 1), group=group
            )
            sums, maxima = carried[0]
        sums, maxima = self.parallel.sum_over_data(sums), self.parallel.max_over_data(maxima)
        loss = sums.pop("train/loss/mean")
        means = {key: value / max(batch.num_loss_tokens, 1) for key, value in sums.items()}
        return {"train/loss/mean": loss, **means, **maxima}

    def _require_finite_loss(
        self, loss: float, results: list[MicrobatchResult], microbatches: Sequence[Microbatch]
    ) -> None:
        """Collective only when the loss is not finite: then every rank raises the same error."""
        if math.isfinite(loss):
            return
        found = [
            f"microbatch {result.index} of rank {self.parallel.rank} (loss {result.loss.item()}), sequences "
            + ", ".join(name for name in microbatches[result.index].names if name)
            for result in results
            if not torch.isfinite(result.loss)
        ]
        everywhere: list[list[str]] = [[] for _ in range(self.parallel.world_size)]
        dist.all_gather_object(everywhere, found)
        lines = "\n  ".join(line for part in everywhere for line in part)
        raise NonFiniteError(
            f"the loss is {loss}; the update was not applied. It comes from:\n  {lines}\n{_remedy(self.cfg)}"
        )


def _remedy(cfg: RunConfig) -> str:
    """For a loss that is not finite."""
    remedy = "Look at the recorded rollouts of these sequences, or lower optim.lr and resume from the last checkpoint"
    if ":" in cfg.algo.loss:
        remedy = (
            f"--algo.loss = {cfg.algo.loss!r}: look there first, for a logarithm or a quotient of 0, and for padding that "
            f"is not masked before exp. {remedy}"
        )
    return remedy


def _local_totals(results: list[MicrobatchResult]) -> tuple[dict[str, float], dict[str, float]]:
    """(sums, maxima) over this rank's microbatches, with one transfer from the device."""
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
    """Collective: another build of the model with the same weights and no gradients."""
    copies = build_chunks(cfg, parallel)
    for copy, model in zip(copies, models, strict=True):
        copy.load_state_dict(model.state_dict())
        copy.requires_grad_(False)
        copy.eval()
    return copies
