"""Agents are checked before a run: what is not a session's function, or has other options, is refused by name."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from launch import slurm
from launch.batch_script import Submission
from launch.cluster import Cluster
from launch.spec import JobSpec, Role
from megatron_fp8rl.config import EnvironmentConfig, ScoringConfig
from megatron_fp8rl.envs import agent_function
from megatron_fp8rl.envs.agent_function import AgentSpecError
from megatron_fp8rl.preflight import rules
from megatron_fp8rl.rollout.agents.agent_process import load_problem
from model_configs.tiny import tiny_qwen3

AGENTS = """
import functools
import inspect
from dataclasses import dataclass
from os.path import join as imported
from typing import Any


async def rollout(
    session, row, *, bonus: float = 0.0, level: str = "easy", tries: int | None = None, names: list[str] = ()
):
    return bonus


async def needs(session, row, level, /, *, mode):
    return 1.0


async def any_option(session, row, **options: Any):
    return 1.0


def sync(session, row):
    return 1.0


async def stream(session, row):
    yield 1.0


async def alone(session):
    return 1.0


class Player:
    def __init__(self, level=1):
        self.level = level

    async def __call__(self, session, row, *, bonus=0.0):
        return bonus


@dataclass
class Settings:
    level: int = 1


def logged(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@logged
async def decorated(session, row, *, bonus=0.0):
    return bonus


instance, partial, number = Player(), functools.partial(rollout, level="hard"), 3
late = lambda session, row: rollout(session, row)
marked = inspect.markcoroutinefunction(lambda session, row: rollout(session, row))

if inspect:
    async def chosen(session, row, *, bonus):
        return bonus
else:
    async def chosen(session, row):
        return 0.0
"""


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "players.py"
    path.write_text(AGENTS)
    return path


# (agent, options, refusal). None: it can play. Both the check of the source and the worker say so.
CASES = [
    ("rollout", {}, None),
    ("rollout", {"bonus": 1, "level": "hard", "tries": None, "names": ["a", "b"]}, None),
    (
        "rollout",
        {"bonsu": 1.0},
        "rollout has no option 'bonsu'; did you mean bonus. Its options are bonus, level, tries",
    ),
    ("rollout", {"bonus": "much"}, "bonus is 'much', and rollout declares float. Give a value of that type"),
    ("rollout", {"bonus": True}, "bonus is True, and rollout declares float"),
    ("rollout", {"level": 3}, "level is 3, and rollout declares str. A number in two pairs of quotes is text"),
    ("rollout", {"tries": 1.5}, r"tries is 1.5, and rollout declares int \| None"),
    ("rollout", {"names": "a"}, r"names is 'a', and rollout declares list\[str\]"),
    ("rollout", {"row": {}}, "row is the session or the row of rollout, which the run passes. Leave it out"),
    ("any_option", {"what": 1}, None),
    ("needs", {}, "needs needs the option 'mode'. Set it by --agent_options.mode VALUE"),
    ("sync", {}, r"sync is not async. Write async def rollout\(session, row\)"),
    ("stream", {}, "stream is an async generator. Return the reward instead of yielding it"),
    ("alone", {}, r"alone\(session\) does not take a session and a row. Write async def rollout\(session, row\)"),
    ("Player", {}, r"Player is a class. .*name an instance whose __call__ is async, such as rollout = Player\(\)"),
    ("rollouts", {}, "has no (function )?'rollouts'; did you mean rollout"),
]
# What only the worker knows, because it runs the module.
LATE = [
    ("decorated", {"bonus": 1.0}, None),
    ("instance", {"bonus": 1.0}, None),
    ("partial", {"bonus": 1.0}, None),
    ("marked", {}, None),
    ("chosen", {"bonus": 1.0}, None),
    ("decorated", {"level": 1}, "decorated has no option 'level'. Its options are bonus"),
    ("instance", {"level": 1}, "Player has no option 'level'. Its options are bonus"),
    ("partial", {"bonsu": 1}, "partial has no option 'bonsu'; did you mean bonus"),
    ("chosen", {}, "chosen needs the option 'bonus'"),
    ("late", {}, "<lambda> is not async"),
    ("imported", {}, "join is not async"),
    ("number", {}, r"it is of type int, not a function. Write async def rollout\(session, row\)"),
]


def refusal(wrong) -> str:
    return "" if wrong is None else f"{wrong.text}. {wrong.remedy}"


@pytest.mark.parametrize(("agent", "options", "expected"), CASES)
def test_the_source_of_an_agent_is_checked_without_running_it(file, agent, options, expected):
    path = file.with_name("never_run.py")
    path.write_text(AGENTS + "\nraise SystemExit(3)\n")
    actual = refusal(agent_function.problem(f"{path}:{agent}", options, has_scores=True))
    assert actual == "" if expected is None else re.search(expected, actual), actual


@pytest.mark.parametrize(("agent", "options", "expected"), CASES + LATE)
def test_a_worker_refuses_the_same_agents(file, agent, options, expected):
    if expected is None:
        assert callable(agent_function.load(f"{file}:{agent}", options))
    else:
        with pytest.raises(AgentSpecError, match=expected):
            agent_function.load(f"{file}:{agent}", options)


@pytest.mark.parametrize(("agent", "options", "expected"), LATE)
def test_what_the_source_does_not_tell_is_not_refused(file, agent, options, expected):
    assert agent_function.problem(f"{file}:{agent}", options, has_scores=True) is None


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("{folder}/player.py:rollout", r"player.py does not exist; did you mean players.py. Name FILE.py:function"),
        ("{folder}/broken.py:rollout", r"broken.py, line 1: "),
        ("{folder}/players.py", "names no function"),
        ("rollout", "is not FILE.py:function"),
        ("no_such_module:rollout", "there is no module 'no_such_module'"),
        ("no_such_package.module:rollout", "cannot import 'no_such_package.module': ModuleNotFoundError"),
        ("megatron_fp8rl.envs.example_agents:nimm", "has no function 'nimm'; did you mean nim"),
    ],
)
def test_a_missing_file_or_module_is_named(file, spec, expected):
    file.with_name("broken.py").write_text("async def rollout(session, row:\n")
    actual = refusal(agent_function.problem(spec.format(folder=file.parent), {}, has_scores=True))
    assert re.search(expected, actual), actual


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("megatron_fp8rl.envs.example_agents:Products", ""),
        ("megatron_fp8rl.envs.example_agents:Product", "has no class 'Product'; did you mean Products. Name one that"),
        ("no_such_module:Products", "there is no module 'no_such_module'. Name module:Class of a module"),
        ("players.py:Products", "is not env:module:Class. Name a module, whose folder is on the Python path"),
        ("players", "is not env:module:Class"),
    ],
)
def test_a_class_that_makes_problems_is_looked_for_too(spec, expected):
    actual = refusal(agent_function.class_problem(spec))
    assert expected in actual and bool(actual) == bool(expected)


def test_a_login_node_without_packages_does_not_refuse_modules_of_other_nodes(file, monkeypatch):
    def here(spec: str) -> str:
        return refusal(agent_function.problem(spec, {}, has_scores=True))

    assert here("no_such_module:rollout") and here("no_such_package.module:rollout")
    monkeypatch.setattr(agent_function, "_has_packages", lambda: False)
    assert here("no_such_module:rollout") == here("no_such_package.module:rollout") == ""
    assert agent_function.class_problem("no_such_module:Tasks") is None
    assert "does not exist" in here(f"{file}x.py:rollout") and "no function" in here(f"{file}:nothing")


@pytest.mark.parametrize(
    ("body", "is_refused"),
    [
        ("await session.ask()", True),
        ("await session.ask(); return", True),
        ("def score(): return 1.0\n    await session.ask(); return None", True),
        ("await session.ask(); return 1.0", False),
        ("await session.ask(); await session.reward(1.0)", False),
        ("await elsewhere(session)", False),
    ],
)
def test_rewards_are_needed_only_where_the_agent_returns_none(tmp_path, body, is_refused):
    path = tmp_path / "one.py"
    path.write_text(f"async def rollout(session, row):\n    {body}\n")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    source = EnvironmentConfig(dataset=str(tmp_path / "train.jsonl"), agent=f"{path}:rollout")

    def refused(source: EnvironmentConfig) -> list[str]:
        cfg = tiny_qwen3()
        return [str(item) for item in rules.check_sources(replace(cfg, data=replace(cfg.data, environments=(source,))))]

    actual = refused(source)
    assert ("rollout never returns a reward, and nothing else scores" in "".join(actual)) == is_refused, actual
    assert len(actual) == is_refused
    generated = replace(source, dataset="chain_sum")  # its problems are scored by the generator
    assert not refused(generated)
    (without,) = refused(replace(source, agent=""))
    assert "nothing scores the answers to" in without
    (without,) = refused(replace(generated, agent="", agent_options={"bonus": 1}))
    assert "agent_options = {'bonus': 1}: has no effect: the source has no agent" in without
    actual = refused(replace(source, agent_options={"scale": {1, 2}}))
    assert any("agent_options = {1, 2}" in item or "cannot be passed to another process" in item for item in actual)


def test_a_worker_loads_agents_before_a_run(file):
    def told(agent: str, **options) -> str:
        fields = {"agent": f"{file}:{agent}", "options": options}
        return load_problem({"rows": fields}, ScoringConfig())

    assert told("instance", bonus=1.0) == ""
    assert "players.py:late: <lambda> is not async" in told("late")
    file.write_text("import sys\nsys.exit('no licence')\nasync def rollout(session, row): ...\n")
    assert told("rollout").endswith("players.py:rollout cannot be loaded: its module called sys.exit(no licence)")
    file.write_text("import no_such_package\nasync def rollout(session, row): ...\n")
    assert "cannot be imported: ModuleNotFoundError: No module named 'no_such_package'" in told("rollout")


def test_a_queued_job_finds_the_copy_of_a_file_with_a_relative_path(file, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(tmp_path)
    role = Role(name="trainer", kind="torchrun", nodes=(0,), command=("-m", "megatron_fp8rl", "train"))
    spec = JobSpec(name="x", run_dir=str(tmp_path / "run"), roles=(role,), nodes=1, user_files=(str(file),))
    submission = slurm.with_code(Submission(spec=spec, cluster=Cluster(), id="x_1"))
    monkeypatch.setattr(slurm, "PACKAGES", ())
    slurm.copy_code(submission.code_dir, (str(file),))
    file.unlink()
    monkeypatch.chdir(elsewhere)
    relative = "players.py:rollout"
    assert "players.py does not exist" in refusal(agent_function.problem(relative, {}, has_scores=True))
    for name, value in submission.spec.env.items():
        monkeypatch.setenv(name, value)
    assert agent_function.problem(relative, {"bonus": 1.0}, has_scores=True) is None
    assert callable(agent_function.load(relative, {"bonus": 1.0}))
