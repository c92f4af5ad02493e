"""Low-rank adapters (LoRA): W = W0 + alpha / rank * B A, with frozen W0 and trained A and B.

W is rounded to the dtype of W0 after each update and is then the weight of its linear. Forward passes, quantization,
publications and exports read W as the weight of a run without adapters. W0 is in host memory. Backward computes the
gradients of A and B from the linear's input x and output gradient g, without the gradient of W:

    dA = s (g B)^T x        dB = s g^T (x A^T)        s = alpha / rank

With ``lora.merge`` False the weight of the linear stays W0, and forward adds the product of the adapter, rounded as in
the engine: y = W0 x + (s B) (A x), where s B is rounded to the dtype of B.

Megatron-Core stacks linears of the engine: q, k and v, or gate and up. Such a stack has one A, which its parts share.

Shapes: E = experts of this rank (1 for a plain linear), R = rank, K and N = input and output features on this rank, P =
equal parts of the output features (2 for gate and up, else 1), T = tokens.
"""

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.kernels import float64
from megatron_fp8rl.names import registry, slicing
from megatron_fp8rl.names.adapted import is_adapted
from megatron_fp8rl.names.table import Weight
from megatron_fp8rl.trainer.model.build import named_linears, unwrap
from megatron_fp8rl.trainer.model.linear import GroupedLinear, QuantizableLinear, ReplicatedLinear, in_bf16
from megatron_fp8rl.trainer.model.weight_cache import clear_weight_caches
from megatron_fp8rl.trainer.optimizer.grad_buffers import add_gradient
from megatron_fp8rl.trainer.parallel import Parallel


