"""Internals of Megatron-Core and of PyTorch's modules that the trainer needs: private names, and classes that override
private methods.

Each has the versions that it was tested with; :mod:`megatron_fp8rl.upstream` lists them and refuses others. Overrides
of public methods stand in ``trainer/model/`` and ``trainer/optimizer/``, marked in the same way.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import Tensor, nn

from megatron_fp8rl.upstream import patches


@patches(
    "megatron-core",
    ">=0.19.2,<0.20",
    why="the product of a column-parallel linear in a recipe of ours; ColumnParallelLinear has no other seam for it",
    remove_when="ColumnParallelLinear takes its product as an argument",
)
class ColumnLinearBase(ColumnParallelLinear):
    """Output features divided over tensor-parallel ranks. ``multiplied`` may compute the product."""

    def multiplied(self, x: Tensor, weight: Tensor, *, is_whole: bool) -> Tensor | None:
        """x [..., K] times weight [N, K] -> [..., N]; None leaves it to Megatron-Core. Unless ``is_whole``, x is what
        this rank has of it."""
        return None

    def _forward_impl(self, input: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        is_whole = not (kwargs["sequence_parallel"] or kwargs["allreduce_dgrad"])
        y, bias = self.multiplied(input, weight, is_whole=is_whole), kwargs.get("bias")
        if y is None:
            return super()._forward_impl(input, weight, **kwargs)
        return y if bias is None else y + bias


@patches(
    "megatron-core",
    ">=0.19.2,<0.20",
    why="the product of a row-parallel linear in a recipe of ours; RowParallelLinear has no other seam for it",
    remove_when="RowParallelLinear takes its product as an argument",
)
class RowLinearBase(RowParallelLinear):
    """Input features divided over tensor-parallel ranks. ``multiplied`` may compute the product."""

    def multiplied(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """x [..., K] times weight [N, K] -> [..., N], a partial sum; None leaves it to Megatron-Core."""
        return None

    def _forward_impl(self, input: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        y = self.multiplied(input, weight)
        return super()._forward_impl(input, weight, **kwargs) if y is None else y


@patches(
    "megatron-core",
    ">=0.19.2,<0.20",
    why="its own hooks name the module and the parameter that they belong to, and autograd holds them where Python's "
    "garbage collector does not look: the memory of a model was never given back",
    remove_when="hooks of DistributedDataParallel hold weak references",
)
class GradientBuffers(DistributedDataParallel):
    """Megatron-Core's buffers, with hooks that do not keep the model alive and do nothing that is not needed here.

    An autograd function that adds to ``main_grad`` itself need not have every parameter as its input: it may call
    ``parameter.gradients_ready(parameters)`` instead, for any of those whose gradients it has added.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        buffers = weakref.ref(self)

        def gradients_ready(parameters: Sequence[nn.Parameter]) -> None:
            buffers().register(parameters)

        for parameter in self.param_to_bucket_group:
            parameter.gradients_ready = gradients_ready

    def register(self, parameters: Sequence[nn.Parameter]) -> None:
        """The gradients of a backward pass are in the buffers: reduce those of buckets that are complete."""
        if self.ddp_config.overlap_grad_reduce:
            for parameter in parameters:
                self.param_to_bucket_group[parameter].register_grad_ready(parameter, self.force_all_reduce)

    def _make_backward_post_hook(self, param: nn.Parameter) -> Callable[..., None]:
        buffers, reference = weakref.ref(self), weakref.ref(param)
        overlaps = self.ddp_config.overlap_grad_reduce

        def hook(*unused) -> None:  # what Megatron-Core's does without CUDA graphs and generalized tensor parallelism
            parameter = reference()
            gradient = parameter.grad
            if gradient is not None:
                if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
                    parameter.main_grad.add_(gradient.data)
                parameter.grad = None
            if overlaps:
                assert gradient is not None, "a parameter without a gradient, whose reduction others wait for"
                buffers().register([parameter])

        return hook


