"""Uses of private Megatron-Core and PyTorch APIs, with the versions tested.

:mod:`megatron_fp8rl.upstream` lists the tested versions and rejects others. Overrides of public methods are in
``trainer/model/`` and ``trainer/optimizer/``, marked in the same way.
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
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import Tensor, nn

from megatron_fp8rl.upstream import patches


@patches(
    "megatron-core",
    why="runs the GEMM of a column-parallel linear with our recipes; ColumnParallelLinear has no other hook for it",
    remove_when="ColumnParallelLinear takes its GEMM as an argument",
)
class ColumnLinearBase(ColumnParallelLinear):
    """Output features sharded over tensor-parallel ranks. Subclasses may override ``multiplied`` to run the GEMM."""

    def multiplied(self, x: Tensor, weight: Tensor, *, is_whole: bool) -> Tensor | None:
        """x [..., K] times weight [N, K] -> [..., N]; None falls back to Megatron-Core. Unless ``is_whole``, x is this
        rank's part of the input, before the tensor-parallel gather or copy."""
        return None

    def _forward_impl(self, input: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        is_whole = not (kwargs["sequence_parallel"] or kwargs["allreduce_dgrad"])
        y, bias = self.multiplied(input, weight, is_whole=is_whole), kwargs.get("bias")
        if y is None:
            return super()._forward_impl(input, weight, **kwargs)
        return y if bias is None else y + bias


@patches(
    "megatron-core",
    why="overrides SelfAttention._apply_output_gate, which takes the sigmoid in FP32 and rounds less than the engine",
    remove_when="vLLM and Megatron-Core round the gate alike",
)
class EngineGate:
    """A base of attention whose output is multiplied by a gate, with the engine's roundings."""

    def _apply_output_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * torch.sigmoid(gate.reshape(x.shape))


@patches(
    "megatron-core",
    why="runs the GEMM of a row-parallel linear with our recipes; RowParallelLinear has no other hook for it",
    remove_when="RowParallelLinear takes its GEMM as an argument",
)
class RowLinearBase(RowParallelLinear):
    """Input features sharded over tensor-parallel ranks. Subclasses may override ``multiplied`` to run the GEMM."""

    def multiplied(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """x [..., K] times weight [N, K] -> [..., N], a partial sum; None falls back to Megatron-Core."""
        return None

    def _forward_impl(self, input: Tensor, weight: Tensor, **kwargs: Any) -> Tensor:
        y = self.multiplied(input, weight)
        return super()._forward_impl(input, weight, **kwargs) if y is None else y


@patches(
    "megatron-core",
    why="Megatron-Core's hooks reference their module and parameter, and autograd keeps the hooks outside the reach of "
    "Python's garbage collector, so the memory of a model was never freed",
    remove_when="DistributedDataParallel's hooks hold weak references",
)
class GradientBuffers(DistributedDataParallel):
    """Megatron-Core's gradient buffers, with minimal hooks that do not keep the model alive.

    Autograd functions that accumulate in ``main_grad`` may call ``parameter.gradients_ready(parameters)`` instead of
    taking every parameter as an input.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        buffers = weakref.ref(self)

        def gradients_ready(parameters: Sequence[nn.Parameter]) -> None:
            buffers().register(parameters)

        for parameter in self.param_to_bucket_group:
            parameter.gradients_ready = gradients_ready

    def register(self, parameters: Sequence[nn.Parameter]) -> None:
        """Mark gradients as accumulated, and start the reduction of buckets that are complete."""
        if self.ddp_config.overlap_grad_reduce:
            for parameter in parameters:
                self.param_to_bucket_group[parameter].register_grad_ready(parameter, self.force_all_reduce)

    def _make_backward_post_hook(self, param: nn.Parameter) -> Callable[..., None]:
        buffers, reference = weakref.ref(self), weakref.ref(param)
        overlaps = self.ddp_config.overlap_grad_reduce

        def hook(*unused) -> None:  # Megatron-Core's hook without CUDA graphs and generalized tensor parallelism
            parameter = reference()
            gradient = parameter.grad
            if gradient is not None:
                if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
                    parameter.main_grad.add_(gradient.data)
                parameter.grad = None
            if overlaps:
                assert gradient is not None, "a parameter has no gradient, but other ranks wait for its reduction"
                buffers().register([parameter])

        return hook


@patches(
    "megatron-core",
    why="copies master weights to parameters outside a step (_copy_main_params_to_model_params)",
    remove_when="the optimizer has a public method for it",
)
def parameters_from_masters(optimizer: Any) -> None:
    """Copy master weights to parameters, as ``optimizer``, one of a chain, does after Adam."""
    optimizer._copy_main_params_to_model_params()


@patches(
    "megatron-core",
    why="every optimizer of a chain gathers all parameters after its step (_defer_param_sync): twice the traffic, and "
    "the first would overwrite gradients that share memory with weights before the second reads them",
    remove_when="an optimizer of a chain gathers only its parameters",
)
def defer_param_gather(optimizer: Any) -> None:
    """Let the caller gather parameters after the steps of ``optimizer``, one of a chain."""
    optimizer._defer_param_sync = True


@patches(
    "transformer-engine",
    why="FusedAdam.state_dict copies all BF16 moments to FP32, and Megatron-Core reads nothing but its groups of them",
    remove_when="FusedAdam's state_dict returns BF16 states",
    optional=True,
)
def without_fp32_copies(adam: torch.optim.Optimizer) -> None:
    """Let ``adam.state_dict`` return the states themselves."""
    adam.state_dict = MethodType(torch.optim.Optimizer.state_dict, adam)


@patches(
    "megatron-core",
    why="passes all master weights to Transformer Engine at once (distrib_optimizer.quantize_param_shard); their BF16 "
    "copies need as much memory as FP8 parameters save on one rank",
    remove_when="Transformer Engine's quantize_master_weights no longer copies all masters to BF16",
    optional=True,
)
@contextlib.contextmanager
def quantized_in_groups(groups: Callable[[list[int]], Iterator[slice]]) -> Iterator[None]:
    """In the block, an optimizer quantizes its masters in groups; ``groups`` maps parameter sizes to slices."""
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
    why="master weights initialized from FP8 would start with its rounding error; the optimizer reads the initial "
    "values of an FP8 parameter through two methods that only parameters created by Transformer Engine have",
    remove_when="the optimizer takes the initial values of master weights as an argument",
)
def set_initial_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Initialize the master weights of an FP8 parameter from ``values``, of its shape; kept until they are cleared."""
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
    why="Megatron-Core's correction bias is updated after every step and cast to BF16 with the model "
    "(nn.Module._apply); here it is a constant FP32 part of the policy",
    remove_when="TopKRouter supports a constant bias and keeps it in FP32",
)
class ConstantBiasRouter(TopKRouter):
    def add_correction_bias(self) -> None:
        del self.expert_bias
        self.register_buffer("expert_bias", torch.zeros(self.num_experts, device=self.weight.device))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ConstantBiasRouter:
        """Keep the bias in FP32 when the model is cast to BF16."""
        bias = self.expert_bias
        super()._apply(fn, recurse)
        if bias is not None:
            self.expert_bias = bias.to(self.expert_bias.device)
        return self


@patches(
    "megatron-core",
    why="it rotates by the length of the pack, and pads values to the size of keys, which truncates larger values "
    "(_run_core_attention)",
    remove_when="MultiLatentAttention accepts values of any size, and core attention can rotate",
)
class LatentAttentionBase(MultiLatentAttention):
    """Latent attention whose core attention rotates and accepts values of any size."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        del self.rotary_pos_emb

    def _run_core_attention(self, query, key, value, attention_mask, packed_seq_params=None, **unused) -> Tensor:
        return self.attend(query, key, value, packed_seq_params)

    def attend(self, query: Tensor, key: Tensor, value: Tensor | None, packed: PackedSeqParams | None) -> Tensor:
        return self.core_attention(query, key, value, packed_seq_params=packed)


@patches(
    "torch",
    why="a fused MLP must not bypass forward hooks on its two linears (_forward_hooks)",
    remove_when="nn.Module has a public way to ask whether it has hooks",
)
def has_forward_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks)