class Adapter(nn.Module):
    """A and B of one linear, or of the experts of one grouped linear, on this rank, and the frozen weights."""

    def __init__(self, linear: QuantizableLinear, weights: Sequence[Weight], cfg: RunConfig, parallel: Parallel):
        super().__init__()
        first, self.scale, is_grouped = weights[0], cfg.lora.alpha / cfg.lora.rank, isinstance(linear, GroupedLinear)
        self.weights, self.model = weights, cfg.model
        self.key = first.name.removesuffix(".weight")  # of checkpoints: the experts of a layer are one tensor
        self.experts = (parallel.ep_rank, parallel.ep_size) if is_grouped else (0, 1)
        if is_grouped:
            self.key = registry.without_expert(self.key)
        size, rank = (parallel.etp_size, parallel.etp_rank) if is_grouped else (parallel.tp_size, parallel.tp_rank)
        self.shard = (rank, size) if first.cut != "none" else (0, 1)
        self.tensor_rank, self.cut = rank, first.cut
        self.copies = parallel.expert_dp_group if is_grouped else parallel.dp_cp_group
        self.sums = parallel.etp_group if is_grouped and size > 1 else None
        num_parts = 2 if first.join == "gate_up" else 1
        drawn = [_draw(weight, cfg) for weight in weights]
        if first.cut == "columns":
            drawn = [registry.shard(w.name, a, cfg.model, size, rank) for w, a in zip(weights, drawn, strict=True)]
        like = linear.weights[0]
        self.a = nn.Parameter(torch.stack(drawn).to(like.device, like.dtype))  # [E, R, K]
        zeros = like.new_zeros(len(weights), num_parts, like.shape[0] // num_parts, cfg.lora.rank)
        self.b = nn.Parameter(zeros)  # [E, P, N / P, R]
        self.merges, self.is_used = cfg.lora.merge, True
        self.base = None  # W0 in host memory, if the linear's weights are W
        if self.merges:
            self.base = _on_host(linear)
        is_replicated = isinstance(linear, ReplicatedLinear)
        for parameter, is_sharded in ((self.a, first.cut == "columns"), (self.b, first.cut == "rows")):
            set_tensor_model_parallel_attributes(parameter, is_sharded and size > 1, 2, 1)
            parameter.allreduce = getattr(like, "allreduce", True)
            # Tensor-parallel ranks have parts of the sums over features or tokens; Megatron-Core adds them.
            parameter.sequence_parallel = not is_grouped and size > 1 and (is_replicated or not is_sharded)
            parameter.partial_in = None if is_sharded else self.sums  # see add_over_expert_tensor

    def forward(self, y: Tensor, x: Tensor, splits: Sequence[int] | None = None) -> Tensor:
        """y [T, N], the product of x [T, K] and the merged weights, or the sum of the products of W0 and the adapter.
        Backward also computes gradients of A and B."""
        if not self.merges:
            sizes = splits or (x.shape[0],)
            return _Added.apply(y, x, self.a, self.b, self.scale, sizes) if self.is_used else y
        if not torch.is_grad_enabled():
            return y
        return _Gradients.apply(y, x, self.a, self.b, self.scale, splits or (x.shape[0],))

    @torch.no_grad()
    def merge_into(self, weights: Sequence[Tensor], base: Tensor | None = None) -> None:
        """Set the linear's weights to W0 + s B A, rounded once; ``base`` is W0 if the adapter does not keep it."""
        wide = torch.float32 if self.a.is_cuda else torch.float64  # on a CPU, float32 sums depend on the shapes
        originals = self.base if base is None else base
        for weight, original, a, b in zip(weights, originals, self.a, self.b.flatten(1, 2), strict=True):
            original = original.to(weight.device, non_blocking=True).to(wide)
            weight.copy_(torch.addmm(original, b.to(wide), a.to(wide), alpha=self.scale))

    def sharded(self) -> dict[str, ShardedTensor]:
        """A and B as parts of global tensors, for a distributed checkpoint."""
        expert, num_ranks = self.experts
        rank, size = self.shard
        result = {}
        for name, parameter, is_sharded in (("a", self.a, self.cut == "columns"), ("b", self.b, self.cut == "rows")):
            offsets = ((0, expert, num_ranks), (2, rank, size)) if is_sharded else ((0, expert, num_ranks),)
            copy = (0, 0 if is_sharded else self.tensor_rank, self.copies.rank())
            result[name] = ShardedTensor.from_rank_offsets(
                f"{self.key}.adapter.{name}", parameter, *offsets, replica_id=copy
            )
        return result

    def pieces(self, *, scaled: bool = False) -> Iterator[tuple[str, str, int | None, Tensor]]:
        """(Hugging Face weight, "A" or "B", axis, tensor): this rank's piece of each matrix along the axis; the whole
        matrix if the axis is None. Of ranks with equal pieces, one yields them. ``scaled``: s B in place of B."""
        if self.copies.rank():
            return
        rank, size = self.shard
        b_of_experts = self.b.detach() * self.scale if scaled else self.b.detach()
        for weight, a, b in zip(self.weights, self.a.detach(), b_of_experts.flatten(1, 2), strict=True):
            names = [name for name, _ in weight.parts]
            if self.cut == "columns":
                yield names[0], "A", 1, a
            elif self.tensor_rank == 0:
                yield from ((name, "A", None, a) for name in names)
            if self.cut == "rows":
                parts = slicing.split(weight, self.model, b, size, rank)
                yield from ((name, "B", 0, part) for name, part in zip(names, parts, strict=True))
            elif self.tensor_rank == 0:
                yield names[0], "B", None, b


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, splits: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x, a, b)
        ctx.scale, ctx.splits = scale, splits
        return y.detach()  # not a view, which autograd would not let a caller write to

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple:
        _, *gradients = _backward(ctx, grad_TN, of_input=False)
        return grad_TN, None, *gradients, None, None


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, a: Tensor, b: Tensor, scale: float, splits: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x, a, b)
        ctx.scale, ctx.splits = scale, splits
        rows = zip(x.split(splits), a, (b * scale).flatten(1, 2), strict=True)
        return y + torch.cat([added(x_TK, a_RK, b_NR) for x_TK, a_RK, b_NR in rows])

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple:
        of_input = ctx.needs_input_grad[1]
        dx, *gradients = _backward(ctx, grad_TN, of_input=of_input)
        return grad_TN, torch.cat(dx).to(grad_TN.dtype) if of_input else None, *gradients, None, None


def added(x_TK: Tensor, a_RK: Tensor, b_NR: Tensor) -> Tensor:
    """[T, N]: what an adapter, whose B is scaled, adds to a product; ``vllm_plugin/patches_adapters.py`` repeats it."""
    return float64.matmul(float64.matmul(x_TK, a_RK.t()), b_NR.t())


def _backward(ctx: Any, grad_TN: Tensor, *, of_input: bool) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    """The gradients of the input, if asked for, of each expert's tokens, and those of A and B."""
    x_TK, a_ERK, b = ctx.saved_tensors
    rows = zip(grad_TN.split(ctx.splits), x_TK.split(ctx.splits), a_ERK, b.flatten(1, 2), strict=True)
    dx, da, db = [], [], []
    for grad, x, a, b_NR in rows:
        grad, x, a, b_NR = (part if part.is_cuda else part.float() for part in (grad, x, a, b_NR))
        through_b = ctx.scale * (grad @ b_NR)
        da.append(through_b.t() @ x)
        if of_input:
            dx.append(through_b @ a)
        db.append(ctx.scale * (grad.t() @ (x @ a.t())))
    grad_a = add_gradient(a_ERK, lambda out: out.add_(torch.stack(da)))
    grad_b = add_gradient(b, lambda out: out.add_(torch.stack(db).view(out.shape)))
    return dx, grad_a, grad_b


