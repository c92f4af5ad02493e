"""What FP8 recipes cost in precision: loss curves from one seed, and the noise in the gradients of each layer.

    python -m benchmarks.recipes --model small small_moe
    python -m benchmarks.recipes --quick

Every arm starts from the same weights and sees the same batches (benchmarks/synthetic.py; the loss of a perfect model
is known). ``edges`` keeps the first and last layer in BF16. ``bf16, other seed`` starts from other weights: so far are
two runs apart that differ in nothing but chance. Gradients are compared at the weights that the BF16 arm arrives at, on
one batch that no arm has seen: signal to noise of an FP8 gradient against the BF16 one, in decibels; each matrix on its
own, experts together. Delayed scaling gets a past of two batches first.

The table and the picture docs/recipes.png are made of all rows.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import record, runner
from benchmarks.record import Row
from benchmarks.runner import num_gpus
from benchmarks.synthetic import Language
from benchmarks.training import MODELS, batches, gradients, model_of, single_rank, switch_precision
from megatron_fp8rl.config import FP8_BLOCK, OptimConfig, PrecisionConfig, RolloutConfig, RunConfig

if TYPE_CHECKING:
    from megatron_fp8rl.trainer.policy import Policy
    from megatron_fp8rl.types import TrainBatch

_SMOOTH = 20  # steps over which losses are averaged before they are compared
_UNTIMED = 5  # steps at the start: kernels compile, memory is found
_OTHER_SEED = "bf16, other seed"
_LINES = {"other seed": "-.", "edges": "--", "FP8 parameters": (0, (5, 1, 1, 1, 1, 1)), "DeepGEMM": ":"}  # else solid
_KINDS = {
    "linear_qkv": "qkv",
    "linear_proj": "attention out",
    "mlp.linear_fc1": "gate and up",
    "mlp.linear_fc2": "down",
    "mlp.experts.linear_fc1": "gate and up",  # with the number of an expert, which is left out here
    "mlp.experts.linear_fc2": "down",
}


_BF16 = {"trainer": "bf16"}
_GROUPED = {"experts": "deep_gemm"}
_DEEP_GEMM = {"linears": "deep_gemm", **_GROUPED}
FP8 = {
    "delayed": {"trainer": "delayed"},
    "tensorwise": {"trainer": "tensorwise"},
    "blockwise, pow2 scales": {"trainer": "blockwise"},
    "blockwise, fp32 scales": {"trainer": "blockwise", "scales": "fp32"},
}
ARMS = {  # fields of precision; linears and experts are Transformer Engine's unless it says otherwise
    "bf16": _BF16,
    _OTHER_SEED: _BF16,
    "blockwise, pow2 scales, DeepGEMM": FP8["blockwise, pow2 scales"] | _DEEP_GEMM,
    "blockwise, fp32 scales, DeepGEMM": FP8["blockwise, fp32 scales"] | _DEEP_GEMM,
    "bf16, DeepGEMM": _BF16 | _GROUPED,
    **FP8,
    "blockwise, pow2 scales, FP8 parameters": FP8["blockwise, pow2 scales"] | {"params": "fp8"},
    **{f"{name}, edges": fields | {"bf16_first_layers": 1, "bf16_last_layers": 1} for name, fields in FP8.items()},
}


def precision_of(arm: str) -> PrecisionConfig:
    return PrecisionConfig(**{"rollout": "bf16", "linears": "te", "experts": "te"} | ARMS[arm])


def run_config(name: str, arm: str, options: argparse.Namespace) -> RunConfig:
    """A supervised run of one arm."""
    return RunConfig(
        name="recipes", model=model_of(name, options.layers), precision=precision_of(arm),
        optim=OptimConfig(lr=options.lr, warmup_steps=min(20, options.steps // 5), decay="cosine", min_lr=0.0),
        rollout=RolloutConfig(max_tokens_per_microbatch=max(options.tokens, options.length)), num_steps=options.steps,
        seed=2 if arm == _OTHER_SEED else 1,
    )  # fmt: skip


def loss_curve(policy: Policy, steps: Sequence[TrainBatch]) -> tuple[list[float], list[float]]:
    """(loss, seconds) of each step."""
    from megatron_fp8rl.algo.losses import sft

    losses, seconds = [], []
    for batch in steps:
        started = time.perf_counter()
        losses.append(policy.update(batch, sft)["train/loss/mean"])  # a number: the GPU has finished
        seconds.append(time.perf_counter() - started)
    return losses, seconds


def gradient_noise(policy: Policy, batch: TrainBatch, history: Sequence[TrainBatch]) -> Iterator[tuple[str, Row]]:
    """For each FP8 recipe: signal to noise in dB of the gradients of each kind of matrix, by layer."""
    import torch

    def snapshot() -> dict[str, torch.Tensor]:
        named = policy.named_parameters()
        return {n: p.main_grad.detach().float().cpu().clone() for n, p in named if kind_of(n) is not None}

    switch_precision(policy, precision_of("bf16"))
    gradients(policy, batch)
    exact = snapshot()
    for arm in FP8:
        switch_precision(policy, precision_of(arm), history)
        gradients(policy, batch)
        yield arm, {"snr_db": signal_to_noise(exact, snapshot())}
    policy.optimizer.zero_gradients()


def kind_of(name: str) -> str | None:
    """The kind of matrix that a parameter's global name stands for; None for norms, router, embedding and head."""
    if not name.startswith("decoder.layers.") or "layer_norm" in name or name.endswith("bias"):
        return None
    name = re.sub(r"\.experts\.\d+\.", ".experts.", name)
    return next((kind for part, kind in _KINDS.items() if f"{part}.weight" in name), None)


