"""Seconds of one step, phase by phase, from a configuration, the rates of ``rates.toml`` and a network. No torch.

    rollouts       FLOP of the prompts. Then decode steps until the longest sequence ends: each reads the weights that
                   it needs or multiplies by them, whichever takes longer, reads the KV cache, and samples
    old_logprobs   one forward pass over all tokens; 0 with ``precision.exact`` and in a step of one update
    update         forward and backward passes, recompute, tensor- and expert-parallel traffic, or the time in which the
                   host launches them if it is longer; the pipeline bubble, the data-parallel reduction, the optimizer
    publish        the wire, and quantizing, loading and proving; with spare memory only the latter pauses the engines
    handover       colocated engines sleep and wake, and ``optim.offload`` copies to the host and back
    driver         work of trainer rank 0 for all engines, as far as others wait for it

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
from megatron_fp8rl.precision.formats import BLOCKWISE_POW2, ITEM_BYTES, QuantFormat, rollout_format, trainer_format
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.kernel_choice import resolved
from megatron_fp8rl.precision.kernel_support import may_gather
from megatron_fp8rl.preflight import weights
from megatron_fp8rl.preflight.assessment import DoctorOptions, gpus_wanted
from megatron_fp8rl.preflight.engine_memory import worker
from megatron_fp8rl.preflight.memory import GpuName
from megatron_fp8rl.preflight.trainer_memory import Bytes
from megatron_fp8rl.rollout.vllm_args import kv_token_bytes

# Read and written for each parameter of a rank's share: gradient, master, two moments, BF16. Reduced moments move less,
# and take the time of so many bytes on an H200.
_OPTIMIZER_BYTES = {"fp32": 30, "bf16": 34, "fp8": 100}
_RECOMPUTED = {"none": 0.0, "selective": 0.5, "full": 1.0}  # share of the layers' forward pass, by ``optim.recompute``
_FLOPS = ("linear_fp8", "linear_bf16", "experts_fp8", "experts_bf16", "attention", "head", "prefill")
_TENSOR_COLLECTIVES = 4  # of a layer's forward under tensor parallelism; twice as many in backward


@dataclass(frozen=True, kw_only=True)
class Lengths:
    prompt: float
    mean: float  # of completions
    longest: float

    @classmethod
    def of(cls, sampling: SamplingConfig, prompt: float | None = None, mean: float | None = None) -> Lengths:
        """The means, or half of the most tokens that the configuration allows."""
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
        new, h200 = (_data()["sheets"][name] for name in (gpu, "h200"))
        flops, read = new["flops"] / h200["flops"], new["bytes_per_s"] / h200["bytes_per_s"]
        factors = dict.fromkeys(_FLOPS, flops) | {"read_bytes_per_s": read}
        scaled = {name: getattr(measured, name) * factor for name, factor in factors.items()}
        shorter = ("feature_fp8_s", "feature_bf16_s", "logit_s", "publish_s_per_byte")
        scaled |= {name: getattr(measured, name) / read for name in shorter}
        source = f"H200's, times {flops:.2f} (FLOP/s) and {read:.2f} (memory) by data sheets; "
        return replace(measured, **scaled, source=f"{source}not measured on {gpu.upper()}")


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


@dataclass(frozen=True)
class StepTime:
    """Seconds by phase. ``pause``: of sampling, part of ``publish``; ``wire``: its part that is traffic."""

    rollouts: float
    old_logprobs: float
    update: float
    publish: float
    handover: float
    driver: float
    driver_gb: float  # on trainer rank 0
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
            attention=2.0 * sum(kind.mixer != "gdn" for kind in model.layers[: model.num_layers]) * width * squares,
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
    sequences = cfg.sampling.prompts_per_step * cfg.sampling.completions_per_prompt
    step = _Step(cfg, lengths, rates, network, memory_bytes, gpus, gpus_per_node, sequences)
    forward, passes = step.passes()
    update, bubble, traffic = step.update(passes)
    wire, proof = step.publish()
    rollouts = step.rollouts()
    driver, driver_gb = step.driver(rollouts)
    return StepTime(
        rollouts=rollouts,
        old_logprobs=forward if needs_old_pass(cfg) else 0.0,
        update=update,
        publish=wire + proof,
        handover=step.handover(),
        driver=driver,
        driver_gb=driver_gb,
        pause=proof if cfg.weight_sync.spare_weights != "none" else wire + proof,
        wire=wire,
        bubble=bubble,
        expert_traffic=traffic,
        overlaps=cfg.sampling.max_staleness > 0 and cfg.engine.placement != "colocated",
        tokens=sequences * step.length,
        gpus=gpus,
    )


def acceptance_to_win(
    cfg: RunConfig,
    lengths: Lengths,
    rates: Rates,
    network: Network,
    *,
    memory_bytes: int,
    gpus: int,
    gpus_per_node: int,
) -> dict[int, float]:
    """By number of sequences of an engine's data-parallel rank, the share of accepted drafts from which they pay.
    Without the host's time for drafts, which is not measured."""
    step = _Step(cfg, lengths, rates, network, memory_bytes, gpus, gpus_per_node, 1)
    return {sequences: step.acceptance_to_win(sequences) for sequences in (1, 16, 64, 256)}


