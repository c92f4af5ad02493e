"""The comparison of tests/gpu/test_te_training_gpu.py on a stand-in for Transformer Engine: what passes, what fails."""

import importlib
from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import OptimConfig, PrecisionConfig
from megatron_fp8rl.kernels.blockwise import E5M2
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.precision.recipes import INPUT
from megatron_fp8rl.trainer.model import build
from megatron_fp8rl.trainer.optimizer import optimizer
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from tests.helpers.dist import run_ranks
from tests.helpers.training import DENSE, MOE, run_config
from tests.tolerances import TE_DECIBELS, TE_DECIBELS_FP32_SCALES

BLOCKWISE = PrecisionConfig(trainer="blockwise", bf16_last_layers=1)
RECIPES = {
    "bf16": PrecisionConfig(trainer="bf16"),
    "blockwise": BLOCKWISE,
    "blockwise fp32": replace(BLOCKWISE, scales="fp32"),
    "blockwise e5m2": replace(BLOCKWISE, gradients="e5m2"),
    "tensorwise": PrecisionConfig(trainer="tensorwise"),
    "delayed": PrecisionConfig(trainer="delayed", gradients="e5m2"),
}
MODELS = {"dense": replace(DENSE, hidden_size=128, head_dim=32), "moe": MOE}


def _te_linear():
    """The module of the last import; its package keeps the earlier one."""
    return importlib.import_module("megatron_fp8rl.trainer.model.linear_te")


def _inputs_in_e5m2(patch) -> None:
    te_linear = _te_linear()
    quantize = te_linear._quantize_tokens

    def wrong(x_PK, call, tensor, fmt, **options):
        return quantize(x_PK, call, tensor, E5M2 if tensor == INPUT else fmt, **options)

    patch.setattr(te_linear, "_quantize_tokens", wrong)


def _weights_in_bf16(patch) -> None:
    patch.setattr(_te_linear(), "_quantized_weights", lambda weights, call: [_Bf16(weight) for weight in weights])


class _Bf16:
    """A weight without quantization."""

    def __init__(self, weight):
        self.product_values = lambda by_rows: weight.detach().float()

    def update_usage(self, **usage) -> None: ...


def _scale_off_by_two(patch) -> None:
    from tests.helpers import fake_te

    rounded = fake_te.Float8BlockQuantizer.round
    patch.setattr(
        fake_te.Float8BlockQuantizer, "round", lambda self, x, fmt: [2 * values for values in rounded(self, x, fmt)]
    )


def _scale_too_large_by_two(patch) -> None:
    from tests.helpers import fake_te

    def rounded(self, x, fmt):
        amax = x.abs().amax().float()
        self.scale = torch.where(amax == 0, 1.0, 2 * fmt.max / amax)
        return fake_te.Float8Quantizer.round(self, x, fmt)

    patch.setattr(fake_te.Float8CurrentScalingQuantizer, "round", rounded)


def _weights_of_the_last_update(patch) -> None:
    patch.setattr(optimizer, "clear_weight_caches", lambda: None)


# change, its recipe, the products that it spoils, the first update in which it shows
MISTAKES = {
    "inputs in E5M2": (_inputs_in_e5m2, "blockwise", {"y", "dW"}, 0),
    "weights not quantized": (_weights_in_bf16, "blockwise", {"y", "dx"}, 0),
    "a scale off by two": (_scale_off_by_two, "blockwise fp32", {"y", "dx", "dW"}, 0),
    "a scale that saturates": (_scale_too_large_by_two, "tensorwise", {"y", "dx", "dW"}, 0),
    "weights of the last update": (_weights_of_the_last_update, "blockwise", {"y", "dx"}, 1),
}


def _limit(name: str) -> float:
    return TE_DECIBELS_FP32_SCALES if RECIPES[name].scales == "fp32" else TE_DECIBELS


def _updates(parallel, kind: str, name: str, change=None, expected=None) -> list[dict[str, float]]:
    """On a rank: by product, the least decibels of any linear in two updates. ``change`` may insert a mistake."""
    from tests.helpers import fake_te, products

    cfg = run_config(model=MODELS[kind], optim=OptimConfig(lr=2e-2, eps=1e-2), max_tokens=48)
    with pytest.MonkeyPatch.context() as patch:
        fake_te.install(patch)
        patch.setattr(build, "local_hardware", lambda: Hardware("hopper"))
        policy = Policy.build(
            replace(cfg, precision=replace(RECIPES[name], kernels={"linears": "te", "experts": "te"})), parallel
        )
        if change is not None:
            change(patch)
        updates = [products.of_an_update(policy, expected) for _ in range(2)]
    return [
        dict(zip(products.PRODUCTS, map(min, zip(*result.values(), strict=True)), strict=True)) for result in updates
    ]


def _everything() -> tuple[dict, dict, dict]:
    """On a rank: correct recipes, recipes that differ from the expected one, and mistakes."""
    parallel = Parallel.init(run_config().parallel, deadline_s=60)
    sound = {
        (kind, name): _updates(parallel, kind, name)
        for kind in MODELS
        for name in RECIPES
        if (kind, name) != ("dense", "bf16")
    }
    names = ("blockwise", "blockwise fp32", "blockwise e5m2", "tensorwise")
    others = {(a, b): _updates(parallel, "dense", a, expected=RECIPES[b]) for a in names for b in names if a != b}
    mistakes = {what: _updates(parallel, "dense", name, change) for what, (change, name, *_) in MISTAKES.items()}
    parallel.barrier("done")
    return sound, others, mistakes


def test_right_products_pass_and_wrong_ones_do_not():
    ((sound, others, mistakes),) = run_ranks(1, _everything)
    for case, updates in sound.items():
        assert all(ratio > TE_DECIBELS for update in updates for ratio in update.values()), (case, updates)
    for case, updates in others.items():
        assert all(min(update.values()) < TE_DECIBELS_FP32_SCALES - 5 for update in updates), (case, updates)
    for what, updates in mistakes.items():
        _, name, spoilt, first = MISTAKES[what]
        actual = [{product for product, ratio in update.items() if not ratio > _limit(name)} for update in updates]
        assert actual == [spoilt if index >= first else set() for index in range(2)], (what, updates)
