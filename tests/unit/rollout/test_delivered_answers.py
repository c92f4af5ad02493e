"""Only answers that the agent has got are trained, and a repeated request costs nothing."""

import asyncio
import time

import pytest

from megatron_fp8rl.rollout.agents import agent_pool
from megatron_fp8rl.rollout.agents.gateway import _Stream
from megatron_fp8rl.rollout.agents.tool_calls import ToolCalls
from tests.helpers.chat_templates import format_of
from tests.helpers.sessions import TOKENIZER, Engine, agent_file, config, play, prompt


class Slow(Engine):
    """The first answers take long."""

    def __init__(self, *args, num_slow: int = 1) -> None:
        super().__init__(*args)
        self.num_slow, self.num_answered = num_slow, 0

    async def generate(self, prompt, n, seed, *, sampling):
        if len(self.prompts) < self.num_slow:
            self.prompts.append(tuple(prompt))
            self.seeds.append(seed)
            await asyncio.sleep(30)
        self.num_answered += 1
        return await super().generate(prompt, n, seed, sampling=sampling)


def texts(rollout) -> list[str]:
    return [TOKENIZER.decode(branch.token_ids) for branch in rollout.branches]


REPEATED_ASK = """
for _ in range(3):
    try:
        await asyncio.wait_for(session.ask(), 0.3)
        break
    except TimeoutError:
        pass
session.say("+")
await session.ask()
return 1.0
"""
REPEATED_BY_CLIENT = """
async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, timeout=0.5, max_retries=5) as client:
    messages = list(session.messages)
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "+"}]
return 1.0
"""
REPEATED_TEXT = """
async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, timeout=0.5, max_retries=5) as client:
    text = row["prompt"]
    for _ in range(2):
        text += (await client.completions.create(model="policy", prompt=text)).choices[0].text + "+"
return 1.0
"""


@pytest.mark.parametrize("body", [REPEATED_ASK, REPEATED_BY_CLIENT, REPEATED_TEXT])
def test_a_request_that_the_agent_gives_up_and_repeats_is_trained_once(body, tmp_path):
    engine = Slow(lambda text: "5", num_slow=2)
    (rollout,) = play(config(agent_file(tmp_path, body), max_turns=2), prompt(), engines=[engine])
    assert (rollout.status, rollout.reward) == ("scored", 1.0), rollout.detail
    assert engine.num_answered == 2 and len(set(engine.seeds)) == len(engine.seeds)
    assert texts(rollout) == ["<bos>2+3=5<eos>+5<eos>"]


@pytest.mark.parametrize("body", [REPEATED_BY_CLIENT, REPEATED_TEXT])
def test_an_answer_for_a_client_that_has_gone_is_not_trained(body, tmp_path, monkeypatch):
    """The engine has answered, but the client closes its connection before the answer is sent."""
    slow, told = [True, True], agent_pool.ToolCalls.message

    def message(self, text, tools):
        if slow:
            slow.pop()
            time.sleep(0.8)
        return told(self, text, tools)

    monkeypatch.setattr(ToolCalls, "message", message)
    if body is REPEATED_TEXT:
        from megatron_fp8rl.rollout.agents import gateway

        names = gateway._told
        monkeypatch.setattr(
            gateway,
            "_told",
            lambda completion, body: (slow and slow.pop() and time.sleep(0.8), names(completion, body))[1],
        )
    engine = Engine(lambda text: "5")
    (rollout,) = play(config(agent_file(tmp_path, body), max_turns=2), prompt(), engines=[engine])
    assert (rollout.status, rollout.reward) == ("scored", 1.0), rollout.detail
    assert len(engine.prompts) == 4, "two answers were sampled again"
    assert texts(rollout) == ["<bos>2+3=5<eos>+5<eos>"] and not slow


@pytest.mark.parametrize("by_url", [False, True])
def test_an_answer_that_cannot_be_told_is_not_trained(by_url, tmp_path, monkeypatch):
    """An error after sampling, as that of a parser: the agent asks again, and only what it got is trained."""
    errors = [ZeroDivisionError("a bug of a parser")] * 3
    told = agent_pool.ToolCalls.message

    def message(self, text, tools):
        if errors:
            raise errors.pop()
        return told(self, text, tools)

    monkeypatch.setattr(ToolCalls, "message", message)
    by_ask = """
    for _ in range(4):
        try:
            return float(await session.ask() == "5")
        except AgentError as error:
            assert "ZeroDivisionError: a bug of a parser" in str(error)
    """
    url = """
    from openai import APIConnectionError, APIStatusError
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        for _ in range(20):
            try:
                answer = await client.chat.completions.create(model="policy", messages=session.messages)
                return float(answer.choices[0].message.content == "5")
            except (APIConnectionError, APIStatusError):
                pass
    """
    engine = Engine(lambda text: "5")
    cfg = config(agent_file(tmp_path, url if by_url else by_ask), max_turns=1)
    (rollout,) = play(cfg, prompt(), engines=[engine])
    assert rollout.reward == 1.0, rollout.detail
    assert len(engine.prompts) == 4 and texts(rollout) == ["<bos>2+3=5<eos>"]