def weight_bytes_read(cfg: RunConfig, num_sequences: float) -> float:
    """Bytes of weights that one engine worker reads in a decode step: of experts, those that the batch reaches."""
    model, engine = cfg.model, cfg.engine
    matrices = float(weights.on_engine_worker(cfg).sent)
    if not model.tie_embeddings:  # the input embedding is looked up
        matrices -= ITEM_BYTES["bfloat16"] * model.vocab_size * model.hidden_size / engine.tensor
    if not model.is_moe:
        return matrices
    experts = parameters.count(model).expert / engine.ranks * ITEM_BYTES[rollout_format(cfg.precision).element]
    reached = 1 - (1 - model.experts_per_token / model.num_experts) ** max(1.0, num_sequences)
    return matrices - experts * (1 - reached)


def step_seconds(cfg: RunConfig, machines: DoctorOptions) -> float:
    """Seconds of a step with the default network and half of the longest sequences, as ``plan`` without options."""
    return step_time(
        resolved(cfg, Hardware(machines.hardware.generation)),
        Lengths.of(cfg.sampling),
        Rates.of(machines.gpu),
        Network(),
        memory_bytes=machines.hardware.memory_bytes,
        gpus=gpus_wanted(cfg),
        gpus_per_node=machines.gpus_per_node,
    ).step


