"""Seconds of one step, phase by phase, from a configuration, the rates of ``rates.toml`` and a network. No torch.

    rollouts       prompts: their FLOP. Decoding: every step reads the matrices that it needs once, or multiplies by them if
                   that takes longer, and the cache of its sequences, and samples; the steps last until the longest sequence
                   ends
    old_logprobs   one forward pass over all tokens; 0 with ``precision.exact``, which takes the engine's, and in a step of
                   one update, which takes its own
    update         forward and backward of linears, attention, the head and what moves memory; for each microbatch a pass over
                   gradients; the recomputed forward, tensor- and expert-parallel traffic, or the host that launches them if
                   it takes longer; the pipeline's bubble, gradients and parameters between data-parallel ranks, and the
                   optimizer's reads and writes
    publish        the wire, and quantizing, loading and proving; with spare memory only the latter pauses the engines
    handover       engines on the trainer's GPUs fall asleep and wake, if ``engine.sleep_level`` says so, and what
                   ``optim.offload`` names goes to the host and back
    driver         what trainer rank 0 does for all engines, as far as others wait for it

Colocated or synchronous phases add up. With ``sampling.max_staleness`` > 0 sampling overlaps training: a step takes the
longer of the two, and the pause.
"""

from __future__ import annotations

import functools
import math
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_fp8rl.algo.old_pass import needs_old_pass
from megatron_fp8rl.config import ModelConfig, RunConfig, SamplingConfig
from megatron_fp8rl.precision import parameters
from megatron_fp8rl.precision.kernel_support import may_gather
from megatron_fp8rl.preflight import weights
from megatron_fp8rl.preflight.assessment import DoctorOptions, gpus_wanted
from megatron_fp8rl.preflight.engine_memory import worker
from megatron_fp8rl.preflight.memory import GpuName
from megatron_fp8rl.preflight.trainer_memory import Bytes
from megatron_fp8rl.rollout.vllm_args import kv_token_bytes

_OPTIMIZER_BYTES = 30  # read and written for each parameter of a rank's share: gradient, master, two moments, BF16
_AGAIN = {"none": 0.0, "selective": 0.5, "full": 1.0}  # of the forward pass of layers, by ``optim.recompute``
_FLOPS = ("linear_fp8", "linear_bf16", "experts_fp8", "experts_bf16", "attention", "head", "prefill")
_TENSOR_COLLECTIVES = 4  # of a layer's forward under tensor parallelism; twice as many in backward


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of the sequences of a step."""

    prompt: float
    mean: float  # of completions
    longest: float

    @classmethod
    def of(cls, sampling: SamplingConfig, prompt: float | None = None, mean: float | None = None) -> Lengths:
        """Those given, or half of the most tokens that the configuration allows."""
        longest = sampling.max_completion_tokens
        return cls(prompt=prompt or sampling.max_prompt_tokens / 2, mean=mean or longest / 2, longest=longest)


@functools.cache
def _data() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "rates.toml").read_text())


def _values(table: dict[str, Any]) -> dict[str, float]:
    return {name: entry["value"] for name, entry in table.items()}


def largest_step_error() -> float:
    """The largest error of a whole predicted step against the measured runs, as a share."""
    return _data()["h200"]["largest_step_error"]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one GPU reaches; ``rates.toml`` says what each rate is, when and how it was measured."""

    linear_fp8: float
    linear_bf16: float
    experts_fp8: float
    experts_bf16: float
    attention: float
    head: float
    feature_fp8_s: float
    feature_bf16_s: float
    parameter_bytes: float
    host_moe_layer_s: float
    prefill: float
    read_bytes_per_s: float
    decode_layer_s: float
    decode_moe_layer_s: float
    logit_s: float
    publish_s: float
    publish_s_per_byte: float
    kv_scales_s: float
    sleep_s: float
    host_bytes_per_s: float
    source: str

    @classmethod
    def of(cls, gpu: GpuName) -> Rates:
        """The rates of a kind of GPU: measured for H200, scaled by data sheets for others."""
        measured = cls(**_values(_data()["h200"]["rates"]), source="measured on H200")
        if gpu == "h200":
            return measured
        theirs, ours = (_data()["sheets"][name] for name in (gpu, "h200"))
        flops, read = theirs["flops"] / ours["flops"], theirs["bytes_per_s"] / ours["bytes_per_s"]
        faster = {name: getattr(measured, name) * flops for name in _FLOPS} | {
            "read_bytes_per_s": measured.read_bytes_per_s * read
        }
        shorter = ("feature_fp8_s", "feature_bf16_s", "logit_s", "publish_s_per_byte")
        return replace(
            measured,
            **faster,
            **{name: getattr(measured, name) / read for name in shorter},
            source=f"H200's, times {flops:.2f} (FLOP/s) and {read:.2f} (memory) by data sheets; "
            f"not measured on {gpu.upper()}",
        )


