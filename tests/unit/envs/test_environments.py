"""Naming environments, rendering templates, and the reasoning-gym adapter over its generators."""

import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pytest

from megatron_fp8rl.config import EnvironmentConfig
from megatron_fp8rl.envs.environment import (
    EnvironmentSpecError,
    Problem,
    build_environment,
    environments_by_key,
    render,
)
from megatron_fp8rl.envs.libraries.reasoning_gym import extract_answer
from megatron_fp8rl.types import Prompt


def as_prompt(problem: Problem) -> Prompt:
    """As it reaches a scorer: through JSON."""
    metadata = json.loads(json.dumps(problem.metadata))
    return Prompt(prompt_id="x/1", environment="x", token_ids=(1,), text="", answer=problem.answer, metadata=metadata)


@pytest.mark.parametrize(
    "dataset",
    # chain_sum: plain; countdown: many right answers; polynomial_multiplication: iterates over sets; list_functions:
    # uses the global random state and ends after 500 problems; base_conversion: answers as text.
    ["chain_sum", "countdown", "polynomial_multiplication", "list_functions", "base_conversion"],
)
def test_reference_answers_score_one_in_a_fresh_environment(dataset):
    for index in (0, 17, 2**31 - 1):
        problem = build_environment(EnvironmentConfig(dataset=dataset)).make_problem(index)
        again = build_environment(EnvironmentConfig(dataset=dataset))
        assert again.make_problem(index) == problem
        assert again.score(as_prompt(problem), f"\n {problem.answer} ") == 1.0
        assert again.score(as_prompt(problem), "surely not") < 0.5


def test_scorer_survives_a_problem_that_cannot_be_made_again():
    """For generators that iterate over sets: the problem's record decides, not a new one."""
    environment = build_environment(EnvironmentConfig())
    problem = environment.make_problem(4)
    altered = Problem(question="another", answer="77", metadata={**problem.metadata, "question": "another"})
    assert environment.score(as_prompt(altered), "77") == 1.0
    assert environment.score(as_prompt(altered), str(Decimal(problem.answer) + 1000)) == 0.0


def test_own_environment_by_module_and_class(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    environment = build_environment(EnvironmentConfig(dataset="misbehaving:Judge", options={"bonus": 2.0}))
    assert environment.score(as_prompt(environment.make_problem(3)), "3") == 3.0
    with pytest.raises(EnvironmentSpecError, match="bonnus"):
        build_environment(EnvironmentConfig(dataset="misbehaving:Judge", options={"bonnus": 2.0}))
    with pytest.raises(EnvironmentSpecError, match="no 'Jugde'; did you mean Judge"):
        build_environment(EnvironmentConfig(dataset="misbehaving:Jugde"))
    with pytest.raises(EnvironmentSpecError, match="cannot import 'nowhere'"):
        build_environment(EnvironmentConfig(dataset="nowhere:Judge"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dataset": "chain_summ"}, "no generator 'chain_summ'; did you mean chain_sum"),
        ({"options": {"min_trems": 2}}, "no option 'min_trems'; did you mean min_terms"),
        ({"options": {"size": 2}}, "no option 'size'"),
        ({"options": {"min_terms": 9}}, "refuses options .*max_terms must be >= min_terms"),
    ],
)
def test_mistakes_are_named_with_what_is_near(fields, message):
    with pytest.raises(EnvironmentSpecError, match=message):
        build_environment(EnvironmentConfig(**fields))


def test_templates():
    problem = Problem(question="what?", answer="4", metadata={"expression": "2 + 2", "difficulty": {"digits": 1}})
    assert render("{question} {expression} {{}} {difficulty[digits]}", problem) == "what? 2 + 2 {} 1"
    with pytest.raises(EnvironmentSpecError, match="no field 'expresion'; did you mean expression"):
        render("{expresion}", problem)
    with pytest.raises(EnvironmentSpecError, match="write a literal brace twice"):
        render("{", problem)
    with pytest.raises(EnvironmentSpecError, match="cannot be filled"):
        render("{difficulty[nothing]}", problem)


def test_keys_number_repeated_datasets():
    configs = [EnvironmentConfig(), EnvironmentConfig(dataset="products"), EnvironmentConfig(), EnvironmentConfig()]
    assert list(environments_by_key(configs)) == ["chain_sum", "products", "chain_sum-2", "chain_sum-3"]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (" 42\n", "42"),
        ("it is <answer>1</answer>, no, <answer> 42 </answer>.", "42"),
        ("<think>perhaps <answer>7</answer></think>\n42", "42"),
        ("", ""),
    ],
)
def test_extract_answer(completion, answer):
    assert extract_answer(completion) == answer


def test_unfinished_reasoning_scores_0():
    environment = build_environment(EnvironmentConfig())
    asked = as_prompt(environment.make_problem(3))
    opened = replace(asked, text=asked.text + "<|assistant|>\n<think>\n")
    answer = f"<answer>{asked.answer}</answer>"
    assert environment.score(asked, answer) == environment.score(opened, f"so</think>{answer}") == 1.0
    assert environment.score(asked, f"[THINK]1[/THINK]{answer}") == 1.0
    assert environment.score(asked, f"<think>{answer}? no") == environment.score(opened, answer) == 0.0
