"""MXFP8 on GPUs without its tensor cores: emulated linears of trainer and engine. Run with -s for differences."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_fp8rl.precision.formats import MXFP8
from megatron_fp8rl.precision.quantizers import dequantize, quantize, round_activation
from tests.tolerances import EMULATED_LOGPROB_MEAN

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_a_gpu_rounds_as_a_cpu_in_a_graph_too():
    from megatron_fp8rl.rollout.vllm_plugin.patches_mxfp8 import round_mxfp8

    generator = torch.Generator().manual_seed(0)
    spread = torch.exp2(torch.randint(-60, 40, (96, 4, 1), generator=generator).float())
    first, second = (torch.randn(96, 4, 32, generator=generator).mul(spread).flatten(1).bfloat16() for _ in range(2))
    first[3, :32] = 0
    x = first.cuda()
    assert torch.equal(round_mxfp8(x).cpu(), round_activation(first, MXFP8, torch.bfloat16))
    assert torch.equal(dequantize(*quantize(x, MXFP8), MXFP8).bfloat16(), round_mxfp8(x))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rounded = round_mxfp8(x)
    x.copy_(second)
    graph.replay()
    assert torch.equal(rounded.cpu(), round_activation(second, MXFP8, torch.bfloat16))


@pytest.mark.parametrize("graphs", ["plain", "compiled"])
def test_a_run_verifies_its_weights_and_both_ends_agree(graphs, tmp_path):
    """A publication ends the run unless all digests of the engine's weights match."""
    options = (
        "--precision.trainer mxfp8 --precision.rollout mxfp8 --precision.kernels.trainer emulated "
        f"--precision.kernels.engine_linears emulated --engine.graphs {graphs} --sampling.prompts_per_step 16 "
        f"--warm_start.steps 20 --num_steps 2 --engine.gpu_memory_utilization 0.2 --output_dir {tmp_path}"
    )
    command = [sys.executable, "-m", "megatron_fp8rl", "train", "tiny_qwen3", *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-3000:]
    assert "but the engine uses" not in output, "the engine multiplies with the chosen kernels"
    lines = list(map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()))
    assert [line["publish/version/max"] for line in lines] == [0, 1, 2]
    for line in lines:
        assert line["publish/num_fp8_tensors/sum"] == 2 * 7
    means = [line["mismatch/abs_logprob_diff/mean"] for line in lines[1:]]
    print(f"\n{graphs}: mean |d| {means}")
    assert max(means) < EMULATED_LOGPROB_MEAN
