"""Functions that the configuration names: what is refused, by which words, and on a login node without an import."""

from __future__ import annotations

import sys

import pytest
import torch
from algo_cases import packed, random_samples, with_logprobs

from megatron_fp8rl.algo import advantages, losses
from megatron_fp8rl.algo.named import NamedFunctionError, load_advantage, load_loss, mistakes
from megatron_fp8rl.config import AlgoConfig

MODULE = """
import sys
from functools import cache
from typing import Literal
from megatron_fp8rl.algo.losses import dapo as same

SYSTEM = sys.no_such_attribute if "{here}" == "imported" else None


def good(mb, trainer_logprobs_T, entropy_T, batch, *, cfg, max_completion_tokens, floor: float = 0.1,
         kind: Literal["a", "b"] = "a", table: "Unknown" = None):
    return -trainer_logprobs_T.sum() * floor, {{}}


def lenient(*arguments, **options):
    return arguments[1].sum(), {{}}


def needs(mb, trainer_logprobs_T, entropy_T, batch, *, cfg, max_completion_tokens, beta: float):
    return trainer_logprobs_T.sum() * beta, {{}}


def old_style(logprobs, advantages):
    return logprobs.sum()


@cache
def wrapped(*arguments, **options):
    return None


def vector(mb, trainer_logprobs_T, entropy_T, batch, *, cfg, max_completion_tokens):
    return trainer_logprobs_T, {{}}


def constant(mb, trainer_logprobs_T, entropy_T, batch, *, cfg, max_completion_tokens):
    return trainer_logprobs_T.detach().sum(), {{}}


def alone(mb, trainer_logprobs_T, entropy_T, batch, *, cfg, max_completion_tokens):
    return trainer_logprobs_T.sum()


def best(rewards, *, scale: int = 1):
    return [scale * (reward - max(rewards)) for reward in rewards]
"""


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """``doors`` is fine; ``doors_login`` cannot be imported, as one that needs torch on a login node."""
    (tmp_path / "doors.py").write_text(MODULE.format(here="source"))
    (tmp_path / "doors_login.py").write_text(MODULE.format(here="imported"))
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("doors", None)


def words(**algo) -> list[str]:
    return [str(violation) for violation in mistakes(AlgoConfig(**algo))]


@pytest.mark.parametrize(
    "algo",
    [
        *({"loss": name} for name in ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "sft")),
        {"loss": "gspo", "loss_options": {"aggregate": "token", "dual_clip": 3}},
        {"loss": "gspo", "loss_options": {"dual_clip": None}},
        {"advantage": "dr_grpo"},
        {"loss": "doors:good", "loss_options": {"floor": 1, "kind": "b", "table": 3}},
        {"loss": "doors:lenient", "loss_options": {"anything": [1]}},
        {"loss": "doors:needs", "loss_options": {"beta": 0.5}},
        {"loss": "doors:same"},
        {"advantage": "doors:best", "advantage_options": {"scale": 2}},
    ],
)
def test_what_can_be_called_is_accepted_by_source_and_by_import(algo):
    cfg = AlgoConfig(**algo)
    assert mistakes(cfg) == []
    load_loss(cfg, max_completion_tokens=8)
    load_advantage(cfg)


@pytest.mark.parametrize(
    ("algo", "message"),
    [
        ({"loss": "grpoo"}, "--algo.loss = 'grpoo': megatron_fp8rl.algo.losses has no function 'grpoo'; did you mean"),
        (
            {"loss": "nowhere:loss"},
            "--algo.loss = 'nowhere:loss': there is no module 'nowhere' on the Python path. Name a",
        ),
        ({"loss": "nowhere.deep:loss"}, "--algo.loss = 'nowhere.deep:loss': there is no module 'nowhere.deep'"),
        ({"loss": "doors:goood"}, "--algo.loss = 'doors:goood': doors has no function 'goood'; did you mean good"),
        ({"loss": "doors:old_style"}, "--algo.loss = 'doors:old_style': cannot be called: "),
        ({"loss": "doors:needs"}, "--algo.loss = 'doors:needs': cannot be called: missing a required"),
        ({"advantage": "doors:good"}, "--algo.advantage = 'doors:good': cannot be called: "),
        ({"advantage": "std"}, "--algo.advantage = 'std': megatron_fp8rl.algo.advantages has no function 'std'"),
        (
            {"loss": "cispo", "loss_options": {"dual_clip": 3.0}},
            "--algo.loss_options.dual_clip = 3.0: is not an option of cispo. Its options: aggregate.",
        ),
        (
            {"loss": "grpo", "loss_options": {"agregate": "token"}},
            "--algo.loss_options.agregate = 'token': is not an option of grpo; did you mean aggregate?. Its options: aggregate",
        ),
        (
            {"loss": "grpo", "loss_options": {"aggregate": "tokens"}},
            "--algo.loss_options.aggregate = 'tokens': has the wrong type. Set a value of Literal['token', 'sequence', 'const",
        ),
        (
            {"loss_options": {"dual_clip": "3"}},
            "--algo.loss_options.dual_clip = '3': has the wrong type. Set a value of float",
        ),
        ({"loss_options": {"dual_clip": True}}, "--algo.loss_options.dual_clip = True: has the wrong type."),
        ({"loss_options": {"cfg": 1}}, "--algo.loss_options.cfg = 1: is not an option of dapo."),
        (
            {"advantage": "doors:best", "advantage_options": {"scale": 0.5}},
            "--algo.advantage_options.scale = 0.5: has the wrong type. Set a value of int.",
        ),
    ],
)
def test_what_cannot_be_called_is_refused_in_the_same_words_by_source_and_by_import(algo, message):
    (found,) = words(**algo)
    assert found.startswith(message), found
    cfg = AlgoConfig(**algo)
    with pytest.raises(NamedFunctionError, match=r"--algo\.") as info:
        (load_advantage(cfg), load_loss(cfg, max_completion_tokens=8))
    if "cannot be called" in message or "_options" in message:
        assert str(info.value) == found


def test_the_source_is_judged_without_an_import():
    assert words(loss="doors_login:good") == []
    assert words(loss="doors_login:wrapped") == [], "a decorator may change the signature"
    (found,) = words(loss="doors_login:old_style")
    assert "cannot be called" in found
    assert "doors_login" not in sys.modules
    with pytest.raises(AttributeError, match="no_such_attribute"):
        load_loss(AlgoConfig(loss="doors_login:good"), max_completion_tokens=8)


def test_bare_names_are_the_functions_of_the_library():
    assert load_loss(AlgoConfig(loss="gspo"), max_completion_tokens=8).func is losses.gspo
    assert load_advantage(AlgoConfig(advantage="dr_grpo")).func is advantages.dr_grpo


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("vector", r"its loss is a tensor of shape \(\d+,\)\. Return a scalar"),
        ("constant", "its loss is a tensor of shape .* without a gradient"),
        ("alone", r"its metrics are None\. Return \(loss, metrics\)"),
    ],
)
def test_a_result_that_is_no_loss_is_named(name, problem):
    batch = with_logprobs(packed(random_samples(seed=1))[0])
    (mb,) = batch.microbatches
    trainer = mb.rollout_logprobs_T.clone().requires_grad_()
    loss = load_loss(AlgoConfig(loss=f"doors:{name}"), max_completion_tokens=8)
    with pytest.raises(NamedFunctionError, match=f"--algo.loss = 'doors:{name}': {problem}"):
        loss(mb, trainer, torch.zeros_like(trainer), batch)
