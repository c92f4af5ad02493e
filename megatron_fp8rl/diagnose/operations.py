"""The operations of one prefill, by name and in order, and the comparison of trainer and engine. Pure.

In: tensors [T, features] by operation name: of the engine for a prompt, of the trainer, and of the trainer's operations
on the *engine's* inputs. Out: for each operation the difference of complete passes, and the isolated difference without
inherited errors. An operation ends where its result is rounded to BF16 and can be read at both ends:

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

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_fp8rl.config import ModelConfig
from megatron_fp8rl.names import registry

# BF16 roundings of nearly equal numbers differ by at most one unit in the last place (2^-8 to 2^-7), and few differ at
# all. Norms get one more bit: engines normalize a sum before it is rounded, and round before and after the weight.
# Operations that round in between (probabilities, the product of gate and up, each expert's output) get two.
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
    def is_beyond_rounding(self) -> bool:
        """Whether rounding to BF16 does not explain ``isolated_db``; True for NaN."""
        limit_db = 20 * math.log10(_ROUNDING * 2 ** _MORE_BITS.get(self.name.rpartition(".")[2], 0))
        return not self.isolated_db <= limit_db


def operation_names(model: ModelConfig) -> list[str]:
    """Names in execution order. Raises ValueError for attention with other operations."""
    others = registry.norms_all_heads, registry.norms_outputs, registry.has_biases
    if model.has("mla") or model.has("gdn") or any(has(model) for has in others):
        raise ValueError(f"model.family: {model.family} cannot be probed; its layers have other operations")
    names = ["embedding"]
    for layer in range(model.num_layers):
        norms = ["q_norm", "k_norm"] if model.qk_norm else []
        mlp = ["router", "experts"] if model.layers[layer].is_moe else ["gate_up", "activation", "down"]
        operations = ["input", "input_norm", "qkv", *norms, "attention", "o_proj", "middle", "post_norm", *mlp]
        names += [f"layer.{layer}.{operation}" for operation in operations]
    return [*names, "final", "final_norm", "logits"]


def compare(
    engine: Mapping[str, Tensor], trainer: Mapping[str, Tensor], replayed: Mapping[str, Tensor], model: ModelConfig
) -> list[Difference]:
    """One entry for each operation, in order. Raises ValueError that names an operation whose shapes differ."""
    rows = []
    for name in operation_names(model):
        reference = engine[name].double()
        numbers: dict[str, float] = {}
        for kind, end, result in (("total", "trainer", trainer[name]), ("isolated", "replayed", replayed[name])):
            if result.shape != reference.shape:
                raise ValueError(f"{name}: {tuple(result.shape)} {end}, {tuple(reference.shape)} in the engine")
            error = result.double() - reference
            numbers |= {f"{kind}_db": decibels(error, reference), f"{kind}_max": error.abs().max().item()}
        rows.append(Difference(name=name, **numbers))
    return rows


def decibels(error: Tensor, reference: Tensor) -> float:
    """20 log10(rms(error) / rms(reference)): -inf if the error is 0, else inf if the reference is 0."""
    noise, signal = error.double().norm().item(), reference.double().norm().item()
    if noise == 0:
        return -math.inf
    return 20 * math.log10(noise / signal) if signal else math.inf


def first_different(rows: Sequence[Difference]) -> Difference | None:
    return next((row for row in rows if row.total_max != 0), None)


def table(rows: Sequence[Difference]) -> str:
    """A Markdown table; marks operations whose isolated difference is beyond rounding."""

    def db(value: float) -> str:
        return "equal" if value == -math.inf else f"{value:.1f}"

    lines = ["| operation | total dB | total max | isolated dB | isolated max | |", "|---|---:|---:|---:|---:|---|"]
    lines += [
        f"| {row.name} | {db(row.total_db)} | {row.total_max:.2g} | {db(row.isolated_db)} | {row.isolated_max:.2g} | "
        f"{'beyond rounding' if row.is_beyond_rounding else ''} |"
        for row in rows
    ]
    return "\n".join(lines)
