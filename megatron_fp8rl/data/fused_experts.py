"""Checkpoints that store all experts of a layer in one tensor: Qwen3.5's, and gpt-oss's in BF16 and in MXFP4.

Everything else here knows experts one by one (``names/gpt_oss.py``). Qwen3.5's are read (:func:`unstacked_entries`) and
gpt-oss's also written. ``gate_up_proj`` of the latter is [E, H, 2 F], whose columns are gate and up in turns, and
``down_proj`` [E, F, H]; their biases are [E, 2 F] and [E, H]. MXFP4 has ``_blocks`` uint8 [E, N, K / 32, 16], two E2M1
values in a byte, and ``_scales`` uint8 [E, N, K / 32], powers of two.

MXFP4 is read as BF16, which has every such value: a policy is trained in BF16, and our FP8 recipes quantize from it.

Shapes: E = experts, H = hidden size, F = features of an expert, N and K = rows and columns of a matrix.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_fp8rl.data.safetensors_header import Entry, Shapes

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj(_bias|_blocks|)")
_PARTS = {"gate": slice(0, None, 2), "up": slice(1, None, 2), "down": slice(None)}
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of E2M1 without its sign


def fused_name(name: str) -> str:
    """The tensor of a checkpoint that contains the tensor of one expert; ``name`` itself for any other."""
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name
    parent, _, part, kind = match.groups()
    return f"{parent}.{'down' if part == 'down' else 'gate_up'}_proj{'_bias' if kind == 'bias' else ''}"


def split(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of single experts in a BF16 tensor of a checkpoint; any other tensor as it is."""
    match = _FUSED.fullmatch(name)
    if match is None:
        yield name, tensor
        return
    parent, part, kind = match.groups()
    for expert, stored in enumerate(tensor):
        for half in ("gate", "up") if part == "gate_up" else ("down",):
            yield f"{parent}.{expert}.{half}_proj.{kind[1:] or 'weight'}", _part(stored, half)


def split_all(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint with those of single experts, as :func:`split` has them."""
    return {name: part for whole in tensors.items() for name, part in split(*whole)}


def _part(stored: Tensor, part: str) -> Tensor:
    """View the bias or the transposed matrix of one expert in a slice of a stored tensor."""
    return (stored.t() if stored.ndim == 2 else stored)[_PARTS[part]]


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """BF16 [N, K] of MXFP4 ``blocks`` uint8 [N, K / 32, 16] and E8M0 ``scales`` uint8 [N, K / 32]."""
    values = torch.tensor([*_VALUES, *(-value for value in _VALUES)])
    pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    wide = torch.ldexp(values[pairs.long()], (scales.int() - 127).unsqueeze(-1))
    return wide.flatten(-2).bfloat16()


def fuse(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint from those of experts, in order; all experts of a layer must be there."""
    fused: dict[str, Tensor] = {}
    shapes = fused_shapes({name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        whole = fused_name(name)
        if whole not in fused:
            dtype, shape = shapes[whole]
            fused[whole] = tensor if whole == name else torch.empty(shape, dtype=dtype)
        if match := _EXPERT.fullmatch(name):
            _part(fused[whole][int(match[2])], match[3]).copy_(tensor)
    return fused


def fused_shapes(shapes: Shapes) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Types and shapes of the tensors of a checkpoint, from those of experts."""
    counts: dict[str, int] = {}
    for name in shapes:
        match = _EXPERT.fullmatch(name)
        counts[fused_name(name)] = int(match[2]) + 1 if match else 0
    result = {}
    for name, (dtype, shape) in shapes.items():
        if num_experts := counts[fused_name(name)]:
            rows = shape[0] * (1 if ".down_proj." in name else 2)
            shape = (num_experts, *shape[1:], rows)
        result[fused_name(name)] = dtype, shape
    return result


@dataclass(frozen=True, slots=True)
class ExpertEntry(Entry):
    """The tensor of one expert in a file; ``stored`` has the entries of the whole tensors."""

    name: str
    stored: tuple[tuple[str, Entry], ...]

    def read(self, rows: Callable[[Entry, int, int], Tensor]) -> Tensor:
        """The whole tensor. ``rows(entry, first, end)`` reads rows of a stored tensor."""
        match = _EXPERT.fullmatch(self.name)
        assert match is not None
        expert = int(match[2])
        stored = [rows(entry, expert, expert + 1)[0] for _, entry in self.stored]
        if len(stored) == 1:
            return _part(stored[0], match[3]).contiguous()
        return dequantize(*stored)[_PARTS[match[3]]].contiguous()

    @property
    def lacks_scales(self) -> str:
        """The name of the scales that MXFP4 blocks lack; empty if there are none to lack."""
        whole = self.stored[0][0]
        return f"{whole.removesuffix('_blocks')}_scales" if whole.endswith("_blocks") and not self.stored[1:] else ""

    def place(self, content: Tensor) -> Tensor:
        """View this tensor in the bytes of its file."""
        ((_, whole),) = self.stored
        raw = content[whole.offset : whole.offset + whole.num_bytes].view(whole.dtype).view(whole.shape)
        match = _EXPERT.fullmatch(self.name)
        assert match is not None
        return _part(raw[int(match[2])], match[3])


def split_entries(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Entries of single experts in place of those that contain all experts of a layer."""
    result: dict[str, Entry] = {}
    for name, entry in entries.items():
        match = _FUSED.fullmatch(name)
        if match is None:
            if not (name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in entries):
                result[name] = entry
            continue
        parent, part, kind = match.groups()
        for expert in range(entry.shape[0]):
            for half in ("gate", "up") if part == "gate_up" else ("down",):
                expert_name = f"{parent}.{expert}.{half}_proj.{'bias' if kind == '_bias' else 'weight'}"
                result[expert_name] = _expert_entry(expert_name, name, entry, entries, kind)
    return result


def unstacked_entries(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Entries of single experts in place of those that stack them as Qwen3.5 does: ``gate_up_proj`` [E, 2 F, H], gate
    above up, and ``down_proj`` [E, H, F]. Matrices of an expert are adjacent bytes."""
    result: dict[str, Entry] = {}
    for name, entry in entries.items():
        match = _FUSED.fullmatch(name)
        if match is None or match[3] or len(entry.shape) != 3:
            result[name] = entry
            continue
        halves = ("gate", "up") if match[2] == "gate_up" else ("down",)
        num, rows, columns = entry.shape[0] * len(halves), entry.shape[1] // len(halves), entry.shape[2]
        for index in range(num):
            expert, half = divmod(index, len(halves))
            offset = entry.offset + index * rows * columns * entry.dtype.itemsize
            expert_name = f"{match[1]}.{expert}.{halves[half]}_proj.weight"
            result[expert_name] = Entry(entry.file, entry.dtype, (rows, columns), offset)
    return result


def _expert_entry(name: str, whole: str, entry: Entry, entries: Mapping[str, Entry], kind: str) -> ExpertEntry:
    halves = 1 if ".down_proj." in name else 2
    stored: Iterable[tuple[str, Entry]] = [(whole, entry)]
    dtype, shape = entry.dtype, (entry.shape[-1] // halves, *entry.shape[1:-1])
    if kind == "_blocks":
        scales = whole.removesuffix("_blocks") + "_scales"
        stored = [(whole, entry), *([(scales, entries[scales])] if scales in entries else [])]
        dtype, shape = torch.bfloat16, (entry.shape[1] // halves, entry.shape[2] * entry.shape[3] * 2)
    return ExpertEntry(entry.file, dtype, shape, entry.offset, name, tuple(stored))
