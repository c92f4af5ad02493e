"""Compare bytes of a random model's tensors: our kernel, its definition, Transformer Engine, and engine digests.

In: a run's configuration and reports of engine workers. Out: a :class:`Tally` of a trainer rank's share of the tensors.
Tensors are drawn again from their names and the seed, independent of the transport.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_fp8rl.config import RunConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_fp8rl.weight_sync.plan import Transfer

_DIGEST_BYTES = 2 << 30  # tensors are digested together from this size
NOT_BLOCKS = "the trainer's part has no whole 128x128 blocks, so it is gathered before quantization"
TE_SCALES = "Transformer Engine's FP32 scale is 1 / (448 / amax), ours and vLLM's amax / 448: last bits differ"
ENGINE_DIFFERS = "unexplained: the engine has other bytes"
KERNEL_DIFFERS = "unexplained: our kernel differs from the definition"
TE_DIFFERS = "unexplained: Transformer Engine's bytes differ"
UNEXPLAINED = frozenset({ENGINE_DIFFERS, KERNEL_DIFFERS, TE_DIFFERS})


@dataclass
class Tally:
    """Counts of one rank. ``exceptions``: Hugging Face names by reason."""

    tensors: int = 0
    fp8: int = 0
    equal_to_definition: int = 0  # of the FP8 tensors
    equal_to_te: int = 0
    equal_in_engine: int = 0  # of all tensors, on all engine ranks of all replicas
    scales_unlike_te: int = 0
    bytes_unlike_te: int = 0
    fp8_bytes: int = 0
    exceptions: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def add(self, other: Tally) -> None:
        for name, value in vars(other).items():
            if name == "exceptions":
                for reason, names in value.items():
                    self.exceptions[reason] += names
            else:
                setattr(self, name, getattr(self, name) + value)


@dataclass
class PendingSlices:
    """Expected slices of engine ranks, collected until one launch digests them."""

    reports: Sequence[Sequence[dict[str, Any]]]  # ``WorkerExtension.weight_digests`` by replica and worker
    slices: list[tuple[str, int, str, Tensor]] = field(default_factory=list)  # weight, engine rank, tensor name, slice
    num_bytes: int = 0
    wrong: set[str] = field(default_factory=set)

    def add(self, transfer: Transfer, tensors: dict[str, Tensor]) -> None:
        for rank, kept in enumerate(transfer.slices):
            if kept is None:
                continue
            for name, tensor in tensors.items():
                first, end = transfer.blocks(kept) if name != transfer.name else kept
                part = tensor.narrow(transfer.axis, first, end - first)
                self.slices.append((transfer.name, rank, name, part))
                self.num_bytes += part.nbytes
        if self.num_bytes > _DIGEST_BYTES:
            self.flush()

    def flush(self) -> None:
        values = worker_digests([part for *_, part in self.slices])
        for (weight, rank, name, _), value in zip(self.slices, values, strict=True):
            for workers in self.reports:
                digests = [report["digests"] for report in workers if report["rank"] == rank]
                if len(digests) != 1 or digests[0].get(name) != value:
                    self.wrong.add(weight)
        self.slices, self.num_bytes = [], 0


def worker_digests(tensors: Sequence[Tensor]) -> list[str]:
    from megatron_fp8rl.weight_sync.digest import prepare_digests

    return prepare_digests(tensors)()


class TransformerEngine:
    """Transformer Engine's quantizer of weights, as in the blockwise recipe."""

    def __init__(self, scales: str):
        import transformer_engine.pytorch  # noqa: F401  loads the library that the binding needs
        import transformer_engine_torch as tex
        from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

        self._quantizer = Float8BlockQuantizer(
            tex.DType.kFloat8E4M3, rowwise=True, columnwise=False, force_pow_2_scales=scales == "pow2"
        )

    def __call__(self, parameter: Tensor) -> tuple[Tensor, Tensor] | None:
        """(bytes uint8 [N, K], scales float32 [Nb, Kb]); None for a shape that it does not quantize."""
        if not self._quantizer.is_quantizable(parameter):
            return None
        quantized = self._quantizer(parameter.contiguous())
        blocks = -(-parameter.shape[0] // 128), -(-parameter.shape[1] // 128)
        return quantized._rowwise_data, quantized._rowwise_scale_inv[
            : blocks[0], : blocks[1]
        ]  # TE pads to multiples of 4


def transformer_engine(scales: str, device: torch.device) -> TransformerEngine | None:
    """The quantizer; None on a CPU or without the package."""
    if device.type == "cpu":
        return None
    try:
        return TransformerEngine(scales)
    except ImportError:
        return None


def groups(cfg: RunConfig) -> Iterator[tuple[str, list[Transfer]]]:
    from megatron_fp8rl.names.layouts import EngineLayout, TrainerLayout
    from megatron_fp8rl.precision.layer_table import LayerTable
    from megatron_fp8rl.weight_sync.plan import plan

    table = LayerTable.build(cfg.model, cfg.precision)
    layouts = TrainerLayout.from_config(cfg.parallel), EngineLayout.from_config(cfg.engine)
    transfers = plan(cfg.model, table, *layouts).transfers
    for name, members in itertools.groupby(transfers, key=lambda transfer: transfer.mcore_name):
        yield name, list(members)


def compare(
    cfg: RunConfig,
    reports: Sequence[Sequence[dict[str, Any]]],
    rank: int,
    device: torch.device,
    te: Callable[[Tensor], tuple[Tensor, Tensor] | None] | None,
) -> Tally:
    """Compare every ``world_size``-th parameter. ``reports``: of the workers, by replica. ``te``: a
    :class:`TransformerEngine`; None leaves it out."""
    from benchmarks.light_policy import draw
    from megatron_fp8rl.kernels.blockwise import quantize_weight
    from megatron_fp8rl.names import registry as names

    tally, pending = Tally(), PendingSlices(reports)
    for index, (name, transfers) in enumerate(groups(cfg)):
        if index % cfg.parallel.world_size != rank:
            continue
        full = draw(names.weight(name, cfg.model), cfg, device)
        whole = dict(names.to_hf(name, full, cfg.model))
        ours: dict[str, tuple[Tensor, Tensor]] = {}
        for transfer in transfers:
            tally.tensors += 1
            tensors = {transfer.name: whole[transfer.name]}
            if transfer.is_fp8:
                data, scale = ours[transfer.name] = quantize_weight(whole[transfer.name], cfg.precision.scales)
                tensors = {transfer.name: data, transfer.scale_name: scale}
                _compare_with_definition(tally, transfer, whole[transfer.name], data, scale, cfg.precision.scales)
            pending.add(transfer, tensors)
        if ours and te is not None:
            _compare_with_te(tally, cfg, te, full, [t for t in transfers if t.is_fp8], ours)
    pending.flush()
    tally.equal_in_engine = tally.tensors - len(pending.wrong)
    if pending.wrong:
        tally.exceptions[ENGINE_DIFFERS] += sorted(pending.wrong)
    return tally


def _compare_with_definition(
    tally: Tally, transfer: Transfer, tensor: Tensor, data: Tensor, scale: Tensor, scales: Any
) -> None:
    import torch

    from megatron_fp8rl.kernels.blockwise import quantize_weight_in_torch

    expected, expected_scale = quantize_weight_in_torch(tensor, scales)
    tally.fp8 += 1
    tally.fp8_bytes += data.numel()
    if torch.equal(_raw(data), _raw(expected)) and torch.equal(scale, expected_scale):
        tally.equal_to_definition += 1
    else:
        tally.exceptions[KERNEL_DIFFERS].append(transfer.name)


def _compare_with_te(
    tally: Tally, cfg: RunConfig, te: Callable, full: Tensor, transfers: list[Transfer], ours: dict
) -> None:
    """Compare each trainer rank's part, quantized by Transformer Engine, with our whole tensors."""
    from megatron_fp8rl.names import registry as names

    name, model = transfers[0].mcore_name, cfg.model
    num_shards = cfg.parallel.expert_tensor if names.is_expert(name) else cfg.parallel.tensor
    offsets = dict.fromkeys(ours, 0)
    unlike: dict[str, tuple[int, int]] = dict.fromkeys(ours, (0, 0))  # scales, bytes
    unquantized = False
    for rank in range(num_shards):
        piece = names.shard(name, full, model, num_shards, rank)
        quantized = te(piece)
        if quantized is None:
            unquantized = True
            break
        parts = dict(names.to_hf(name, quantized[0], model, num_shards, rank))
        scales = dict(names.to_hf(name, _per_element(quantized[1], piece.shape), model, num_shards, rank))
        for transfer in transfers:
            data, scale = ours[transfer.name]
            first, length = offsets[transfer.name], parts[transfer.name].shape[transfer.axis]
            offsets[transfer.name] += length
            data = _raw(data).narrow(transfer.axis, first, length)
            scale = _per_element(scale, transfer.shape).narrow(transfer.axis, first, length)
            num_scales, num_bytes = unlike[transfer.name]
            num_scales += (scale != scales[transfer.name]).sum().item()
            unlike[transfer.name] = num_scales, num_bytes + (data != parts[transfer.name]).sum().item()
    for transfer in transfers:
        num_scales, num_bytes = unlike[transfer.name]
        tally.scales_unlike_te += num_scales
        tally.bytes_unlike_te += num_bytes
        if not unquantized and num_scales == num_bytes == 0:
            tally.equal_to_te += 1
        else:
            tally.exceptions[_reason(transfer, unquantized, cfg.precision.scales)].append(transfer.name)


def _reason(transfer: Transfer, unquantized: bool, scales: str) -> str:
    if unquantized or transfer.quantize == "gathered":
        return NOT_BLOCKS
    return TE_SCALES if scales == "fp32" else TE_DIFFERS


def _raw(data: Tensor) -> Tensor:
    import torch

    return data.view(torch.uint8)


def _per_element(scale: Tensor, shape: Sequence[int]) -> Tensor:
    return scale.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
