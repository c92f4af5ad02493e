"""The score pool against scorers that hang, crash, raise, print and lie."""

import asyncio
import resource
import threading
import time
from pathlib import Path

import psutil
import pytest

from megatron_fp8rl.config import DataConfig, EnvironmentConfig, RewardConfig, ScoringConfig
from megatron_fp8rl.envs import scorer_process
from megatron_fp8rl.envs.environment import build_environment
from megatron_fp8rl.envs.scoring import ScorePool, ScorePoolError, keys_of
from megatron_fp8rl.types import Prompt
from tests.helpers.processes import is_running, until
from tests.helpers.scoring import score_all

JUDGE = EnvironmentConfig(dataset="misbehaving:Judge", options={"bonus": 0.5})
DEADLINE_S = 4.0  # of a score: what takes milliseconds has to fit on a busy machine
PROMPT = Prompt(prompt_id="judge/3", environment="judge", token_ids=(1,), text="?", answer="3")


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def pool():
    with ScorePool({"judge": JUDGE}, num_workers=1, deadline_s=DEADLINE_S) as pool:
        yield pool


def score(pool, text):
    return asyncio.run(pool.score(PROMPT, text))


def test_scores_and_keeps_its_worker(pool):
    assert score(pool, "3") == (1.5, "scored", "", {})
    assert score(pool, "4") == (0.5, "scored", "", {})
    assert score(pool, "pid") == score(pool, "pid")
    assert score(pool, "x" * 300_000) == (0.5, "scored", "", {})  # more than a pipe holds


@pytest.mark.parametrize(
    ("text", "detail"),
    [
        ("sleep:60", "did not answer within 4 s"),
        ("regex", "did not answer within 4 s"),
        ("crash", "exit code -6"),
        ("exit", "exit code 7: last words"),
        ("raise:bad luck", "RuntimeError: bad luck"),
        ("nan", "returned {'reward': nan}"),
        ("huge", "returned {'reward': 1e+308}"),
    ],
)
def test_a_failing_scorer_costs_one_score(pool, text, detail):
    assert score(pool, "3")[1] == "scored"
    started = time.monotonic()
    reward, status, reason, _ = score(pool, text)
    assert (reward, status) == (0.0, "score_failed")
    assert reason.startswith("scorer of judge") and detail in reason
    assert time.monotonic() - started < 50, "the scorer was not waited for"
    assert score(pool, "3") == (1.5, "scored", "", {})


def test_a_scorer_killed_from_outside_is_asked_once_more(pool, tmp_path):
    assert score(pool, f"kill:{tmp_path / 'once'}") == (0.5, "scored", "", {})
    reward, status, reason, _ = score(pool, f"kill:{tmp_path / 'always'}")
    assert (reward, status) == (0.0, "score_failed") and "exit code -9" in reason
    assert (tmp_path / "always").read_text().count("asked") == 2
    assert score(pool, "3") == (1.5, "scored", "", {})


def test_a_scorer_stopped_from_outside_is_asked_once_more(pool, tmp_path):
    assert score(pool, f"stop:{tmp_path / 'once'}") == (0.5, "scored", "", {})
    assert (tmp_path / "once").read_text().count("asked") == 2


def test_a_worker_killed_while_it_starts_costs_no_score(tmp_path):
    others = set(psutil.Process().children())

    def kill_new(number):
        """Kill the next ``number`` workers as soon as they start."""
        end = time.monotonic() + 60
        while number and time.monotonic() < end:
            for child in set(psutil.Process().children()) - others:
                others.add(child)
                child.kill()
                number -= 1
            time.sleep(0.002)

    with ScorePool({"judge": JUDGE}, num_workers=1, deadline_s=DEADLINE_S) as pool:
        kill_new(1)
        assert score(pool, "3") == (1.5, "scored", "", {})
        others.update(psutil.Process().children())
        killer = threading.Thread(target=kill_new, args=(2,))
        killer.start()
        # its scorer is killed once with the completion, then twice while it starts
        assert score(pool, f"kill:{tmp_path / 'once'}") == (0.5, "scored", "", {})
        killer.join()
        assert (tmp_path / "once").read_text().count("asked") == 2


def test_what_a_scorer_prints_is_not_a_reply(pool):
    assert score(pool, "print") == (0.5, "scored", "", {})
    assert score(pool, "3") == (1.5, "scored", "", {})


def test_a_scorer_that_forks_answers_once(pool):
    for _ in range(3):
        assert score(pool, "fork") == (0.5, "scored", "", {})
    time.sleep(0.5)
    assert score(pool, "3") == (1.5, "scored", "", {})


def test_what_a_scorer_prints_is_bounded(pool):
    printed = [score(pool, "chatter:3")[0] for _ in range(6)]  # MiB, each time
    assert max(printed) <= (3 + 1 + 3) * 2**20 + 64, "what was printed before is still there"
    assert score(pool, "3") == (1.5, "scored", "", {})


def test_memory_is_limited():
    with ScorePool({"judge": JUDGE}, num_workers=1, deadline_s=DEADLINE_S, memory_gib=1.0) as pool:
        assert "MemoryError" in score(pool, "allocate:2")[2]
        assert score(pool, "allocate:0.1") == (0.5, "scored", "", {})


