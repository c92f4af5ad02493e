"""Where trainer and engine first differ: the operations of one prefill, by name and in order, and how they compare.

In:  what the engine computed for a prompt, what the trainer computed for the same tokens, and what each of the
     trainer's operations returns when it is fed the *engine's* inputs; by operation name, tensors [T, features].
Out: for each operation its difference, and how much of it is its own rather than inherited from those before it.
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
    layer.N.gate_up     then activation, down: a dense feed-forward
    layer.N.router      logits; then experts: a mixture of experts with its choice
    final, final_norm   residual stream behind the last layer, and its norm
    logits              of the prompt's last token
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_fp8rl.config import ModelConfig

# Two results that were rounded to BF16 from nearly equal numbers differ by at most one unit in the last place, 2^-7 of
# a number just above a power of two and 2^-8 below the next; few of them differ at all. Norms get a bit more: engines
# normalize a sum before it is rounded, and round before and after the weight. Operations that round in between
# (probabilities, the product of gate and up, each expert's output) get two.
_ROUNDING = 2.0**-8
_MORE_BITS = {"attention": 2, "experts": 2, "input_norm": 1, "post_norm": 1, "final_norm": 1, "q_norm": 1, "k_norm": 1}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Trainer against engine at one operation. dB are 20 log10(rms(difference) / rms(engine)); -inf is equality."""

    name: str
    total_db: float  # each end's own forward pass
    total_max: float  # largest absolute difference
    own_db: float  # the trainer's operation on the engine's inputs
    own_max: float

    @property
    def limit_db(self) -> float:
        """The largest ``own_db`` that rounding to BF16 explains."""
        return 20 * math.log10(_ROUNDING * 2 ** _MORE_BITS.get(self.name.rpartition(".")[2], 0))

    @property
    def is_beyond_rounding(self) -> bool:
        return not self.own_db <= self.limit_db  # NaN is beyond


def operation_names(model: ModelConfig) -> list[str]:
    """Names in the order of execution. Raises ValueError for latent attention, whose operations are others."""
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
                own_db=decibels(own, theirs),
                own_max=own.abs().max().item(),
            )
        )
    return rows


def decibels(error: Tensor, reference: Tensor) -> float:
    """20 log10(rms(error) / rms(reference)): -inf when nothing differs, inf when the reference is zero and it does."""
    noise, signal = error.double().norm().item(), reference.double().norm().item()
    if noise == 0:
        return -math.inf
    return 20 * math.log10(noise / signal) if signal else math.inf


def first_beyond_rounding(rows: Sequence[Difference]) -> Difference | None:
    """The first operation that computes something else at the two ends, on equal inputs."""
    return next((row for row in rows if row.is_beyond_rounding), None)


def first_different(rows: Sequence[Difference]) -> Difference | None:
    """The first operation with a bit that differs in the two forward passes."""
    return next((row for row in rows if row.total_max != 0), None)


def share_of_other_experts(engine_logits: Tensor, trainer_logits: Tensor, top_k: int) -> float:
    """The share of tokens whose ``top_k`` largest router logits [T, E] belong to another set of experts.

    Of equal logits, of which rounding makes many, a GPU's two ends take the lower expert.
    """

    def chosen(logits: Tensor) -> Tensor:
        order = logits.float().sort(dim=-1, descending=True, stable=True).indices
        return order[:, :top_k].sort(dim=-1).values

    return (chosen(engine_logits) != chosen(trainer_logits)).any(dim=-1).double().mean().item()


def table(rows: Sequence[Difference]) -> str:
    """A Markdown table; operations that differ by themselves beyond rounding are marked."""

    def db(value: float) -> str:
        return "equal" if value == -math.inf else f"{value:.1f}"

    lines = ["| operation | total dB | total max | own dB | own max | |", "|---|---:|---:|---:|---:|---|"]
    lines += [
        f"| {row.name} | {db(row.total_db)} | {row.total_max:.2g} | {db(row.own_db)} | {row.own_max:.2g} | "
        f"{'beyond rounding' if row.is_beyond_rounding else ''} |"
        for row in rows
    ]
    return "\n".join(lines)
