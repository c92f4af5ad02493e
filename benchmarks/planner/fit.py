"""Fit the rates of ``preflight/rates.toml`` to the measured rows, by least squares of relative errors.

    python -m benchmarks.planner.fit

Prints each rate, fitted and stored. Linears and attention are fitted to updates of dense models, experts to updates of
a mixture, and decode layers to rollouts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from benchmarks.planner import against_runs
from benchmarks.planner.against_runs import Row
from megatron_fp8rl.config import EngineConfig, OptimConfig, PrecisionConfig, RunConfig, SamplingConfig
from megatron_fp8rl.preflight.memory import gpu_in
from megatron_fp8rl.preflight.step_time import Lengths, Network, Rates, StepTime, step_time
from megatron_fp8rl.preflight.weights import on_engine_worker
from model_configs import qwen3

Equation = tuple[list[float], float, float]  # (seconds that each rate adds, measured seconds, seconds of the rest)
H200 = Rates.of("h200")
FLOPS = ("linear_fp8", "linear_bf16", "experts_fp8", "experts_bf16", "attention", "head")
DENSE = ("linear_fp8", "linear_bf16", "attention", "feature_fp8_s", "feature_bf16_s", "parameter_bytes")
MIXTURE = ("experts_fp8", "experts_bf16")
HOST = ("host_moe_layer_s",)  # not the limit in the fitted runs


@functools.cache
def known_rows() -> tuple[tuple[Row, RunConfig, Lengths], ...]:
    rows = [(row, against_runs.ledger_config(row, against_runs.models())) for row in against_runs.rows("ledger")]
    return tuple((row, *known) for row, known in rows if known is not None)


def seconds_with(changes: dict[str, float], row: Row, cfg: RunConfig, lengths: Lengths) -> StepTime:
    gpu = gpu_in(row["device"])
    changed = replace(Rates.of(gpu.name), **changes)
    return step_time(cfg, lengths, changed, Network(), memory_bytes=gpu.memory_bytes, gpus=row["gpus"])


def solved(equations: Sequence[Equation]) -> np.ndarray:
    matrix = [[factor / seconds for factor in factors] for factors, seconds, _ in equations]
    return np.linalg.lstsq(
        np.array(matrix), np.array([1 - rest / seconds for _, seconds, rest in equations]), rcond=None
    )[0]


def free(names: Sequence[str]) -> dict[str, float]:
    return {name: math.inf if name in FLOPS else 0.0 for name in names}


def equation(names: Sequence[str], measured: float, seconds: Callable[[dict[str, float]], float]) -> Equation:
    none = free(names)
    rest = seconds(none)
    return [seconds(none | {name: getattr(H200, name)}) - rest for name in names], measured, rest


def _phase_seconds(changes: dict[str, float], phase: str, row: Row, cfg: RunConfig, lengths: Lengths) -> float:
    return getattr(seconds_with(free(HOST) | changes, row, cfg, lengths), phase)


def run_equations(letters: str, names: Sequence[str], phase: str) -> list[Equation]:
    """Equations of a phase of these ledger runs."""
    return [
        equation(
            names,
            median(row["phases_s"][phase]),
            functools.partial(_phase_seconds, phase=phase, row=row, cfg=cfg, lengths=lengths),
        )
        for row, cfg, lengths in known_rows()
        if row["run"] in letters
    ]


def _depth_seconds(changes: dict[str, float], row: Row, layers: int) -> float:
    """Seconds of an update of ``layers`` layers without the optimizer."""
    model = {"qwen3_8b": qwen3.qwen3_8b(), "qwen3_30b_a3b": qwen3.qwen3_30b_a3b()}[row["model"]]
    sampling = SamplingConfig(prompts_per_step=row["tokens"] // 2048, completions_per_prompt=1)
    engine = EngineConfig(num_replicas=1)
    optim = OptimConfig(max_tokens_per_microbatch=row["tokens"])
    precision = PrecisionConfig(trainer=row["precision"], exact=False)
    cfg = RunConfig(
        name="layers",
        model=replace(model, num_layers=layers),
        precision=precision,
        sampling=sampling,
        engine=engine,
        optim=optim,
    )
    lengths = Lengths(prompt=0, mean=2048, longest=2048)
    total, optimizer = (
        seconds_with(rates, row | {"gpus": 1}, cfg, lengths).update
        for rates in (free(HOST) | changes, free((*FLOPS, *DENSE, *HOST)))
    )
    return total - optimizer


def _layers_seconds(changes: dict[str, float], row: Row) -> float:
    half = row["layers"] // 2
    return 2 * (_depth_seconds(changes, row, 2 * half) - _depth_seconds(changes, row, half))


def _head_seconds(changes: dict[str, float], row: Row) -> float:
    """Seconds of an update outside the layers."""
    half = row["layers"] // 2
    return 2 * _depth_seconds(changes, row, half) - _depth_seconds(changes, row, 2 * half)


def layer_equations(names: Sequence[str], *, head: bool) -> Iterator[Equation]:
    """Equations of run A of ``layers``: layers of the dense model, or with ``head`` the rest of each update."""
    for row in (
        row for row in against_runs.rows("layers") if row["run"] == "A" and (head or row["model"] == "qwen3_8b")
    ):
        if head:
            measured = (row["busy_ms"] - row["layers_busy_ms"]) / 1e3
            yield equation(names, measured, functools.partial(_head_seconds, row=row))
        else:
            yield equation(names, row["layers_busy_ms"] / 1e3, functools.partial(_layers_seconds, row=row))


def decode_equations() -> list[Equation]:
    """Equations of dense rollouts: ledger runs L, O, R and S, and run B of ``rollout_speed``."""
    names, model = ("decode_layer_s", "logit_s"), qwen3.qwen3_8b()
    equations = run_equations("LORS", names, "rollouts")
    for row in (row for row in against_runs.rows("rollout_speed") if row["run"] == "B"):
        in_fp8 = row["precision"] == "fp8_kv"
        engine = EngineConfig(placement="separate", num_replicas=1, kv_cache_dtype="fp8" if in_fp8 else "auto")
        sampling = SamplingConfig(
            prompts_per_step=64, completions_per_prompt=1, max_prompt_tokens=512, max_completion_tokens=8192
        )
        name = "blockwise" if in_fp8 else "bf16"
        precision = PrecisionConfig(trainer=name, rollout=name, exact=False)
        cfg = RunConfig(name="engine", model=model, precision=precision, engine=engine, sampling=sampling)
        lengths, gpu = Lengths(prompt=512, mean=8192, longest=8192), {"device": "H200", "gpus": 2}
        seconds = functools.partial(_rollout_seconds, gpu=gpu, cfg=cfg, lengths=lengths)
        equations.append(equation(names, row["seconds"], seconds))
    return equations


def _rollout_seconds(changes: dict[str, float], gpu: Row, cfg: RunConfig, lengths: Lengths) -> float:
    return seconds_with(changes, gpu, cfg, lengths).rollouts


def publications(*, with_scales: bool) -> list[tuple[Row, RunConfig, Lengths]]:
    """Rows of a trainer and an engine on one H200 each, with or without KV-cache scales."""
    return [
        (row, cfg, lengths)
        for row, cfg, lengths in known_rows()
        if "H200" in row["device"]
        and row["gpus"] == 2
        and cfg.engine.placement == "separate"
        and (row["arm"] == "fp8_kv") == with_scales
    ]


def publication_equations() -> list[Equation]:
    """Equations of publications without KV-cache scales, whose measurement is in the same phase."""
    equations = []
    for row, cfg, lengths in publications(with_scales=False):
        num_bytes = on_engine_worker(cfg).sent
        rest = seconds_with({"publish_s": 0.0, "publish_s_per_byte": 0.0}, row, cfg, lengths).publish
        factors = [H200.publish_s, H200.publish_s_per_byte * num_bytes]
        equations.append((factors, median(row["phases_s"]["publish"]), rest))
    return equations


def fitted() -> dict[str, float]:
    """Each rate that is fitted, divided by the stored one."""
    groups = (
        (("head",), list(layer_equations(["head"], head=True))),
        (DENSE, [*run_equations("JRS", DENSE, "update"), *layer_equations(DENSE, head=False)]),
        (MIXTURE, run_equations("P", MIXTURE, "update")),
        (("decode_layer_s", "logit_s"), decode_equations()),
        (("decode_moe_layer_s",), run_equations("P", ["decode_moe_layer_s"], "rollouts")),
        (("publish_s", "publish_s_per_byte"), publication_equations()),
    )
    factors = {}
    for names, equations in groups:
        for name, factor in zip(names, solved(equations), strict=True):
            factors[name] = 1 / factor if name in FLOPS else factor  # equations count seconds
    scales = [
        median(row["phases_s"]["publish"]) - seconds_with({"kv_scales_s": 0.0}, row, cfg, lengths).publish
        for row, cfg, lengths in publications(with_scales=True)
    ]
    asleep = [row for row in against_runs.rows("ledger") if row["run"] in "NQR" and row["layout"]["sleep"]]
    slept = median(median(row["phases_s"]["colocated"]) for row in asleep)
    return factors | {"kv_scales_s": median(scales) / H200.kv_scales_s, "sleep_s": slept / H200.sleep_s}


if __name__ == "__main__":
    for name, factor in fitted().items():
        stored = getattr(H200, name)
        print(f"{name:<20} {stored * factor:12.4g} fitted {stored:12.4g} stored {factor - 1:+.1%}")
