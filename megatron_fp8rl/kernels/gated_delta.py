"""The gated delta rule (arXiv:2412.06464) over packed sequences: one recurrence for trainer and engine on a CPU, chunks
of 64 tokens for a trainer on GPUs.

    state = exp(decay) * state                      decay = -exp(A_log) * softplus(a + dt_bias)
    state = state + key (x) strength * (value - state^T key)        strength = sigmoid(b)
    output = state^T query / sqrt(K)

before which query, key and value pass a causal convolution over the last W tokens and silu, and queries and keys get
length 1. In the recurrence sums are in float64, token after token, and the state is rounded to float32 after every
token: a prompt, its chunks, decoding and a packed microbatch give a token the same bits, up to the probability in
``float64.py``. Autograd differentiates the loop, which keeps a state per token.

The chunked form (:func:`chunked`) is section 3 of arXiv:2406.06484, with decays. With S the state before a chunk and
D_t the sum of decays from the chunk's begin to token t, the state of token t is

    exp(D_t) S + sum over i <= t of exp(D_t - D_i) key_i (x) delta_i
    delta_t = strength_t (value_t - exp(D_t) S^T key_t - sum over i < t of exp(D_t - D_i) (key_i . key_t) delta_i)

The second line is a triangular system, whose solution is linear in S: a loop over chunks has matrix products only. On
GPUs, vLLM computes prompts in chunks, too, and decoded tokens by the recurrence. So sums have different orders, and
trainer and engine differ in the last bits.

Shapes: T = tokens of all sequences, N = sequences, G = key heads, H = value heads, R = H / G, K and V = features of a
key and of a value head, C = 2 G K + H V channels of the convolution, W = its width, B = chunks of all sequences, L =
tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fp8rl.config import GdnConfig
from megatron_fp8rl.kernels.types import DELTA_CHUNK as CHUNK

_LENGTH_EPS = 1e-6


@dataclass(frozen=True)
class DeltaState:
    """What a sequence carries to its next token."""

    inputs_NWC: Tensor  # the last W - 1 inputs of the convolution
    state_NHKV: Tensor  # float32


def split_heads(qkvz_TX: Tensor, ba_TY: Tensor, gdn: GdnConfig) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The outputs of both projections, whose features are sorted by key head -> (input of the convolution [T, C],
    output gate [T, H, V], b [T, H], a [T, H]) of as many key heads as the features have."""
    ratio, keys, values = gdn.num_value_heads // gdn.num_key_heads, gdn.key_head_dim, gdn.value_head_dim
    sizes = [keys, keys, ratio * values, ratio * values]
    parts = qkvz_TX.unflatten(-1, (-1, sum(sizes))).split(sizes, dim=-1)
    b, a = ba_TY.unflatten(-1, (-1, 2 * ratio)).chunk(2, dim=-1)
    mixed_TC = torch.cat([part.flatten(1) for part in parts[:3]], dim=-1)
    return mixed_TC, parts[3].reshape(len(qkvz_TX), -1, values), b.flatten(1), a.flatten(1)


