"""The turns of a session in order of time, over all of its conversations."""

import pytest

from tests.helpers.sessions import Engine, Scorer, agent_file, config, play, prompt

# Conversations A, B, A: two of them in one session.
BY_MESSAGES = """
session.messages = a = [{"role": "user", "content": "1+"}]
await session.ask()
await session.reward(row["rewards"][0])
session.messages = [{"role": "user", "content": "2+"}]
await session.ask()
await session.reward(row["rewards"][1])
session.messages = a
session.say("3")
await session.ask()
await session.reward(row["rewards"][2])
"""
BY_URL = """
async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
    async def ask(messages, reward):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        await session.reward(reward)
        return [*messages, answer.choices[0].message.model_dump(exclude_none=True)]
    a = await ask([{"role": "user", "content": "1+"}], row["rewards"][0])
    await ask([{"role": "user", "content": "2+"}], row["rewards"][1])
    await ask([*a, {"role": "user", "content": "3"}], row["rewards"][2])
"""


def answer(text: str) -> str:
    return {"1": "4", "2": "5"}[text[0]] if len(text) == 2 else "6"


@pytest.mark.parametrize("body", [BY_MESSAGES, BY_URL])
def test_interleaved_conversations_have_rewards_and_returns_in_order_of_time(body, tmp_path):
    scorer = Scorer()
    cfg = config(agent_file(tmp_path, body))
    (rollout,) = play(cfg, prompt(rewards=[1.0, 2.0, 4.0]), engines=[Engine(answer)], scorer=scorer)
    assert rollout.status == "scored", rollout.detail
    assert [completion.text for completion in rollout.completions] == ["4", "6", "5"]
    assert rollout.turn_rewards == (1.0, 4.0, 2.0) and rollout.turn_order == (0, 2, 1)
    assert scorer.texts == ["6"], "the source scores the last answer in time, not that of the last conversation"
    assert rollout.answer_text == "6" and rollout.reward == 7.75


def test_a_reward_is_that_of_the_answer_that_the_agent_has_got(tmp_path):
    """Two requests at once: the second answer is there when the agent rewards the first, but it has not seen it."""
    body = """
    other = session.aside()  # a second object of the same session
    other._number = 0
    other.messages = [{"role": "user", "content": "2+"}]
    session.messages = [{"role": "user", "content": "1+"}]
    first, second = asyncio.ensure_future(session.ask()), asyncio.ensure_future(other.ask())
    await first
    await second
    await session.reward(1.0)
    await other.reward(0.5)
    """
    (rollout,) = play(config(agent_file(tmp_path, body)), prompt(), engines=[Engine(answer)])
    by_text = dict(zip([completion.text for completion in rollout.completions], rollout.turn_rewards, strict=True))
    assert by_text == {"4": 1.0, "5": 0.5}, rollout.detail
