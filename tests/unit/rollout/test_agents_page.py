"""docs/agents.md: its agents are run as written, and what it names exists."""

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from megatron_fp8rl.config import EnvironmentConfig, SamplingConfig, SessionConfig
from megatron_fp8rl.observe.metrics import meaning
from tests.helpers.sessions import TOKENIZER, Engine, config, play, prompt

PAGE = (Path(__file__).parents[3] / "docs" / "agents.md").read_text()


def files() -> dict[str, str]:
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL)
    return dict(blocks)


@pytest.mark.parametrize("name", ["sums.py", "by_url.py"])
def test_the_agents_of_the_page(name, tmp_path):
    path = tmp_path / name
    path.write_text(files()[name])
    engine = Engine(lambda text: "2+3" if text.endswith("=") else "5")
    cfg = config(f"{path}:rollout")
    if name == "sums.py":
        (source,) = cfg.data.environments
        source = replace(source, agent_options={"bonus": 0.25})
        cfg = replace(cfg, data=replace(cfg.data, environments=(source,)))
    (rollout,) = play(cfg, prompt(), engines=[engine])
    assert rollout.status == "scored", rollout.detail
    assert rollout.reward == (1.25 if name == "sums.py" else 1.0)
    assert rollout.reward_parts == ({"answer": 1.0, "short": 0.25} if name == "sums.py" else {})
    assert TOKENIZER.decode(rollout.branches[0].token_ids) == "<bos>2+3=2+3<eos>55<eos>"


def test_the_fields_and_metrics_that_the_page_names_exist():
    known = {f"session.{one.name}" for one in fields(SessionConfig)} | {
        f"sampling.{one.name}" for one in fields(SamplingConfig)
    }
    for name in re.findall(r"`(?:--)?((?:session|sampling)\.\w+)", PAGE):
        assert name in known | {"session.messages", "session.base_url", "session.api_key", "session.finish_reason"} or (
            re.search(rf"`(?:await )?{re.escape(name)}\(", PAGE)
        ), name
    for key in re.findall(r"`((?:session|rollout)/[\w/]+)`", PAGE):
        assert meaning(key), key
    block = re.search(r"```python\n(EnvironmentConfig\(.*?)```", PAGE, re.DOTALL)[1]
    assert eval(block).agent_options == {"bonus": 0.1} and EnvironmentConfig


@pytest.mark.parametrize(
    ("moves", "trained", "reward"),
    [("331", "31", 1.0), ("3211", "31", 0.0), ("9", "9", 0.0), ("39", "3", 1.0), ("33x", "3x", 0.0)],
)
def test_a_game_of_two_of_whom_one_is_trained(moves, trained, reward):
    """The session moves first, third, ...; who takes the last of 7 wins, and who breaks the rules loses."""
    turns = iter(moves)
    cfg = config("megatron_fp8rl.envs.example_agents:nim")
    (rollout,) = play(cfg, prompt(), engines=[Engine(lambda text: next(turns))])
    assert "".join(completion.text for completion in rollout.completions) == trained and rollout.reward == reward


def test_a_program_in_the_sandbox_may_be_asked_for():
    from megatron_fp8rl.envs import sandbox

    if sandbox.problem():
        pytest.skip(sandbox.problem())
    engine = Engine(lambda text: "```python\nprint(5)" if text.endswith("=") else "5")
    engine.sampling = replace(engine.sampling, max_tokens=32)
    cfg = config("megatron_fp8rl.envs.example_agents:with_python")
    cfg = replace(cfg, sampling=replace(cfg.sampling, max_completion_tokens=32))
    (rollout,) = play(cfg, prompt(), engines=[engine])
    assert rollout.reward == 0.75 and [s.text for s in rollout.branches[0].segments][2:] == ["5\n", "5"]