def _draw(weight: Weight, cfg: RunConfig) -> Tensor:
    """A of one weight, float32 [rank, K], normal with standard deviation 1 / sqrt(K); equal everywhere."""
    shape = cfg.lora.rank, weight.shape[1]
    generator = torch.Generator().manual_seed(zlib.crc32(f"{cfg.seed}/{weight.name}/adapter".encode()))
    return torch.randn(shape, generator=generator).div_(math.sqrt(shape[1]))


def add_adapters(chunks: Sequence[nn.Module], cfg: RunConfig, parallel: Parallel) -> None:
    """Freeze the chunks, whose weights are loaded, and add the adapters of ``cfg.lora``; no communication."""
    for chunk in chunks:
        chunk.requires_grad_(False)
    for names, linear in named_linears(chunks, parallel):
        if is_adapted(names[0], cfg.lora):
            linear.gemm = linear.gemm or in_bf16
            linear.adapter = Adapter(linear, [registry.weight(name, cfg.model) for name in names], cfg, parallel)
    for chunk in map(unwrap, chunks):
        if chunk.pre_process:  # recomputed layers need an input with a gradient
            chunk.embedding.register_forward_hook(lambda _, __, out: out.requires_grad_(torch.is_grad_enabled()))


def adapted_linears(chunks: Iterable[nn.Module]) -> Iterator[QuantizableLinear]:
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, QuantizableLinear) and module.adapter is not None:
            yield module


def merge_adapters(chunks: Iterable[nn.Module]) -> None:
    """Compute every adapted weight of this rank; call after adapters have changed. A no-op without merged adapters."""
    for linear in adapted_linears(chunks):
        if linear.adapter.merges:
            linear.adapter.merge_into(linear.weights)


@contextmanager
def without_adapters(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """In the block, the chunks are the base model."""
    linears = [*adapted_linears(chunks)]
    for linear in linears:
        linear.adapter.is_used = False
        if linear.adapter.merges:
            _restore(linear, linear.adapter.base)
    clear_weight_caches()
    try:
        yield
    finally:
        for linear in linears:
            linear.adapter.is_used = True
        merge_adapters(chunks)
        clear_weight_caches()


@contextmanager
def merged(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """In the block, every adapted weight of this rank is W0 + s B A, to be exported. Host memory holds W0 meanwhile."""
    bases = [(linear, _on_host(linear)) for linear in adapted_linears(chunks) if not linear.adapter.merges]
    try:
        for linear, base in bases:
            linear.adapter.merge_into(linear.weights, base)
        yield
    finally:
        for linear, base in bases:
            _restore(linear, base)


def _on_host(linear: QuantizableLinear) -> Tensor:
    weights = torch.stack([weight.detach() for weight in linear.weights])
    return weights.cpu().pin_memory() if weights.is_cuda else weights


def _restore(linear: QuantizableLinear, base: Tensor) -> None:
    for weight, original in zip(linear.weights, base, strict=True):
        weight.data.copy_(original, non_blocking=True)


def add_over_expert_tensor(chunks: Iterable[nn.Module]) -> None:
    """Collective over expert-tensor-parallel ranks: add their parts of reduced gradients of adapters."""
    for linear in adapted_linears(chunks):
        for parameter in (linear.adapter.a, linear.adapter.b):
            if parameter.partial_in is not None:
                dist.all_reduce(parameter.main_grad, group=parameter.partial_in)


def sharded_adapters(chunk: nn.Module) -> dict[str, ShardedTensor]:
    """The adapters of a chunk by their names in its state dict, for a distributed checkpoint."""
    return {
        f"{path}.adapter.{name}": tensor
        for path, module in unwrap(chunk).named_modules()
        if isinstance(module, QuantizableLinear) and module.adapter is not None
        for name, tensor in module.adapter.sharded().items()
    }


def base_digest(chunks: Sequence[nn.Module], parallel: Parallel) -> int:
    """Collective, before the first update: a number that tells base models apart, equal in every parallel layout. It is
    the sum of the squared bit patterns of the weights that have adapters."""
    total = 0
    for linear in adapted_linears(chunks):
        adapter = linear.adapter
        if adapter.copies.rank() == 0 and (adapter.shard[1] > 1 or adapter.tensor_rank == 0):
            bits = torch.int16 if linear.weights[0].dtype.itemsize == 2 else torch.int32
            total += sum(int(weight.detach().view(bits).long().square().sum()) for weight in linear.weights)
    return sum(parallel.gather_from_all(total)) % (1 << 63)
