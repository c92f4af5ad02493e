"""Gradient buffers and distributed AdamW over FP32 master weights, sharded over data-parallel ranks, by Megatron-Core.

Losses are already divided by the global batch's denominators, so gradients are summed over ranks and microbatches.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed import finalize_model_grads as reduce_and_divide_gradients
from megatron.core.optimizer import Adam, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32
from megatron.core.optimizer.optimizer import GRAD_NORM_GROUP_ATTR, MTP_GRAD_NORM_GROUP
from megatron.core.utils import get_model_config

from megatron_fp8rl.config import ModelConfig, OptimConfig, PrecisionConfig
from megatron_fp8rl.trainer.compat.megatron import GradientBuffers, defer_param_gather, parameters_from_masters
from megatron_fp8rl.trainer.model.build import named_global_parameters
from megatron_fp8rl.trainer.model.lora import add_over_expert_tensor, merge_adapters
from megatron_fp8rl.trainer.model.weight_cache import clear_weight_caches
from megatron_fp8rl.trainer.optimizer.fp8_params import limit_master_copies
from megatron_fp8rl.trainer.optimizer.muon import Muon
from megatron_fp8rl.trainer.optimizer.shared_memory import SharedMemory
from megatron_fp8rl.trainer.optimizer.states import ReducedStates
from megatron_fp8rl.trainer.parallel import Parallel

_MAX_NAMES = 20  # offending tensors listed in an error


class NonFiniteError(RuntimeError):
    """A loss or gradient is infinite or NaN. The weights are unchanged by the update."""


def wrap_chunks(
    chunks: Sequence[torch.nn.Module], optim: OptimConfig, precision: PrecisionConfig
) -> list[DistributedDataParallel]:
    """Collective: wrap each model chunk with an FP32 gradient buffer that is summed over data-parallel ranks."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".experts." in name:
                # Experts always get a separate optimizer, so that checkpoints have the same keys in every layout.
                # Megatron-Core by default separates them only if expert parallelism is above 1.
                parameter.allreduce = False
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=optim.overlap_grad_reduce,
        fp8_param_gather=precision.params == "fp8",
    )
    wrapped = [
        GradientBuffers(get_model_config(chunk), ddp, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    for config in {id(config): config for config in map(get_model_config, wrapped)}.values():
        if not config.calculate_per_token_loss:
            raise ValueError(
                "the model's TransformerConfig must set calculate_per_token_loss: without it Megatron-Core divides "
                "gradients by the number of microbatches and ranks, but losses here are already normalized"
            )
        config.finalize_model_grads_func = _reduce_gradients
        if optim.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in wrapped]
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


def _reduce_gradients(chunks, num_tokens=None, pg_collection=None, force_all_reduce=False) -> None:
    """Megatron-Core's reductions over data, tensor and embedding groups, without dividing by ``num_tokens``."""
    reduce_and_divide_gradients(chunks, None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
    add_over_expert_tensor(chunks)


def learning_rate(optim: OptimConfig, update: int, num_updates: int) -> float:
    """Rate of an update, counted from 1: warm-up from 0 over ``warmup_steps``, then constant or decay to ``min_lr``."""
    if update < 1:
        raise ValueError(f"updates are counted from 1, not {update}")
    if update <= optim.warmup_steps:
        return optim.lr * update / optim.warmup_steps
    if optim.decay == "constant":
        return optim.lr
    progress = min(1.0, (update - optim.warmup_steps) / max(1, num_updates - optim.warmup_steps))
    share = 1 - progress if optim.decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return optim.min_lr + (optim.lr - optim.min_lr) * share


class Optimizer:
    """AdamW or Muon for all chunks of this rank; weight decay applies to embeddings and matrices, not to norms and
    biases."""

    def __init__(
        self,
        chunks: Sequence[DistributedDataParallel],
        optim: OptimConfig,
        precision: PrecisionConfig,
        parallel: Parallel,
        model: ModelConfig,
    ) -> None:
        self._chunks = chunks
        self._parallel = parallel
        self._clip = optim.clip_grad_norm
        self._weight_decay = optim.weight_decay
        self._drafts = model.num_mtp_layers > 0
        self._memory = SharedMemory(chunks)
        is_bf16 = precision.params != "fp32"  # FP8 parameters also report BF16 as their dtype
        is_fused = optim.states != "fp32" and Adam.__module__.startswith("transformer_engine")
        moments = torch.bfloat16 if is_fused else torch.float32
        self.megatron = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=optim.lr,
                min_lr=optim.min_lr,
                weight_decay=optim.weight_decay,
                adam_beta1=optim.beta1,
                adam_beta2=optim.beta2,
                adam_eps=optim.eps,
                clip_grad=optim.clip_grad_norm,
                bf16=is_bf16,
                params_dtype=torch.bfloat16 if is_bf16 else torch.float32,
                use_distributed_optimizer=True,
                # With a recipe, Megatron-Core and not FusedAdam has the master weights.
                fp8_recipe="blockwise" if precision.params == "fp8" or is_fused else None,
                use_precision_aware_optimizer=is_fused,
                exp_avg_dtype=moments,
                exp_avg_sq_dtype=moments,
            ),
            list(chunks),
        )
        for part in self._parts:
            defer_param_gather(part)
        muons = [Muon(part, chunks, model, parallel) for part in self._parts] if optim.optimizer == "muon" else []
        self._muons: Sequence[Muon] = muons
        adams = [part.optimizer for part in self._parts if not part.is_stub_optimizer]
        self.states = ReducedStates(adams, optim.states, is_fused=is_fused)

    @property
    def _parts(self) -> list:
        """Megatron-Core's optimizers: one for experts, one for all other parameters."""
        return getattr(self.megatron, "chained_optimizers", [self.megatron])

    def zero_gradients(self) -> None:
        """Begin an update. Weights of FP8 linears may be gone until it ends: ``shared_memory.py``."""
        self._memory.take_gradients()
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def step(self, lr: float) -> float:
        """Collective: clip the reduced gradients, update the weights, and return the norm before clipping. Raises
        NonFiniteError on all ranks, before any weight changes, naming the parameters with non-finite gradients."""
        self.megatron.prepare_grads()
        norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(norm):
            raise NonFiniteError(self._describe_non_finite(norm))
        norms = {None: norm}  # by Megatron-Core's groups of parameters with a norm of their own
        if self._drafts:
            norms[MTP_GRAD_NORM_GROUP] = math.hypot(*(self._draft_norm(part) for part in self._parts))
            if not math.isfinite(norms[MTP_GRAD_NORM_GROUP]):
                raise NonFiniteError(self._describe_non_finite(norms[MTP_GRAD_NORM_GROUP]))
        for group, total in norms.items():
            if 0 < self._clip < total + 1e-6:  # same condition as clip_grad_by_total_norm_fp32, before its loop
                for part in self._parts:
                    parameters = [p for p in part.get_parameters() if getattr(p, GRAD_NORM_GROUP_ATTR, None) == group]
                    if parameters:
                        clip_grad_by_total_norm_fp32(parameters, max_norm=self._clip, total_norm=total)
        for group in self.megatron.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self._weight_decay * group["wd_mult"]
        for muon in self._muons:
            muon.step()
        with limit_master_copies(), self.states.expanded():
            self.megatron.step_with_ready_grads()
        self._gather_parameters()
        return norm

    @staticmethod
    def _draft_norm(part: Any) -> float:
        """Collective: the norm of the gradients of multi-token prediction layers in one optimizer of Megatron-Core."""
        gradients = part.get_grads_for_grad_norm(MTP_GRAD_NORM_GROUP)
        return float(get_grad_norm_fp32(gradients, grad_stats_parallel_group=part.get_grad_stats_parallel_group()))

    @torch.no_grad()
    def rebuild_parameters(self) -> None:
        """Collective: recompute every parameter from its FP32 master weights, as a step does after Adam."""
        with limit_master_copies():
            for part in self._parts:
                parameters_from_masters(part)
        self._gather_parameters()

    def _gather_parameters(self) -> None:
        for chunk in self._chunks:
            chunk.start_param_sync()
        self._memory.take_weights()
        merge_adapters(self._chunks)
        clear_weight_caches()

    @property
    def may_step_in_pieces(self) -> bool:
        """Whether Adam alone reads its states during a step."""
        return not self._muons and not self.states.converts

    @property
    def has_weights(self) -> bool:
        return not self._memory.holds_gradients

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the state of a checkpoint, but keep the hyperparameters of the present configuration.

        Megatron-Core matches groups of parameters by their learning rates among others, and Adam reads ``betas`` and
        ``eps`` from the loaded groups.
        """
        present = self.megatron.param_groups[0]
        kept = {name: present[name] for name in ("max_lr", "min_lr", "betas", "eps")}
        for group in _groups_in(state):
            group.update(kept)
        with self.states.expanded():
            self.megatron.load_state_dict(state)

    def set_num_updates(self, num_updates: int) -> None:
        """Set Adam's update count before a checkpoint is written, which stores the first rank's. Adam does not count
        expert updates there if all layers of the first pipeline stage are dense."""
        for part in self._parts:
            for group in part.optimizer.param_groups:
                if not group["params"]:
                    group["step"] = num_updates

    def _describe_non_finite(self, norm: float) -> str:
        """Collective: the error message, listing non-finite gradients and their ranks."""
        rank = self._parallel.rank
        modules = [chunk.module for chunk in self._chunks]
        gradients = [
            f"{name} on rank {rank}"
            for name, parameter in named_global_parameters(modules, self._parallel)
            if parameter.requires_grad and not torch.isfinite(parameter.main_grad).all()
        ]
        everywhere: list[list[str]] = [[] for _ in range(self._parallel.world_size)]
        dist.all_gather_object(everywhere, gradients)
        names = sorted(name for part in everywhere for name in part)
        shown = "\n  ".join(names[:_MAX_NAMES]) or "none; the sum of their squares overflows"
        rest = f"\n  and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        return (
            f"the gradient norm is {norm}; the update was not applied. Non-finite gradients:\n  {shown}{rest}\n"
            "Look at the losses and log-probabilities of this step, lower optim.lr, or resume from the last checkpoint"
        )


def _groups_in(state: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    """The groups of parameters in an optimizer's state, at any depth."""
    for name, value in state.items():
        if name == "param_groups":
            yield from value
        elif isinstance(value, dict):
            yield from _groups_in(value)


def optimizer_name(optim: OptimConfig) -> str:
    """The AdamW implementation that Megatron-Core imported, with its package, and Muon, for the run record."""
    adam = f"{Adam.__module__.partition('.')[0]}.{Adam.__name__}"
    return f"Muon; other than matrices {adam}" if optim.optimizer == "muon" else adam
