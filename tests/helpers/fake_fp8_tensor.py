"""A stand-in for Transformer Engine's block FP8 tensor, and for what it does for Megatron-Core, in plain torch.

What it imitates of ``Float8BlockwiseQTensor``: it calls itself BF16, holds bytes and padded scales in rows, on demand
in columns, and can be copied to from BF16. To an operation that has to look inside it gives nothing: the real one gives
BF16 values there, at a cost that this project does not want to pay unseen.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fp8rl.kernels.blockwise import dequantize_weight, quantize_weight

aten = torch.ops.aten
calls = {"cast": 0, "gathered": 0}


class Fp8Tensor(torch.Tensor):
    """Rows [N, K] uint8 with scales [N / 128, K / 128 up to a multiple of 4]."""

    @staticmethod
    def __new__(cls, rows: Tensor, scale_inv: Tensor, scales: str):
        made = torch.Tensor._make_wrapper_subclass(cls, rows.shape, dtype=torch.bfloat16, device=rows.device)
        made._rowwise_data, made._rowwise_scale_inv, made._scales = rows, scale_inv, scales
        made._columnwise_data = None
        return made

    @classmethod
    def of(cls, x: Tensor, scales: str) -> Fp8Tensor:
        assert x.dtype == torch.bfloat16, "masters are rounded to BF16 first"
        data, scale = quantize_weight(x, scales)
        padded = scale.new_full((scale.shape[0], -(-scale.shape[1] // 4) * 4), torch.nan)
        padded[:, : scale.shape[1]] = scale
        return cls(data.view(torch.uint8), padded, scales)

    data = property(lambda self: self, lambda self, value: pytest.fail("the data of an FP8 parameter are never set"))

    def __repr__(self, **kwargs) -> str:
        return f"Fp8Tensor{tuple(self.shape)}"

    def detach(self) -> Fp8Tensor:
        made = Fp8Tensor(self._rowwise_data, self._rowwise_scale_inv, self._scales)
        made._columnwise_data = self._columnwise_data
        return made

    def dequantize(self) -> Tensor:
        kb = -(-self.shape[1] // 128)
        data = self._rowwise_data.view(torch.float8_e4m3fn)
        return dequantize_weight(data, self._rowwise_scale_inv[:, :kb]).bfloat16()

    def expand_as(self, other: Tensor) -> Tensor:
        assert other is self
        return _Identity.apply(self)

    def untyped_storage(self) -> torch.UntypedStorage:
        return torch.UntypedStorage(0)

    def update_usage(self, rowwise_usage=None, columnwise_usage=None) -> None:
        assert rowwise_usage is not False
        if columnwise_usage and self._columnwise_data is None:
            self._columnwise_data = self._rowwise_data.t().contiguous()
        elif columnwise_usage is False:
            self._columnwise_data = None

    def product_values(self, by_rows: bool) -> Tensor:
        """Float values from the bytes of one orientation, so that stale columns show in a product."""
        if by_rows:
            return self.dequantize().float()
        assert self._columnwise_data is not None, "a product lacks the columns of a weight"
        columns = self.detach()
        columns._rowwise_data = self._columnwise_data.t().contiguous()
        return columns.dequantize().float()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is aten.detach.default:
            return args[0].detach()
        if func is aten.copy_.default and isinstance(args[0], cls):
            made = cls.of(args[1].bfloat16(), args[0]._scales)
            args[0]._rowwise_data.copy_(made._rowwise_data)
            args[0]._rowwise_scale_inv.copy_(made._rowwise_scale_inv)
            return args[0]
        raise NotImplementedError(f"{func} would turn an FP8 parameter into BF16")


class _Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad


def _replace_raw_data(tensor: Fp8Tensor, new: Tensor) -> None:
    assert new.dtype == torch.uint8
    new.detach().copy_(tensor._rowwise_data)
    tensor._rowwise_data = new


def _cast_masters(parameters, masters, offsets, group, shards=None) -> None:
    """Cast each rank's part of the FP32 masters into its part of the bytes; whole blocks share scales over ranks."""
    assert shards is None
    calls["cast"] += bool(parameters)
    for parameter, master, offset in zip(parameters, masters, offsets, strict=True):
        whole = torch.zeros(parameter.numel(), dtype=torch.float32)
        if master is not None:
            whole[offset : offset + master.numel()] = master.to(parameter.dtype).float()
        dist.all_reduce(whole, group=group)  # the real one reduces the largest magnitudes of blocks alone
        made = Fp8Tensor.of(whole.view(parameter.shape).bfloat16(), parameter._scales)
        parameter._rowwise_scale_inv.copy_(made._rowwise_scale_inv)
        if master is not None:
            here = slice(offset, offset + master.numel())
            parameter._rowwise_data.view(-1)[here] = made._rowwise_data.view(-1)[here]


def _after_gather(parameters: list[Fp8Tensor]) -> None:
    calls["gathered"] += 1
    for parameter in parameters:
        parameter._columnwise_data = parameter._rowwise_data.t().contiguous()


def install(patch: pytest.MonkeyPatch) -> None:
    """Let Megatron-Core take :class:`Fp8Tensor` for Transformer Engine's. After ``fake_te.install``."""
    from megatron.core import fp8_utils
    from megatron.core.distributed import param_and_grad_buffer

    calls.update(cast=0, gathered=0)
    patch.setattr(fp8_utils, "HAVE_TE_FP8_TENSOR_CLASS", True)
    patch.setattr(fp8_utils, "FP8_TENSOR_CLASS", Fp8Tensor)
    patch.setattr(fp8_utils, "_modify_underlying_storage_impl", _replace_raw_data)
    patch.setattr(fp8_utils, "_quantize_param_shard_impl", _cast_masters)
    patch.setattr(fp8_utils, "te_post_all_gather_processing", _after_gather)
    # Megatron-Core gathers FP8 and BF16 buffers in one coalesced call. NCCL makes a gather of each; gloo would put them
    # into one tensor of the first one's type, unless all are bytes.
    gather = param_and_grad_buffer.dist_all_gather_func
    patch.setattr(
        param_and_grad_buffer,
        "dist_all_gather_func",
        lambda whole, part, **options: gather(whole.view(torch.uint8), part.view(torch.uint8), **options),
    )
