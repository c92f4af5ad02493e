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

    linear_fp8: float  # FLOP/s of the linears of layers, long microbatches, blockwise FP8, dense
    linear_bf16: float
    experts_fp8: float  # the same of layers with grouped experts
    experts_bf16: float
    attention: float  # FLOP/s, forward and backward
    head: float  # FLOP/s of the output layer and what it makes of its logits, BF16
    feature_fp8_s: float  # of a feature of a token in a layer, forward and backward: norms, quantization, activations
    feature_bf16_s: float
    parameter_bytes: float  # of a microbatch for each parameter: weights, FP32 gradients, what short GEMMs lose
    host_moe_layer_s: (
        float  # of the host to launch forward and backward of a layer of grouped experts, whatever its tokens
    )
    prefill: float  # FLOP/s of an engine's prompts
    read_bytes_per_s: float  # at which decode steps read weights and cache
    decode_layer_s: float  # of a decode step for each layer, beyond its reads or products at the rates above
    decode_moe_layer_s: float  # the same of a layer of experts
    logit_s: float  # of a decode step for each logit of a sequence: what sampling makes of it
    publish_s: float  # a publication, whatever it carries
    publish_s_per_byte: float  # of a worker's weights: quantized, loaded, digested at both ends; not the wire
    kv_scales_s: float  # of a publication: measuring and sending the scales of an FP8 KV cache
    sleep_s: float  # of a step: engines on the trainer's GPUs fall asleep and wake
    host_bytes_per_s: float  # between a GPU and its host, of what the trainer offloads meanwhile
    source: str


@dataclass(frozen=True, kw_only=True)
class Network:
    """Assumed, never measured here. Bytes per second of one GPU, in each direction."""

    nvlink_bytes_per_s: float = 360e9  # of 450 on an H100 or H200
    nic_bytes_per_s: float = 40e9  # of 50: 400 Gb/s per GPU
    node_collective_s: float = 15e-6  # of a small collective within a node
    cluster_collective_s: float = 60e-6  # and across nodes
    storage_bytes_per_s: float = 2e9  # of one GPU, to and from the shared file system


# From rows of docs/measured, by least squares: dense updates from runs J, R and S of the ledger (Qwen3-8B and 1.7B, five lengths
# of microbatches) and from the layers of Qwen3-8B in run A of layers, which has the head, too; decode steps of dense layers
# from runs L, O, R and S and from run B of rollout_speed, with answers of 8,192 tokens; updates and decode steps of mixtures
# from run P, 11 layers of Qwen3-30B-A3B on two GPUs; what the host takes from the FP8 arm of run I, of older code, whose GPUs
# had least to do; what engines take to sleep and wake from runs N, Q and R, and the rate of what the trainer offloads meanwhile,
# with memory freed and mapped again, from run U. The rate for prompts is assumed.
H200 = Rates(
    linear_fp8=1602e12,
    linear_bf16=795e12,
    experts_fp8=884e12,
    experts_bf16=625e12,
    attention=202e12,
    head=658e12,
    feature_fp8_s=102e-12,
    feature_bf16_s=96e-12,
    parameter_bytes=26.2,
    host_moe_layer_s=11.87e-3,
    prefill=500e12,
    read_bytes_per_s=4.3e12,
    decode_layer_s=31.8e-6,
    decode_moe_layer_s=76.9e-6,
    logit_s=1.94e-11,
    publish_s=0.048,
    publish_s_per_byte=2.27e-12,
    kv_scales_s=0.052,
    sleep_s=0.428,
    host_bytes_per_s=18.0e9,
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
            for name in ("linear_fp8", "linear_bf16", "experts_fp8", "experts_bf16", "attention", "head", "prefill")
        },
        **{name: getattr(H200, name) / read for name in ("feature_fp8_s", "feature_bf16_s", "logit_s")},
        read_bytes_per_s=H200.read_bytes_per_s * read,
        publish_s_per_byte=H200.publish_s_per_byte / read,
        source=f"H200's, times {flops:.2f} (FLOP/s) and {read:.2f} (memory) by data sheets; not measured on {gpu.upper()}",
    )