@dataclass(frozen=True)
class _Step:
    cfg: RunConfig
    lengths: Lengths
    rates: Rates
    network: Network
    memory_bytes: int
    gpus: int
    node: int  # GPUs of a node
    sequences: int

    @property
    def length(self) -> float:
        return self.lengths.prompt + self.lengths.mean

    @property
    def moe_layers(self) -> int:
        return sum(kind.is_moe for kind in self.cfg.model.layers)

    @functools.cached_property
    def weights(self) -> weights.RankWeights:
        """Weights of the trainer rank that has most."""
        stages = (weights.on_trainer_rank(self.cfg, stage) for stage in range(self.cfg.parallel.pipeline))
        return max(stages, key=lambda stage: stage.trained + stage.frozen)

    def link(self, ranks: int) -> float:
        """Bytes per second between so many ranks."""
        return self.network.nvlink_bytes_per_s if ranks <= self.node else self.network.nic_bytes_per_s

    def linear_rate(self, fmt: QuantFormat) -> float:
        kind = "experts" if self.cfg.model.is_moe else "linear"
        return getattr(self.rates, f"{kind}_{'fp8' if fmt.is_quantized else 'bf16'}")

    def passes(self) -> tuple[float, float]:
        """Seconds of a rank's share of (forward pass, update), without traffic and the cost of a microbatch. Backward
        takes twice as long as forward; of attention, which computes its scores again, 2.5 times."""
        cfg, model, rates, lengths = self.cfg, self.cfg.model, self.rates, self.lengths
        tokens, fmt = self.sequences * self.length, trainer_format(cfg.precision)
        # Of an exponential distribution the mean square is twice the square of the mean; of equal lengths it is the
        # square.
        square = self.length**2 * (1.0 + max(0.0, min(0.5, 1.0 - lengths.mean / lengths.longest)))
        flops = Flops.of(model, tokens, self.sequences * square)
        feature_s = rates.feature_fp8_s if fmt.is_quantized else rates.feature_bf16_s
        layers = flops.linears / self.linear_rate(fmt) + tokens * model.num_layers * model.hidden_size * feature_s / 3.0
        attention, head = flops.attention / rates.attention, flops.head / rates.head
        recomputed = _RECOMPUTED[cfg.optim.recompute]
        update = (3.0 + recomputed) * layers + (3.5 + (recomputed == 1.0)) * attention + 3.0 * head
        return (layers + attention + head) / cfg.parallel.world_size, update / cfg.parallel.world_size

    def update(self, passes: float) -> tuple[float, float, float]:
        """(seconds, of these the pipeline bubble, of these expert-parallel traffic)."""
        cfg, model, parallel, rates = self.cfg, self.cfg.model, self.cfg.parallel, self.rates
        tokens = self.sequences * self.length / parallel.data / parallel.context  # of one rank
        layers, recomputed = model.num_layers / parallel.pipeline, _RECOMPUTED[cfg.optim.recompute]
        rounds = 2.0 + (recomputed == 1.0)  # forward, backward, and forward again
        experts = tensor = 0.0
        if model.is_moe and parallel.expert > 1:
            others = parallel.expert - 1
            copies = model.experts_per_token * others / parallel.expert  # of a token for other ranks, by an all-to-all
            item = ITEM_BYTES["bfloat16"]
            sent = item  # of a number on its way to experts
            if may_gather(cfg.parallel, cfg.precision) and others <= copies:
                copies = others
                if trainer_format(cfg.precision) is BLOCKWISE_POW2:
                    sent = ITEM_BYTES[BLOCKWISE_POW2.element]
            moved = tokens / parallel.tensor * copies * model.hidden_size * (sent + item)  # dispatch and combine
            experts = rounds * layers * self.moe_layers / model.num_layers * moved / self.link(parallel.expert)
        if parallel.tensor > 1:
            moved = tokens * model.hidden_size * ITEM_BYTES["bfloat16"] * (parallel.tensor - 1) / parallel.tensor
            tensor = rounds * _TENSOR_COLLECTIVES * layers * moved / self.link(parallel.tensor)
        updates, most = cfg.algo.updates_per_step, self.weights
        together = max(1.0, cfg.optim.max_tokens_per_microbatch // self.length)  # sequences of a microbatch
        microbatches = max(1, math.ceil(self.sequences / parallel.data / updates / together))
        gradients = updates * microbatches * most.trained * rates.parameter_bytes / rates.read_bytes_per_s
        busy = passes + gradients + experts + tensor
        if model.is_moe:
            launched = rates.host_moe_layer_s * (1.0 + recomputed / 3.0)
            busy = max(busy, updates * microbatches * layers * launched)
        bubble = busy * (parallel.pipeline - 1) / (microbatches * parallel.virtual_stages)
        copied = most.dense * (parallel.data * parallel.context > 1)
        copied += most.expert * (weights.expert_copies(parallel) > 1)
        reduced = copied * (4 + 2) / self.link(parallel.world_size)  # gradients in FP32, parameters in BF16
        optimizer = most.divided(parallel) * _OPTIMIZER_BYTES[cfg.optim.states] / rates.read_bytes_per_s
        return busy + bubble + updates * (reduced + optimizer), bubble, experts

    def handover(self) -> float:
        cfg, most = self.cfg, self.weights
        if cfg.engine.placement != "colocated":
            return 0.0
        states = Bytes.of(cfg).optimizer * most.divided(cfg.parallel) * cfg.algo.updates_per_step
        sizes = {"params": ITEM_BYTES["bfloat16"] * (most.trained + most.frozen), "optimizer": states}
        away = sum(size for part, size in sizes.items() if part in cfg.optim.offload)
        return (self.rates.sleep_s if cfg.engine.sleep_level else 0.0) + 2.0 * away / self.rates.host_bytes_per_s

    def rollouts(self) -> float:
        cfg, model, rates, lengths, engine = self.cfg, self.cfg.model, self.rates, self.lengths, self.cfg.engine
        sequences = math.ceil(self.sequences / engine.num_replicas)
        per_group = math.ceil(sequences / engine.data)  # sequences of one data-parallel rank
        fitting = max(1, int(worker(cfg, self.memory_bytes).kv_tokens / self.length))
        steps = max(lengths.longest, per_group * lengths.mean / min(per_group, engine.max_num_sequences, fitting))
        average = per_group * lengths.mean / steps  # sequences of a step
        kv_read = per_group * lengths.mean * self.kv_bytes_read
        prompts = Flops.of(model, sequences * lengths.prompt, sequences * lengths.prompt**2)
        prefill_s = prompts.total / (rates.prefill * engine.ranks)
        return prefill_s + kv_read / rates.read_bytes_per_s + steps * self.decode_s(average)

    @property
    def kv_bytes_read(self) -> float:
        """Bytes of the KV cache that a worker reads for one sequence in one decode step, on average."""
        per_token = kv_token_bytes(self.cfg.model, self.cfg.engine, expanded=False)
        return (self.lengths.prompt + self.lengths.mean / 2) * per_token

    def decode_s(self, average: float) -> float:
        """Seconds of a decode step with so many tokens on a data-parallel rank, without the KV cache."""
        cfg, model, rates, engine = self.cfg, self.cfg.model, self.rates, self.cfg.engine
        decode = Flops.of(model, average / engine.tensor, 0.0)
        products = decode.linears / self.linear_rate(rollout_format(cfg.precision)) + decode.head / rates.head
        matrices = max(products, weight_bytes_read(cfg, average * engine.data) / rates.read_bytes_per_s)
        launches = (model.num_layers - self.moe_layers) * rates.decode_layer_s
        launches += self.moe_layers * rates.decode_moe_layer_s
        is_wide, spreads_experts = engine.ranks > self.node, engine.expert > 1 and model.is_moe
        latency = self.network.cluster_collective_s if is_wide else self.network.node_collective_s
        calls = 2 * model.num_layers * ((engine.tensor > 1) + spreads_experts)
        copies = 2 * average * model.experts_per_token * model.num_layers / engine.tensor * spreads_experts
        moved = copies * model.hidden_size * ITEM_BYTES["bfloat16"]
        sampling = average * model.vocab_size * rates.logit_s
        return matrices + sampling + launches + calls * latency + moved / self.link(engine.ranks)

    def acceptance_to_win(self, sequences: int) -> float:
        """The share of accepted drafts from which ``engine.draft_tokens`` drafts in every step pay, with so many
        sequences on a data-parallel rank."""
        cached = sequences * self.kv_bytes_read / self.rates.read_bytes_per_s
        drafts = self.cfg.engine.draft_tokens
        longer = (self.decode_s(sequences * (1 + drafts)) + cached) / (self.decode_s(sequences) + cached)
        # A step samples 1 + a + a^2 + ... tokens of a sequence.
        shares = (percent / 100 for percent in range(101))
        return next((a for a in shares if sum(a**i for i in range(1 + drafts)) >= longer), 1.0)

    def publish(self) -> tuple[float, float]:
        """(seconds of the wire, of everything else). The busiest GPUs are engines', or trainers' if they are few."""
        cfg, rates = self.cfg, self.rates
        received = weights.published_bytes(cfg)
        sent = received * cfg.engine.ranks * cfg.engine.num_replicas / cfg.parallel.world_size
        scales = rates.kv_scales_s if cfg.engine.kv_cache_dtype == "fp8" else 0.0
        wire = max(received, sent) / self.link(self.gpus)
        return wire, rates.publish_s + rates.publish_s_per_byte * received + scales

    def driver(self, rollout_s: float) -> tuple[float, float]:
        """(seconds beside ``rollout_s`` of sampling, gigabytes) that trainer rank 0 takes for all engines."""
        rates = _values(_data()["driver"])
        counts = {"completion": self.sequences, "token": self.sequences * self.lengths.mean}

        def total(name: str) -> float:
            return sum(count * rates[name.format(kind)] for kind, count in counts.items())

        return max(0.0, total("ask_{}_s") - rollout_s) + total("{}_s"), total("{}_bytes") / 1e9
