"""Linears with pluggable FP8 GEMMs, and RMSNorm; parameter names and layout are those of Transformer Engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megatron_fp8rl.kernels import float64
from megatron_fp8rl.kernels.ordered_sum import add_in_order
from megatron_fp8rl.precision.recipes import AmaxHistory, Recipe, quantized_linear
from megatron_fp8rl.trainer.compat.megatron import ColumnLinearBase, RowLinearBase
from megatron_fp8rl.trainer.model import linear_deep_gemm
from megatron_fp8rl.trainer.model.weight_cache import WeightCache
from megatron_fp8rl.upstream import patches

Norm = Callable[[Tensor, Tensor, float], Tensor | tuple[Tensor, Tensor]]


class RMSNorm(nn.Module):
    """RMSNorm with statistics in FP32 (on a CPU, float64), rounded where the engine rounds.

    On a CPU that is both before and after the multiplication by the weight, as in the published models. GPU kernels of
    vLLM and Transformer Engine multiply in FP32 and round once. ``compute`` may return its input behind the result,
    which a layer takes as its residual stream.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        compute: Norm | None = None,
        **unused: Any,
    ):
        super().__init__()
        self.eps, self.compute = eps, compute or float64.rms_norm
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=current_device()))
        # Under sequence parallelism each rank has only its tokens; this makes Megatron-Core sum the gradient.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return (self.compute if x.numel() else float64.rms_norm)(x, self.weight, self.eps)


