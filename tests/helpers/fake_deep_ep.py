"""Stand-ins for the package ``deep_ep`` on CPUs, over torch.distributed: DeepEP's Buffer and HybridEP's HybridEPBuffer.

They check how they are called, as the real ones do (dtypes, equal numbers of tokens for HybridEP), and compute what
those document: a token travels once to each rank that has one of its experts, and what ranks return is added without
weights. Objects travel, so only the results are those of the real package, and not its speed.
"""

import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor


def _of_all_ranks(group: Any, value: Any) -> list[Any]:
    result = [None] * group.size()
    dist.all_gather_object(result, value, group=group)
    return result


def _sent_back(group: Any, handle: list[Tensor], num_tokens: int, rows: Tensor) -> Tensor:
    """Sum over ranks of the results for this rank's tokens, [num_tokens, ...], in float32."""
    summed = torch.zeros(num_tokens, *rows.shape[1:])
    for places, returned in _of_all_ranks(group, (handle, rows)):
        start = sum(len(each) for each in places[: group.rank()])
        mine = places[group.rank()]
        summed.index_add_(0, mine, returned[start : start + len(mine)].float())
    return summed.to(rows.dtype)


class Event:
    def __init__(self, event: Any = None) -> None: ...

    def current_stream_wait(self) -> None: ...


class _Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    """A handle is, for each rank, the tokens that it sent here."""

    calls: ClassVar[list[str]] = []  # of this process
    num_sms = 0

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @classmethod
    def set_num_sms(cls, number: int) -> None:
        assert number % 2 == 0
        cls.num_sms = number

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> _Config:
        return _Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, **_: Any) -> tuple:
        assert topk_idx.dtype == torch.int64
        per_rank = topk_idx // (num_experts // self.group.size())
        in_rank = torch.stack([(per_rank == rank).any(1) for rank in range(self.group.size())], 1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts)
        return in_rank.sum(0), None, per_expert, in_rank, Event()

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        **_: Any,
    ) -> tuple:
        assert x.is_contiguous()
        if handle is not None:
            rows = [there[places] for there, places in zip(_of_all_ranks(self.group, x), handle, strict=True)]
            return torch.cat(rows), None, None, [], handle, Event()
        Buffer.calls.append("deepep")
        assert topk_weights.dtype == torch.float32
        num_local = len(num_tokens_per_expert) // self.group.size()
        first = num_local * self.group.rank()
        handle, parts = [], []
        for there, experts, weights, in_rank in _of_all_ranks(
            self.group, (x, topk_idx, topk_weights, is_token_in_rank)
        ):
            places = in_rank[:, self.group.rank()].nonzero().flatten()
            handle.append(places)
            own = experts[places] - first
            is_here = (own >= 0) & (own < num_local)
            parts.append((there[places], own.where(is_here, -1), weights[places] * is_here))
        rows, own, weights = map(torch.cat, zip(*parts, strict=True))
        return rows, own, weights, torch.bincount(own[own >= 0], minlength=num_local).tolist(), handle, Event()

    def combine(self, x: Tensor, handle: list[Tensor], topk_weights: Tensor | None = None, **_: Any) -> tuple:
        (num_tokens,) = self.num_tokens(handle)
        weights = None if topk_weights is None else _sent_back(self.group, handle, num_tokens, topk_weights)
        return _sent_back(self.group, handle, num_tokens, x), weights, Event()

    def num_tokens(self, handle: list[Tensor]) -> tuple[int]:
        """Number of this rank's tokens: every token has an expert on some rank."""
        places = [there[self.group.rank()] for there in _of_all_ranks(self.group, handle)]
        return (int(torch.cat(places).max()) + 1,)


class HybridEPBuffer:
    """A handle is (for each rank, its tokens here, sorted by expert; their experts; tokens per expert)."""

    def __init__(
        self,
        *,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool,
        num_sms_preprocessing_api: int,
    ) -> None:
        self.group, self.num_local = group, num_local_experts

    def dispatch_with_permute(
        self,
        *,
        hidden: Tensor,
        scaling_factor: None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        handle: Any = None,
        num_of_experts_per_rank: int | None = None,
        pad_multiple: int | None = None,
        num_permuted_tokens: Any = None,
        non_blocking: bool = False,
    ) -> tuple:
        assert pad_multiple is None and not non_blocking
        if handle is None:
            Buffer.calls.append("hybridep")
            assert routing_map.dtype == torch.bool and probs.dtype == torch.float32
            assert num_of_experts_per_rank == self.num_local
            first = self.num_local * self.group.rank()
            maps = _of_all_ranks(self.group, routing_map[:, :])
            assert len({len(each) for each in maps}) == 1, "HybridEP wants as many tokens of every rank"
            # By expert, then by rank, then by token.
            actual = torch.stack(maps)[:, :, first : first + self.num_local].permute(2, 0, 1).nonzero()
            handle = (actual, first, len(routing_map), routing_map.shape[1])
        actual, first, _, _ = handle
        expert, rank, token = actual.unbind(1)
        tokens = torch.stack(_of_all_ranks(self.group, hidden))[rank, token]
        weights = None if probs is None else torch.stack(_of_all_ranks(self.group, probs))[rank, token, first + expert]
        return tokens, weights, None, torch.bincount(expert, minlength=self.num_local), handle

    def combine_with_unpermute(
        self, *, hidden: Tensor, handle: tuple, probs: Tensor | None = None, pad_multiple: int | None = None
    ) -> tuple:
        _, _, num_tokens, num_experts = handle
        summed, weights = torch.zeros(num_tokens, hidden.shape[1]), torch.zeros(num_tokens, num_experts)
        for (actual, first, _, _), rows, theirs in _of_all_ranks(self.group, (handle, hidden, probs)):
            expert, rank, token = actual.unbind(1)
            mine = rank == self.group.rank()
            summed.index_add_(0, token[mine], rows[mine].float())
            if theirs is not None:
                weights[token[mine], first + expert[mine]] = theirs[mine].float()
        return summed.to(hidden.dtype), None if probs is None else weights


def install(patch: pytest.MonkeyPatch) -> None:
    """Before Megatron-Core's dispatchers are imported: as the installed package ``deep_ep``, with both branches."""
    package, utils = types.ModuleType("deep_ep"), types.ModuleType("deep_ep.utils")
    package.Buffer, package.HybridEPBuffer, package.utils = Buffer, HybridEPBuffer, utils
    package.__spec__ = ModuleSpec("deep_ep", None)
    utils.EventHandle = utils.EventOverlap = Event
    patch.setitem(sys.modules, "deep_ep", package)
    patch.setitem(sys.modules, "deep_ep.utils", utils)
