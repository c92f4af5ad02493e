"""Texts of sessions whose answers contain special tokens: turns, texts that continue, and what scorers see."""

from tests.helpers.chat_templates import format_of
from tests.helpers.sessions import Engine, config, play, prompt


def agent_file(tmp_path, body: str) -> str:
    file = tmp_path / "agent.py"
    lines = [
        "from openai import AsyncOpenAI",
        "async def rollout(session, row):",
        "    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:",
        *(f"        {line}" for line in body.splitlines()),
    ]
    file.write_text("\n".join(lines) + "\n")
    return f"{file}:rollout"


def test_a_text_with_special_tokens_continues_its_branch_and_its_end_token_is_not_repeated(tmp_path):
    chat = format_of("qwen3")
    body = """first = "<|im_start|>user\\n7<|im_end|>\\n<|im_start|>assistant\\n"
told = (await client.completions.create(model="m", prompt=first)).choices[0].text
assert told == "<think>8</think>9", told
second = first + told + "<|im_end|>\\n<|im_start|>user\\n5<|im_end|>\\n<|im_start|>assistant\\n"
return float((await client.completions.create(model="m", prompt=second)).choices[0].text == told)"""
    engine = Engine(lambda text: "<think>8</think>9", chat=chat)
    (rollout,) = play(config(agent_file(tmp_path, body)), prompt(), engines=[engine], chat=chat)
    assert rollout.reward == 1.0, rollout.detail
    (branch,) = rollout.branches
    whole = chat.tokenizer.decode(branch.token_ids)
    assert whole.count("<|im_end|>") == 4 and "9<|im_end|>\n<|im_start|>user\n5" in whole


def test_token_ids_that_a_text_continues_stay_one_branch(tmp_path):
    body = """told = (await client.completions.create(model="m", prompt=row["ids"])).choices[0].text
again = await client.completions.create(model="m", prompt="1+1=" + told + "3")
return float(again.choices[0].text == "2")"""
    from tests.helpers.sessions import TOKENIZER

    cfg = config(agent_file(tmp_path, body))
    (rollout,) = play(cfg, prompt(ids=TOKENIZER.encode("1+1=")), engines=[Engine(lambda text: "2")])
    assert rollout.reward == 1.0, rollout.detail
    (branch,) = rollout.branches
    assert TOKENIZER.decode(branch.token_ids) == "<bos>1+1=2<eos>32<eos>"
