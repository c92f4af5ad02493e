"""Packed attention against a loop over sequences and heads in float64, forward and backward."""

import types

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_fp8rl.trainer.model.attention import PackedAttention
from megatron_fp8rl.trainer.model.packed_sequences import plan_pack
from megatron_fp8rl.trainer.model.rotary import Rotary, rotary_table
from tests.tolerances import ATTENTION_FLOAT32

HEADS, GROUPS, DIM, THETA = 4, 2, 16, 10_000.0
ROTARY = Rotary(num_features=DIM, first_feature=0, theta=THETA, scaling=None, interleaved=False)
ROTARY = Rotary(num_features=DIM, first_feature=0, theta=THETA, scaling=None, interleaved=False)


def _attention(window: int | None = None) -> PackedAttention:
    groups = types.SimpleNamespace(cp=types.SimpleNamespace(size=lambda: 1, rank=lambda: 0))
    return PackedAttention(None, 1, None, "self", rotary=ROTARY, scale=DIM**-0.5, window=window, pg_collection=groups)


def _packed(lengths) -> PackedSeqParams:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding from its definition: pairs (i, i + D / 2) turned by position * theta^(-2 i / D)."""
    out = x.clone()
    for i in range(DIM // 2):
        angle = torch.arange(x.shape[0], dtype=torch.float64) * THETA ** (-2 * i / DIM)
        a, b = x[..., i], x[..., i + DIM // 2]
        shape = (-1, *[1] * (a.ndim - 1))
        cos, sin = angle.cos().view(shape), angle.sin().view(shape)
        out[..., i], out[..., i + DIM // 2] = a * cos - b * sin, b * cos + a * sin
    return out


def _loop(query, key, value, lengths, window):
    parts = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value))):
        q, k = _rotated(q), _rotated(k)
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            scores = (q[:, head] @ k[:, group].T) / DIM**0.5
            seen = torch.ones_like(scores).tril() - torch.ones_like(scores).tril(-(window or 100))
            scores = scores.masked_fill(seen == 0, -torch.inf)
            heads.append(scores.softmax(-1) @ v[:, group])
        parts.append(torch.cat(heads, dim=-1))
    return torch.cat(parts)


@pytest.mark.parametrize("lengths", [(5,), (8, 8, 8), (3, 40, 1, 17, 18, 16, 2)], ids=["one", "equal", "ragged"])
@pytest.mark.parametrize("window", [None, 1, 8, 16])
def test_packed_sequences_against_a_loop(lengths, window):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(sum(lengths), h, DIM, generator=generator) for h in (HEADS, GROUPS, GROUPS)]
    grad = torch.randn(sum(lengths), HEADS * DIM, generator=generator)
    actual = [x.clone().requires_grad_() for x in inputs]
    out = _attention(window)(*actual, packed_seq_params=_packed(lengths))
    out.backward(grad)
    exact = [x.double().requires_grad_() for x in inputs]
    expected = _loop(*exact, list(lengths), window)
    expected.backward(grad.double())
    torch.testing.assert_close(out.double(), expected, **ATTENTION_FLOAT32)
    for a, e in zip(actual, exact):
        torch.testing.assert_close(a.grad.double(), e.grad, **ATTENTION_FLOAT32)


def test_sequences_do_not_see_each_other_or_their_padding():
    lengths, generator = (6, 10, 4), torch.Generator().manual_seed(1)
    inputs = [torch.randn(20, h, DIM, generator=generator) for h in (HEADS, GROUPS, GROUPS)]
    before = _attention()(*inputs, packed_seq_params=_packed(lengths))
    changed = [x.clone() for x in inputs]
    for x in changed:
        x[6:10] += 1.0  # the first tokens of the second sequence
    after = _attention()(*changed, packed_seq_params=_packed(lengths))
    same = (before == after).all(dim=1)
    assert same[:6].all() and same[16:].all() and not same[6:16].any()


def test_bf16_is_float32_attention_rounded_once_after_rotation():
    lengths, generator = (9, 12), torch.Generator().manual_seed(2)
    inputs = [torch.randn(21, h, DIM, generator=generator).bfloat16() for h in (HEADS, GROUPS, GROUPS)]
    out = _attention()(*inputs, packed_seq_params=_packed(lengths))
    cos, sin = rotary_table(16, ROTARY, torch.bfloat16)
    positions = torch.cat([torch.arange(n) for n in lengths])
    # Undo the loop's own rotation by giving it positions of zero: rotate here, as the model's type does.
    turned = [ROTARY.rotate(x, cos[positions].float()[:, None], sin[positions].float()[:, None]) for x in inputs[:2]]
    parts = []
    for q, k, v in zip(*(x.float().split(lengths) for x in (*turned, inputs[2]))):
        k, v = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1))
    expected = torch.cat(parts)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=2**-8, atol=ATTENTION_FLOAT32["atol"])


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_ranks_of_context_parallelism_share_every_position_once(cp_size):
    lengths = (16, 8, 40, 8)
    plans = [plan_pack(lengths, cp_size, rank) for rank in range(cp_size)]
    for plan in plans:
        assert plan.positions_T.numel() == sum(lengths) // cp_size
    for index, length in enumerate(lengths):
        start = sum(lengths[:index]) // cp_size
        held = torch.cat([plan.positions_T[start : start + length // cp_size] for plan in plans])
        assert sorted(held.tolist()) == list(range(length))


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_segments_of_context_parallel_ranks_see_what_causal_attention_sees(cp_size):
    lengths, generator = (16, 8, 40, 8), torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(sum(lengths), h, DIM, generator=generator) for h in (HEADS, GROUPS, GROUPS))
    plans = [plan_pack(lengths, cp_size, rank) for rank in range(cp_size)]
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    local = [n // cp_size for n in lengths]
    rows = [plan.positions_T + starts.repeat_interleave(torch.tensor(local)) for plan in plans]
    gathered = torch.cat(rows)  # the packed position of every gathered row
    expected = torch.empty(sum(lengths), HEADS * DIM)
    for start, n in zip(starts.tolist(), lengths):
        part = slice(start, start + n)
        expected[part] = _segment(query[part], key[part], value[part])
    for plan, own in zip(plans, rows):
        segments = plan.segments
        keys = gathered if segments.key_rows is None else gathered[segments.key_rows]
        outputs = []
        for (q0, q1), (k0, k1) in zip(segments.cu_queries.unfold(0, 2, 1), segments.cu_keys.unfold(0, 2, 1)):
            outputs.append(_segment(query[own[q0:q1]], key[keys[k0:k1]], value[keys[k0:k1]]))
            assert q1 - q0 <= segments.max_queries and k1 - k0 <= segments.max_keys
        torch.testing.assert_close(torch.cat(outputs), expected[own], **ATTENTION_FLOAT32)
    assert sum(plan.segments.cu_keys[-1] for plan in plans) >= sum(lengths)


def _segment(query, key, value):
    """Attention whose last query sees the last key."""
    key, value = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / DIM**0.5
    hidden = torch.ones(scores.shape[-2:]).triu(1 + key.shape[0] - query.shape[0]).bool()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value).flatten(1)


def test_sequences_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="do not divide into 4 chunks"):
        plan_pack((8, 6), 2, 0)


def test_unpacked_input_is_refused():
    x = torch.zeros(4, 1, HEADS, DIM)
    with pytest.raises(ValueError, match="packed sequences"):
        _attention()(x, x, x)
