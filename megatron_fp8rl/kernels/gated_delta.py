"""The gated delta rule (arXiv:2412.06464) over packed sequences: one recurrence for trainer and engine on a CPU, chunks
of the package ``fla`` (flash-linear-attention) for a trainer on GPUs.

    state = exp(decay) * state                      decay = -exp(A_log) * softplus(a + dt_bias)
    state = state + key (x) strength * (value - state^T key)        strength = sigmoid(b)
    output = state^T query / sqrt(K)

before which query, key and value pass a causal convolution over the last W tokens and silu, and queries and keys get
length 1. Sums are in float64, token after token, and the state is rounded to float32 after every token: a prompt, its
chunks, decoding and a packed microbatch give a token the same bits, up to the probability in ``float64.py``. Autograd
differentiates the loop, which keeps a state per token.

On GPUs, vLLM computes prompts in chunks of 64 tokens and decoded tokens by the recurrence; :func:`chunked` computes all
tokens in chunks. So sums have different orders, and trainer and engine differ in the last bits.

Shapes: T = tokens of all sequences, N = sequences, G = key heads, H = value heads, K and V = features of a key and of
a value head, C = 2 G K + H V channels of the convolution, W = its width.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_fp8rl.config import GdnConfig
from megatron_fp8rl.upstream import patches

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
    groups = heads * gdn.num_key_heads // gdn.num_value_heads
    if before is None:
        shape = (num, heads, gdn.key_head_dim, gdn.value_head_dim)
        before = DeltaState(
            mixed_TC.new_zeros(num, width - 1, mixed_TC.shape[1]), mixed_TC.new_zeros(shape, dtype=torch.float32)
        )
    convolved, inputs = _convolved(mixed_TC, lengths, conv_CW, before.inputs_NWC)
    sizes = [groups * gdn.key_head_dim] * 2 + [heads * gdn.value_head_dim]
    query, key, value = (part.unflatten(-1, (count, -1)).double() for part, count in
                         zip(convolved.split(sizes, dim=-1), (groups, groups, heads), strict=True))  # fmt: skip
    query, key = (_unit(x).repeat_interleave(heads // groups, dim=1) for x in (query, key))
    query = query * gdn.key_head_dim**-0.5
    strength_TH = b_TH.contiguous().double().sigmoid()
    decay_TH = (-A_log_H.double().exp() * F.softplus(a_TH.contiguous().double() + dt_bias_H.double())).exp()
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
    """:func:`gated_delta_net` on a GPU, of sequences that begin: [T, H, V] in the dtype of the input, with gradients.

    The package ``fla`` computes in BF16 with sums, decays and states in float32. Raises ModuleNotFoundError without it.
    """
    conv1d, delta_rule, _ = _fla()
    starts = torch.tensor([0, *lengths]).cumsum(0)
    packs = {"cu_seqlens": starts.to(mixed_TC.device, non_blocking=True), "cu_seqlens_cpu": starts}
    convolved, _ = conv1d(mixed_TC.contiguous()[None], conv_CW.contiguous(), activation="silu", **packs)
    heads = len(A_log_H)
    groups = heads * gdn.num_key_heads // gdn.num_value_heads
    sizes = [groups * gdn.key_head_dim] * 2 + [heads * gdn.value_head_dim]
    query, key, value = (part.unflatten(-1, (count, -1)) for part, count in
                         zip(convolved.split(sizes, dim=-1), (groups, groups, heads), strict=True))  # fmt: skip
    decay_TH = -A_log_H.float().exp() * F.softplus(a_TH.float() + dt_bias_H.float())
    strength_TH = b_TH.float().sigmoid()
    out, _ = delta_rule(query, key, value, decay_TH[None], strength_TH[None], use_qk_l2norm_in_kernel=True, **packs)
    return out[0]


@patches(
    "fla-core",
    why="takes kernels out of Triton's tuning, which would compile dozens at the start and change bits between runs",
    remove_when="fla has one configuration for each kernel and GPU",
)
@functools.cache
def _fla() -> tuple[Callable[..., Any], ...]:
    """The convolution, the delta rule and the gated norm of the package ``fla``; each kernel has one configuration."""
    from fla.modules.causal_conv1d import causal_conv1d  # imports Triton
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from triton.runtime.autotuner import Autotuner

    for module in [module for name, module in sys.modules.items() if name.startswith("fla.")]:
        for kernel in list(vars(module).values()):
            while not isinstance(kernel, Autotuner) and type(kernel).__module__.startswith("triton."):
                kernel = getattr(kernel, "fn", None)  # behind a heuristic
            if isinstance(kernel, Autotuner):
                kernel.configs = kernel.configs[:1]
    return causal_conv1d, chunk_gated_delta_rule, rms_norm_gated


def gated_norm(x_THV: Tensor, gate_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """RMSNorm of each head times silu of its gate, rounded once: [T, H * V]; in float32 by ``fla`` on a GPU."""
    if x_THV.is_cuda:
        return _fla()[2](x_THV, gate_THV, weight_V, None, activation="silu", eps=eps).flatten(1)
    x, gate = x_THV.double(), gate_THV.double()
    y = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight_V.double() * F.silu(gate)
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


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _LENGTH_EPS)
