"""Agents that work, and agents that do not."""

import asyncio
import ctypes
import os
import subprocess
import sys
import time

from megatron_fp8rl.envs.agent_session import AgentError, SessionLimit
from megatron_fp8rl.envs.tools import calculate, python


async def calculator(session, row):
    """Two turns: what to calculate, then the answer."""
    call = await session.ask()
    session.say(calculate(call), role="tool")
    return float((await session.ask()).strip() == row["answer"])


async def by_turn(session, row):
    for value in row["values"]:
        await session.ask()
        session.say(".")
        await session.reward(value)
    return {"format": 0.25}


async def turns_only(session, row):
    for value in row["values"]:
        await session.ask()
        session.say(".")
        await session.reward(value)


async def unscored(session, row):
    await session.ask()


async def endless(session, row):
    while True:
        await session.ask()
        session.say("go on")


async def endless_by_url(session, row):
    messages = list(session.messages)
    async with openai_client(session) as client:
        while True:
            answer = await client.chat.completions.create(model="any", messages=messages)
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content},
                {"role": "user", "content": "go on"},
            ]


async def many(session, row):
    """10,000 requests at once."""
    asides = [session.aside({"role": "user", "content": "?"}) for _ in range(3)]
    actual = await asyncio.gather(*(session.ask() for _ in range(10_000)), return_exceptions=True)
    assert any(isinstance(item, SessionLimit) for item in actual)
    return float(len(asides) == 3)


async def player(session, row):
    """The policy plays against itself; the opponent's moves are not trained."""
    other = session.aside({"role": "user", "content": "x"})
    for _ in range(2):
        move = await session.ask()
        other.say(move)
        session.say(await other.ask())
    return 1.0


LEAKED = []


async def faulty(session, row):
    """Fails as its row says."""
    kind = row["kind"]
    await session.ask()
    if kind == "leaks":
        LEAKED.append(bytearray(row["mib"] << 20))
    if kind == "raises":
        raise ValueError("the environment's server is gone")
    if kind == "crashes":
        ctypes.string_at(0)
    if kind == "exits":
        os._exit(7)
    if kind == "blocks":
        time.sleep(600)
    if kind == "waits":
        await asyncio.sleep(600)
    if kind == "hangs in a thread":
        await asyncio.to_thread(time.sleep, 600)
    if kind == "leaves a process":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    if kind == "10 MB":
        session.say("x" * 10_000_000, role="tool")
    if kind == "binary":
        session.say(b"\xff\x00\xfe", role="tool")
        session.messages[-1]["content"] = session.messages[-1]["content"].replace("\ufffd", "?").replace("\0", "0")
        await session.ask()
    if kind == "unknown characters":
        session.say("\u20ac", role="tool")
        await session.ask()
    if kind == "no number":
        return "good"
    if kind == "not a number":
        return float("nan")
    if kind == "wrong messages":
        session.messages = [{"role": "user", "content": None, "tool_calls": [{"function": {}}]}]
        try:
            await session.ask()
        except AgentError:
            return 0.5
    if kind == "program":
        session.say(await python("while True: pass", deadline_s=0.5), role="tool")
        await session.ask()
    return 1.0


def not_a_coroutine(session, row):
    return 1.0


def openai_client(session):
    from openai import AsyncOpenAI

    return AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, timeout=60.0, max_retries=0)


async def by_url(session, row):
    """The two turns of ``calculator`` through the official client."""
    async with openai_client(session) as client:
        messages = list(session.messages)
        first = await client.chat.completions.create(model="any", messages=messages, temperature=0.3, logprobs=True)
        assert [m.id for m in (await client.models.list()).data] == [first.model]
        messages.append({"role": "assistant", "content": first.choices[0].message.content})
        messages.append({"role": "tool", "tool_call_id": "1", "content": calculate(first.choices[0].message.content)})
        text = ""
        stream = await client.chat.completions.create(
            model="any", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        async for chunk in stream:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage
        assert usage.completion_tokens == len(text) + 1
        assert len(first.choices[0].logprobs.content) == len(first.choices[0].message.content) + 1
    return float(text == row["answer"])


async def by_text(session, row):
    """The same through /v1/completions: each text continues the earlier one."""
    async with openai_client(session) as client:
        call = (await client.completions.create(model="any", prompt=row["prompt"])).choices[0].text
        prompt = row["prompt"] + call + calculate(call)
        return float((await client.completions.create(model="any", prompt=prompt)).choices[0].text == row["answer"])


async def misbehaving_client(session, row):
    """Invalid requests, each rejected by name, and a withdrawn one."""
    import openai

    output = []
    async with openai_client(session) as client:
        chat = client.chat.completions.create
        ask = {"model": "any", "messages": list(session.messages)}
        for wrong in (
            {"n": 2},
            {"frequency_penalty": 0.5},
            {"response_format": {"type": "json_object"}},
            {"max_tokens": -1},
            {"messages": []},
            {"messages": [{"role": "user", "content": 5}]},
            {"extra_body": {"min_tokens": 3}},
        ):
            try:
                await chat(**ask | wrong)
            except openai.BadRequestError as error:
                output.append(error.body["message"])
        try:
            await chat(**ask, timeout=0.2, max_tokens=9)  # the engine answers it later
        except openai.APITimeoutError:
            output.append("withdrawn")
        client.api_key = "session-of-another"
        try:
            await client.models.list()
        except openai.AuthenticationError as error:
            output.append(error.body["message"])
    with open(row["file"], "w") as file:
        file.write("\n".join(output))
    return 1.0


async def after_the_end(session, row):
    """Leaves a process that sends a request after the session's end."""
    program = (
        "import openai, sys, time\ntime.sleep(1.0)\n"
        "client = openai.OpenAI(base_url=sys.argv[1], api_key=sys.argv[2])\n"
        "try:\n    client.completions.create(model='any', prompt='2+3=')\n"
        "except openai.APIStatusError as error:\n    print(error.status_code, error, file=open(sys.argv[3], 'w'))\n"
    )
    subprocess.Popen([sys.executable, "-c", program, session.base_url, session.api_key, row["file"]])
    await session.ask()
    return 1.0
