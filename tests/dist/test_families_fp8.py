"""Biases, latent attention and partial blocks in emulated FP8: the trainer against transformers with FP8 linears."""

from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import ModelConfig, ParallelConfig, PrecisionConfig
from megatron_fp8rl.kernels import blockwise
from megatron_fp8rl.precision.layer_table import LayerTable
from megatron_fp8rl.trainer.parallel import Parallel
from tests.helpers.dist import run_ranks
from tests.helpers.families import MODELS
from tests.helpers.logits import reference_logits, sequences, trainer_logits, unpacked
from tests.tolerances import FAMILY_FP8

# Dense layers only: an expert that changes for one rounding would change the whole token.
CASES = {
    "qwen2-one-group": MODELS["qwen2-one-group"],
    "deepseek_v3": replace(MODELS["deepseek_v3"], first_dense_layers=MODELS["deepseek_v3"].num_layers),
    "deepseek_v3-direct-queries": replace(
        MODELS["deepseek_v3-direct-queries"], first_dense_layers=MODELS["deepseek_v3-direct-queries"].num_layers
    ),
}


def _fp8_linear(weight: torch.Tensor, bias: torch.Tensor | None):
    data, scale_inv = blockwise.quantize_weight(weight.detach(), "pow2")

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = blockwise.linear(x, data, scale_inv, "pow2")
        return y if bias is None else y + bias

    return forward


def _in_float32_and_fp8(model: ModelConfig, folder: str) -> tuple[list, list]:
    """transformers' logits in FP32, and with the layer table's linears in FP8."""
    import transformers

    plain = reference_logits(model, folder)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    table = LayerTable.build(model, PrecisionConfig())
    for name, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear) and table.trainer_format(name).is_quantized:
            module.forward = _fp8_linear(module.weight, module.bias)
    with torch.no_grad():
        return plain, [[reference(tokens[None]).logits[0] for tokens in pack] for pack in sequences(model)]


def _compare_all(folder: str) -> dict[str, tuple[float, float]]:
    """On a rank: mean logit differences by case: trainer against transformers in FP8, and transformers FP8 against
    FP32."""
    parallel = Parallel.init(ParallelConfig())
    result = {}
    for kind, model in CASES.items():
        plain, fp8 = _in_float32_and_fp8(model, f"{folder}/{kind}")
        packed = trainer_logits(model, dict(world_size=1), f"{folder}/{kind}", parallel, "blockwise")
        joined = torch.cat([x for pack in fp8 for x in pack])
        error = torch.cat([x for pack in unpacked(packed, fp8) for x in pack]) - joined
        effect = torch.cat([x for pack in plain for x in pack]) - joined
        result[kind] = error.abs().mean().item(), effect.abs().mean().item()
    return result


@pytest.fixture(scope="module")
def differences(tmp_path_factory):
    return run_ranks(1, _compare_all, str(tmp_path_factory.mktemp("fp8")))[0]


@pytest.mark.parametrize("kind", CASES)
def test_fp8_linears_are_those_of_the_layer_table(kind, differences):
    error, effect = differences[kind]
    assert effect > 0.01
    assert error < FAMILY_FP8 * effect, f"off by {error:.4f} where FP8 makes a difference of {effect:.4f}"