class AllHeadsNorm(RMSNorm):
    """RMSNorm over the features of all heads, also those of other tensor-parallel ranks. A rank has the weights of its
    heads. Several ranks are not measured on GPUs yet."""

    def __init__(
        self, config: TransformerConfig, num_features: int, group: dist.ProcessGroup, compute: Norm | None = None
    ):
        """``compute``: of a norm whose heads are all on this rank."""
        super().__init__(config, num_features, config.layernorm_epsilon, compute=compute)
        self.group, self.weight.sequence_parallel = group, False
        set_tensor_model_parallel_attributes(self.weight, group.size() > 1, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Collective over tensor-parallel ranks: heads [..., H, D] -> the same shape."""
        heads = x.flatten(-2)
        if self.group.size() == 1:
            return super().forward(heads).view_as(x)
        return float64.rms_norm(heads, self.weight, self.eps, self._over_ranks).view_as(x)

    def _over_ranks(self, mean: Tensor) -> Tensor:
        """The gradient is summed too: every rank's output depends on the mean."""
        total = reduce_from_tensor_model_parallel_region(mean, group=self.group)
        return copy_to_tensor_model_parallel_region(total, group=self.group) / self.group.size()

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        groups = {"tp_group": self.group, "dp_cp_group": metadata["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(
            {"weight": self.weight}, prefix, {"weight": 0}, sharded_offsets, **groups
        )


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


Gemm = Callable[["QuantizableLinear", Tensor, Sequence[Tensor], "Sequence[int] | None"], Tensor]
"""(linear, x [T, K], E weights [N, K], tokens per expert or None) -> y [T, N], with gradients."""


@dataclass(frozen=True, eq=False)
class LinearSpec:
    recipe: Recipe | None = None  # None: the dtype of the parameters, such as BF16
    gemm: Gemm | None = None  # None: Megatron-Core's GEMM, or experts whose module multiplies
    block_rows: Tensor | None = None  # int64 [N] row order in which FP8 blocks are formed; None: the weight's order
    history_len: int | None = None
    """Length of the amax history under delayed scaling. Every linear of such a model has a history, FP8 or not: layers
    must be homogeneous for distributed checkpointing, which stacks them."""


class QuantizableLinear:
    """Base of the linears: recipe, GEMM and weight cache, and under delayed scaling the amax history."""

    def multiply_by(self, spec: LinearSpec) -> None:
        """Apply ``spec``; the last step of construction."""
        self.recipe, self.gemm, self.block_rows = spec.recipe, spec.gemm, spec.block_rows
        self.cache = WeightCache()  # of quantized weights
        if spec.history_len is not None:
            self.fp8 = AmaxHistory(spec.history_len, getattr(self, "num_gemms", 1), current_device())

    @property
    def history(self) -> AmaxHistory | None:
        return self._modules.get("fp8")

    @property
    def adapter(self) -> nn.Module | None:
        """The ``trainer.model.lora.Adapter`` of this linear, if any."""
        return self._modules.get("adapter")

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        return (self.weight,)

    @property
    def reads_copies(self) -> bool:
        """Whether the GEMM never reads the weight itself."""
        return self.gemm is on_deep_gemm

    def keep_copies(self) -> None:
        """Copy the weight, which leaves its memory, until :meth:`drop_copies`."""
        matrix_of(self, self.weight).quantized()
        self.cache.pin()

    def drop_copies(self) -> None:
        """There is a new weight."""
        self.cache.renew()


class ColumnLinear(QuantizableLinear, ColumnLinearBase):
    def __init__(self, *args: Any, spec: LinearSpec = LinearSpec(), **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.multiply_by(spec)

    def multiplied(self, x: Tensor, weight: Tensor, *, is_whole: bool) -> Tensor | None:
        return None if self.gemm is None else quantized(self, x if is_whole else self.gathered(x), weight)

    def gathered(self, x: Tensor) -> Tensor:
        """Collective over tensor-parallel ranks: gather the GEMM input from this rank's [s, b, h]."""
        if self.sequence_parallel:
            # Backward: each rank has the gradient of its output features only, so the slices are summed.
            return gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=True, group=self.tp_group)
        return copy_to_tensor_model_parallel_region(x, group=self.tp_group) if self.allreduce_dgrad else x


@patches(
    "megatron-core",
    why="overrides forward: partial products are added in one order at both ends, not by Megatron-Core's collectives",
    remove_when="RowParallelLinear takes its reduction as an argument",
)
class RowLinear(QuantizableLinear, RowLinearBase):
    """Input features sharded over tensor-parallel ranks. ``num_parts``: this rank's partial products, if those of all
    ranks are added in order; 0: Megatron-Core's collectives add one per rank. ``norm`` builds a norm of the sum."""

    def __init__(
        self,
        *args: Any,
        spec: LinearSpec = LinearSpec(),
        num_parts: int = 0,
        norm: Callable[..., RMSNorm] | None = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        eps = self.config.layernorm_epsilon
        self.post_layernorm = None if norm is None else norm(self.config, self.output_size, eps)
        self.multiply_by(spec)
        self.num_parts = num_parts
        if num_parts:  # Megatron-Core leaves the reduction to the caller
            self.explicit_expert_comm = self.skip_bias_add = True

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Collective over tensor-parallel ranks: x [s, b, K of this rank] -> ([s, b, N], None), reduced."""
        y, bias = self._summed(x)
        return y if self.post_layernorm is None else self.post_layernorm(y), bias

    def _summed(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.num_parts < 2:
            y, bias = super().forward(x)
            return self.reduced(y) if self.num_parts else y, bias
        pairs = zip(x.chunk(self.num_parts, -1), self.weight.chunk(self.num_parts, 1), strict=True)
        first, *others = (_product(self, *pair) for pair in pairs)
        return self.reduced(_adapted(self, first, x), *others), None

    def multiplied(self, x: Tensor, weight: Tensor) -> Tensor | None:
        return None if self.gemm is None else quantized(self, x, weight)

    def reduced(self, y: Tensor, *others: Tensor) -> Tensor:
        """Collective over tensor-parallel ranks: the sum of all parts or, under sequence parallelism, of this rank's
        tokens."""
        if self.num_parts:
            return _SumInOrder.apply(self.tp_group if self.sequence_parallel else None, y, *others)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(y, group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(y, group=self.tp_group)


class _SumInOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup | None, *parts: Tensor) -> Tensor:
        """Parts [s, b, N] of this rank, for all tokens -> [s / ranks, b, N], the sum of all ranks' parts in order."""
        ctx.group = group
        stacked = torch.stack(parts)
        if group is not None:
            sent = stacked.unflatten(1, (group.size(), -1)).transpose(0, 1).contiguous()
            stacked = torch.empty_like(sent)
            dist.all_to_all_single(stacked, sent, group=group)
            stacked = stacked.flatten(0, 1)
        return add_in_order(stacked)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.group is not None:
            mine = grad.contiguous()
            grad = mine.new_empty(len(mine) * ctx.group.size(), *mine.shape[1:])
            dist.all_gather_into_tensor(grad, mine, group=ctx.group)
        return None, *[grad] * (len(ctx.needs_input_grad) - 1)


def rounded_weight(linear: QuantizableLinear) -> Tensor:
    """[N, K]: the weight in the values that the linear multiplies."""
    if linear.recipe is None:
        return linear.weight
    rows = linear.block_rows
    weight = linear.weight if rows is None else linear.weight[rows]
    values = linear.recipe.weight(weight[None], None, False).values[0]
    return values if rows is None else values[rows.argsort()]


def quantized(linear: QuantizableLinear, x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] times weight [N, K] with the recipe of ``linear`` -> [..., N]."""
    return _adapted(linear, _product(linear, x, weight), x)


def _product(linear: QuantizableLinear, x: Tensor, weight: Tensor) -> Tensor:
    y = linear.gemm(linear, x.reshape(-1, x.shape[-1]), (weight,), None)
    return y.view(*x.shape[:-1], y.shape[-1])


def _adapted(linear: QuantizableLinear, y: Tensor, x: Tensor) -> Tensor:
    """``y``, or a part of it; its gradient with the whole input gives those of an adapter."""
    if linear.adapter is None:
        return y
    return linear.adapter(y.flatten(0, -2), x.reshape(-1, x.shape[-1])).view_as(y)


def in_torch(
    linear: QuantizableLinear, x_TK: Tensor, weights: Sequence[Tensor], splits: Sequence[int] | None
) -> Tensor:
    """A :data:`Gemm`: emulated FP8 (``precision/recipes.py``), or BF16, without a recipe, summed as in the engine."""
    rows = linear.block_rows
    if rows is not None:
        weights = tuple(weight[rows] for weight in weights)
    y = quantized_linear(x_TK, weights, linear.recipe, splits=splits, history=linear.history)
    return y if rows is None else y[:, rows.argsort()]


def in_bf16(linear: QuantizableLinear, x_TK: Tensor, weights: Sequence[Tensor], splits: Sequence[int] | None) -> Tensor:
    """A :data:`Gemm` for a single frozen matrix, in its dtype."""
    (weight,) = weights
    return F.linear(x_TK, weight)


class _FixedOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_NK: Tensor) -> Tensor:
        from megatron_fp8rl.kernels.triton import batch_invariant

        ctx.save_for_backward(x_TK, weight_NK)
        return batch_invariant.linear(x_TK.contiguous(), weight_NK.contiguous())

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor, Tensor]:
        x_TK, weight_NK = ctx.saved_tensors
        return grad_TN @ weight_NK, grad_TN.t() @ x_TK


def in_fixed_order(
    linear: QuantizableLinear, x_TK: Tensor, weights: Sequence[Tensor], splits: Sequence[int] | None
) -> Tensor:
    """A :data:`Gemm` for a single BF16 matrix, with the bits of a batch-invariant engine; gradients by cuBLAS."""
    (weight,) = weights
    return _FixedOrder.apply(x_TK, weight)


def on_deep_gemm(
    linear: QuantizableLinear, x_TK: Tensor, weights: Sequence[Tensor], splits: Sequence[int] | None
) -> Tensor:
    """A :data:`Gemm` for a single matrix, on DeepGEMM."""
    (weight,) = weights
    return linear_deep_gemm.linear(x_TK, matrix_of(linear, weight))


def matrix_of(linear: QuantizableLinear, weight: Tensor) -> linear_deep_gemm.Matrix:
    return linear_deep_gemm.Matrix(weight, linear.recipe.fmt, linear.cache, linear.block_rows)


def on_transformer_engine(
    linear: QuantizableLinear, x_TK: Tensor, weights: Sequence[Tensor], splits: Sequence[int] | None
) -> Tensor:
    from megatron_fp8rl.trainer.model.linear_te import te_linear

    return te_linear(
        x_TK,
        weights,
        linear.recipe,
        splits=splits,
        history=linear.history,
        cache=linear.cache,
        block_rows=linear.block_rows,
    )


class ReplicatedLinear(QuantizableLinear, nn.Module):
    """A weight replicated on every tensor-parallel rank and applied to the rank's tokens."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, tp_group, spec: LinearSpec = LinearSpec()
    ):
        super().__init__()
        self.multiply_by(spec)
        self.tp_group = tp_group
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype, device=current_device())
        self.weight = nn.Parameter(weight)
        # Each rank has only its tokens; this makes Megatron-Core sum the gradient over tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) if self.gemm is None else quantized(self, x, self.weight)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class GroupedLinear(QuantizableLinear, nn.Module):
    """This rank's expert linears: parameters ``weight{i}`` as in TEGroupedLinear, filled by ``build_chunks``."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        parallel_mode: str,
        config: TransformerConfig,
        pg_collection,
        bias: bool = False,
        spec: LinearSpec = LinearSpec(),
        **unused: Any,
    ):
        super().__init__()
        tp_size = pg_collection.expt_tp.size()
        self.num_gemms, self.pg_collection = num_gemms, pg_collection
        self.multiply_by(spec)
        self.axis = 0 if parallel_mode == "column" else 1
        shape = [output_size, input_size]
        shape[self.axis] //= tp_size
        own_groups = (
            config.expert_model_parallel_size > 1
            or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        )
        stack = torch.empty(num_gemms, *shape, dtype=config.params_dtype, device=current_device())
        # Megatron-Core's buffers hold parameters in reverse order of registration. Registering experts in reverse keeps
        # them in order there, as in this one tensor, so grouped kernels read weights and add gradients without copies.
        for index in reversed(range(num_gemms)):
            weight = nn.Parameter(stack[index])
            stride = 2 if self.axis == 0 and config.gated_linear_unit else 1
            set_tensor_model_parallel_attributes(weight, tp_size > 1, self.axis, stride)
            weight.allreduce = not own_groups  # False: reduce gradients over the expert groups
            self.register_parameter(f"weight{index}", weight)
        self.has_bias = bias
        for index in range(num_gemms if bias else 0):
            vector = nn.Parameter(torch.zeros(shape[0], dtype=config.params_dtype, device=current_device()))
            vector.allreduce = not own_groups
            self.register_parameter(f"bias{index}", vector)

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        """One per expert, in order; they are this module's only parameters but biases, registered in reverse."""
        return tuple(reversed([*self.parameters(recurse=False)][: self.num_gemms]))

    @property
    def biases(self) -> tuple[nn.Parameter, ...]:
        """One per expert, in order; empty without biases."""
        return tuple(self.parameters(recurse=False))[self.num_gemms :]

    def forward(self, x: Tensor, splits: list[int]) -> tuple[Tensor, None]:
        """x [T, K], sorted by expert, ``splits`` tokens each -> [T, N]."""
        y = self.gemm(self, x, self.weights, splits)
        y = y if self.adapter is None else self.adapter(y, x, splits)
        if self.has_bias:
            y = y + torch.cat([bias.expand(count, -1) for bias, count in zip(self.biases, splits, strict=True)])
        return y, None

    def backward_dw(self) -> None:
        """No-op: wgrad is never delayed here."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Each expert's weight as a shard of one global tensor; interchangeable with TEGroupedLinear."""
        ep, tp, dp = (getattr(self.pg_collection, name) for name in ("ep", "expt_tp", "expt_dp"))
        num_experts, first, result = ep.size() * self.num_gemms, ep.rank() * self.num_gemms, {}
        named = [("weight", *item) for item in enumerate(self.weights)]
        named += [("bias", *item) for item in enumerate(self.biases)]
        for kind, index, tensor in named:
            offsets = (*sharded_offsets, (len(sharded_offsets), first + index, num_experts))
            part = make_sharded_tensors_for_checkpoint(
                {f"{index}.{kind}": tensor},
                "",
                {f"{index}.{kind}": self.axis} if kind == "weight" or self.axis == 0 else {},
                offsets,
                tp_group=tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(part, f"{index}.", prefix)
            sharded = part[f"{index}.{kind}"]
            sharded.replica_id = (*sharded.replica_id[:2], dp.rank())
            result[f"{prefix}{kind}{index}"] = sharded
        if self.history is not None:
            num_axes = len(sharded_offsets)
            result[f"{prefix}fp8.history"] = ShardedTensor.from_rank_offsets(
                f"{prefix}fp8.history",
                self.history.history,
                *sharded_offsets,
                (num_axes + 2, ep.rank(), ep.size()),
                replica_id=(0, tp.rank(), dp.rank()),
                prepend_axis_num=num_axes,
            )
        return result