def gated_delta_net(
    mixed_TC: Tensor,
    b_TH: Tensor,
    a_TH: Tensor,
    lengths: Sequence[int],
    conv_CW: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    gdn: GdnConfig,
    before: DeltaState | None = None,
) -> tuple[Tensor, DeltaState]:
    """(outputs [T, H, V] in the dtype of the input, what each sequence carries on), of sequences with these lengths.
    ``before``: what they carried; None: they begin."""
    num, width, heads = len(lengths), conv_CW.shape[1], len(A_log_H)
    if before is None:
        shape = (num, heads, gdn.key_head_dim, gdn.value_head_dim)
        before = DeltaState(
            mixed_TC.new_zeros(num, width - 1, mixed_TC.shape[1]), mixed_TC.new_zeros(shape, dtype=torch.float32)
        )
    convolved, inputs = _convolved(mixed_TC, lengths, conv_CW, before.inputs_NWC)
    query, key, value, strength_TH, decay_TH = _operands(convolved, b_TH, a_TH, A_log_H, dt_bias_H, gdn, torch.float64)
    query, key = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (query, key))
    decay_TH = decay_TH.exp()
    order = sorted(range(num), key=lambda n: -lengths[n])  # those that still have tokens come first
    starts = torch.tensor([0, *lengths]).cumsum(0)[order]
    state, ended, outputs, rows = before.state_NHKV[order], [], [], []
    for t in range(max(lengths)):
        active = sum(length > t for length in lengths)
        ended.append(state[active:])
        now = starts[:active] + t
        k_NHK1 = key[now].unsqueeze(-1)
        wide = state[:active].double() * decay_TH[now, :, None, None]
        delta_NHV = (value[now] - (wide * k_NHK1).sum(dim=2)) * strength_TH[now, :, None]
        state = (wide + k_NHK1 * delta_NHV.unsqueeze(2)).float()
        outputs.append((state.double() * query[now].unsqueeze(-1)).sum(dim=2))
        rows.append(now)
    states = torch.cat([state, *reversed(ended)])[torch.tensor(order).argsort()]
    out = torch.cat(outputs)[torch.cat(rows).argsort()]
    return out.to(mixed_TC.dtype), DeltaState(inputs, states)


def chunked(
    mixed_TC: Tensor,
    b_TH: Tensor,
    a_TH: Tensor,
    lengths: Sequence[int],
    conv_CW: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    gdn: GdnConfig,
) -> Tensor:
    """:func:`gated_delta_net` in chunks, of sequences that begin: [T, H, V] in the dtype of the input, with gradients.

    Autograd keeps some 20 numbers in float32 for each number of the output: call it inside a checkpoint.
    """
    position_T, row_T, active = _layout(lengths, mixed_TC.device)
    groups = len(A_log_H) * gdn.num_key_heads // gdn.num_value_heads
    convolved = _convolved_together(mixed_TC, position_T, conv_CW)
    operands = _operands(convolved, b_TH, a_TH, A_log_H, dt_bias_H, gdn, torch.float32)
    # [B, G, 1 or R, L, features]
    query, key, value, strength, decay = (
        _in_chunks(x, row_T, sum(active)).unflatten(1, (groups, -1)) for x in operands
    )
    strength = strength.unsqueeze(-1)
    sums = decay.double() @ decay.new_ones(CHUNK, CHUNK, dtype=torch.float64).triu()  # a cumulative sum
    between = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).tril().float().exp().tril()
    from_begin = sums.float().exp().unsqueeze(-1)
    right = torch.cat([value * strength, key * (from_begin * strength)], dim=-1)
    system = strength * between * (key @ key.mT)  # its diagonal counts as 1
    solution = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solution.split([gdn.value_head_dim, gdn.key_head_dim], dim=-1)
    writes = key * (sums[..., -1:] - sums).float().exp().unsqueeze(-1)
    parts = values, keys, query * from_begin, between * (query @ key.mT), writes, from_begin[..., -1:, :]
    state = values.new_zeros(active[0], *values.shape[1:3], gdn.key_head_dim, gdn.value_head_dim)
    outputs = []
    for value, key, reads, scores, write, remains in zip(*(x.split(active) for x in parts), strict=True):
        state = state[: len(value)]
        delta = value - key @ state
        outputs.append(reads @ state + scores @ delta)
        state = state * remains + write.mT @ delta
    out = torch.cat(outputs).flatten(1, 2).transpose(1, 2).flatten(0, 1)
    return out.index_select(0, row_T).to(mixed_TC.dtype)