@pytest.mark.parametrize("text", ["leak:0.15", "leak:0.4", "leak quietly:0.1", "leak files:6000"])
def test_a_scorer_that_leaks_is_restarted_and_every_completion_scored(text, caplog):
    """Files are limited to 20,000 at most, which this test's processes inherit."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(20_000, *limits), limits[1]))
    with ScorePool({"judge": JUDGE}, num_workers=1, deadline_s=DEADLINE_S, memory_gib=1.0) as pool:
        pids, scores = set(), []
        for _ in range(12):
            scores.append(score(pool, text))
            pids.add(score(pool, "pid")[0])
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert scores == [(0.5, "scored", "", {})] * 12
    assert 2 <= len(pids) <= 8
    assert caplog.text.count("keeps memory, threads or files of earlier scores") == 1


def test_a_scorer_that_needs_much_memory_from_the_start_keeps_its_worker():
    with ScorePool({"judge": JUDGE}, num_workers=1, deadline_s=DEADLINE_S, memory_gib=1.0) as pool:
        assert score(pool, "leak:0.7")[1] == "scored"
        assert len({score(pool, "pid")[0] for _ in range(5)}) == 1


def test_a_scorer_sees_no_keys_but_those_that_are_listed(monkeypatch):
    for name in ("WANDB_API_KEY", "JUDGE_KEY", "MINE"):
        monkeypatch.setenv(name, "secret")
    keyed = EnvironmentConfig(dataset="rows.jsonl", rewards=(RewardConfig(options={"key_env": "JUDGE_KEY"}),))
    sources = {"judge": JUDGE}
    assert keys_of([keyed]) == ["JUDGE_KEY"]
    with ScorePool(sources, num_workers=1, deadline_s=DEADLINE_S, variables=("MINE",)) as pool:
        seen = {name: score(pool, f"variable:{name}")[0] for name in ("PATH", "WANDB_API_KEY", "JUDGE_KEY", "MINE")}
    assert {name for name, value in seen.items() if value == 1.0} == {"PATH", "MINE"}


@pytest.mark.parametrize("kind", ["child", "session"])
def test_children_of_a_late_scorer_die_with_it(pool, tmp_path, kind):
    assert score(pool, "3")[1] == "scored"
    assert score(pool, f"{kind}:{tmp_path / 'pid'}")[1] == "score_failed"
    child = int((tmp_path / "pid").read_text())
    until(lambda: not is_running(child), "the end of the child, which sleeps for ten minutes")


def test_batch_keeps_order_and_outlives_failures():
    with ScorePool({"judge": JUDGE}, num_workers=2, deadline_s=DEADLINE_S) as pool:
        texts = ["3", "crash", "4", "sleep:60", *["3"] * 20]
        results = score_all(pool, [(PROMPT, text) for text in texts])
    assert [status for _, status, *_ in results] == [
        "scored",
        "score_failed",
        "scored",
        "score_failed",
        *["scored"] * 20,
    ]
    assert [reward for reward, *_ in results[4:]] == [1.5] * 20


def test_queued_scores_have_the_whole_deadline(pool):
    """Four scores of 1.2 s on one worker with a deadline of 4 s."""
    results = score_all(pool, [(PROMPT, "sleep:1.2")] * 4)
    assert [status for _, status, *_ in results] == ["scored"] * 4


def test_close_interrupts_and_refuses(pool):
    assert score(pool, "3")[1] == "scored"

    async def interrupted():
        task = asyncio.create_task(pool.score(PROMPT, "sleep:60"))
        await asyncio.sleep(0.3)
        pool.close()
        return await task

    assert asyncio.run(interrupted())[1] == "score_failed"
    pool.close()
    with pytest.raises(ScorePoolError, match="closed"):
        score(pool, "3")


def test_a_worker_that_was_ready_long_ago_scores(monkeypatch, pool):
    """The first answer of a slow run comes minutes after the workers started."""
    monkeypatch.setattr(scorer_process, "START_DEADLINE_S", -200.0)  # it passed before the first question
    assert score(pool, "3") == (1.5, "scored", "", {})


def test_environment_that_cannot_be_built_is_an_error_with_its_reason():
    with ScorePool({"judge": EnvironmentConfig(dataset="misbehaving:Broken")}, num_workers=1, deadline_s=1) as pool:
        for _ in range(2):
            with pytest.raises(ScorePoolError, match="cannot build its environments: .*OSError: no licence server"):
                score(pool, "3")


def test_unknown_environment_is_named(pool):
    prompt = Prompt(prompt_id="other/1", environment="other", token_ids=(1,), text="?", answer="")
    with pytest.raises(ScorePoolError, match=r"prompt other/1: no environment 'other' \(there are: judge\)"):
        asyncio.run(pool.score(prompt, "3"))


def test_reasoning_gym_out_of_process_equals_in_process():
    environments = DataConfig().environments
    environment = build_environment(environments[0])
    problem = environment.make_problem(11)
    prompt = Prompt(
        prompt_id="chain_sum/11",
        environment="chain_sum",
        token_ids=(1,),
        text="",
        answer=problem.answer,
        metadata=problem.metadata,
    )
    texts = [
        problem.answer,
        f" {problem.answer}.0\n",
        f"<answer>{problem.answer}</answer>",
        "",
        "12",
        problem.answer + "9",
    ]
    with ScorePool.build(ScoringConfig(num_workers=1), environments) as pool:
        results = score_all(pool, [(prompt, text) for text in texts])
    assert [reward for reward, *_ in results] == [environment.score(prompt, text) for text in texts]
    assert [reward for reward, *_ in results[:4]] == [1.0, 1.0, 1.0, 0.0]