@patches(
    "megatron-core",
    ">=0.19.2,<0.20",
    why="finds each parameter's place in its buffers again wherever it needs it, and launches a copy for each: a GPU "
    "waits for most of an update; the class of a built optimizer is replaced, since nothing lets one choose it",
    remove_when="DistributedOptimizer keeps lists of its parameters' places",
)
class ListableOptimizer(DistributedOptimizer):
    """A DistributedOptimizer whose copies to and from master weights are methods of a subclass."""

    @classmethod
    def adopt(cls, optimizer: object) -> None:
        """Make one of a DistributedOptimizer that has parameters, in place. Others stay what they are, and so does one
        for FP8 parameters or gradients that are not FP32."""
        if type(optimizer) is not DistributedOptimizer or optimizer.is_stub_optimizer:
            return
        is_fp32 = all(buffer.grad_dtype == torch.float32 for buffer in optimizer.buffers)
        special = optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        if is_fp32 and not special and not optimizer.ddp_config.fp8_param_gather:
            optimizer.__class__ = cls

    def place_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Where this rank's part of a parameter lies: ranges within the parameter ("param") and within its bucket
        ("gbuf_world_in_bucket"), each with ``start`` and ``end``."""
        return self._get_model_param_range_map(parameter)

    def set_master_gradients(self) -> None:
        """Give every master weight its gradient."""
        raise NotImplementedError(f"{type(self).__name__} has no list of gradients")

    def write_parameters(self) -> None:
        """Copy every master weight to its part of the parameter buffers."""
        raise NotImplementedError(f"{type(self).__name__} has no list of weights")

    def _copy_model_grads_to_main_grads(self) -> None:
        self.set_master_gradients()

    def _copy_main_params_to_model_params(self) -> None:
        self.write_parameters()


@patches(
    "megatron-core",
    ">=0.19.2,<0.20",
    why="parameters are made from their master weights outside a step (_copy_main_params_to_model_params)",
    remove_when="the optimizer does so in a public method",
)
def parameters_from_masters(optimizer: Any) -> None:
    """What ``optimizer``, one of a chain, does after Adam."""
    optimizer._copy_main_params_to_model_params()


@patches(
    "megatron-core",
    ">=0.19.2,<0.20",
    why="hands Transformer Engine all master weights at once (distrib_optimizer.quantize_param_shard), which makes a "
    "list of them in BF16, as large as what FP8 parameters save on one rank",
    remove_when="quantize_master_weights of Transformer Engine keeps no such list",
)
@contextlib.contextmanager
def quantized_in_groups(groups: Callable[[list[int]], Iterator[slice]]) -> Iterator[None]:
    """Inside, an optimizer has its masters quantized group after group: ``groups`` of the sizes of parameters."""
    quantize_all = distrib_optimizer.quantize_param_shard

    def quantize(parameters, masters, offsets, group):
        for some in groups([parameter.numel() for parameter in parameters]):
            quantize_all(parameters[some], masters[some], offsets[some], group)

    distrib_optimizer.quantize_param_shard = quantize
    try:
        yield
    finally:
        distrib_optimizer.quantize_param_shard = quantize_all


@patches(
    "megatron-core",
    ">=0.19.2,<0.20",
    why="master weights that come from FP8 would begin with its rounding; the optimizer asks an FP8 parameter for its "
    "first values by two methods that Transformer Engine gives to those that it makes itself",
    remove_when="the optimizer takes the first values of master weights as an argument",
)
def begin_with(parameter: nn.Parameter, values: Tensor) -> None:
    """Have master weights of an FP8 parameter begin with ``values``, of its shape, until they are forgotten."""
    parameter._high_precision_init_val = values
    parameter.get_high_precision_init_val = MethodType(_initial_values, parameter)
    parameter.clear_high_precision_init_val = MethodType(_forget_initial_values, parameter)


def _initial_values(parameter: nn.Parameter) -> Tensor | None:
    return getattr(parameter, "_high_precision_init_val", None)


def _forget_initial_values(parameter: nn.Parameter) -> None:
    if hasattr(parameter, "_high_precision_init_val"):
        del parameter._high_precision_init_val


@patches(
    "megatron-core",
    ">=0.19.2,<0.20",
    why="gathered optimizer state leaves out the padding behind buckets of a gradient buffer, and parameters are then "
    "looked up by offsets that count it: everything behind the first padded bucket is written shifted. Tied embeddings "
    "of odd size on the last of several stages, and odd sizes with overlap_grad_reduce, have such buckets",
    remove_when="get_parameter_state_dp_zero and sharded_param_state_fully_reshardable agree on offsets",
)
@contextlib.contextmanager
def padded_buckets(optimizer: Any) -> Iterator[None]:
    """Inside, Megatron-Core gathers optimizer state with the padding."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    buffers = [buffer for part in parts for buffer in part.buffers]
    sizes = [(buffer, buffer.numel) for buffer in buffers]
    sizes += [(bucket, bucket.grad_data.numel()) for buffer in buffers for bucket in buffer.buckets]
    unpadded = [(owner, owner.numel_unpadded) for owner, _ in sizes]
    for owner, size in sizes:
        owner.numel_unpadded = size
    try:
        yield
    finally:
        for owner, size in unpadded:
            owner.numel_unpadded = size