def _layout(lengths: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, list[int]]:
    """(a token's position in its sequence [T], its row in the chunks [T], how many sequences have a chunk of each
    number). First come all sequences' first chunks, then all second ones, always the longest sequence first."""
    counts = [-(-length // CHUNK) for length in lengths]
    active = [sum(count > number for count in counts) for number in range(max(counts))]
    rank_N = torch.tensor([-count for count in counts]).argsort(stable=True).argsort()
    each = torch.tensor(lengths)
    position_T = torch.arange(sum(lengths)) - (each.cumsum(0) - each).repeat_interleave(each)
    first = torch.tensor([0, *active]).cumsum(0)
    chunk_T = first[position_T // CHUNK] + rank_N.repeat_interleave(each)
    row_T = chunk_T * CHUNK + position_T % CHUNK
    return position_T.to(device, non_blocking=True), row_T.to(device, non_blocking=True), active


def _in_chunks(x: Tensor, row_T: Tensor, num: int) -> Tensor:
    """[T, heads, ...] -> [chunks, heads, L, ...]; rows without a token are 0, and change no state."""
    rows = x.new_zeros(num * CHUNK, *x.shape[1:]).index_copy(0, row_T, x)
    return rows.unflatten(0, (num, CHUNK)).transpose(1, 2)


def gated_norm(x_THV: Tensor, gate_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """RMSNorm of each head times silu of its gate, rounded once: [T, H * V]; in float32 on GPUs, else in float64."""
    x, gate, weight = (y.to(torch.float32 if x_THV.is_cuda else torch.float64) for y in (x_THV, gate_THV, weight_V))
    y = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight * F.silu(gate)
    return y.to(x_THV.dtype).flatten(1)


def _convolved(mixed_TC: Tensor, lengths: Sequence[int], conv_CW: Tensor, inputs_NWC: Tensor) -> tuple[Tensor, Tensor]:
    """(silu of the causal convolution of each sequence, rounded before and after; its last W - 1 inputs)."""
    width, results, last = conv_CW.shape[1], [], []
    for n, x in enumerate(mixed_TC.split(list(lengths))):
        padded = torch.cat([inputs_NWC[n].to(x.dtype), x])
        wide = padded.double()
        sums = sum(wide[w : w + len(x)] * conv_CW[:, w].double() for w in range(width))
        results.append(F.silu(sums.to(x.dtype)))
        last.append(padded[len(x) :])
    return torch.cat(results), torch.stack(last)


def _convolved_together(mixed_TC: Tensor, position_T: Tensor, conv_CW: Tensor) -> Tensor:
    """silu of the causal convolution of all sequences, which begin; in float32, and rounded once as in the engine."""
    width = conv_CW.shape[1]
    padded = F.pad(mixed_TC.float(), (0, 0, width - 1, 0))
    sums = mixed_TC.new_zeros((), dtype=torch.float32)
    for w in range(width):
        is_own = (position_T >= width - 1 - w).unsqueeze(-1)
        sums = sums + padded[w : w + len(mixed_TC)] * conv_CW[:, w].float() * is_own
    return F.silu(sums).to(mixed_TC.dtype)


def _operands(
    convolved_TC: Tensor,
    b_TH: Tensor,
    a_TH: Tensor,
    A_log_H: Tensor,
    bias_H: Tensor,
    gdn: GdnConfig,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Queries and keys [T, G, K], values [T, H, V], strengths and decays [T, H], in ``dtype``."""
    heads = len(A_log_H)
    groups = heads * gdn.num_key_heads // gdn.num_value_heads
    sizes = [groups * gdn.key_head_dim] * 2 + [heads * gdn.value_head_dim]
    query, key, value = (part.unflatten(-1, (count, -1)).to(dtype) for part, count in
                         zip(convolved_TC.split(sizes, dim=-1), (groups, groups, heads), strict=True))  # fmt: skip
    decay_TH = -A_log_H.to(dtype).exp() * F.softplus(a_TH.contiguous().to(dtype) + bias_H.to(dtype))
    return _unit(query) * gdn.key_head_dim**-0.5, _unit(key), value, b_TH.contiguous().to(dtype).sigmoid(), decay_TH


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _LENGTH_EPS)