def signal_to_noise(exact: dict[str, Any], rounded: dict[str, Any]) -> dict[str, list[float]]:
    """20 log10(|g| / |g' - g|) by kind of matrix, a list over layers; experts count as one matrix."""
    from megatron_fp8rl.diagnose.operations import decibels

    together: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name in exact:
        together[kind_of(name), int(name.split(".")[2])].append(name)
    found: dict[str, list[float]] = defaultdict(list)
    import torch

    for (kind, _), names in sorted(together.items()):
        g = torch.cat([exact[n].flatten() for n in names])
        noise = torch.cat([rounded[n].flatten() for n in names]) - g
        found[kind].append(round(-decibels(noise, g), 2))
    return dict(found)


def deviation(losses: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """(largest difference of the averaged curves over the second half, mean loss of the last steps)."""
    from megatron_fp8rl.report.style import moving_average

    width = min(_SMOOTH, len(losses))
    ours, theirs = moving_average(losses, width), moving_average(reference, width)
    half = len(ours) // 2
    worst = max((a - b for a, b in zip(ours[half:], theirs[half:])), key=abs)
    return worst, statistics.fmean(losses[-width:])


def lines(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One line per arm: final loss, distance from BF16 of the same run, gradient noise, time."""
    shown = []
    curves = {(r.get("run"), r["model"], r["arm"]): r for r in rows if r["measured"] == "loss"}
    noises = {(r.get("run"), r["model"], r["arm"]): r["snr_db"] for r in rows if r["measured"] == "noise"}
    for (run, model, arm), row in curves.items():
        exact = curves.get((run, model, "bf16"))
        if exact is None:
            continue
        worst, final = deviation(row["losses"], exact["losses"])
        by_kind = noises.get((run, model, arm), {})
        noise = {k: f"{min(v):.1f} to {max(v):.1f}" for k, v in by_kind.items()}
        shown.append(
            {
                "run": row.get("run", "-"),
                "model": f"{model}, {row['layers']} layers",
                "recipe": arm,
                "final loss": f"{final:.4f}",
                "final - bf16": f"{final - deviation(exact['losses'], exact['losses'])[1]:+.4f}",
                "largest - bf16": f"{worst:+.4f}",
                "ms per step": f"{1000 * row['step_s']:.0f}",
                **{f"{kind} dB": noise.get(kind, "-") for kind in dict.fromkeys(_KINDS.values())},
            }
        )
    return shown


def plot(rows: Sequence[Row], path: Path) -> None:
    """For each model: the curves, their distance from BF16, and the noise of gradients by layer."""
    from megatron_fp8rl.report import style

    curves = [r for r in rows if r["measured"] == "loss"]
    models = list(dict.fromkeys(r["model"] for r in curves))
    colors = dict(zip(("bf16", *FP8), style.CYCLE))  # a variant has the one of its recipe
    with style.styled():
        figure = style.new_figure(15.0, 3.6 * len(models))
        grid = figure.subplots(len(models), 3, squeeze=False)
        for (left, middle, right), model in zip(grid, models):
            own = {r["arm"]: r for r in curves if r["model"] == model}
            exact = own.get("bf16")
            for arm, row in own.items():
                color = next((colors[name] for name in colors if arm.startswith(name)), style.GREY)
                line = next((line for words, line in _LINES.items() if arm.endswith(words)), "-")
                smooth = style.moving_average(row["losses"], min(_SMOOTH, len(row["losses"])))
                steps = range(1, len(smooth) + 1)
                left.plot(steps, smooth, color=color, linestyle=line, label=arm, linewidth=1.2)
                if exact is not None and row is not exact:
                    reference = style.moving_average(exact["losses"], min(_SMOOTH, len(exact["losses"])))
                    apart = [a - b for a, b in zip(smooth, reference)][len(smooth) // 4 :]
                    middle.plot(steps[len(smooth) // 4 :], apart, color=color, linestyle=line, linewidth=1.2)
            left.axhline(next(iter(own.values()))["best_loss"], color=style.GREY, linewidth=0.8, linestyle=":")
            for row in (r for r in rows if r["measured"] == "noise" and r["model"] == model):
                by_layer = [statistics.fmean(values) for values in zip(*row["snr_db"].values())]
                right.plot(range(len(by_layer)), by_layer, color=colors[row["arm"]], label=row["arm"], marker="o")
                right.set_xticks(range(len(by_layer)))
            style.finish(left, f"{model}: loss", y="nats, mean over 20 steps")
            style.finish(middle, "distance from BF16, behind the first quarter", y="nats")
            style.finish(right, "gradient signal to noise", x="layer", y="dB, mean over matrices")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=140)


class Recipes(runner.Benchmark):
    name, title, about = "recipes", "Precision of the FP8 recipes", __doc__
    keys = ("measured", "model", "layers", "arm", "steps", "tokens", "device")
    picture = "recipes.png"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.choices(parser, "--model", MODELS, ["small", "small_moe"])
        parser.add_argument("--layers", type=int, help="cut the models to this depth")
        parser.add_argument("--steps", type=int, default=200)
        parser.add_argument("--tokens", type=int, default=16384, help="of one step")
        parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
        parser.add_argument("--lr", type=float, default=6e-4)
        runner.choices(parser, "--arms", ARMS, ARMS)

    def settle(self, options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
        if options.quick and num_gpus():
            options.model, options.steps = ["small"], 40
        elif options.quick:
            options.model, options.steps, options.tokens, options.length, options.lr = ["tiny"], 20, 512, 64, 4e-3

    def arms(self, options: argparse.Namespace) -> Iterator[Row]:
        """What differs, and what this machine has kernels for."""
        for name in options.model:
            model = model_of(name, options.layers)
            for arm in options.arms:
                fields = ARMS[arm]
                leaves_no_fp8 = "bf16_first_layers" in fields and model.num_layers <= 2
                wants_gpu = "params" in fields and (not num_gpus() or model.head_dim % FP8_BLOCK)
                wants_gpu |= "experts" in fields and not num_gpus()
                is_the_same = fields == _BF16 | _GROUPED and not model.is_moe
                if not leaves_no_fp8 and not wants_gpu and not is_the_same:
                    base = {"model": name, "layers": model.num_layers, "steps": options.steps, "tokens": options.tokens}
                    yield base | {"arm": arm}

    def gpus(self, arm: Row) -> int:
        return int(not arm["model"].startswith("tiny"))

    def measure(self, arm: Row, options: argparse.Namespace) -> Iterator[Row]:
        cfg = run_config(arm["model"], arm["arm"], options)
        language = Language(cfg.model.vocab_size)
        arm = arm | {"best_loss": round(language.entropy, 4)}
        size = {"num_sequences": options.tokens // options.length, "length": options.length}
        with single_rank(cfg) as parallel:
            from megatron_fp8rl.trainer.policy import Policy

            # The same batches for every arm, whatever its seed.
            first = run_config(arm["model"], "bf16", options)
            *steps, unseen, past, past_too = batches(first, language, options.steps + 3, **size)
            policy = Policy.build(cfg, parallel)
            losses, seconds = loss_curve(policy, steps)
            step_s = statistics.median(seconds[_UNTIMED:] or seconds)
            yield arm | {"measured": "loss", "losses": [round(x, 5) for x in losses], "step_s": step_s}
            if arm["arm"] == "bf16":
                for fp8, noise in gradient_noise(policy, unseen, (past, past_too)):
                    yield arm | {"measured": "noise", "arm": fp8} | noise

    def table(self, rows: Sequence[Row]) -> str:
        return record.table(lines(rows))

    def notes(self, rows: Sequence[Row]) -> str:
        return (
            "From one seed on the synthetic language of benchmarks/synthetic.py, AdamW, the same batches for every arm. "
            "Losses are averaged over 20 steps; 'largest' is over the second half of the run. The last columns are the "
            "signal to noise of gradients against BF16 at equal weights, from the worst layer to the best. Curves: "
            "[recipes.png](../recipes.png)."
        )

    def draw(self, rows: Sequence[Row], path: Path) -> None:
        plot(rows, path)


if __name__ == "__main__":
    sys.exit(runner.main(Recipes()))