@dataclass(frozen=True, kw_only=True)
class Network:
    """Assumed, never measured here. Bytes per second of one GPU, in each direction."""

    nvlink_bytes_per_s: float = 0.0  # 0 in any field: the value of rates.toml
    nic_bytes_per_s: float = 0.0
    node_collective_s: float = 0.0
    cluster_collective_s: float = 0.0
    storage_bytes_per_s: float = 0.0

    def __post_init__(self):
        for name, value in _values(_data()["network"]).items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class Driver:
    """What trainer rank 0 does for all engines, and what it holds; ``rates.toml`` has the numbers."""

    ask_completion_s: float
    ask_token_s: float
    completion_s: float
    token_s: float
    completion_bytes: float
    token_bytes: float

    def seconds(self, completions: float, tokens: float, rollout_s: float) -> float:
        """Beside ``rollout_s`` of sampling."""
        asking = completions * self.ask_completion_s + tokens * self.ask_token_s
        return max(0.0, asking - rollout_s) + completions * self.completion_s + tokens * self.token_s

    def gigabytes(self, completions: float, tokens: float) -> float:
        return (completions * self.completion_bytes + tokens * self.token_bytes) / 1e9


@dataclass(frozen=True)
class StepTime:
    """Seconds by phase. ``pause``: of sampling, part of ``publish``; ``wire``: its part that is traffic."""

    rollouts: float
    old_logprobs: float
    update: float
    publish: float
    handover: float
    driver: float
    driver_gb: float  # held by trainer rank 0
    pause: float
    wire: float
    bubble: float  # of the update
    expert_traffic: float  # of the update
    overlaps: bool
    tokens: float  # trained
    gpus: int

    @property
    def training(self) -> float:
        return self.old_logprobs + self.update

    @property
    def step(self) -> float:
        if self.overlaps:
            return max(self.rollouts + self.driver + self.pause, self.training + self.publish)
        return self.rollouts + self.driver + self.training + self.publish + self.handover

    @property
    def gpu_seconds_per_million(self) -> float:
        """Of all GPUs, for a million trained tokens."""
        return self.step * self.gpus / self.tokens * 1e6


@dataclass(frozen=True)
class Flops:
    """Operations of one forward pass: two for each weight that a token meets, and causal attention."""

    linears: float  # of layers
    attention: float
    head: float

    @classmethod
    def of(cls, model: ModelConfig, tokens: float, squares: float) -> Flops:
        """``squares``: the sum over sequences of the square of their length."""
        counted = parameters.count(model)
        width = model.num_attention_heads * model.head_dim
        return cls(
            linears=2.0 * (counted.active - counted.embedding) * tokens,
            attention=2.0 * model.num_layers * width * squares,
            head=2.0 * model.vocab_size * model.hidden_size * tokens,
        )

    @property
    def total(self) -> float:
        return self.linears + self.attention + self.head


def step_time(
    cfg: RunConfig,
    lengths: Lengths,
    rates: Rates,
    network: Network,
    *,
    memory_bytes: int,
    gpus: int,
    gpus_per_node: int = 8,
) -> StepTime:
    """Seconds by phase. ``memory_bytes``: of one GPU, which bounds the sequences that an engine holds."""
    has_old_pass = needs_old_pass(cfg) and not cfg.precision.exact
    sequences = cfg.sampling.prompts_per_step * cfg.sampling.completions_per_prompt
    length = lengths.prompt + lengths.mean
    # Of an exponential distribution the mean square is twice the square of the mean; of equal lengths it is the square.
    square = length**2 * (1.0 + max(0.0, min(0.5, 1.0 - lengths.mean / lengths.longest)))
    passes = _Passes.of(cfg, Flops.of(cfg.model, sequences * length, sequences * square), sequences * length, rates)
    update, bubble, traffic = _update_s(cfg, passes, sequences, length, rates, network, gpus_per_node)
    wire, proof = _publish_s(cfg, rates, network, gpus, gpus_per_node)
    in_spare = cfg.weight_sync.spare_weights != "none"
    rollouts = _rollout_s(cfg, sequences, lengths, rates, network, memory_bytes, gpus_per_node)
    driver, sampled = Driver(**_values(_data()["driver"])), sequences * lengths.mean
    return StepTime(
        rollouts=rollouts,
        old_logprobs=passes.forward if has_old_pass else 0.0,
        update=update,
        publish=wire + proof,
        handover=_handover_s(cfg, rates),
        driver=driver.seconds(sequences, sampled, rollouts),
        driver_gb=driver.gigabytes(sequences, sampled),
        pause=proof if in_spare else wire + proof,
        wire=wire,
        bubble=bubble,
        expert_traffic=traffic,
        overlaps=cfg.sampling.max_staleness > 0 and cfg.engine.placement != "colocated",
        tokens=sequences * length,
        gpus=gpus,
    )


