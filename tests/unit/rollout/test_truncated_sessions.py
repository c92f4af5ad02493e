"""Only limits of the run truncate a session. A limit that an agent caught does not excuse its errors."""

import re
from dataclasses import replace

import pytest

from megatron_fp8rl.algo.samples import shaped_rewards
from megatron_fp8rl.config import AlgoConfig
from megatron_fp8rl.types import RolloutGroup
from tests.helpers.samples import make_completion
from tests.helpers.sessions import TOKENIZER, Engine, agent_file, config, play, prompt


class Cutting(Engine):
    """Answers with as many tokens as it may; longer texts are cut."""

    async def generate(self, prompt, n, seed, *, sampling):
        self.prompts.append(tuple(prompt))
        ids = TOKENIZER.encode("1234567890" * 3, add_special_tokens=False)[: sampling.max_tokens]
        text = TOKENIZER.decode(ids)
        return [make_completion(ids, [-1.0] * len(ids), text=text, finish_reason="length")]


ASK = "await session.ask(max_tokens={})\nassert session.finish_reason == 'length'\nreturn 1.0"
CLIENT = """
client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
async def ask(text="go on", **fields):
    messages.append({"role": "user", "content": text})
    answer = await client.chat.completions.create(model="policy", messages=messages, **fields)
    messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    return answer.choices[0].finish_reason
messages = []
"""
BY_URL = CLIENT + "assert await ask(max_tokens={}) == 'length'\nreturn 1.0"


@pytest.mark.parametrize("body", [ASK, BY_URL])
@pytest.mark.parametrize(("wanted", "status"), [(3, "scored"), (15, "scored"), (16, "truncated"), (500, "truncated")])
def test_an_answer_that_the_agent_limits_is_complete(body, wanted, status, tmp_path):
    """The run's limit is 16 tokens."""
    cfg = config(agent_file(tmp_path, body.replace("{}", str(wanted))))
    cfg = replace(cfg, sampling=replace(cfg.sampling, max_completion_tokens=16))
    (rollout,) = play(cfg, prompt(), engines=[Cutting(None)])
    assert (rollout.status, rollout.reward) == (status, 1.0), rollout.detail
    assert len(rollout.completions[0].token_ids) == min(wanted, 16)
    group = RolloutGroup(prompt=rollout.prompt, rollouts=(rollout,))
    kept, _ = shaped_rewards(group, AlgoConfig(overlong="mask"), cfg.sampling)
    assert len(kept) == (status == "scored")


def test_the_end_of_the_session_truncates_an_answer_that_is_shorter_than_its_limit(tmp_path):
    """25 tokens: 5 of the prompt, 12 of the first answer, and 2 of the next message leave 6 of the wanted 12."""
    body = "await session.ask(max_tokens=12)\nsession.say('+-')\nawait session.ask(max_tokens=12)\nreturn 1.0"
    cfg = config(agent_file(tmp_path, body), max_tokens=25)
    cfg = replace(cfg, sampling=replace(cfg.sampling, max_completion_tokens=16, max_prompt_tokens=8))
    (rollout,) = play(cfg, prompt(), engines=[Cutting(None)])
    assert [len(one.token_ids) for one in rollout.completions] == [12, 6]
    assert rollout.status == "truncated" and rollout.reward == 1.0, rollout.detail
    assert [one.finish_reason for one in rollout.completions] == ["stop", "length"]


