"""Rates that a plan counts with: what a GPU reaches, as measured, and what a network does, as assumed. Pure.

``H200`` holds numbers measured on NVIDIA H200 GPUs (rows of docs/measured; ``tests/unit/sizing`` computes them again
from the rows). For other kinds of GPU :func:`of` scales them by peak FLOP/s and bandwidth from data sheets, and says so.
Every field can be set on the command line.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_fp8rl.preflight.memory import GpuName


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one GPU reaches. FLOP/s count two for each weight that a token meets, and causal attention."""

    update_fp8: float  # FLOP/s of forward and backward of an update, blockwise FP8, dense
    update_bf16: float
    update_moe_fp8: float  # the same with grouped experts
    update_moe_bf16: float
    host_moe_layer_s: float  # of the host to launch forward and backward of a layer of grouped experts, whatever its tokens
    forward_fp8: float  # FLOP/s of a pass for old log-probabilities
    forward_bf16: float
    prefill: float  # FLOP/s of an engine's prompts
    read_bytes_per_s: float  # at which decode steps read weights and cache
    decode_layer_s: float  # of a decode step for each layer, beyond its reads at the rate above
    decode_moe_layer_s: float  # the same of a layer of experts
    publish_s: float  # a publication, whatever it carries
    publish_s_per_byte: float  # of a worker's weights: quantized, loaded, digested at both ends; not the wire
    kv_scales_s: float  # of a publication: measuring and sending the scales of an FP8 KV cache
    source: str


@dataclass(frozen=True, kw_only=True)
class Network:
    """Assumed, never measured here. Bytes per second of one GPU, in each direction."""

    nvlink_bytes_per_s: float = 360e9  # of 450 on an H100 or H200
    nic_bytes_per_s: float = 40e9  # of 50: 400 Gb/s per GPU
    node_collective_s: float = 15e-6  # of a small collective within a node
    cluster_collective_s: float = 60e-6  # and across nodes
    storage_bytes_per_s: float = 2e9  # of one GPU, to and from the shared file system


# From rows of docs/measured: dense updates from run J of the ledger, 20 layers of Qwen3-8B; decode steps of dense layers from
# its runs L and O and from run B of rollout_speed, all 36 layers with answers of 8,192 tokens; updates and decode steps of
# mixtures from run P, 11 layers of Qwen3-30B-A3B on two GPUs with microbatches of 16,384 tokens; what the host takes from the
# FP8 arm of run I, of older code, whose GPUs had least to do, with microbatches of 8,192; passes for old log-probabilities
# from run A. The rate for prompts is assumed.
H200 = Rates(
    update_fp8=789e12,
    update_bf16=534e12,
    update_moe_fp8=475e12,
    update_moe_bf16=422e12,
    host_moe_layer_s=13.85e-3,
    forward_fp8=913e12,
    forward_bf16=580e12,
    prefill=500e12,
    read_bytes_per_s=4.3e12,
    decode_layer_s=49.6e-6,
    decode_moe_layer_s=111e-6,
    publish_s=0.048,
    publish_s_per_byte=2.27e-12,
    kv_scales_s=0.052,
    source="measured on H200",
)

# (peak FP8 and BF16 FLOP/s, memory bytes/s), data sheets
_SHEETS = {"h200": (1979e12, 4.8e12), "h100": (1979e12, 3.35e12), "b200": (4500e12, 8.0e12)}


def of(gpu: GpuName) -> Rates:
    """The rates of a kind of GPU: measured for H200, scaled by data sheets for others."""
    if gpu == "h200":
        return H200
    flops, read = (theirs / ours for theirs, ours in zip(_SHEETS[gpu], _SHEETS["h200"]))
    return replace(
        H200,
        **{
            name: getattr(H200, name) * flops
            for name in ("update_fp8", "update_bf16", "update_moe_fp8", "update_moe_bf16", "forward_fp8", "forward_bf16",
                         "prefill")
        },  # fmt: skip
        read_bytes_per_s=H200.read_bytes_per_s * read,
        publish_s_per_byte=H200.publish_s_per_byte / read,
        source=f"H200's, times {flops:.2f} (FLOP/s) and {read:.2f} (memory) by data sheets; not measured on {gpu.upper()}",
    )
