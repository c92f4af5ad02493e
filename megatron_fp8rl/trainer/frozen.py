"""A policy that is not trained: weights of any format and layout, without gradients and optimizer, to publish."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.data.packing import build_for, divide_for, old_logprobs_by_sample
from megatron_fp8rl.trainer import kv_scales
from megatron_fp8rl.trainer.forward import Forward
from megatron_fp8rl.trainer.model.build import build_chunks, load_hf, named_global_tensors
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.types import KVScales, Prompt, Sample, TrainBatch


@dataclass(kw_only=True)
class FrozenPolicy:
    """Replaces ``trainer.policy.Policy`` where weights are only read. Create it with :meth:`build`."""

    cfg: RunConfig
    parallel: Parallel
    models: list[nn.Module]  # this rank's model chunks

    @classmethod
    def build(cls, cfg: RunConfig, parallel: Parallel) -> FrozenPolicy:
        """Collective: load ``cfg.model.hf_path``, a Hugging Face or distributed checkpoint; None keeps random weights.
        Raises FileNotFoundError, KeyError or ValueError, like :func:`load_hf`, if it does not match the model."""
        models = build_chunks(cfg, parallel)
        if cfg.model.hf_path is not None:
            load_hf(models, cfg.model.hf_path, cfg.model, parallel)
        for model in models:
            model.requires_grad_(False)
            model.eval()
        return cls(cfg=cfg, parallel=parallel, models=models)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        return named_global_tensors(self.models, self.parallel)

    def with_old_logprobs(self, batch: TrainBatch) -> TrainBatch:
        """Collective: add ``old_logprobs_T``, as ``Policy.with_old_logprobs`` does."""
        old = Forward(self.cfg, self.parallel).logprobs(self.models, batch.microbatches)
        pairs = zip(batch.microbatches, old, strict=True)
        filled = (replace(mb, old_logprobs_T=values.to(mb.tokens_T.device)) for mb, values in pairs)
        return replace(batch, microbatches=tuple(filled))

    def sample_logprobs(self, samples: Sequence[Sample]) -> dict[str, np.ndarray]:
        """Collective: log-probabilities of the trained tokens of rank 0's ``samples``, FP32, by name, on all ranks."""
        shares = divide_for(self.cfg, samples) if self.parallel.rank == 0 else None
        batches = build_for(self.cfg.parallel, self.parallel.scatter_over_data(shares))
        part = {
            name: x for batch in batches for name, x in old_logprobs_by_sample(self.with_old_logprobs(batch)).items()
        }
        return {name: x for other in self.parallel.gather_from_all(part) for name, x in other.items()}

    def with_distributions(
        self, batch: TrainBatch, environments: Collection[str], vocab_size: int, top_k: int
    ) -> TrainBatch:
        """Collective: add this model's distributions at the loss tokens of some environments' sequences, see
        :class:`Taught`. ``top_k`` 0 keeps hidden states, for a divergence over the full vocabulary."""
        taught = []
        for mb in batch.microbatches:
            are_here_S = torch.tensor([name in environments for name in mb.environments])
            taught.append(replace(mb, loss_mask_T=mb.loss_mask_T & are_here_S[mb.sequence_ids_T]))
        parts = Forward(self.cfg, self.parallel).distributions(self.models, taught, vocab_size, top_k)
        pairs = enumerate(batch.microbatches)
        filled = (replace(mb, taught=(*mb.taught, parts[i])) if i in parts else mb for i, mb in pairs)
        return replace(batch, microbatches=tuple(filled))

    def kv_scales(self, prompts: Sequence[Prompt]) -> KVScales | None:
        """Collective: scales for the engines' FP8 KV cache, measured on ``prompts``; None for BF16 caches."""
        if self.cfg.engine.kv_cache_dtype != "fp8":
            return None
        forward = Forward(self.cfg, self.parallel)
        with kv_scales.measure_amax(self.models, self.cfg.model.num_layers, self.parallel.device) as amax:
            for batch in kv_scales.calibration_batches(self.cfg, prompts, data_rank=self.parallel.dp_rank):
                forward.logprobs(self.models, batch.microbatches)
        scales = kv_scales.scales(kv_scales.max_over_ranks(amax, self.parallel.world_size))
        kv_scales.set_scales(self.models, scales, self.parallel.device)
        return scales
