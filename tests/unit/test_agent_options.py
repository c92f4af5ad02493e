"""Agents and their options from the command line: the same configuration, and a refusal before anything starts."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_fp8rl import cli, evaluate
from megatron_fp8rl.__main__ import COMMANDS
from megatron_fp8rl.config import ConfigError, EnvironmentConfig
from megatron_fp8rl.envs.libraries import verifiers
from tests.helpers.own_model import make_model

BY_NAME = {command.name: command for command in COMMANDS}
AGENT = """
import functools


async def rollout(session, row, *, bonus: float = 0.0, names: list[str] = (), strict: bool = False, **others):
    await session.ask()
    return bonus


async def few(session, row, *, bonus: float = 0.0):
    return bonus

late = functools.partial(few, bonus=1.0)
blocking = print
"""
VERIFIERS = "megatron_fp8rl.envs.libraries.verifiers"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a model, rows, an agent and a taskset."""
    path = tmp_path_factory.mktemp("own")
    sums = [(f"{a}+{b}=", str(a + b)) for a in range(9) for b in range(9)]
    make_model(path / "model", [question + answer for question, answer in sums])
    rows = [{"prompt": question, "answer": answer} for question, answer in sums]
    (path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (path / "play.py").write_text(AGENT)
    (path / "tasks").mkdir()
    (path / "tasks" / "my_sums.py").write_text("")
    return path


def sources(*args: str) -> tuple[EnvironmentConfig, ...]:
    """The sources of ``grpo`` with a model in the current folder."""
    return cli.parse(["grpo", "--model", "model", "--gpus", "0", *args], BY_NAME).cfg.data.environments


def run(capsys, *args: str) -> tuple[int, str, str]:
    """(exit status, standard output, standard error) of a command."""
    status = cli.main(COMMANDS, args)
    output = capsys.readouterr()
    return status, output.out, output.err


OPTIONS = [
    (["bonus", "0.1"], {"bonus": 0.1}),
    (["bonus", "-1e-3"], {"bonus": -0.001}),
    (["bonus", ".5"], {"bonus": 0.5}),
    (["bonus=2"], {"bonus": 2}),
    (["bonus", "Infinity"], {"bonus": math.inf}),
    (["strict", "True"], {"strict": True}),
    (["strict", "false"], {"strict": False}),
    (["names", "a", "b"], {"names": ["a", "b"]}),
    (["names", '["a", "b"]'], {"names": ["a", "b"]}),
    (["names", "('a', 'b')"], {"names": ["a", "b"]}),
    (["x", "two words"], {"x": "two words"}),
    (["x", "None"], {"x": None}),
    (["x", "007"], {"x": "007"}),
    (["x", '"3"'], {"x": "3"}),
    (["x.y.z", "3"], {"x": {"y": {"z": 3}}}),
    (["x", '{"y": [1, {"z": null}]}'], {"x": {"y": [1, {"z": None}]}}),
    (["a-b", "1"], {"a-b": 1}),
]


@pytest.mark.parametrize(("typed", "expected"), OPTIONS)
def test_options_have_one_name_on_the_command_line_and_in_a_configuration(typed, expected):
    name, *values = typed
    agent = "--data.environments.0.agent=megatron_fp8rl.envs.example_agents:nim"
    before = cli.load_config("tiny_calculator")
    for option in (f"--agent_options.{name}", f"--agent-options.{name}", f"--data.environments.0.agent_options.{name}"):
        cfg = cli.parse_overrides(before, [agent, option, *values, "--num_steps", "7"])
        assert cfg.data.environments[0].agent_options == expected and cfg.num_steps == 7
    whole = cli.parse_overrides(before, ["--agent_options", json.dumps(expected)])
    assert whole.data.environments[0].agent_options == expected


def test_options_are_those_of_every_source_with_an_agent(folder, monkeypatch):
    monkeypatch.chdir(folder)
    args = ("--data", "train.jsonl", "chain_sum", "--agent", "play.py:rollout", "--agent_options.bonus", "0.1")
    actual = sources(*args, "--agent_options.names", "a", "b", "--data.environments.1.options.max_terms", "3")
    assert [source.agent_options for source in actual] == [{"bonus": 0.1, "names": ["a", "b"]}] * 2
    assert {source.agent for source in actual} == {f"{folder}/play.py:rollout"} and actual[1].options == {
        "max_terms": 3
    }
    assert actual[0].rewards == ()


@pytest.mark.parametrize(
    "path", ["tasks/my_sums.py", "./tasks/my_sums.py", "~/tasks/my_sums.py", "{}/tasks/my_sums.py"]
)
def test_a_taskset_is_a_file_in_any_folder(folder, monkeypatch, path):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    options = ("--agent_options.env", "user-sim", "--agent_options.options.split.name", "train")
    (actual,) = sources("--data", f"verifiers:{path.format(folder)}", *options)
    tasks = {"taskset": f"{folder}/tasks/my_sums.py", "options": {"split": {"name": "train"}}}
    assert (actual.dataset, actual.agent, actual.rewards) == (f"env:{VERIFIERS}:Tasks", f"{VERIFIERS}:rollout", ())
    assert actual.options == tasks and actual.agent_options == {**tasks, "env": "user-sim"}
    assert sources("--data", "verifiers:gsm8k")[0].options == {"taskset": "gsm8k"}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--data", "train.jsonl", "--agent", "plays.py:few"], "plays.py does not exist; did you mean play.py"),
        (["--data", "train.jsonl", "--agent", "play.py:fey"], "play.py has no function 'fey'; did you mean few"),
        (["--data", "train.jsonl", "--agent", "no_module:few"], "there is no module 'no_module'"),
        (
            ["--data", "train.jsonl", "--agent", "play.py:few", "--agent_options.bonsu", "1"],
            "agent_options = {'bonsu': 1}: few has no option 'bonsu'; did you mean bonus. Its options are bonus.",
        ),
        (["--data", "train.jsonl", "--reward", "number", "--agent_options.x", "1"], "the source has no agent"),
        (["--data", "verifiers:gsm8k", "--agent", "play.py:few"], "verifiers:gsm8k has an agent of its own"),
        (["--data", "verifiers:gsm8k", "--reward", "number"], "verifiers:gsm8k scores its own problems"),
        (["--data", "verifiers:"], "--data = 'verifiers:': names no taskset. Write verifiers:NAME or"),
        (["--data", "verifiers:tasks/"], "--data = 'verifiers:tasks/': names no taskset"),
    ],
)
def test_a_mistake_is_refused_by_name(folder, monkeypatch, args, expected):
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError) as error:
        sources(*args)
    (actual,) = map(str, error.value.violations)
    assert expected in actual


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--agent_options.bonus"], "--agent_options.bonus needs a value, such as --agent_options.bonus True"),
        (["--agent_options"], "--agent_options needs a JSON object; set one option by --agent_options.NAME VALUE"),
        (["--agent_options", "3", "--num_steps", "2"], "--agent_options needs a JSON object"),
    ],
)
def test_an_option_needs_a_value(args, expected):
    with pytest.raises(cli.UsageError, match=expected):
        cli.parse_overrides(cli.load_config("tiny_calculator"), args)


