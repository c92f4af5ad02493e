"""Functions that the configuration names: accepted options, and errors with field, value and remedy."""

import importlib.util
import sys

import pytest
import torch
from algo_cases import packed, random_samples, with_logprobs

from megatron_fp8rl.algo import advantages, losses
from megatron_fp8rl.algo.load_function import (
    FunctionError,
    errors,
    load_advantage,
    load_function,
    load_loss,
    may_lack_lower_clip,
)
from megatron_fp8rl.config import AlgoConfig
from megatron_fp8rl.types import LossInputs

MODULE = """
from megatron_fp8rl.algo.losses import dapo as same


def good(inputs, *, floor=0.1, kind="a"):
    return -inputs.trainer_logprobs_T.sum() * floor, {}


def lenient(inputs, **options):
    return inputs.trainer_logprobs_T.sum(), {}


def needs(inputs, *, beta):
    return inputs.trainer_logprobs_T.sum() * beta, {}


def old_style(logprobs, advantages):
    return logprobs.sum()


def vector(inputs):
    return inputs.trainer_logprobs_T, {}


def constant(inputs):
    return inputs.trainer_logprobs_T.detach().sum(), {}


def alone(inputs):
    return inputs.trainer_logprobs_T.sum()


def best(rewards, *, scale=1):
    return [scale * (reward - max(rewards)) for reward in rewards]
"""


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    (tmp_path / "my_functions.py").write_text(MODULE)
    (tmp_path / "my_broken.py").write_text("import sys\nsys.no_such_attribute\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_functions", None)


@pytest.mark.parametrize(
    "algo",
    [
        *({"loss": name} for name in ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "sft")),
        {"loss": "gspo", "loss_options": {"aggregate": "token", "dual_clip": 3}},
        {"advantage": "dr_grpo"},
        {"loss": "my_functions:good", "loss_options": {"floor": 1, "kind": "b"}},
        {"loss": "my_functions:lenient", "loss_options": {"anything": [1]}},
        {"loss": "my_functions:needs", "loss_options": {"beta": 0.5}},
        {"loss": "my_functions:same"},
        {"advantage": "my_functions:best", "advantage_options": {"scale": 2}},
    ],
)
def test_valid_functions_and_options_are_accepted(algo):
    cfg = AlgoConfig(**algo)
    assert errors(cfg) == []
    load_loss(cfg)
    load_advantage(cfg)


@pytest.mark.parametrize(
    ("algo", "message"),
    [
        ({"loss": "grpoo"}, "--algo.loss = 'grpoo': megatron_fp8rl.algo.losses has no 'grpoo'; did you mean"),
        ({"loss": "nowhere:loss"}, "--algo.loss = 'nowhere:loss': cannot import 'nowhere': ModuleNotFoundError: "),
        ({"loss": "my_broken:loss"}, "--algo.loss = 'my_broken:loss': cannot import 'my_broken': AttributeError: "),
        ({"loss": "my_functions:goood"}, "--algo.loss = 'my_functions:goood': my_functions has no 'goood'; did you"),
        ({"loss": "my_functions:old_style"}, "--algo.loss_options = {}: my_functions:old_style cannot be called"),
        ({"loss": "my_functions:needs"}, "--algo.loss_options = {}: my_functions:needs cannot be called with these"),
        ({"advantage": "std"}, "--algo.advantage = 'std': megatron_fp8rl.algo.advantages has no 'std'"),
        (
            {"loss": "cispo", "loss_options": {"dual_clip": 3.0}},
            "--algo.loss_options = {'dual_clip': 3.0}: cispo cannot be called with these options: got an unexpected "
            "keyword argument 'dual_clip'. Match its signature: (inputs: 'LossInputs', *, aggregate:",
        ),
        ({"loss_options": {"inputs": 1}}, "--algo.loss_options = {'inputs': 1}: dapo cannot be called with these"),
        (
            {"advantage": "my_functions:best", "advantage_options": {"size": 2}},
            "--algo.advantage_options = {'size': 2}: my_functions:best cannot be called with these options: got an "
            "unexpected keyword argument 'size'. Match its signature: (rewards, *, scale=1).",
        ),
    ],
)
def test_errors_name_field_value_and_remedy_before_and_at_the_start(algo, message):
    cfg = AlgoConfig(**algo)
    (violation,) = errors(cfg)
    assert str(violation).startswith(message), violation
    with pytest.raises(FunctionError) as info:
        (load_advantage(cfg), load_loss(cfg))
    assert str(info.value) == str(violation)


def test_a_login_node_without_torch_leaves_the_check_to_the_trainer(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name))
    assert errors(AlgoConfig(loss="my_functions:goood")) == []
    assert "my_functions" not in sys.modules


def test_bare_names_are_functions_of_the_library():
    assert load_loss(AlgoConfig(loss="gspo")).func is losses.gspo
    assert load_advantage(AlgoConfig(advantage="dr_grpo")).func is advantages.dr_grpo
    assert load_function("json:dumps") is sys.modules["json"].dumps


@pytest.mark.parametrize(("loss", "expected"), [("cispo", True), ("dapo", False), ("my_functions:good", True)])
def test_only_losses_that_say_so_accept_a_clip_without_lower_bound(loss, expected):
    assert may_lack_lower_clip(AlgoConfig(loss=loss)) is expected


def loss_of_a_batch(cfg: AlgoConfig):
    batch = with_logprobs(packed(random_samples(seed=1))[0])
    (mb,) = batch.microbatches
    trainer = mb.rollout_logprobs_T.clone().requires_grad_()
    inputs = LossInputs(
        mb=mb,
        batch=batch,
        trainer_logprobs_T=trainer,
        entropy_T=torch.zeros_like(trainer),
        cfg=cfg,
        max_completion_tokens=8,
    )
    return load_loss(cfg)(inputs)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("vector", r"its loss is a tensor of shape \(\d+,\)\. Return a scalar"),
        ("constant", "its loss is a tensor of shape .* without a gradient"),
        ("alone", r"its metrics are None\. Return \(loss, metrics\)"),
    ],
)
def test_an_invalid_result_names_the_function(name, problem):
    with pytest.raises(FunctionError, match=f"--algo.loss = 'my_functions:{name}': {problem}"):
        loss_of_a_batch(AlgoConfig(loss=f"my_functions:{name}"))


def test_an_unknown_aggregate_is_an_error():
    with pytest.raises(ValueError, match=r"--algo.loss_options.aggregate = 'tokens': .*token, sequence, constant"):
        loss_of_a_batch(AlgoConfig(loss="grpo", loss_options={"aggregate": "tokens"}))