@patches(
    "megatron-core",
    ">=0.19.2,<0.20",
    why="a dispatcher that skips sorting still has to bring the numbers of tokens to the host at the moments at which "
    "Megatron-Core's does (_maybe_dtoh_and_synchronize)",
    remove_when="MoEAlltoAllTokenDispatcher skips the sort on a rank that has all experts",
)
def counts_on_host(dispatcher: MoEAlltoAllTokenDispatcher) -> Tensor:
    """Tokens of each expert, on the host; the dispatcher has them no longer."""
    counts = dispatcher._maybe_dtoh_and_synchronize("before_permutation_2", dispatcher.tokens_per_expert)
    counts = dispatcher._maybe_dtoh_and_synchronize("before_finish", counts)
    dispatcher.tokens_per_expert = None
    return counts


@patches(
    "megatron-core",
    ">=0.19.2,<0.20",
    why="the correction bias of a router exists only with a rule that moves it after every step, and becomes BF16 with "
    "the model (nn.Module._apply); here it is a constant float32 part of the policy",
    remove_when="TopKRouter has a bias without a rule, and keeps it float32",
)
class ConstantBiasRouter(TopKRouter):
    """A router that can have a correction bias that nothing moves."""

    def add_correction_bias(self) -> None:
        """Register ``expert_bias``, float32 [experts], zeros."""
        del self.expert_bias
        self.register_buffer("expert_bias", torch.zeros(self.num_experts, device=self.weight.device))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ConstantBiasRouter:
        """Follow the model to another device, but keep the bias float32 when the model becomes BF16."""
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self


@patches(
    "megatron-core",
    ">=0.19.2,<0.20",
    why="it rotates by the length of the pack, and pads values to the size of keys, which cuts them off where they are "
    "larger (_run_core_attention)",
    remove_when="MultiLatentAttention passes values of any size on, and core attention can rotate",
)
class LatentAttentionBase(MultiLatentAttention):
    """Latent attention whose core attention rotates, and takes values of any size."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        del self.rotary_pos_emb

    def _run_core_attention(self, query, key, value, attention_mask, packed_seq_params=None, **unused) -> Tensor:
        return self.core_attention(query, key, value, packed_seq_params=packed_seq_params)


@patches(
    "torch",
    ">=2.11,<2.12",
    why="an MLP that computes both linears in one piece must not pass by those that look at them (_forward_hooks)",
    remove_when="nn.Module tells whether it has hooks",
)
def is_watched(module: nn.Module) -> bool:
    """Whether someone looks at what a module returns."""
    return bool(module._forward_hooks)


@patches(
    "torch",
    ">=2.11,<2.12",
    why="getattr of a parameter takes twenty times as long as its dictionary, and every pass asks for hundreds",
    remove_when="nn.Module gives its own parameters as fast",
)
def own_parameters(module: nn.Module) -> Sequence[nn.Parameter]:
    """Of this module itself, in the order of their registration."""
    return tuple(module._parameters.values())
