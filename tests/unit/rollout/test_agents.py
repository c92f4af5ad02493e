"""Sessions of agents against engines in memory: what is trained, what goes wrong, and that it costs one session.

The workers are real processes.
"""

import asyncio
import contextlib
import os

import psutil
import pytest

from megatron_fp8rl.envs.scorer_process import ScorePoolError
from megatron_fp8rl.rollout.agents import agent_process
from megatron_fp8rl.rollout.agents.agent_pool import AgentPool
from megatron_fp8rl.rollout.agents.requests import Requests
from megatron_fp8rl.types import Completion, Context
from tests.helpers.processes import until
from tests.helpers.sessions import CHAT, TOKENIZER, Engine, Fleet, Scorer, config, play, prompt

MARK = "MEGATRON_FP8RL_TEST_OF_AGENTS"  # agents inherit such variables


def descendants(mark: str) -> list[psutil.Process]:
    """Agent workers of this test, and what they have started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.pid != os.getpid():
                found.append(process)
    return [one for one in found if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


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
    assert [one.status for one in rollouts] == ["scored"] * 2 and len(engine.prompts) <= 8


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
    """Neither processes, files and tasks, nor memory that grows with them; one in a hundred goes wrong."""
    mark = f"{os.getpid()} 2000"
    monkeypatch.setenv(MARK, mark)
    kinds = ["raises", "exits", "10 MB", "wrong messages"]
    me = psutil.Process()

    async def run() -> list[tuple[int, int, int]]:
        pool = AgentPool(config("faulty"), Requests(Fleet(Engine(lambda text: "5"))), Scorer(), CHAT)
        seen = []
        for part in range(4):
            prompts = [prompt(i, kind=kinds[i // 100 % 4] if i % 100 == 7 else "works") for i in range(500)]
            rollouts = await asyncio.gather(*(pool.play(one, i, i) for i, one in enumerate(prompts)))
            bad = [one for one in rollouts if one.status == "score_failed"]
            assert len(bad) == 3, [one.detail for one in bad]  # raises, exits, raises again; the others are answered
            seen.append((me.num_fds(), len(asyncio.all_tasks()), me.memory_info().rss >> 20))
            assert len(descendants(mark)) <= 2, part
        await pool.close()
        return seen

    seen = asyncio.run(run())
    assert seen[-1][0] <= seen[0][0] + 4 and seen[-1][1] <= seen[0][1] + 4, seen
    assert seen[-1][2] - seen[1][2] < 60, seen
    until(lambda: not descendants(mark), "what agents had started to end")


def test_an_agent_that_cannot_be_loaded_ends_the_run(tmp_path):
    with pytest.raises(ScorePoolError, match="an agent cannot be loaded: RewardError: .*has no function 'nothing'"):
        play(config("nothing"), prompt())
    (rollout,) = play(config("not_a_coroutine"), prompt())
    assert "use async def rollout(session, row)" in rollout.detail


@pytest.mark.parametrize(("policy", "num_branches"), [("fork", 2), ("keep", 1), ("refuse", 1)])
def test_a_rewritten_past_forks_or_is_kept_or_is_refused(policy, num_branches):
    from tests.helpers.chat_templates import format_of

    chat = format_of("qwen3")
    tokenizer, end = chat.tokenizer, chat.tokenizer.convert_tokens_to_ids("<|im_end|>")

    class Thinker(Engine):
        async def generate(self, prompt, n, seed, *, sampling):
            text = "<think>a</think>b"
            ids = (*tokenizer.encode(text, add_special_tokens=False), end)
            return [
                Completion(
                    token_ids=ids,
                    rollout_logprobs=(-1.0,) * len(ids),
                    finish_reason="stop",
                    min_version=0,
                    max_version=0,
                    text=text,
                )
            ]

    cfg = config("by_turn", rewritten_history=policy)
    (rollout,) = play(cfg, prompt(values=[1.0, 2.0]), engines=[Thinker(None)], chat=chat)
    assert len(rollout.branches) == num_branches
    if policy == "refuse":
        assert rollout.status == "score_failed" and "the chat template rewrites what was said before" in rollout.detail
        return
    assert rollout.turn_rewards == (1.0, 2.0)
    sampled = [segment for branch in rollout.branches for segment in branch.segments if isinstance(segment, Completion)]
    assert len(sampled) == 2, "each sampled token is sampled in one branch"
    told = [tokenizer.decode(branch.token_ids) for branch in rollout.branches]
    if policy == "fork":
        assert told[1] == (
            "<|im_start|>user\n2+3=<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
            "<|im_start|>user\n.<|im_end|>\n<|im_start|>assistant\n<think>a</think>b<|im_end|>"
        )
    else:
        assert told[0].count("<think>a</think>b<|im_end|>") == 2 and told[0].count("<|im_end|>") == 4
    assert all(isinstance(branch.segments[0], Context) for branch in rollout.branches)