def step_seconds(cfg: RunConfig, machines: DoctorOptions) -> float:
    """Seconds of a step with the default network and half of the longest sequences, as ``plan`` without options."""
    return step_time(
        cfg,
        Lengths.of(cfg.sampling),
        Rates.of(machines.gpu),
        Network(),
        memory_bytes=machines.hardware.memory_bytes,
        gpus=gpus_wanted(cfg),
        gpus_per_node=machines.gpus_per_node,
    ).step


def _moe_layers(model: ModelConfig) -> int:
    return model.num_layers - model.first_dense_layers if model.is_moe else 0


def _linear_rate(model: ModelConfig, in_fp8: bool, rates: Rates) -> float:
    if model.is_moe:
        return rates.experts_fp8 if in_fp8 else rates.experts_bf16
    return rates.linear_fp8 if in_fp8 else rates.linear_bf16


@dataclass(frozen=True)
class _Passes:
    """Seconds of a rank for its share of all tokens, without traffic and what a microbatch costs."""

    forward: float
    update: float  # with what is computed again

    @classmethod
    def of(cls, cfg: RunConfig, forward: Flops, tokens: float, rates: Rates) -> _Passes:
        """Backward takes twice as long as forward; of attention, which computes its scores again, 2.5 times."""
        model, in_fp8 = cfg.model, cfg.precision.trainer != "bf16"
        feature_s = rates.feature_fp8_s if in_fp8 else rates.feature_bf16_s
        layers = forward.linears / _linear_rate(model, in_fp8, rates)
        layers += tokens * model.num_layers * model.hidden_size * feature_s / 3.0
        attention, head = forward.attention / rates.attention, forward.head / rates.head
        again = _AGAIN[cfg.optim.recompute]
        update = (3.0 + again) * layers + (3.5 + (again == 1.0)) * attention + 3.0 * head
        return cls((layers + attention + head) / cfg.parallel.world_size, update / cfg.parallel.world_size)


