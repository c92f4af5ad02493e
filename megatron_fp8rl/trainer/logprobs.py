"""Log-probabilities and entropy of target tokens, chunkwise from the last hidden states.

In: hidden states and the vocabulary shard of the output head on the ranks of the last pipeline stage, packed tokens.
Out: an FP32 log-probability and entropy per token, equal on all tensor-parallel ranks and, after
:func:`gather_context`, for the whole microbatch on all context-parallel ranks.

Logits exist for one chunk of tokens at a time. If one chunk holds all tokens, backward overwrites its logits with their
gradient. With more chunks, forward keeps three values per token and backward computes each chunk again. Peak memory is
about three FP32 chunks of ``chunk_tokens * vocabulary / tensor parallel`` values. For BF16 parameters on a GPU it is
one BF16 chunk, which the Triton kernels in log_softmax.py overwrite. The gradient of the head is accumulated in its
FP32 gradient buffer, unless the embedding shares it.

Logits are rounded to the parameters' dtype and then cast to FP32, as in the engine.

With kept entries, the distribution is the truncated one of the engine's sampler. Logits of other entries are replaced
by a number whose exponential is 0, so that the same functions and kernels serve.

Shapes: N = tokens, H = hidden size, V = vocabulary rows of this rank, T = packed tokens of one microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp8rl.kept_entries import KeptEntries
from megatron_fp8rl.kernels import float64
from megatron_fp8rl.kernels.backend import runs_triton
from megatron_fp8rl.kernels.exact_logprobs import divided, exp_sum, log_of_sum
from megatron_fp8rl.trainer.optimizer.grad_buffers import add_gradient

# Replaces logits outside the kept entries. Its exponential is 0; unlike with -inf, 0 times the logit is 0 and not NaN.
_DROPPED = -1e30
_MASKS = 64  # bit masks that are expanded at a time: bounds memory


@dataclass(frozen=True, kw_only=True)
class HeadShard:
    first_token: int  # vocabulary id of row 0
    num_tokens: int  # rows that hold vocabulary; the remaining rows pad the shard
    temperature: float
    chunk_tokens: int  # tokens whose FP32 logits are in memory at a time
    group: dist.ProcessGroup | None  # tensor-parallel ranks with the other shards; None for one rank
    is_shared: bool = False  # with the embedding, whose gradient autograd adds to this one

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"log-probabilities need a temperature above 0, not {self.temperature}")
        if self.chunk_tokens < 1:
            raise ValueError(f"optim.logprob_chunk_tokens must be at least 1, not {self.chunk_tokens}")

    @classmethod
    def of(
        cls,
        *,
        num_rows: int,
        vocab_size: int,
        temperature: float,
        chunk_tokens: int,
        group: dist.ProcessGroup | None,
        is_shared: bool = False,
    ) -> HeadShard:
        """This rank's shard of ``vocab_size`` tokens, padded at the end and sharded in order over ``group``."""
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        first = rank * num_rows
        if num_rows * size < vocab_size:
            raise ValueError(f"{size} shards of {num_rows} head rows cannot hold a vocabulary of {vocab_size}")
        return cls(
            first_token=first,
            num_tokens=min(max(vocab_size - first, 0), num_rows),
            temperature=temperature,
            chunk_tokens=chunk_tokens,
            group=group if size > 1 else None,
            is_shared=is_shared,
        )


def token_logprobs(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, shard: HeadShard, kept: KeptEntries | None = None
) -> tuple[Tensor, Tensor]:
    """Collective over ``shard.group``: log-probability of each target and entropy of its distribution, FP32 [N] each.

    With logits ``z = hidden @ weight.T / temperature`` over the real vocabulary: ``logprob = z[target] - logsumexp(z)``
    and ``entropy = logsumexp(z) - sum(softmax(z) * z)``, in nats, both differentiable; an entropy outside the loss
    costs nothing in backward. The gradient of ``hidden_NH`` is this shard's partial sum: the caller's gather or copy
    into the tensor-parallel region reduces it. ``targets_N`` are int64 vocabulary ids, equal on all ranks of the group.
    ``kept`` [N] restricts each token's distribution to some entries.
    """
    return _TokenLogprobs.apply(hidden_NH, weight_VH, targets_N, shard, kept, torch.is_grad_enabled())


