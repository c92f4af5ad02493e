"""Sessions of agents against engines in memory: what is trained, what goes wrong, and that it costs one session.

The workers are real processes.
"""

import asyncio
import contextlib
import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import fields, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest
from openai import OpenAI

from megatron_fp8rl.config import EnvironmentConfig, RunConfig, SamplingConfig, SessionConfig
from megatron_fp8rl.envs.environment import EnvironmentSpecError
from megatron_fp8rl.envs.libraries.nemo_gym import PARAMETERS, Rows
from megatron_fp8rl.envs.scorer_process import ScorePoolError
from megatron_fp8rl.observe.metrics import meaning
from megatron_fp8rl.rollout.agents import agent_process
from megatron_fp8rl.rollout.agents.agent_pool import AgentPool
from megatron_fp8rl.rollout.agents.requests import Requests
from megatron_fp8rl.types import Completion, Context, Prompt
from tests.helpers.processes import until
from tests.helpers.sessions import CHAT, TOKENIZER, Engine, Fleet, Scorer, config, play, prompt

MARK = "MEGATRON_FP8RL_TEST_OF_AGENTS"  # agents inherit such variables


def descendants(mark: str) -> list[psutil.Process]:
    """Agent workers of this test, and what they have started."""
    result = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.pid != os.getpid():
                result.append(process)
    return [item for item in result if item.is_running() and item.status() != psutil.STATUS_ZOMBIE]


def test_two_turns_and_a_tool_are_one_trajectory():
    engine = Engine(lambda text: "2+3" if text.endswith("=") else "5")
    (rollout,) = play(config("calculator"), prompt(), engines=[engine])
    assert (rollout.reward, rollout.status, rollout.detail) == (1.0, "scored", "")
    (branch,) = rollout.branches
    kinds = [type(segment).__name__ for segment in branch.segments]
    assert kinds == ["Context", "Completion", "Context", "Completion"]
    assert TOKENIZER.decode(branch.token_ids) == "<bos>2+3=2+3<eos>55<eos>"
    assert [s.text for s in branch.segments] == ["2+3=", "2+3", "5", "5"] and branch.segments[2].role == "tool"
    # The engine was given the very ids that are trained, and each turn has a seed of its own.
    assert engine.prompts[1] == branch.token_ids[: -len(branch.segments[-1].token_ids)]
    assert len(set(engine.seeds)) == 2 and engine.seeds[0] == rollout.seed
    assert set(rollout.seconds) == {"model", "tools", "queue"} and rollout.seconds["model"] > 0


def test_rewards_by_turn_and_by_part_and_by_the_source():
    (rollout,) = play(config("by_turn"), prompt(values=[0.5, -0.25]))
    assert rollout.turn_rewards == (0.5, -0.25) and rollout.reward == 0.5 and rollout.reward_parts == {"format": 0.25}
    (rollout,) = play(config("unscored"), prompt())
    assert rollout.reward == 0.75 and rollout.status == "scored"


def test_an_opponent_is_sampled_and_not_trained():
    engine = Engine(lambda text: "o" if text.startswith("x") else "m")
    (rollout,) = play(config("player"), prompt(), engines=[engine])
    (branch,) = rollout.branches
    assert len(engine.prompts) == 4 and len(set(engine.seeds)) == 4
    assert [(type(s).__name__, s.text) for s in branch.segments[1:]] == [
        ("Completion", "m"),
        ("Context", "o"),
        ("Completion", "m"),
    ]


@pytest.mark.parametrize("agent", ["endless", "endless_by_url"])
@pytest.mark.parametrize("limits", [{"max_turns": 3}, {"max_tokens": 60}])
def test_an_agent_that_never_stops_ends_at_its_limit(limits, agent):
    (rollout,) = play(config(agent, **limits), prompt())
    assert rollout.status == "truncated" and "is at its limit" in rollout.detail
    assert next(iter(limits)) in rollout.detail and rollout.reward == 0.0
    assert len(rollout.completions) == 3 if "max_turns" in limits else len(rollout.branches[0].token_ids) <= 60