# Agents whose third request is rejected (--session.max_turns 2): the body, and the status of the session.
LIMITED = {
    "not caught": ("while True: await session.ask()", "truncated"),
    "passed on": (
        """
        try:
            while True: await session.ask()
        except SessionLimit as error:
            raise RuntimeError("the framework gives up") from error
        """,
        "truncated",
    ),
    "in a group of tasks": (
        """
        await session.ask()
        async with asyncio.TaskGroup() as group:
            for _ in range(3): group.create_task(session.ask())
        """,
        "truncated",
    ),
    "caught": (
        """
        try:
            while True: await session.ask()
        except SessionLimit:
            return 0.5
        """,
        "scored",
    ),
    "caught before a bug": (
        """
        try:
            while True: await session.ask()
        except SessionLimit:
            pass
        return {}["answer"]
        """,
        "score_failed",
    ),
    "a bug while it is handled": (
        """
        try:
            while True: await session.ask()
        except SessionLimit:
            return {}["answer"]
        """,
        "score_failed",
    ),
    "a limit and a bug in a group of tasks": (
        """
        async def fail():
            await asyncio.sleep(0)
            raise KeyError("answer")
        async def both(): await asyncio.gather(session.ask(), session.ask())
        results = await asyncio.gather(both(), session.ask(), fail(), return_exceptions=True)
        raise ExceptionGroup("of tasks", [error for error in results if isinstance(error, Exception)])
        """,
        "score_failed",
    ),
    "a wrong reward after it": (
        """
        try:
            while True: await session.ask()
        except SessionLimit:
            return "good"
        """,
        "score_failed",
    ),
    "of the client": (CLIENT + "while True: await ask()", "truncated"),
    "of the client, passed on": (
        CLIENT
        + """
try:
    while True: await ask()
except Exception as error:
    raise RuntimeError("the framework gives up") from error
""",
        "truncated",
    ),
    "of the client, caught before a bug": (
        CLIENT
        + """
try:
    while True: await ask()
except Exception:
    pass
return {}["answer"]
""",
        "score_failed",
    ),
    "of httpx": (
        """
        import httpx
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {session.api_key}"}) as client:
            while True:
                body = {"model": "policy", "messages": session.messages}
                (await client.post(f"{session.base_url}/chat/completions", json=body)).raise_for_status()
        """,
        "truncated",
    ),
    "of a program": (
        """
        program = (
            "import openai, sys\\nclient = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=0)\\n"
            "while True: client.completions.create(model='policy', prompt='2+3=')"
        )
        import subprocess
        command = [sys.executable, "-c", program, session.base_url, session.api_key]
        await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
        """,
        "truncated",
    ),
    "of a side conversation by URL": (
        """
        await session.ask()
        beside = session.aside()
        async with AsyncOpenAI(base_url=session.base_url, api_key=beside.api_key, max_retries=0) as client:
            while True:
                await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "7"}])
        """,
        "truncated",
    ),
    "too many side conversations": (
        """
        await session.ask()
        for _ in range(70):
            await session.aside({"role": "user", "content": "7"}).ask()
        """,
        "score_failed",
    ),
    "of a tool, before any limit of the session": (
        """
        await session.ask()
        raise RuntimeError("429: the search engine is at its limit")
        """,
        "score_failed",
    ),
}


def test_a_limit_truncates_unless_the_agent_caught_it(tmp_path):
    """All agents in one worker; a row names its own."""
    files = {}
    for number, (body, _) in enumerate(LIMITED.values()):
        (tmp_path / str(number)).mkdir()
        files[str(number)] = agent_file(tmp_path / str(number), body).removesuffix(":rollout")
    choose = """
    from importlib.util import module_from_spec, spec_from_file_location
    spec = spec_from_file_location("own", row["file"])
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return await module.rollout(session, row)
    """
    cfg = config(agent_file(tmp_path, choose), max_turns=2)
    rollouts = play(
        cfg, *(prompt(i, file=file) for i, file in enumerate(files.values())), engines=[Engine(lambda _: "5")]
    )
    statuses = {name: (one.status, one.reward) for name, one in zip(LIMITED, rollouts, strict=True)}
    rewards = {"truncated": 0.0, "score_failed": 0.0, "scored": 0.5}
    expected = {name: (status, rewards[status]) for name, (_, status) in LIMITED.items()}
    assert statuses == expected, [one.detail for one in rollouts]
    details = [one.detail for one in rollouts if one.status == "truncated"]
    assert all(re.search("is at its limit: it has (taken 2 turns|2 branches)", detail) for detail in details), details