def keep_only(logits_nV: Tensor, kept: KeptEntries, first_token: int) -> None:
    """Overwrite the logits of entries that were not kept. Column 0 is entry ``first_token``."""
    num_columns, device = logits_nV.shape[1], logits_nV.device
    are_masks, lengths = kept.are_masks(), kept.lengths
    of_ids_K = ~np.repeat(are_masks, lengths)
    rows_k, columns_k = np.repeat(np.arange(len(kept)), lengths)[of_ids_K], kept.words[of_ids_K].astype(np.int64)
    columns_k -= first_token
    are_here_k = (columns_k >= 0) & (columns_k < num_columns)
    places = tuple(torch.from_numpy(x[are_here_k]).to(device) for x in (rows_k, columns_k))
    values = logits_nV[places]
    logits_nV.index_fill_(0, torch.from_numpy(np.flatnonzero(~are_masks & (lengths > 0))).to(device), _DROPPED)
    logits_nV[places] = values
    masks = torch.from_numpy(kept.words[~of_ids_K].reshape(-1, kept.width))
    bits = torch.arange(32, dtype=torch.int32, device=device)
    for rows, words in zip(torch.from_numpy(np.flatnonzero(are_masks)).split(_MASKS), masks.split(_MASKS), strict=True):
        are_kept = (words.to(device)[:, :, None] >> bits & 1).bool().flatten(1)
        are_kept = are_kept[:, first_token : first_token + num_columns]
        rows = rows.to(device)
        logits_nV[rows] = logits_nV[rows].masked_fill(~are_kept, _DROPPED)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        shard: HeadShard,
        kept: KeptEntries | None,
        record: bool,
    ):
        rows_VH = weight_VH[: shard.num_tokens]
        num = hidden_NH.shape[0]
        logprobs_N, entropy_N, log_norm_N = hidden_NH.new_empty((3, num), dtype=torch.float32).unbind()
        chunks = _chunks(num, shard.chunk_tokens)
        ctx.logits, ctx.kept = None, kept
        for chunk in chunks:
            logits = float64.matmul(hidden_NH[chunk], rows_VH.t()) if shard.num_tokens else None
            if kept is not None and logits is not None:
                keep_only(logits, kept[chunk], shard.first_token)
            part = _chunk_statistics(logits, hidden_NH[chunk], targets_N[chunk], shard)
            logprobs_N[chunk], entropy_N[chunk], log_norm_N[chunk] = part
            if record and len(chunks) == 1:
                ctx.logits = logits  # not save_for_backward: backward overwrites them
            del logits  # before the next chunk's are there
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, entropy_N, log_norm_N)
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx, grad_logprobs_N: Tensor | None, grad_entropy_N: Tensor | None):
        hidden_NH, weight_VH, targets_N, entropy_N, log_norm_N = ctx.saved_tensors
        if grad_logprobs_N is None and grad_entropy_N is None:
            return None, None, None, None, None, None
        shard, num = ctx.shard, hidden_NH.shape[0]
        if grad_logprobs_N is None:
            grad_logprobs_N = torch.zeros_like(entropy_N)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        rows_VH = weight_VH[: shard.num_tokens]
        grad_hidden_NH = torch.empty_like(hidden_NH) if need_hidden else None

        def run(grad_weight_VH: Tensor | None) -> None:
            for chunk in _chunks(num, shard.chunk_tokens):
                logits, ctx.logits = ctx.logits, None
                if logits is None:
                    logits = torch.mm(hidden_NH[chunk], rows_VH.t())
                    if ctx.kept is not None:
                        keep_only(logits, ctx.kept[chunk], shard.first_token)
                grad_logits = _chunk_logit_gradient(
                    logits,
                    targets_N[chunk],
                    shard,
                    log_norm=log_norm_N[chunk],
                    entropy=entropy_N[chunk],
                    grad_logprobs=grad_logprobs_N[chunk],
                    grad_entropy=None if grad_entropy_N is None else grad_entropy_N[chunk],
                )
                del logits
                if need_hidden:
                    torch.mm(grad_logits, rows_VH, out=grad_hidden_NH[chunk])
                if grad_weight_VH is not None:
                    _add_product(grad_weight_VH[: shard.num_tokens], grad_logits.t(), hidden_NH[chunk])
                del grad_logits  # before the next chunk's logits are there

        grad_weight_VH = None
        if need_weight:
            grad_weight_VH = add_gradient(weight_VH, run, is_shared=shard.is_shared)
        else:
            run(None)
        return grad_hidden_NH, grad_weight_VH, None, None, None, None


