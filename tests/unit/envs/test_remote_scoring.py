"""Score servers and who asks them: right scores, scorers that misbehave, servers that die, come back, or never were."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from megatron_fp8rl import cli
from megatron_fp8rl.config import DataConfig, EnvironmentConfig
from megatron_fp8rl.envs import remote_scoring
from megatron_fp8rl.envs.remote_scoring import RemoteScorePool, build_scorer
from megatron_fp8rl.envs.score_server import serving
from megatron_fp8rl.envs.scoring import CompletionScorer, ScorePool, ScorePoolError
from megatron_fp8rl.net import auth
from megatron_fp8rl.net.endpoint import Endpoint, scorer_path
from megatron_fp8rl.types import Prompt
from tests.helpers.processes import is_running, until
from tests.helpers.scoring import score_all

HERE = Path(__file__).parent
JUDGE = EnvironmentConfig(dataset="misbehaving:Judge", options={"bonus": 0.5})
PROMPT = Prompt(prompt_id="judge/3", environment="judge", token_ids=(1, 2), text="?", answer="3", metadata={"a": [1]})
DEADLINE_S = 120.0
SCORE_S = 4.0  # for one score: what takes milliseconds has to fit on a busy machine
WAIT_S = 4.0  # for servers that never come, after each was asked once


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


@contextlib.contextmanager
def server(run_dir: Path, index: int, scorer: CompletionScorer, *, token: str = "secret") -> Iterator[Path]:
    """A score server in a thread of this process; its endpoint file."""
    with serving(scorer, "127.0.0.1", token) as url:
        path = scorer_path(run_dir, index)
        Endpoint.announce(path, name=path.stem, url=url, pid=os.getpid(), token=token)
        yield path


def judges(**changes) -> ScorePool:
    return ScorePool(**{"environments": {"judge": JUDGE}, "num_workers": 1, "deadline_s": SCORE_S} | changes)


def asking(*paths: Path, wait_s: float = DEADLINE_S) -> RemoteScorePool:
    return RemoteScorePool(paths, num_workers=1, deadline_s=SCORE_S, wait_s=wait_s)


def scores(pool: CompletionScorer, *texts: str, prompt: Prompt = PROMPT) -> list:
    return score_all(pool, [(prompt, text) for text in texts])


@pytest.mark.slow
def test_servers_score_as_a_pool_of_this_host_does(tmp_path):
    texts = ["3", "4", "x" * 300_000, "sleep:60", "regex", "crash", "raise:bad luck", "nan", "print", "3"]
    with judges() as local:
        expected = scores(local, *texts)
        with server(tmp_path, 0, local) as path, asking(path) as remote:
            found = scores(remote, *texts)
    # Process numbers and the like apart, the reasons are those of the pool behind the server.
    assert found == expected
    assert [status for _, status, *_ in found].count("score_failed") == 5 and found[-1] == (1.5, "scored", "", {})


def test_completions_go_to_the_server_with_the_fewest_under_way(tmp_path):
    with (
        judges(deadline_s=30.0) as one,
        judges(deadline_s=30.0) as two,
        server(tmp_path, 0, one) as first,
        server(tmp_path, 1, two) as second,
        asking(first, second) as pool,
    ):
        scores(pool, *["3"] * 8)  # both have been found
        until(lambda: not any(one.problem for one in pool._servers), "both servers")
        sleeping, beside = scores(pool, "sleep:2", "pid")
        [alone] = scores(pool, "pid")
        assert sleeping == (0.5, "scored", "", {}) and beside[0] != alone[0], "the first was busy, and then was not"


def test_only_the_token_of_the_file_is_let_in(tmp_path):
    with judges() as scorer, server(tmp_path, 0, scorer) as path:
        known = Endpoint.read(path)
        body = json.dumps({"prompt": {}, "text": "3"})
        refused = {"error": "the token of this score server is missing or wrong"}
        assert request(known, "POST", "/score", body, {}) == (401, refused)
        assert request(known, "GET", "/health", None, auth.headers("guess")) == (401, refused)
        assert request(known, "GET", "/health", None, auth.headers("secret")) == (200, {})
        assert request(known, "GET", "/", None, auth.headers("secret"))[0] == 404
        status, answer = request(known, "POST", "/score", body, auth.headers("secret"))
        assert status == 400 and "token_ids" in answer["error"]
        replace(known, token="another").write(path)
        with asking(path, wait_s=WAIT_S) as pool, pytest.raises(ScorePoolError) as caught:
            scores(pool, "3")
        refuses = re.escape(f"score-0 on {known.host} refuses with status 401")
        assert re.search(rf"score server has answered for \d+ s: {refuses}", str(caught.value))


def request(endpoint: Endpoint, method: str, path: str, body: str | None, headers: dict) -> tuple[int, dict]:
    connection = http.client.HTTPConnection(urlsplit(endpoint.url).netloc, timeout=300)
    connection.request(method, path, body, headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def test_nobody_there_is_an_error_that_names_whom_it_waited_for(tmp_path):
    gone = Endpoint(name="score-1", url="http://127.0.0.1:9", host="node7", pid=1, incarnation=1, log="", token="x")
    gone.write(scorer_path(tmp_path, 1))
    with asking(scorer_path(tmp_path, 0), scorer_path(tmp_path, 1), wait_s=WAIT_S) as pool:
        with pytest.raises(ScorePoolError) as caught:
            scores(pool, "3")
    missing, logs = re.escape(str(scorer_path(tmp_path, 0))), re.escape(f"{tmp_path}/logs/score-*.log")
    assert re.match(
        rf"no score server has answered for \d+ s: score-0 has no endpoint file {missing}; score-1 on node7 does not "
        r"answer at http://127.0.0.1:9 \(ConnectionRefusedError: .*\)\. "
        rf"Check {logs}, or raise rollout.start_deadline_s$",
        str(caught.value),
    )


def test_a_server_may_come_after_the_completion(tmp_path):
    with asking(scorer_path(tmp_path, 0)) as pool, judges() as scorer:
        asked = pool.submit(PROMPT, "3")
        time.sleep(1.0)
        assert not asked.done()
        with server(tmp_path, 0, scorer):
            assert asked.result(DEADLINE_S) == (1.5, "scored", "", {})


class Falling(CompletionScorer):
    """Ends the connection without an answer, as a server that dies does."""

    def __init__(self, times: int, scorer: CompletionScorer) -> None:
        self.times = times
        self.scorer = scorer

    def submit(self, prompt, text):
        self.times -= 1
        if self.times >= 0:
            raise ConnectionAbortedError
        return self.scorer.submit(prompt, text)

    def close(self) -> None:
        pass


def test_a_completion_that_ends_servers_fails_alone(tmp_path):
    with judges() as scorer:
        falling = Falling(2, scorer)
        with server(tmp_path, 0, falling) as path, asking(path) as pool:
            assert scores(pool, "3") == [(1.5, "scored", "", {})], "two servers may be lost over it"
            falling.times = 3
            [(reward, status, detail, _)] = scores(pool, "3")
            assert (reward, status) == (0.0, "score_failed")
            assert re.match(r"3 score servers ended, or did not answer, over it: score-0 on .*, score-0 on ", detail)
            assert scores(pool, "3") == [(1.5, "scored", "", {})]


def test_a_server_that_can_score_nothing_is_named_with_its_reason(tmp_path):
    broken = {"judge": EnvironmentConfig(dataset="misbehaving:Broken")}
    with judges(environments=broken) as scorer, server(tmp_path, 0, scorer) as path, asking(path) as pool:
        with pytest.raises(ScorePoolError, match=r"score-0 on .*: prompt judge/3: .*OSError: no licence server"):
            scores(pool, "3")
        with pytest.raises(ScorePoolError, match=r"prompt other/1: no environment 'other' \(there are: judge\)"):
            scores(pool, "3", prompt=replace(PROMPT, prompt_id="other/1", environment="other"))


def test_a_silent_server_is_left_after_its_deadline(tmp_path, monkeypatch):
    """It listens, and answers nothing: a host that hangs."""
    monkeypatch.setattr(remote_scoring, "START_DEADLINE_S", 0.0)
    monkeypatch.setattr(remote_scoring, "_ANSWER_MARGIN_S", 0.0)
    with judges() as scorer, server(tmp_path, 0, Hanging()) as first, server(tmp_path, 1, scorer) as second:
        assert scores(scorer, "3") == [
            (1.5, "scored", "", {})
        ]  # its worker has started: what is timed is the answer alone
        with asking(first, second) as pool:
            assert scores(pool, *["3"] * 3) == [(1.5, "scored", "", {})] * 3


class Hanging(CompletionScorer):
    def submit(self, prompt, text):
        threading.Event().wait(60.0)
        raise ConnectionAbortedError

    def close(self) -> None:
        pass


def test_close_interrupts_and_refuses(tmp_path):
    with judges(deadline_s=60.0) as scorer, server(tmp_path, 0, scorer) as path:
        pool = asking(path)
        assert scores(pool, "3") == [(1.5, "scored", "", {})]
        asked = pool.submit(PROMPT, "sleep:50")
        until(lambda: any(one.num_running for one in pool._servers), "the request")
        started_s = time.monotonic()
        pool.close()
        pool.close()
        assert asked.result(0)[1] == "score_failed" and time.monotonic() - started_s < 45
        with pytest.raises(ScorePoolError, match="closed"):
            pool.submit(PROMPT, "3")


def test_the_configuration_chooses_who_scores(tmp_path):
    cfg = cli.load_config("tiny_qwen3_moe")
    cfg = replace(cfg, data=DataConfig(num_score_workers=1), output_dir=str(tmp_path))
    with build_scorer(cfg) as pool:
        assert isinstance(pool, ScorePool)
    cfg = replace(cfg, data=replace(cfg.data, score_servers=2), rollout=replace(cfg.rollout, start_deadline_s=WAIT_S))
    missing = r"scorers/score-0.json; .*scorers/score-1.json"
    with build_scorer(cfg) as pool, pytest.raises(ScorePoolError, match=missing):
        scores(pool, "3")


# ---- as processes

# An agent that can be killed, above the real program.
AGENT = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-m', *sys.argv[1:]]).returncode)"


@contextlib.contextmanager
def process(path: Path, incarnation: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """A score server as agents start it: the process of its agent."""
    words = ("misbehaving:judged", "--server", "0", "--endpoint", str(path))
    environment = os.environ | {"LAUNCH_ADDRESS": "127.0.0.1", "LAUNCH_INCARNATION": str(incarnation)}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, sys.path)])
    command = [sys.executable, "-c", AGENT, "megatron_fp8rl", "score_server", *words]
    agent = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        until(lambda: (found := Endpoint.read(path)) is not None and found.incarnation == incarnation, f"{path}")
        yield agent
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait(DEADLINE_S)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_a_killed_server_costs_no_score_once_it_is_started_again(tmp_path):
    path, prompt = scorer_path(tmp_path, 0), replace(PROMPT, environment="misbehaving:Judge")
    with asking(path) as pool:
        with process(path, 1):
            assert scores(pool, "3", prompt=prompt) == [(1.0, "scored", "", {})]
            asked = pool.submit(prompt, "sleep:5")
            until(lambda: any(one.num_running for one in pool._servers), "the request")
            os.kill(Endpoint.read(path).pid, signal.SIGKILL)
        with process(path, 2):
            assert asked.result(DEADLINE_S) == (0.0, "scored", "", {})
            assert scores(pool, "3", prompt=prompt) == [(1.0, "scored", "", {})]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["agent", "asked"])
def test_a_server_ends_with_its_agent_and_when_asked(end, tmp_path):
    path = scorer_path(tmp_path, 0)
    with process(path, 2001) as agent:
        endpoint = Endpoint.read(path)
        assert (endpoint.name, len(endpoint.token) > 30) == ("score-0", True)
        assert endpoint.url.startswith("http://127.0.0.1:") and oct(path.stat().st_mode)[-3:] == "600"
        workers = children(endpoint.pid)
        assert len(workers) == 1
        os.kill(endpoint.pid, signal.SIGUSR1)  # a warning for somebody else
        if end == "agent":
            agent.kill()
        else:
            os.kill(endpoint.pid, signal.SIGTERM)
            assert agent.wait(DEADLINE_S) == 0
        until(lambda: not any(map(is_running, [endpoint.pid, *workers])), "the end of the server and its workers")
        assert not path.exists()
