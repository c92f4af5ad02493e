"""Whole layers and whole training steps of a model, the same for each precision: what ``--layers`` times.

Used by benchmarks/experts.py and benchmarks/linears.py. Two measurements of each arm, 8 sequences of 2,048 tokens, both
in a process of its own: on an H200 steps of grouped kernels took 217 and 221 ms behind other arms in one process, where
they take 187 and 179 ms alone.

    ms, peak_GiB              forward and backward of the layers, with a small vocabulary, gradients added to FP32
                              buffers, weights quantized once for both passes, no optimizer
    step_ms, tokens_per_s     a training step with the model's own vocabulary: gradients set to zero, forward, loss,
                              backward, gradient norm, AdamW; one microbatch

Weights are random, and hidden states of random layers are much alike: a router would send most tokens to a few experts.
Its logits are drawn at random instead, in every pass, by Megatron-Core's switch for such measurements
(``moe_router_force_load_balancing``); their gradient goes on to the router. ``busiest`` is the largest number of tokens
that an expert got over the mean of its layer, in the worst layer.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.results import Row
from benchmarks.synthetic import Language
from benchmarks.training import batches, model_of, single_rank, train
from megatron_fp8rl.config import OptimConfig, PrecisionConfig, RolloutConfig, RunConfig

if TYPE_CHECKING:
    import torch
    from megatron.core.distributed import DistributedDataParallel

    from megatron_fp8rl.trainer.forward import Forward
    from megatron_fp8rl.trainer.parallel import Parallel
    from megatron_fp8rl.types import TrainBatch

TOKENS = 16_384
LENGTH = 2_048
VOCABULARY = 2_048  # so small that the layers are what is timed
_WARM = 3  # kernels compile in the first, which gives delayed scaling a past
_STEPS = 5
_LIMIT_S = 300.0  # of one process
_ROW, _ERROR = "ROW ", "ERROR "  # how its answer begins
NOTES = (
    "Layers: milliseconds of forward and backward with a vocabulary of 2,048, gradients added to FP32 buffers, weights "
    "quantized once for both, no optimizer; steps with the model's own vocabulary and AdamW, one microbatch. `te` and "
    "`bf16` are Transformer Engine's kernels and cuBLAS's, with Megatron-Core's fused SwiGLU. Routers choose at random, "
    "which balances the experts: `busiest` is the largest number of tokens of an expert over the mean of a layer."
)


def run_of(model_name: str, num_layers: int, precision: PrecisionConfig, *, tokens: int = TOKENS) -> RunConfig:
    """A run that trains the first layers of a model; its vocabulary is the model's own."""
    return RunConfig(
        name="layers",
        model=model_of(model_name, num_layers),
        precision=precision,
        optim=OptimConfig(lr=1e-5, recompute="none"),
        rollout=RolloutConfig(max_tokens_per_microbatch=tokens),
        num_steps=100,
    )


def random_chunks(cfg: RunConfig, parallel: Parallel) -> list[DistributedDataParallel]:
    """A model whose random weights are drawn where they lie: in a second, and in no run's numbers. Routers balance."""
    import torch
    from megatron.core.utils import get_model_config

    from megatron_fp8rl.trainer.model.build import build_chunks, named_global_parameters
    from megatron_fp8rl.trainer.optimizer.optimizer import wrap_chunks

    models = build_chunks(replace(cfg, model=replace(cfg.model, hf_path="filled below")), parallel)
    for model in models:
        get_model_config(model).moe_router_force_load_balancing = True
        _fuse_swiglu(model)
    torch.manual_seed(cfg.seed)
    std = cfg.model.initializer_range
    for name, parameter in named_global_parameters(models, parallel):
        adds_to_residual = name.endswith("linear_proj.weight") or ".linear_fc2.weight" in name
        with torch.no_grad():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                parameter.normal_(0.0, std / math.sqrt(2 * cfg.model.num_layers) if adds_to_residual else std)
    chunks = wrap_chunks(models, cfg)
    for chunk in chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    return chunks