def test_a_configuration_names_a_taskset_by_its_class():
    cfg = cli.load_config("tiny_calculator")
    with pytest.raises(ConfigError, match="'verifiers:gsm8k': is a name for the command line. Copy the source that"):
        cli.parse(["train", "tiny_calculator", "--data.environments.0.dataset", "verifiers:gsm8k"], BY_NAME)
    assert cfg.data.environments[0].dataset != "verifiers:gsm8k"


def test_a_missing_extra_is_named_with_the_command_that_installs_it(folder, monkeypatch):
    monkeypatch.setattr(verifiers.importlib.util, "find_spec", lambda name: None)
    for options in (verifiers.Tasks, verifiers.rollout.check_options):
        with pytest.raises(ValueError, match="verifiers is not installed: `make install EXTRAS=verifiers`"):
            options(taskset="gsm8k")


def test_a_dry_run_loads_the_agent_and_the_environment(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    own = ("grpo", "--model", "model", "--gpus", "0", "--data", "train.jsonl", "--dry-run", "--agent")
    status, output, _ = run(capsys, *own, "play.py:late", "--agent_options.bonus", "0.5")
    assert status == 0 and "agent_options={'bonus': 0.5}" in output and "81 rows" in output
    for agent, args, expected in (
        ("play.py:late", ["--agent_options.bonsu", "1"], "play.py:late: partial has no option 'bonsu'"),
        ("play.py:blocking", [], "play.py:blocking: print is not async"),
    ):
        status, _, errors = run(capsys, *own, agent, *args)
        assert status == 2 and expected in errors and "Traceback" not in errors
        assert len(errors.splitlines()) == 1, errors
    model = ("train", "grpo_qwen3_1_7b", "--model.random", "True", "--dry-run")  # neither a tokenizer nor weights
    status, _, errors = run(capsys, *model, "--data.environments.0.dataset", "env:no_module:Tasks")
    assert status == 2 and "dataset = 'env:no_module:Tasks': there is no module 'no_module'" in errors, errors
    (folder / "my_tasks.py").write_text("class Tasks:\n    def __init__(self):\n        raise KeyError('server')\n")
    monkeypatch.syspath_prepend(str(folder))
    status, _, errors = run(capsys, *model, "--data.environments.0.dataset", "env:my_tasks:Tasks")
    assert status == 2 and "environment 'env:my_tasks:Tasks' with options {}: KeyError: 'server'" in errors, errors


def test_an_evaluation_loads_the_agents_before_it_starts(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(evaluate, "check", lambda evaluation: None)
    monkeypatch.setattr(evaluate, "plan", lambda cfg, options: SimpleNamespace(cfg=cfg))
    agent = ("--data.environments.0.agent", "play.py:blocking")
    monkeypatch.delenv("FP8RL_CHECKPOINT_CHECKED", raising=False)
    assert cli.main(COMMANDS, ["eval", "tiny_calculator", *agent]) == 2
    assert "play.py:blocking: print is not async" in capsys.readouterr().err
