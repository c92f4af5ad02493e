"""Every model family in training: gradients, updates, checkpoints and exports agree between layouts.

One set of ranks treats all families one after another, so that a layout costs one start.
"""

from dataclasses import replace

import pytest
import torch

from megatron_fp8rl.config import ModelConfig, ParallelConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.trainer import checkpoint
from megatron_fp8rl.trainer.forward import Forward
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from tests.helpers.dist import run_ranks
from tests.helpers.families import MODELS, fits
from tests.helpers.logits import reference_logits
from tests.helpers.training import (
    SMOOTH_ADAM,
    continue_training,
    full_weights,
    make_batch,
    make_loss,
    run_config,
    weight_pieces,
)
from tests.tolerances import FAMILY_GRADIENT, LAYOUT_WEIGHTS

# One of each kind of attention and router; the tests of logits have all.
KINDS = """
    qwen2-one-group glm4_moe minimax_m2 gpt_oss olmo2 gemma3_text phi3-long qwen3_next qwen3_5 qwen3_5_moe deepseek_v3
    deepseek_v3-direct-queries
""".split()
LAYOUTS = {
    "tp2": dict(world_size=2, tensor=2),
    "tp2_etp2": dict(world_size=2, tensor=2, expert_tensor=2),
    "pp2": dict(world_size=2, pipeline=2),
    "tp2_ep2": dict(world_size=2, tensor=2, expert=2),
    "ep2": dict(world_size=2, expert=2),
}


def _fitting(layout: dict) -> list[str]:
    return [kind for kind in KINDS if fits(MODELS[kind], layout)]


def _config(kind: str, layout: dict, folder: str, **options):
    model = replace(MODELS[kind], hf_path=f"{folder}/{kind}")
    return run_config(model=model, optim=SMOOTH_ADAM, **layout, **options)


def _policies(layout: dict, folder: str, **options):
    """On a rank: (kind, policy that starts from the reference's weights) of every family that fits the layout."""
    parallel = Parallel.init(ParallelConfig(**layout), deadline_s=60)
    for kind in _fitting(layout):
        yield kind, Policy.build(_config(kind, layout, folder, **options), parallel)


def _gradients(policy) -> dict[str, tuple[int, torch.Tensor]]:
    """This rank's gradients after one forward and backward, of parameters that only this rank has."""
    batch = policy.with_old_logprobs(make_batch(policy.cfg, policy.parallel.dp_rank))
    policy.optimizer.zero_gradients()
    Forward(policy.cfg, policy.parallel).gradients(policy.chunks, batch, make_loss(policy.cfg))
    parallel = policy.parallel
    whole = {False: parallel.dp_cp_group.size() == 1, True: parallel.expert_dp_group.size() == 1}
    ranks = {name: rank for name, (rank, _) in weight_pieces(policy).items()}
    return {
        name: (ranks[name], parameter.main_grad.clone())
        for name, parameter in policy.named_parameters()
        if whole[registry.is_expert(name)]
    }


def _train_all(layout: dict, folder: str, checkpoints: str | None) -> dict[str, tuple]:
    """(gradients, weights after two updates, router biases after them) of every family; saves on the way."""
    result = {}
    for kind, policy in _policies(layout, folder):
        gradients = _gradients(policy)
        continue_training(policy, 1)
        if checkpoints is not None:
            checkpoint.save(f"{checkpoints}/{kind}", 1, policy, {})
        continue_training(policy, 1)
        result[kind] = gradients, weight_pieces(policy), _biases(policy)
    return result


def _biases(policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.named_tensors() if name.endswith("expert_bias")}


def _resume_all(layout: dict, folder: str, checkpoints: str) -> dict[str, tuple]:
    """(weights, router biases) one update after the checkpoint. The policy starts from other weights."""
    result = {}
    for kind, policy in _policies(layout, folder):
        with torch.no_grad():
            for _, tensor in policy.named_tensors():
                tensor.zero_()
        checkpoint.restore(checkpoint.latest(f"{checkpoints}/{kind}"), policy)
        continue_training(policy, 1)
        result[kind] = weight_pieces(policy), _biases(policy)
    return result


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder of Hugging Face checkpoints, folder of checkpoints, what one rank computes)."""
    folder, checkpoints = (str(tmp_path_factory.mktemp(name)) for name in ("hf", "checkpoints"))
    run_ranks(1, _save_references, folder)
    (one,) = run_ranks(1, _train_all, dict(world_size=1), folder, checkpoints)
    return folder, checkpoints, one


def _save_references(folder: str) -> None:
    for kind in KINDS:
        reference_logits(MODELS[kind], f"{folder}/{kind}")


def _assert_close(model: ModelConfig, ranks: list[dict], expected: dict, what: str, **tolerance: float) -> None:
    actual, wanted = full_weights(model, ranks), full_weights(model, [expected])
    if model.tie_embeddings:  # the last of several stages holds a copy
        actual.pop("output_layer.weight", None)
    assert actual.keys() == wanted.keys() if what == "weight" else actual.keys() <= wanted.keys()
    for name, tensor in actual.items():
        scale = wanted[name].abs().max().clamp(min=1e-6) if what == "gradient" else 1.0
        off, largest = (tensor - wanted[name]).abs().max(), wanted[name].abs().max()
        message = f"{what} of {name}: off by {off:.2e} of {largest:.2e}"
        torch.testing.assert_close(tensor / scale, wanted[name] / scale, **tolerance, msg=message)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_and_updates_do_not_depend_on_the_layout(layout, trained):
    folder, _, expected = trained
    ranks = run_ranks(2, _train_all, LAYOUTS[layout], folder, None)
    for kind in _fitting(LAYOUTS[layout]):
        gradients, weights, biases = expected[kind]
        _assert_close(MODELS[kind], [rank[kind][0] for rank in ranks], gradients, "gradient", **FAMILY_GRADIENT)
        _assert_close(MODELS[kind], [rank[kind][1] for rank in ranks], weights, "weight", **LAYOUT_WEIGHTS)
        for rank in ranks:
            for name, bias in rank[kind][2].items():
                assert torch.equal(bias, biases[name]), name


@pytest.mark.parametrize("source, target", [("one", "tp2_ep2"), ("one", "pp2"), ("pp2", "one")])
def test_training_resumes_in_another_layout(source, target, trained, tmp_path):
    """The first of two stages may have no expert, and it describes the optimizer in a checkpoint."""
    folder, checkpoints, expected = trained
    if source != "one":
        checkpoints = str(tmp_path)
        run_ranks(2, _train_all, LAYOUTS[source], folder, checkpoints)
    layout = LAYOUTS.get(target, dict(world_size=1))
    ranks = run_ranks(layout["world_size"], _resume_all, layout, folder, checkpoints)
    for kind in _fitting(layout):
        _, weights, biases = expected[kind]
        _assert_close(MODELS[kind], [rank[kind][0] for rank in ranks], weights, "weight", **LAYOUT_WEIGHTS)
        for rank in ranks:
            assert all(torch.equal(bias, biases[name]) and bias.any() for name, bias in rank[kind][1].items())