def _add_product(sum_VH: Tensor, a_Vn: Tensor, b_nH: Tensor) -> None:
    """Add a product to an FP32 sum; on a GPU nothing is rounded to BF16 in between."""
    if sum_VH.is_cuda and a_Vn.dtype != torch.float32:
        torch.addmm(sum_VH, a_Vn, b_nH, out_dtype=torch.float32, out=sum_VH)
    else:
        sum_VH += a_Vn @ b_nH


def _chunks(num: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, num)) for start in range(0, num, size)]


def _kernels(logits_nV: Tensor):
    """The Triton kernel module if it supports these logits; None selects the torch implementation."""
    if logits_nV.dtype != torch.bfloat16 or not runs_triton(logits_nV):
        return None
    from megatron_fp8rl.kernels.triton import log_softmax  # imports Triton

    return log_softmax


def _owned(targets_n: Tensor, shard: HeadShard) -> tuple[Tensor, Tensor]:
    """Row indices of the targets clamped to this shard, and whether the shard owns them."""
    local_n = targets_n - shard.first_token
    owned_n = (local_n >= 0) & (local_n < shard.num_tokens)
    return local_n.clamp_(0, max(shard.num_tokens - 1, 0)), owned_n


def _chunk_statistics(
    logits: Tensor | None, hidden_nH: Tensor, targets_n: Tensor, shard: HeadShard
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probability, entropy, logsumexp) of each token over the whole vocabulary, FP32 [n] each. ``logits`` [n, V]
    are this shard's; None if the shard has only padding."""
    num = hidden_nH.shape[0]
    if logits is not None:
        max_n = divided(logits.amax(-1), shard.temperature)
    else:  # a shard with only padding must still join the reductions
        logits, max_n = None, hidden_nH.new_full((num,), -torch.inf, dtype=torch.float32)
    if shard.group is not None:
        dist.all_reduce(max_n, op=dist.ReduceOp.MAX, group=shard.group)

    if logits is None:
        exp_sums_n = torch.zeros(num, dtype=torch.int64, device=hidden_nH.device)
        others_2n = hidden_nH.new_zeros((2, num), dtype=torch.float32)
    elif kernels := _kernels(logits):
        exp_sums_n, others_2n = kernels.sums(logits, max_n, targets_n, shard.first_token, shard.temperature)
    else:
        exp_sums_n, others_2n = _sums(logits, max_n, targets_n, shard)
    if shard.group is not None:
        dist.all_reduce(exp_sums_n, group=shard.group)
        dist.all_reduce(others_2n, group=shard.group)
    log_sum_n = log_of_sum(exp_sums_n)
    weighted_n, at_target_n = others_2n
    return at_target_n - log_sum_n, log_sum_n - weighted_n / log_sum_n.exp(), max_n + log_sum_n