def test_answers_of_requests_that_run_when_the_agent_returns_are_not_trained(tmp_path):
    body = """
    first = asyncio.create_task(session.ask())
    other = session.aside({"role": "user", "content": "7"})
    while not (await other.ask()):
        pass
    return 1.0
    """

    class Uneven(Engine):
        async def generate(self, prompt, n, seed, *, sampling):
            if "2+3" in TOKENIZER.decode(prompt):
                await asyncio.sleep(0.5)
            return await super().generate(prompt, n, seed, sampling=sampling)

    (rollout,) = play(config(agent_file(tmp_path, body)), prompt(), engines=[Uneven(lambda text: "5")])
    assert rollout.status == "score_failed" and not rollout.branches, "nothing was sampled for the session itself"


def test_malformed_tools_are_refused_before_sampling(tmp_path):
    """The client sends the same request again and again; the one that it corrects is trained."""
    chat = format_of("qwen3")
    body = """
    from openai import APIStatusError
    add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    malformed = [[{"type": "function"}], [{"type": "function", "function": {"parameters": {}}}], [5], ["add"]]
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=1) as client:
        for tools in malformed:
            try:
                await client.chat.completions.create(model="policy", messages=session.messages, tools=tools)
                return 0.0
            except APIStatusError as error:
                assert "tools" in str(error), error
            try:
                await session.ask(tools=tools)
                return 0.0
            except AgentError as error:
                assert "tools" in str(error), error
        await client.chat.completions.create(model="policy", messages=session.messages, tools=[add])
    return 1.0
    """
    engine = Engine(lambda text: "5", chat=chat)
    cfg = config(agent_file(tmp_path, body), max_tokens=1000, tool_parser="hermes")
    (rollout,) = play(cfg, prompt(), engines=[engine], chat=chat)
    assert rollout.reward == 1.0, rollout.detail
    assert len(engine.prompts) == 1 == len(rollout.completions)


@pytest.mark.parametrize("leaves_after", [0, 1, 2, None])
def test_a_stream_that_is_cut_withdraws_its_answer(leaves_after):
    """A client that leaves between the parts of a stream, whose connection does not take more."""

    async def run() -> bool:
        sent, gone, withdrawn = [], asyncio.Event(), []

        async def parts():
            for part in "ab":
                yield part

        async def send(message):
            if leaves_after is not None and len(sent) == leaves_after:
                gone.set()
                await asyncio.sleep(30)
            sent.append(message)

        async def receive():
            await gone.wait()
            return {"type": "http.disconnect"}

        stream = _Stream(parts())
        stream.withdraw = lambda: withdrawn.append(1)
        if leaves_after is None:
            asyncio.get_running_loop().call_later(0.2, gone.set)
        await stream({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send)
        return bool(withdrawn)

    assert asyncio.run(run()) == (leaves_after is not None)


def test_a_client_that_reads_a_part_of_a_stream_has_got_the_answer(tmp_path):
    body = """
    messages = list(session.messages)
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        stream = await client.chat.completions.create(model="policy", messages=messages, stream=True)
        async for chunk in stream:
            text = chunk.choices[0].delta.content
            break
        await stream.close()
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "+"}]
        await client.chat.completions.create(model="policy", messages=messages)
    return float(text == "5")
    """
    (rollout,) = play(config(agent_file(tmp_path, body)), prompt(), engines=[Engine(lambda text: "5")])
    assert rollout.reward == 1.0, rollout.detail
    assert texts(rollout) == ["<bos>2+3=5<eos>+5<eos>"]


def test_parallel_requests_of_which_some_are_given_up(tmp_path):
    """Eight requests at once on eight conversations; every second one is cancelled."""
    body = """
    options = {"base_url": session.base_url, "api_key": session.api_key, "max_retries": 0}
    async def ask(number, limit_s):
        async with AsyncOpenAI(timeout=limit_s, **options) as client:
            messages = [{"role": "user", "content": f"{number}="}]
            return (await client.chat.completions.create(model="policy", messages=messages)).choices[0].message.content
    answers = await asyncio.gather(*(ask(i, 0.4 if i % 2 else 30) for i in range(8)), return_exceptions=True)
    return float([isinstance(answer, str) for answer in answers] == [True, False] * 4)
    """

    class Even(Engine):
        async def generate(self, prompt, n, seed, *, sampling):
            if int(TOKENIZER.decode(prompt, skip_special_tokens=True)[0]) % 2:
                await asyncio.sleep(1.0)
            return await super().generate(prompt, n, seed, sampling=sampling)

    (rollout,) = play(config(agent_file(tmp_path, body)), prompt(), engines=[Even(lambda text: text[0])])
    assert rollout.reward == 1.0, rollout.detail
    assert sorted(texts(rollout)) == [f"<bos>{i}={i}<eos>" for i in (0, 2, 4, 6)]
