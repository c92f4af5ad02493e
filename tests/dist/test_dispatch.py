"""Training with tokens carried by DeepEP and HybridEP (stand-ins on CPUs): the updates of the all-to-all."""

import importlib
from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import PrecisionConfig
from megatron_fp8rl.precision import kernel_choice
from tests.helpers import fake_deep_ep
from tests.helpers.dist import run_ranks
from tests.helpers.training import MOE, full_weights, run_config, train
from tests.tolerances import FP8_FIRST_LOSS, LAYOUT_WEIGHTS

LAYOUTS = {
    "ep2": dict(world_size=2, expert=2),
    "tp2_ep2": dict(world_size=2, tensor=2, expert=2),
    "ep2_etp2": dict(world_size=4, tensor=2, expert=2, expert_tensor=2),
}


def _trained(cfg, num_updates):
    """Runs on a rank: ``train`` as on a GPU where deep_ep is installed, and the number of dispatches by it."""
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    def on_cpu(*shape, zeros=torch.zeros, device=None, **kwargs):
        return zeros(*shape, device="cpu" if device == "cuda" else device, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        fake_deep_ep.install(patch)
        importlib.reload(fused_a2a)  # looks for the package
        for name in tuple(
            "fused_dispatch fused_combine set_deepep_num_sms hybrid_ep_dispatch hybrid_ep_combine".split()
        ):
            patch.setattr(token_dispatcher, name, getattr(fused_a2a, name))
        patch.setattr(torch, "zeros", on_cpu)  # of HybridEP's counter
        for name, kernel in (kernels := kernel_choice.TABLE["trainer.dispatch"].kernels).items():
            patch.setitem(kernels, name, replace(kernel, supports=kernel_choice.support.always))
        return train(cfg, num_updates), fake_deep_ep.Buffer.calls


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dispatch", ["deepep", "hybridep"])
def test_updates_are_those_of_the_all_to_all(dispatch, layout):
    cfg = run_config(**LAYOUTS[layout])
    expected = run_ranks(cfg.parallel.world_size, train, cfg, 2)
    cfg = replace(cfg, parallel=replace(cfg.parallel, dispatch=dispatch))
    ranks = run_ranks(cfg.parallel.world_size, _trained, cfg, 2)
    assert all(set(calls) == {dispatch} for _, calls in ranks)
    for (got, _), want in zip(ranks, expected, strict=True):
        assert got.metrics[0]["train/grad_norm/max"] == pytest.approx(want.metrics[0]["train/grad_norm/max"], rel=1e-5)
    weights = full_weights(MOE, [result.pieces for result, _ in ranks])
    for name, weight in full_weights(MOE, [result.pieces for result in expected]).items():
        torch.testing.assert_close(weights[name], weight, **LAYOUT_WEIGHTS, msg=name)


@pytest.mark.parametrize("dispatch", ["deepep", "hybridep"])
def test_grouped_experts_in_fp8_take_what_arrives(dispatch):
    """They read each expert's tokens from the dispatcher; sums over a token's experts have another order."""
    model = replace(MOE, num_layers=2, hidden_size=128, moe_ffn_hidden_size=256)
    cfg = run_config(model=model, **LAYOUTS["ep2"])
    cfg = replace(cfg, precision=PrecisionConfig(kernels={"experts": "deep_gemm"}))
    expected = run_ranks(2, train, cfg, 1)
    cfg = replace(cfg, parallel=replace(cfg.parallel, dispatch=dispatch))
    for (got, _), want in zip(run_ranks(2, _trained, cfg, 1), expected, strict=True):
        assert got.metrics[0]["train/loss/mean"] == pytest.approx(
            want.metrics[0]["train/loss/mean"], abs=FP8_FIRST_LOSS
        )
        assert got.metrics[0]["train/grad_norm/max"] == pytest.approx(want.metrics[0]["train/grad_norm/max"], rel=0.01)