def _update_s(
    cfg: RunConfig, passes: _Passes, sequences: int, length: float, rates: Rates, network: Network, node: int
) -> tuple[float, float, float]:
    """(seconds, of which the pipeline's bubble, of which expert-parallel traffic)."""
    model, parallel = cfg.model, cfg.parallel
    own = sequences * length / parallel.data / parallel.context  # tokens of one rank
    layers = model.num_layers / parallel.pipeline
    rounds = 2.0 + (cfg.optim.recompute == "full")  # forward, backward, and forward again
    experts = tensor = 0.0
    if model.is_moe and parallel.expert > 1:
        others = parallel.expert - 1
        copies = model.experts_per_token * others / parallel.expert  # of a token for other ranks, by an all-to-all
        there = 2  # bytes of a number on its way to experts, and of its gradient
        if may_gather(cfg) and others <= copies:
            copies = others
            there -= cfg.precision.trainer == "blockwise" and cfg.precision.scales == "pow2"
        link = network.nvlink_bytes_per_s if parallel.expert <= node else network.nic_bytes_per_s
        moved = own / parallel.tensor * copies * model.hidden_size * (there + 2)  # dispatch and combine
        experts = rounds * layers * _moe_layers(model) / model.num_layers * moved / link
    if parallel.tensor > 1:
        link = network.nvlink_bytes_per_s if parallel.tensor <= node else network.nic_bytes_per_s
        moved = own * model.hidden_size * 2 * (parallel.tensor - 1) / parallel.tensor
        tensor = rounds * _TENSOR_COLLECTIVES * layers * moved / link
    updates = cfg.algo.updates_per_step
    together = max(1.0, cfg.optim.max_tokens_per_microbatch // length)  # sequences of a microbatch
    microbatches = max(1, math.ceil(sequences / parallel.data / updates / together))
    held = _held(cfg)
    gradients = updates * microbatches * held.trained * rates.parameter_bytes / rates.read_bytes_per_s
    busy = passes.update + gradients + experts + tensor
    if model.is_moe:
        launched = rates.host_moe_layer_s * (1.0 + _AGAIN[cfg.optim.recompute] / 3.0)
        busy = max(busy, updates * microbatches * layers * launched)
    bubble = busy * (parallel.pipeline - 1) / (microbatches * parallel.virtual_stages)
    link = network.nvlink_bytes_per_s if parallel.world_size <= node else network.nic_bytes_per_s
    copied = held.dense * (parallel.data * parallel.context > 1) + held.expert * (weights.expert_copies(parallel) > 1)
    reduced = copied * (4 + 2) / link  # gradients in FP32, parameters in BF16
    optimizer = held.divided(parallel) * _OPTIMIZER_BYTES / rates.read_bytes_per_s
    return busy + bubble + updates * (reduced + optimizer), bubble, experts


def _held(cfg: RunConfig) -> weights.RankWeights:
    """Weights of the trainer rank that has most."""
    stages = [weights.on_trainer_rank(cfg, stage) for stage in range(cfg.parallel.pipeline)]
    return max(stages, key=lambda stage: stage.trained)


def _handover_s(cfg: RunConfig, rates: Rates) -> float:
    if cfg.engine.placement != "colocated":
        return 0.0
    held, updates = _held(cfg), cfg.algo.updates_per_step
    sizes = {"params": 2.0 * held.trained, "optimizer": Bytes.of(cfg).optimizer * held.divided(cfg.parallel) * updates}
    away = sum(size for part, size in sizes.items() if part in cfg.optim.offload)
    return (rates.sleep_s if cfg.engine.sleep_level else 0.0) + 2.0 * away / rates.host_bytes_per_s


def _rollout_s(
    cfg: RunConfig, sequences: int, lengths: Lengths, rates: Rates, network: Network, memory_bytes: int, node: int
) -> float:
    model = cfg.model
    own = math.ceil(sequences / cfg.engine.num_replicas)
    engine = worker(cfg, memory_bytes)
    per_group = math.ceil(own / cfg.engine.data)  # sequences of one data-parallel rank
    fitting = max(1, int(engine.kv_tokens / (lengths.prompt + lengths.mean)))
    held = min(per_group, cfg.engine.max_num_sequences, fitting)
    steps = max(lengths.longest, per_group * lengths.mean / held)
    average = per_group * lengths.mean / steps  # sequences of a step
    kv_read = per_group * lengths.mean * (lengths.prompt + lengths.mean / 2)
    kv_read *= kv_token_bytes(cfg.model, cfg.engine, cpu=False)
    one = Flops.of(model, average / cfg.engine.tensor, 0.0)
    products = one.linears / _linear_rate(model, cfg.precision.rollout != "bf16", rates) + one.head / rates.head
    matrices = max(products, _read_bytes(cfg, average * cfg.engine.data) / rates.read_bytes_per_s)
    sampling = average * model.vocab_size * rates.logit_s
    prefill = Flops.of(model, own * lengths.prompt, own * lengths.prompt**2).total / (rates.prefill * cfg.engine.ranks)
    moe_layers = _moe_layers(model)
    fixed = (model.num_layers - moe_layers) * rates.decode_layer_s + moe_layers * rates.decode_moe_layer_s
    is_wide = cfg.engine.ranks > node
    latency = network.cluster_collective_s if is_wide else network.node_collective_s
    calls = 2 * model.num_layers * (cfg.engine.tensor > 1) + 2 * model.num_layers * (
        cfg.engine.expert > 1 and model.is_moe
    )
    link = network.nic_bytes_per_s if is_wide else network.nvlink_bytes_per_s
    moved = 0.0
    if cfg.engine.expert > 1 and model.is_moe:
        moved = 2 * average * model.experts_per_token * model.hidden_size * 2 * model.num_layers / cfg.engine.tensor
    of_step = matrices + sampling + fixed + calls * latency + moved / link
    return prefill + kv_read / rates.read_bytes_per_s + steps * of_step


def _read_bytes(cfg: RunConfig, num_sequences: float) -> float:
    """Bytes of weights that one worker reads in a decode step: of experts, those that the batch reaches."""
    model, engine = cfg.model, cfg.engine
    matrices = float(weights.on_engine_worker(cfg).sent)
    if not model.tie_embeddings:  # the input embedding is looked up
        matrices -= 2 * model.vocab_size * model.hidden_size / engine.tensor
    if not model.is_moe:
        return matrices
    counted = parameters.count(model)
    element = 2 if cfg.precision.rollout == "bf16" else 1
    experts = counted.expert / engine.ranks * element
    reached = 1 - (1 - model.experts_per_token / model.num_experts) ** max(1.0, num_sequences)
    return matrices - experts * (1 - reached)


def _publish_s(cfg: RunConfig, rates: Rates, network: Network, gpus: int, node: int) -> tuple[float, float]:
    """(seconds of the wire, of everything else). The busiest cards are those of engines, or of trainers if they are few."""
    own = weights.on_engine_worker(cfg).sent
    link = network.nvlink_bytes_per_s if gpus <= node else network.nic_bytes_per_s
    sent = own * cfg.engine.ranks * cfg.engine.num_replicas / cfg.parallel.world_size
    scales = rates.kv_scales_s if cfg.engine.kv_cache_dtype == "fp8" else 0.0
    return max(own, sent) / link, rates.publish_s + rates.publish_s_per_byte * own + scales
