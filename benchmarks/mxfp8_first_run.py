"""The first run of MXFP8 on a Blackwell GPU: bytes, one linear and one GRPO step. Never run on hardware.

    python -m benchmarks.mxfp8_first_run [bytes] [linear] [grpo]

    bytes    Transformer Engine's MXFP8Quantizer against precision/quantizers.py, in rows and in columns
    linear   y, dx and dW on Transformer Engine's kernels against the emulation
    grpo     one step of tiny_qwen3 and tiny_qwen3_moe with MXFP8 at both ends; engines verify the published weights

Prints one line per check. The exit status is 1 if a check fails. Please report the output as an issue.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_fp8rl.config import PrecisionConfig
from megatron_fp8rl.precision.formats import MXFP8
from megatron_fp8rl.precision.quantizers import quantize
from megatron_fp8rl.precision.recipes import make_recipe, quantized_linear

_ROUNDING = 2.0**-7  # relative to the largest result: two BF16 results of products summed in another order


def same_bytes(quantizer: Any, device: str = "cuda") -> bool:
    """Compare all bytes and scales of a matrix whose blocks have many magnitudes; one block is zero."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.exp2(torch.randint(-40, 20, (512, 32, 1), generator=generator).float())
    matrix = (torch.randn(512, 32, 32, generator=generator) * spread).flatten(1).bfloat16().to(device)
    matrix[:32, :32] = 0
    made, equal = quantizer(matrix), True
    for name, ours in (("rowwise", quantize(matrix, MXFP8)), ("columnwise", quantize(matrix.t().contiguous(), MXFP8))):
        if name == "columnwise":
            ours = ours[0].t(), ours[1].t()
        for kind, expected in zip(("data", "scale_inv"), ours, strict=True):
            theirs = getattr(made, f"_{name}_{kind}")[: expected.shape[0], : expected.shape[1]]  # scales are padded
            number = int((theirs.view(torch.uint8) != expected.contiguous().view(torch.uint8)).sum())
            print(f"bytes   {name} {kind}: {number} of {expected.numel()} differ")
            equal &= number == 0
    return equal


def same_linear(te_linear: Callable[..., Tensor], device: str = "cuda") -> bool:
    """Compare a forward and a backward pass, for one matrix and for three experts."""
    generator, recipe, equal = torch.Generator().manual_seed(1), make_recipe(PrecisionConfig(trainer="mxfp8")), True
    for splits in (None, (160, 0, 97)):
        x = torch.randn(257, 512, generator=generator).bfloat16().to(device).requires_grad_()
        number = len(splits) if splits else 1
        weights = [
            torch.nn.Parameter(torch.randn(384, 512, generator=generator).bfloat16().to(device)) for _ in range(number)
        ]
        grad = torch.randn(257, 384, generator=generator).bfloat16().to(device)
        results = []
        for linear in (te_linear, quantized_linear):
            y = linear(x, weights, recipe, splits=splits)
            results.append([y.detach(), *torch.autograd.grad(y, [x, *weights], grad)])
        for name, ours, expected in zip(("y", "dx", *["dW"] * number), *results, strict=True):
            error = float((ours.float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-9))
            print(f"linear  {name}, {number} matrices: largest difference {error:.1e} of the largest value")
            equal &= error <= _ROUNDING
    return equal


def one_step(config: str) -> bool:
    """One GRPO step of a tiny model; a publication ends the run unless all digests of the engine's weights match."""
    with tempfile.TemporaryDirectory() as folder:
        options = f"--precision.trainer mxfp8 --precision.rollout mxfp8 --num_steps 1 --output_dir {folder}"
        command = [sys.executable, "-m", "megatron_fp8rl", "train", config, *options.split()]
        status = subprocess.run(command).returncode
    print(f"grpo    {config}: exit status {status}")
    return status == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = ("bytes", "linear", "grpo")
    parser.add_argument("checks", nargs="*", choices=names, default=names)
    chosen = parser.parse_args().checks
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 10:
        parser.error("MXFP8 needs a Blackwell GPU of compute capability 10; this machine has none")
    passed = []
    if "bytes" in chosen:
        import transformer_engine.pytorch  # noqa: F401  loads the library that the binding needs
        import transformer_engine_torch as tex
        from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

        passed.append(same_bytes(MXFP8Quantizer(tex.DType.kFloat8E4M3)))
    if "linear" in chosen:
        from megatron_fp8rl.trainer.model.linear_te import te_linear

        passed.append(same_linear(te_linear))
    if "grpo" in chosen:
        passed += [one_step(config) for config in ("tiny_qwen3", "tiny_qwen3_moe")]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
