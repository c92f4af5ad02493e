"""docs/extending.md does what it says: its code trains a policy, from a file outside of the library."""

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fp8rl import cli
from megatron_fp8rl.algo.load_function import load_advantage
from megatron_fp8rl.config import AlgoConfig, ConfigError
from tests.helpers.dist import RankError, run_ranks
from tests.helpers.training import DENSE, make_samples, run_config

PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
NUM_UPDATES = 4
OWN = AlgoConfig(
    loss="my_loss:fading",
    loss_options={"temperature": 0.3},
    advantage="my_loss:against_the_others",
    advantage_options={"scale": 2.0},
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of my_loss.py, on the Python path of this process and its children."""
    name, code = re.search(r"```python\n# (my_loss\.py)\n(.*?)```", PAGE, re.DOTALL).groups()
    (tmp_path / name).write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def learn(folder: str, algo: AlgoConfig, world_size: int) -> list[dict[str, float]]:
    """On a rank: metrics of updates with the configured loss and advantages."""
    import sys

    sys.path.insert(0, folder)
    from megatron_fp8rl.algo.load_function import load_advantage, load_loss
    from megatron_fp8rl.trainer.parallel import Parallel
    from megatron_fp8rl.trainer.policy import Policy
    from tests.helpers.training import make_batch

    cfg = run_config(model=DENSE, algo=algo, world_size=world_size)
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    policy, loss, samples = Policy.build(cfg, parallel), load_loss(algo), make_samples()
    advantages = load_advantage(algo)([float(index % 2) for index in range(len(samples))])
    samples = [
        replace(
            s,
            segments=tuple(segment._replace(advantage=a) if segment.is_trained else segment for segment in s.segments),
        )
        for s, a in zip(samples, advantages, strict=True)
    ]
    batch = policy.with_old_logprobs(make_batch(cfg, parallel.dp_rank, samples))
    return [policy.update(batch, loss) for _ in range(NUM_UPDATES)]


def test_a_loss_and_advantages_of_ones_own_train(folder):
    rows = run_ranks(1, learn, str(folder), OWN, 1)[0]
    assert rows[0]["loss/own_log_ratio/mean"] == 0, "before the first update the policies are equal"
    assert rows[-1]["loss/own_log_ratio/mean"] != 0
    losses = [row["train/loss/mean"] for row in rows]
    assert losses[-1] < losses[0] - 1e-3, "the objective rises on the batch that is trained on"
    assert max(abs(row["loss/own_log_ratio/mean"]) for row in rows) < 0.3


def test_ones_own_loss_is_the_same_on_two_ranks(folder):
    alone, pair = run_ranks(1, learn, str(folder), OWN, 1)[0], run_ranks(2, learn, str(folder), OWN, 2)[0]
    assert [row["train/loss/mean"] for row in pair] == pytest.approx(
        [row["train/loss/mean"] for row in alone], rel=1e-4, abs=1e-6
    )


def test_a_loss_that_is_nan_names_the_field(folder):
    code = "def broken(inputs):\n    return (inputs.trainer_logprobs_T * float('nan')).sum(), {}\n"
    (folder / "my_loss.py").write_text(code)
    with pytest.raises(
        RankError,
        match=r"the loss is nan; the update was not applied.*\n.*sample(.*\n)+"
        "Check the function of --algo.loss = 'my_loss:broken'",
    ):
        run_ranks(
            1,
            learn,
            str(folder),
            replace(OWN, loss="my_loss:broken", loss_options={}, advantage="grpo", advantage_options={}),
            1,
        )


def test_the_command_of_the_page_is_accepted_and_mistakes_in_it_are_not():
    args = re.search(r"python -m megatron_fp8rl (train .*?)```", PAGE, re.DOTALL)[1].replace("\\\n", " ").split()
    commands = {"train": cli.Command(name="train", summary="", run=lambda _: 0)}
    algo = cli.parse(args, commands).cfg.algo
    assert (algo.loss, algo.loss_options) == ("my_loss:fading", {"temperature": 0.3})
    assert algo.advantage == "my_loss:against_the_others"
    actual = load_names(cli, [*args, "--set", "algo.loss_options.heat=1"], commands)
    assert actual == ["--algo.loss_options"]
    assert load_names(cli, [word.replace(":fading", ":fadin") for word in args], commands) == ["--algo.loss"]


def load_names(cli, args, commands) -> list[str]:
    with pytest.raises(ConfigError) as info:
        cli.parse(args, commands)
    return [violation.field for violation in info.value.violations]


def test_advantages_of_the_page_by_hand():
    actual = load_advantage(OWN)([1.0, 0.0, 0.0])
    assert actual == pytest.approx([2.0, -1.0, -1.0]) and math.isclose(sum(actual), 0, abs_tol=1e-12)