def _sums(logits_nV: Tensor, max_n: Tensor, targets_n: Tensor, shard: HeadShard) -> tuple[Tensor, Tensor]:
    """int64 [n]: sum exp(z - max); FP32 [2, n]: sum exp(z - max) * (z - max), z[target] - max; over this shard."""
    shifted = divided(logits_nV, shard.temperature).sub_(max_n[:, None])
    local_n, owned_n = _owned(targets_n, shard)
    at_target_n = shifted.gather(1, local_n[:, None])[:, 0].masked_fill_(~owned_n, 0.0)
    exp_sums_n = exp_sum(shifted)
    return exp_sums_n, torch.stack([shifted.exp().mul_(shifted).sum(-1), at_target_n])


def _chunk_logit_gradient(
    logits: Tensor,
    targets_n: Tensor,
    shard: HeadShard,
    *,
    log_norm: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Gradient of the loss with respect to this shard's raw logits, [n, V] in their dtype; may overwrite them. With p =
    softmax(z): d logprob / dz = onehot(target) - p, and d entropy / dz = -p * (log p + entropy)."""
    if shard.num_tokens and (kernels := _kernels(logits)):
        rows = dict(log_norm=log_norm, entropy=entropy, grad_logprobs=grad_logprobs, grad_entropy=grad_entropy)
        return kernels.gradient(logits, targets_n, shard.first_token, shard.temperature, **rows)
    log_p = logits.float().div_(shard.temperature).sub_(log_norm[:, None])
    grad = log_p.exp()
    if grad_entropy is None:
        grad.mul_(grad_logprobs[:, None].neg())
    else:
        log_p.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_logprobs[:, None])
        grad.mul_(log_p).neg_()
    if shard.num_tokens:
        local_n, owned_n = _owned(targets_n, shard)
        grad.scatter_add_(1, local_n[:, None], (grad_logprobs * owned_n)[:, None])
    return grad.div_(shard.temperature).to(logits.dtype)


def zigzag_indices(cu_seqlens_S: Tensor, context_size: int, context_rank: int) -> Tensor:
    """Packed positions [T / context_size] of a context-parallel rank, in local order (Transformer Engine's layout).

    Rank r gets chunks r and ``2 * context_size - 1 - r`` of the ``2 * context_size`` chunks of every sequence, which
    balances causal attention. Raises ValueError if a padded length is not a multiple of ``2 * context_size``.
    """
    starts = cu_seqlens_S.long()
    lengths = starts[1:] - starts[:-1]
    num_chunks = 2 * context_size
    if bool((lengths % num_chunks).any()):
        raise ValueError(
            f"context parallelism over {context_size} ranks splits each sequence into {num_chunks} equal chunks, but "
            f"padded lengths {lengths.tolist()} are not all multiples of {num_chunks}. Pack with Alignment.of(parallel)"
        )
    position = torch.arange(int(starts[-1]), device=starts.device) - starts[:-1].repeat_interleave(lengths)
    chunk = position // (lengths // num_chunks).repeat_interleave(lengths)
    return torch.nonzero((chunk == context_rank) | (chunk == num_chunks - 1 - context_rank))[:, 0]


def gather_context(values: Tensor, order_T: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Collective over ``group``: gather the values of all context-parallel ranks in packed order.

    ``values`` [..., T / size] are this rank's, ``order_T`` [T] the concatenation of all ranks' :func:`zigzag_indices`.
    Returns [..., T]. Every rank must compute the same loss from it: backward slices the gradient without a reduction.
    """
    return _GatherContext.apply(values, order_T, group)


class _GatherContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, order_T: Tensor, group: dist.ProcessGroup) -> Tensor:
        local = values.shape[-1]
        ctx.own = order_T[group.rank() * local : (group.rank() + 1) * local]
        parts = [torch.empty_like(values) for _ in range(group.size())]
        dist.all_gather(parts, values.contiguous(), group=group)
        packed = values.new_empty((*values.shape[:-1], order_T.numel()))
        packed[..., order_T] = torch.cat(parts, dim=-1)
        return packed

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad[..., ctx.own], None, None
