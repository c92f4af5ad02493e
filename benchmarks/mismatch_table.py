"""What docs/measured.md shows of the rows of benchmarks/mismatch.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks import record
from benchmarks.results import Row

ROUNDING = 1e-5  # nats: two FP32 sums of the same logits in different order are not further apart


def table(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as docs/measured.md shows them."""
    shown = []
    for row in rows:
        kernels = f"{row['linear']} / {row['moe']} / {row['attention']}"
        kernels += ", batch-invariant" if row.get("batch_invariant") else ""
        kernels += {"on": ", torch.compile", "eager": ", eager"}.get(row.get("compile"), "")
        trainer = row["trainer"] + (", grouped experts" if row.get("experts") == "deep_gemm" else "")
        rollout = row["rollout"] if row["rollout"] == "bf16" else f"{row['rollout']}, {row['scales']} scales"
        head = {"model": f"{row['model']}, {row['layers']} layers", "rollout": rollout, "trainer": trainer}
        if "error" in row:
            numbers = dict.fromkeys(("mean d", "max d", "KL k3", "mean exp d", "d = 0, d < 1e-5"), "-")
            numbers["mean d"] = f"failed: {row['error'][:80]}"
        else:
            numbers = {
                "mean d": f"{row['abs_logprob_diff/mean']:.5f}",
                "max d": f"{row['abs_logprob_diff/max']:.3f}",
                "KL k3": f"{row['kl_k3/mean']:.2e}",
                "mean exp d": f"{row['multiplicative_error/mean']:.5f}",
                "d = 0, d < 1e-5": _shares(row),
            }
        shown.append(head | numbers | {"linear / experts / attention": kernels})
    return shown


def write_section(rows: Sequence[Row]) -> None:
    notes = (
        "d = |old - rollout| in nats per sampled token, at temperature 1: the trainer's log-probabilities of what the "
        "engine sampled, on the same weights. Models of these shapes, trained from random weights by supervised steps "
        f"in BF16 on the language of benchmarks.synthetic ({_warm_starts(rows)}). fp8_kv adds an FP8 KV cache of "
        "measured scales; the trainer engine is blockwise with attention by the engine's kernel, deep_gemm with that "
        "of its linears. Engine's prefill: no trainer, but the engine's own log-probabilities of its sequences, read "
        f"as prompts. The last numbers are shares of tokens; FP32 sums in another order agree to {ROUNDING:g}."
    )
    record.section("mismatch", "Train/rollout mismatch", table(rows), notes=notes)


def _warm_starts(rows: Sequence[Row]) -> str:
    """Each program starts anew, and BF16 sums vary: the range of what they come to."""
    found: dict[tuple[str, int], set[float]] = {}
    for row in rows:
        losses = found.setdefault((row["model"], row["warm_steps"]), set())
        losses |= {row["warm_loss"]} - {None}
    parts = []
    for (model, steps), losses in found.items():
        nats = " to ".join(f"{loss:.3f}" for loss in sorted({min(losses), max(losses)})) if losses else "random"
        parts.append(f"{model}: {steps} steps, {nats} nats")
    return "; ".join(parts)


def _shares(row: Row) -> str:
    """Of sampled tokens; rows of earlier versions lack them."""
    return f"{row['equal_share']:.1%}, {row['rounding_share']:.1%}" if "equal_share" in row else "-"