@pytest.mark.slow
def test_ten_thousand_requests_cost_their_session_only():
    engine = Engine(lambda text: "5")
    rollouts = play(config("many", max_turns=4), prompt(0), prompt(1), engines=[engine])
    assert [rollout.status for rollout in rollouts] == ["scored"] * 2 and len(engine.prompts) <= 8


def test_a_replica_that_dies_in_mid_turn_costs_nothing():
    first, second = (Engine(lambda text: "2+3" if text.endswith("=") else "5", name=name) for name in "ab")
    first.dies_at = 2
    (rollout,) = play(config("calculator"), prompt(), engines=[first, second])
    assert rollout.reward == 1.0 and len(first.prompts) == 2
    assert second.prompts == first.prompts[1:], "the session goes on elsewhere, from its ids"


def test_the_turns_of_a_session_go_to_one_replica():
    engines = [Engine(lambda text: "2+3" if text.endswith("=") else "5", name=name) for name in "abc"]
    play(config("calculator"), *(prompt(i, f"{i}+3=") for i in range(9)), engines=engines)
    for engine in engines:
        firsts = [ids for ids in engine.prompts if ids[-1] == TOKENIZER.convert_tokens_to_ids("=")]
        assert len(firsts) == 3 and len(engine.prompts) == 6
        assert all(any(ids[: len(first)] == first for ids in engine.prompts if ids != first) for first in firsts)