def _fuse_swiglu(model: torch.nn.Module) -> None:
    """Have linears and experts on Transformer Engine's kernels, and in BF16, compute SwiGLU in one kernel, experts with
    the router's weights.

    So does Megatron-Core, whose kernels these are (from torch.compile). The library's own modules take several, which
    would make the arms that others are compared with slower than they need be.
    """
    import torch
    from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
    from megatron.core.utils import get_model_config

    from megatron_fp8rl.trainer.model.layers import Experts

    torch._dynamo.config.suppress_errors = True  # without a compiler: PyTorch's kernels, as before
    get_model_config(model).bias_activation_fusion = True  # of dense layers whose kernels are not DeepGEMM

    def fused(experts: Experts) -> Callable:
        def forward(hidden: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor) -> tuple:
            splits = tokens_per_expert.tolist()
            h, _ = experts.linear_fc1(hidden, splits)
            return experts.linear_fc2(weighted_bias_swiglu_impl(h, None, probs[:, None]), splits)[0], None

        return forward

    for module in model.modules():
        if isinstance(module, Experts):
            module.forward = fused(module)


def random_batch(cfg: RunConfig, tokens: int, length: int) -> TrainBatch:
    """One microbatch of sequences whose tokens are drawn from half of the vocabulary, at most 4,096 of it."""
    vocabulary = cfg.model.vocab_size
    language = Language(vocabulary, num_words=min(4096, vocabulary // 2), num_successors=64)
    (batch,) = batches(cfg, language, 1, num_sequences=tokens // length, length=length)
    return batch


def passes(forward: Forward, chunks: Sequence[DistributedDataParallel], batch: TrainBatch) -> None:
    """Forward and backward as of a step's first microbatch, for which weights are quantized; gradients add up."""
    from megatron_fp8rl.algo.losses import sft
    from megatron_fp8rl.trainer.model.weight_cache import forget_quantized_weights

    forget_quantized_weights()
    forward.gradients(chunks, batch, sft)


@contextmanager
def busiest_expert(chunks: Sequence[DistributedDataParallel], row: Row) -> Iterator[None]:
    """Passes of the block put ``busiest`` into the row: the largest number of tokens of an expert over the mean of its
    layer, in the worst layer. Nothing without experts."""
    from megatron_fp8rl.trainer.model.router import Router

    found = []

    def look(module, args, output) -> None:
        per_expert = output[1].sum(0)
        found.append((per_expert.max() / per_expert.float().mean()).item())

    routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]
    hooks = [router.register_forward_hook(look) for router in routers]
    yield
    for hook in hooks:
        hook.remove()
    if found:
        row["busiest"] = round(max(found), 3)


def seconds(call: Callable[[], object], count: int) -> float:
    """Median of ``count`` calls, each until the device has finished."""
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    times = []
    for _ in range(count):
        wait()
        started = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


@contextmanager
def _peak(row: Row, name: str) -> Iterator[None]:
    """Memory of the block at its highest, into ``row``; nothing on a CPU."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    yield
    if torch.cuda.is_available():
        row[name] = round(torch.cuda.max_memory_allocated() / 2**30, 2)


def measure_layers(cfg: RunConfig, parallel: Parallel, rounds: int, *, length: int = LENGTH) -> Row:
    """Forward and backward alone; ``cfg`` brings the vocabulary."""
    from megatron_fp8rl.trainer.forward import Forward
    from megatron_fp8rl.trainer.model.build import finish_fp8_step

    row: Row = {}
    chunks, forward = random_chunks(cfg, parallel), Forward(cfg, parallel)
    batch = random_batch(cfg, cfg.rollout.max_tokens_per_microbatch, length)
    with busiest_expert(chunks, row):
        row["first_s"] = round(seconds(lambda: passes(forward, chunks, batch), 1), 2)
    finish_fp8_step(chunks, parallel)
    seconds(lambda: passes(forward, chunks, batch), _WARM - 1)
    with _peak(row, "peak_GiB"):
        row["ms"] = round(1e3 * seconds(lambda: passes(forward, chunks, batch), rounds), 2)
    return row


def measure_steps(cfg: RunConfig, parallel: Parallel, *, length: int = LENGTH) -> Row:
    """Whole training steps of one microbatch."""
    from megatron_fp8rl.trainer.optimizer.optimizer import Optimizer
    from megatron_fp8rl.trainer.policy import Policy

    row: Row = {}
    chunks = random_chunks(cfg, parallel)
    optimizer = Optimizer(chunks, cfg, parallel)
    policy = Policy(cfg=cfg, parallel=parallel, chunks=chunks, optimizer=optimizer, reference=None)
    tokens = cfg.rollout.max_tokens_per_microbatch
    batch = random_batch(cfg, tokens, length)
    train(policy, [batch] * 2)  # memory is found
    with _peak(row, "step_peak_GiB"):
        step = seconds(lambda: train(policy, [batch]), _STEPS)
    return row | {"step_ms": round(1e3 * step, 2), "tokens_per_s": round(tokens / step, 1)}


def apart(what: str, cfg: RunConfig, rounds: int) -> Row:
    """:func:`measure_layers` ("layers") or :func:`measure_steps` ("steps") of a run, in a process of its own.

    Raises RuntimeError with what the process raised, or when it ends without a row or not within 300 s.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.layers"], input=pickle.dumps((what, cfg, rounds)), stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[1], timeout=_LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{what} of {cfg.name} took more than {_LIMIT_S:.0f} s") from None
    lines = done.stdout.decode(errors="replace").splitlines()
    said = next((line for line in reversed(lines) if line.startswith((_ROW, _ERROR))), "")
    if not said.startswith(_ROW):
        raise RuntimeError(said.removeprefix(_ERROR) or f"exit status {done.returncode} without a row")
    return json.loads(said.removeprefix(_ROW))


def main() -> int:
    """The process of :func:`apart`."""
    what, cfg, rounds = pickle.load(sys.stdin.buffer)
    with suppress(ImportError):
        import transformer_engine.pytorch  # noqa: F401  before PyTorch loads cuDNN
    try:
        with single_rank(cfg) as parallel:
            row = measure_layers(cfg, parallel, rounds) if what == "layers" else measure_steps(cfg, parallel)
    except (RuntimeError, ValueError, ImportError, AssertionError) as error:
        print(f"{_ERROR}{type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
        return 1
    print(f"{_ROW}{json.dumps(row)}", flush=True)
    return 0


def measure(model_name: str, arms: Mapping[str, PrecisionConfig], options: argparse.Namespace) -> Iterator[Row]:
    """A row for each arm that has none yet, ``options.layers`` layers on one GPU."""
    for arm, precision in arms.items():
        cfg = run_of(model_name, options.layers, precision)
        num_layers = cfg.model.num_layers
        row: Row = {"measured": "layers", "what": model_name, "layers": num_layers, "tokens": TOKENS, "arm": arm}
        row |= {"pattern": "balanced"} if cfg.model.is_moe else {}
        if options.is_known(row) or not options.budget.allows(f"{num_layers} layers, {arm}"):
            continue
        with options.budget.case():
            try:
                small = replace(cfg, model=replace(cfg.model, vocab_size=VOCABULARY))
                row |= apart("layers", small, options.rounds) | apart("steps", cfg, options.rounds)
            except RuntimeError as error:
                row["error"] = str(error)
        yield row


def table(rows: Sequence[Row]) -> list[Row]:
    """The rows of layers, each with how much faster it is than BF16 of the same layers by Transformer Engine.

    Without those of experts that were not balanced, which were measured before routers chose at random.
    """
    rows = [row for row in rows if row["measured"] == "layers" and "ms" in row]
    rows = [row for row in rows if "pattern" in row or "busiest" not in row]
    lines = []
    for row in rows:
        key = [row[name] for name in ("what", "layers", "tokens", "device")]
        same = [other for other in rows if [other[name] for name in ("what", "layers", "tokens", "device")] == key]
        bf16 = next((other for other in same if other["arm"] in ("bf16", "te bf16")), None)
        line = {name: value for name, value in row.items() if name not in ("measured", "device")}
        for name in ("ms", "step_ms"):
            line[f"bf16 : this, {name}"] = round(bf16[name] / row[name], 2) if bf16 and name in row else None
        lines.append(line | {"device": row["device"]})
    return lines


def told(rows: Sequence[Row]) -> list[str]:
    """The same in words, one line for each arm."""
    return [
        f"{line['what']}, {line['layers']} layers, {line['arm']}: {line['ms']:.1f} ms, "
        f"{line['bf16 : this, ms']}x of BF16 in speed, {line.get('peak_GiB')} GiB; step {line.get('step_ms')} ms, "
        f"{line['bf16 : this, step_ms']}x"
        for line in table(rows)
    ]


if __name__ == "__main__":
    sys.exit(main())
