"""Muon on gloo ranks: updates against singular value decompositions, equal weights in every layout, exact resumes."""

from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.names import registry, slicing
from megatron_fp8rl.preflight.rules import check
from megatron_fp8rl.trainer.optimizer.muon import orthogonalized
from tests.dist.test_checkpoint import _resume_and_go_on, assert_a_resume_changes_no_bit
from tests.helpers.configs import DENSE, make
from tests.helpers.dist import run_ranks
from tests.helpers.training import SMOOTH_ADAM, first_gradients, full_weights, run_config, train, weight_pieces

MUON = replace(SMOOTH_ADAM, optimizer="muon")


def _by_singular_values(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The quintic iteration, applied to the singular values in float64."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right


@pytest.mark.parametrize("shape", [(32, 96), (96, 32), (64, 64), (1, 8)])
def test_matrices_are_orthogonalized(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    actual = orthogonalized(matrix)
    torch.testing.assert_close(actual.double(), _by_singular_values(matrix), atol=1e-4, rtol=1e-3)
    if shape[0] != shape[1]:
        values = torch.linalg.svdvals(actual)
        assert 0.6 < values.min() and values.max() < 1.3


def _update_of(cfg):
    gradients, before = first_gradients(cfg, weight_pieces)
    return gradients, before


def test_an_update_is_that_of_the_formula():
    cfg = run_config(optim=MUON)
    ((gradients, before),) = run_ranks(1, _update_of, cfg)
    ((trained),) = run_ranks(1, train, cfg, 1)
    count = 0
    for name, (_, weight) in before.items():
        after, lr = trained.pieces[name][1], cfg.optim.lr
        is_adams = weight.ndim < 2 or any(x in name for x in ("embedding", "output_layer", "router"))
        if is_adams:
            decay = 1 - lr * cfg.optim.weight_decay * (weight.ndim > 1)
            gradient = gradients[name] / max(1.0, trained.metrics[0]["train/grad_norm/max"])
            expected = weight * decay - lr * gradient / (gradient.abs() + cfg.optim.eps)
            torch.testing.assert_close(after, expected, atol=2e-6, rtol=1e-5, msg=name)
            continue
        entry = registry.weight(name, cfg.model)
        pieces = [slicing.split(entry, cfg.model, x, 1, 0) for x in (gradients[name], weight, after)]
        for gradient, old, new in zip(*pieces, strict=True):
            count += 1
            step = 0.2 * max(gradient.shape) ** 0.5 * _by_singular_values(gradient)
            expected = old.double() * (1 - lr * cfg.optim.weight_decay) - lr * step
            torch.testing.assert_close(new.double(), expected, atol=1e-5, rtol=1e-4, msg=name)
    assert count == 4 * (4 + 4 * 3)  # q, k, v, o, and gate, up, down of four experts, in four layers


@pytest.fixture(scope="module")
def on_one_rank():
    return run_ranks(1, train, run_config(optim=MUON))[0]


@pytest.mark.parametrize(
    "layout",
    [dict(world_size=2), dict(world_size=2, pipeline=2), dict(world_size=4, tensor=2, expert=2, expert_tensor=2)],
    ids=["dp2", "pp2", "tp2_ep2_etp2"],
)
def test_layouts_train_equal_weights(layout, on_one_rank):
    cfg = run_config(optim=MUON, **layout)
    ranks = run_ranks(layout["world_size"], train, cfg)
    expected = full_weights(cfg.model, [on_one_rank.pieces])
    for name, weight in full_weights(cfg.model, [rank.pieces for rank in ranks]).items():
        torch.testing.assert_close(weight, expected[name], atol=1e-4, rtol=1e-3, msg=name)
    for rank in ranks:
        for got, want in zip(rank.metrics, on_one_rank.metrics, strict=True):
            assert got["train/loss/mean"] == pytest.approx(want["train/loss/mean"], rel=1e-4, abs=1e-5)


def test_a_resume_changes_no_bit(tmp_path):
    cfg = run_config(params="bf16", optim=MUON, world_size=2, expert=2)
    assert_a_resume_changes_no_bit(cfg, tmp_path)
    with pytest.raises(
        Exception, match="--optim.optimizer = 'adam': was 'muon' in .*, whose states have another meaning"
    ):
        run_ranks(2, _resume_and_go_on, replace(cfg, optim=replace(cfg.optim, optimizer="adam")), str(tmp_path))


def test_what_muon_does_not_train_is_refused():
    (refused,) = check(make(optim__optimizer="muon", lora__rank=8), accelerator="cpu")
    assert str(refused).startswith("--optim.optimizer = 'muon': trains matrices, and adapters are factors of matrices")
    model = replace(DENSE, head_dim=128)
    (refused,) = check(make(model, optim__optimizer="muon", precision__params="fp8"), accelerator="hopper")
    text = "--optim.optimizer = 'muon': is not tested with FP8 parameters. Set --precision.params bf16"
    assert str(refused).startswith(text)
    assert check(make(optim__optimizer="muon"), accelerator="cpu") == []