FAULTS = {
    "raises": ("score_failed", "the agent raised ValueError: the environment's server is gone"),
    "crashes": ("score_failed", "the agent's process ended with exit code -11"),
    "exits": ("score_failed", "the agent's process ended with exit code 7"),
    "blocks": ("score_failed", "its event loop was blocked"),
    "waits": ("score_failed", "did not end within 4 s"),
    "hangs in a thread": ("score_failed", "did not end within 4 s"),
    "leaves a process": ("scored", ""),
    "10 MB": ("truncated", "a message of role tool has 10000000 characters"),
    "binary": ("scored", ""),
    "unknown characters": ("score_failed", "the tokenizer does not know '€'"),
    "no number": ("score_failed", "returned 'good', which is not a number"),
    "not a number": ("score_failed", "returned nan"),
    "wrong messages": ("scored", ""),
    "program": ("scored", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_what_goes_wrong_costs_one_session(kind, monkeypatch):
    mark = f"{os.getpid()} {kind}"
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setattr(agent_process, "BLOCKED_S", 3.0)
    monkeypatch.setattr(agent_process, "CANCEL_S", 1.0)
    deadline_s = 4.0 if "did not end" in FAULTS[kind][1] else 60.0
    engine = Engine(lambda text: "5")
    prompts = [prompt(i, kind=kind if i == 2 else "works") for i in range(5)]
    rollouts = play(config("faulty", deadline_s=deadline_s), *prompts, engines=[engine])
    status, detail = FAULTS[kind]
    assert rollouts[2].status == status and detail in rollouts[2].detail, rollouts[2].detail
    assert [one.status for i, one in enumerate(rollouts) if i != 2] == ["scored"] * 4
    assert all(one.reward == 1.0 for i, one in enumerate(rollouts) if i != 2)
    until(lambda: not descendants(mark), "what agents had started to end")


@pytest.mark.slow
def test_two_thousand_sessions_leave_nothing(monkeypatch):
    """No processes, files, tasks or growing memory; one session in a hundred fails."""
    mark = f"{os.getpid()} 2000"
    monkeypatch.setenv(MARK, mark)
    kinds = ["raises", "exits", "10 MB", "wrong messages"]
    me = psutil.Process()

    async def run() -> list[tuple[int, int, int]]:
        pool = AgentPool(config("faulty"), Requests(Fleet(Engine(lambda text: "5"))), Scorer(), CHAT)
        seen = []
        for part in range(4):
            prompts = [prompt(i, kind=kinds[i // 100 % 4] if i % 100 == 7 else "works") for i in range(500)]
            rollouts = await asyncio.gather(*(pool.run_session(one, i, i) for i, one in enumerate(prompts)))
            bad = [rollout for rollout in rollouts if rollout.status == "score_failed"]
            assert len(bad) == 3, [item.detail for item in bad]  # raises, exits, raises again; the others are answered
            seen.append((me.num_fds(), len(asyncio.all_tasks()), me.memory_info().rss >> 20))
            assert len(descendants(mark)) <= 2, part
        await pool.close()
        return seen

    seen = asyncio.run(run())
    assert seen[-1][0] <= seen[0][0] + 4 and seen[-1][1] <= seen[0][1] + 4, seen
    assert seen[-1][2] - seen[1][2] < 60, seen
    until(lambda: not descendants(mark), "what agents had started to end")


def test_an_agent_that_cannot_be_loaded_ends_the_run():
    with pytest.raises(ScorePoolError, match="session_agents.py:nothing cannot be loaded: .* has no 'nothing'"):
        play(config("nothing"), prompt())
    with pytest.raises(ScorePoolError, match=r"not_a_coroutine is not async. Write async def rollout\(session, row\)"):
        play(config("not_a_coroutine"), prompt())


def test_rows_without_rewards_take_those_of_the_agent_and_none_is_an_error(tmp_path):
    def of_rows(agent: str) -> RunConfig:
        cfg = config(agent)
        source = replace(cfg.data.environments[0], dataset=str(rows_file(tmp_path, "2+3=")), options={})
        return replace(cfg, data=replace(cfg.data, environments=(source,)))

    def played(agent: str, **row):
        (rollout,) = play(of_rows(agent), replace(prompt(**row), environment="rows"))
        return rollout

    assert played("calculator").reward == 1.0
    rollout = played("turns_only", values=[0.5, -0.25])
    assert (rollout.status, rollout.reward) == ("scored", 0.25), rollout.detail
    rollout = played("unscored")
    assert rollout.status == "score_failed" and "the agent returned None, and nothing else scores" in rollout.detail


def test_a_rewritten_history_starts_a_branch():
    from tests.helpers.chat_templates import format_of

    chat = format_of("qwen3")
    engine = Engine(lambda told: "<think>a</think>b", chat=chat)
    (rollout,) = play(config("by_turn"), prompt(values=[1.0, 2.0]), engines=[engine], chat=chat)
    assert len(rollout.branches) == 2
    assert rollout.turn_rewards == (1.0, 2.0)
    sampled = [segment for branch in rollout.branches for segment in branch.segments if isinstance(segment, Completion)]
    assert len(sampled) == 2, "each sampled token is sampled in one branch"
    told = [chat.tokenizer.decode(branch.token_ids) for branch in rollout.branches]
    assert told[1] == (
        "<|im_start|>user\n2+3=<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\n.<|im_end|>\n<|im_start|>assistant\n<think>a</think>b<|im_end|>"
    )
    assert all(isinstance(branch.segments[0], Context) for branch in rollout.branches)


class AgentServer(BaseHTTPRequestHandler):
    """One turn with the model server's fixed URL and key; rewards the right sum."""

    def do_POST(self) -> None:
        row = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert self.path == "/run"
        parameters = row[PARAMETERS]
        client = OpenAI(base_url=self.server.policy_url, api_key="one for all", max_retries=0)
        extra_body = json.loads(parameters["metadata"]["extra_body"])
        answer = client.chat.completions.create(model="policy", messages=parameters["input"], extra_body=extra_body)
        text = answer.choices[0].message.content
        actual = {"reward": float(text == row["sum"])} if row["sum"] else {"error": "no reward"}
        content = json.dumps(row | actual).encode()
        self.send_response(500 if row["sum"] == "breaks" else 200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), AgentServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def rows_file(folder: Path, *sums: str) -> Path:
    path = folder / "rows.jsonl"
    message = {"role": "user", "content": "2+3="}
    rows = [{PARAMETERS: {"input": [message], "metadata": {"extra_body": '{"seed": 1}'}}, "sum": item} for item in sums]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def of_rows(server, file: Path) -> RunConfig:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    server.policy_url = f"http://127.0.0.1:{port}/v1"
    cfg = config("megatron_fp8rl.envs.libraries.nemo_gym:rollout", endpoint=f"127.0.0.1:{port}")
    (source,) = cfg.data.environments
    source = replace(source, agent_options={"file": str(file), "url": f"http://127.0.0.1:{server.server_port}/"})
    return replace(cfg, data=replace(cfg.data, environments=(source,)))


def test_rows_are_problems(tmp_path):
    file = tmp_path / "rows.jsonl"
    parts = [{"type": "input_text", "text": "2+"}, {"type": "input_text", "text": "3="}]
    inputs = ["1+1=", [{"role": "system", "content": "Add."}, {"role": "user", "content": parts}]]
    file.write_text("\n".join(json.dumps({PARAMETERS: {"input": input_}}) for input_ in inputs))
    first, second = (Rows(file=str(file)).make_problem(index) for index in (2, 1))
    assert first.messages == ({"role": "user", "content": "1+1="},) and first.metadata == {"row": 0}
    assert second.messages == ({"role": "system", "content": "Add."}, {"role": "user", "content": "2+3="})
    assert second.question == "2+3="
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "1+1="}')
    with pytest.raises(EnvironmentSpecError, match=r"other.jsonl:1 has no responses_create_params"):
        Rows(file=str(other))


def test_runs_are_rewarded_and_their_turns_are_trained(server, tmp_path):
    cfg = of_rows(server, rows_file(tmp_path, "5", "6", "", "breaks"))
    prompts: list[Prompt] = [prompt(number, row=number) for number in range(4)]
    right, wrong, *lost = play(cfg, *prompts, engines=[Engine(lambda text: "5")])
    assert (right.reward, wrong.reward) == (1.0, 0.0), right.detail + wrong.detail
    for played in (right, wrong):
        (branch,) = played.branches
        assert [type(segment) is Completion for segment in branch.segments] == [False, True]
        prompt_ids = played.prompt.token_ids
        assert branch.segments[1].text == "5" and branch.token_ids[: len(prompt_ids)] == prompt_ids
    assert [rollout.status for rollout in lost] == ["score_failed"] * 2
    assert "answered without a reward" in lost[0].detail and "status 500" in lost[1].detail


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
    known = {f"session.{field_.name}" for field_ in fields(SessionConfig)} | {
        f"sampling.{field_.name}" for field_ in fields(SamplingConfig)
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
    """The session moves first, third, ...; taking the last of 7 wins, and breaking the rules loses."""
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


def _with_memory(cfg: RunConfig, gib: float, num_workers: int) -> RunConfig:
    return replace(
        cfg,
        scoring=replace(cfg.scoring, memory_gib=gib),
        session=replace(cfg.session, num_workers=num_workers, max_running=4),
    )


@pytest.mark.slow
def test_an_agent_that_leaks_costs_restarts_of_its_worker_and_no_session(caplog):
    """Twelve sessions keep 300 MiB each, and a worker may use 2 GiB."""
    cfg = _with_memory(config("faulty"), 2.0, num_workers=1)
    rollouts = play(cfg, *(prompt(i, kind="leaks", mib=300) for i in range(12)))
    assert [one.status for one in rollouts] == ["scored"] * 12, [one.detail for one in rollouts]
    assert "has filled most of scoring.memory_gib" in caplog.text or "is lost and played again" in caplog.text


@pytest.mark.slow
def test_sessions_that_a_full_worker_loses_are_named_and_played_again(caplog):
    """Four sessions at once exceed the limit together, and none of them alone."""
    cfg = _with_memory(config("faulty"), 1.5, num_workers=1)
    rollouts = play(cfg, *(prompt(i, kind="leaks", mib=500) for i in range(4)))
    assert [one.status for one in rollouts] == ["scored"] * 4, [one.detail for one in rollouts]
    lines = [line for line in caplog.messages if "is lost and played again" in line]
    assert lines and all(re.search(r"session chain_sum/\d#\d is lost .* no memory, threads or files", x) for x in lines)


@pytest.mark.slow
def test_a_session_that_needs_more_than_the_limit_fails_by_name(caplog):
    cfg = _with_memory(config("faulty"), 1.5, num_workers=1)
    rollouts = play(cfg, prompt(0, kind="leaks", mib=4000), *(prompt(i, kind="works") for i in range(1, 6)))
    assert [one.status for one in rollouts] == ["score_failed"] + ["scored"] * 5, [one.detail for one in rollouts]
    assert "no memory, threads or files left: the agent raised MemoryError" in rollouts[0].detail
    assert "session chain_sum/0#0 is lost" in caplog.text
