"""The operations of one prefill, by name and in order, and the comparison of trainer and engine.

In:  the engine's results for a prompt, the trainer's results for the same tokens, and the result of each trainer
     operation on the *engine's* inputs; tensors [T, features] by operation name.
Out: for each operation the difference, and how much of it is its own rather than inherited from earlier operations.
Pure. ``rollout/vllm_plugin/probe.py`` and ``diagnose/trainer_probe.py`` record under these names.

An operation ends where its result is rounded to BF16 and can be read at both ends:

    embedding
    layer.N.input       residual stream into the layer: the sum of the layer before it
    layer.N.input_norm
    layer.N.qkv         all of q, then k, then v
    layer.N.q_norm      by head; also k_norm
    layer.N.attention   rotary embedding and core attention
    layer.N.o_proj
    layer.N.middle      residual stream after attention
    layer.N.post_norm
    layer.N.gate_up     then activation, down: a dense MLP
    layer.N.router      logits; then experts: an MoE layer including its routing
    final, final_norm   residual stream after the last layer, and its norm
    logits              of the prompt's last token
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_fp8rl.config import ModelConfig

# Two BF16 roundings of nearly equal numbers differ by at most one unit in the last place, 2^-7 of a number just above a
# power of two and 2^-8 below the next; few of them differ at all. Norms get one more bit: engines normalize a sum
# before it is rounded, and round before and after the weight. Operations that round in between (probabilities, the
# product of gate and up, each expert's output) get two.
_ROUNDING = 2.0**-8
_MORE_BITS = {"attention": 2, "experts": 2, "input_norm": 1, "post_norm": 1, "final_norm": 1, "q_norm": 1, "k_norm": 1}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Trainer against engine at one operation. dB are 20 log10(rms(difference) / rms(engine)); -inf is equality."""

    name: str
    total_db: float  # of two complete forward passes
    total_max: float  # largest absolute difference
    isolated_db: float  # the trainer's operation on the engine's inputs
    isolated_max: float

    @property
    def limit_db(self) -> float:
        """The largest ``isolated_db`` that rounding to BF16 explains."""
        return 20 * math.log10(_ROUNDING * 2 ** _MORE_BITS.get(self.name.rpartition(".")[2], 0))

    @property
    def is_beyond_rounding(self) -> bool:
        return not self.isolated_db <= self.limit_db  # NaN is beyond


def operation_names(model: ModelConfig) -> list[str]:
    """Names in execution order. Raises ValueError for latent attention, which has other operations."""
    if model.mla is not None:
        raise ValueError("model.mla: latent attention cannot be probed; its engine fuses other operations")
    names = ["embedding"]
    for layer in range(model.num_layers):
        norms = ["q_norm", "k_norm"] if model.qk_norm else []
        mlp = ["router", "experts"] if model.is_moe_layer(layer) else ["gate_up", "activation", "down"]
        operations = ["input", "input_norm", "qkv", *norms, "attention", "o_proj", "middle", "post_norm", *mlp]
        names += [f"layer.{layer}.{operation}" for operation in operations]
    return [*names, "final", "final_norm", "logits"]


def compare(
    engine: Mapping[str, Tensor], trainer: Mapping[str, Tensor], replayed: Mapping[str, Tensor], model: ModelConfig
) -> list[Difference]:
    """One entry for each operation, in order. Raises ValueError that names an operation whose shapes differ."""
    rows = []
    for name in operation_names(model):
        theirs = engine[name].double()
        for end, ours in (("trainer", trainer[name]), ("replayed", replayed[name])):
            if ours.shape != theirs.shape:
                raise ValueError(f"{name}: {tuple(ours.shape)} {end}, {tuple(theirs.shape)} in the engine")
        total, own = trainer[name].double() - theirs, replayed[name].double() - theirs
        rows.append(
            Difference(
                name=name,
                total_db=decibels(total, theirs),
                total_max=total.abs().max().item(),
                isolated_db=decibels(own, theirs),
                isolated_max=own.abs().max().item(),
            )
        )
    return rows


def decibels(error: Tensor, reference: Tensor) -> float:
    """20 log10(rms(error) / rms(reference)): -inf if nothing differs, inf if the reference is zero and something does."""
    noise, signal = error.double().norm().item(), reference.double().norm().item()
    if noise == 0:
        return -math.inf
    return 20 * math.log10(noise / signal) if signal else math.inf


def first_different(rows: Sequence[Difference]) -> Difference | None:
    """The first operation with a differing bit in the two forward passes."""
    return next((row for row in rows if row.total_max != 0), None)


def table(rows: Sequence[Difference]) -> str:
    """A Markdown table; marks operations whose own difference is beyond rounding."""

    def db(value: float) -> str:
        return "equal" if value == -math.inf else f"{value:.1f}"

    lines = ["| operation | total dB | total max | own dB | own max | |", "|---|---:|---:|---:|---:|---|"]
    lines += [
        f"| {row.name} | {db(row.total_db)} | {row.total_max:.2g} | {db(row.isolated_db)} | {row.isolated_max:.2g} | "
        f"{'beyond rounding' if row.is_beyond_rounding else ''} |"
        for row in rows
    ]
    return "\n".join(lines)
