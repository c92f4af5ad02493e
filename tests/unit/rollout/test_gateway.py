"""The OpenAI-compatible endpoint, asked by the official client in an agent's process."""

import asyncio
import json
from dataclasses import replace

import pytest

from megatron_fp8rl.rollout.agents.tool_calls import ToolCalls
from megatron_fp8rl.types import Completion
from tests.helpers.chat_templates import format_of
from tests.helpers.sessions import TOKENIZER, Engine, config, play, prompt


def two_turns(text: str) -> str:
    return "2+3" if text.endswith("=") else "5"


def solved_with_tools(agent, num_tokens: int, engine: Engine, chat):
    """The branch of a session whose agent, in a file, calls tools and gets its reward."""
    cfg = config(f"{agent}:rollout", max_tokens=num_tokens, tool_parser="hermes")
    cfg = replace(cfg, model=replace(cfg.model, max_position_embeddings=num_tokens))
    (rollout,) = play(cfg, prompt(), engines=[engine], chat=chat)
    assert rollout.reward == 1.0, rollout.detail
    (branch,) = rollout.branches
    return branch


@pytest.mark.parametrize("agent", ["by_url", "by_text"])
def test_the_official_client_gives_the_trajectory_of_the_protocol(agent):
    engine, other = Engine(two_turns), Engine(two_turns)
    (rollout,) = play(config(agent), prompt(), engines=[engine])
    (expected,) = play(config("calculator"), prompt(), engines=[other])
    assert rollout.reward == 1.0, rollout.detail
    (ours,), (theirs,) = rollout.branches, expected.branches
    assert ours.token_ids == theirs.token_ids and ours.completions == theirs.completions
    assert engine.prompts == other.prompts and engine.seeds == other.seeds


def test_what_would_change_the_distribution_is_refused_by_name(tmp_path):
    class Slow(Engine):
        cancelled = 0

        async def generate(self, prompt, n, seed, *, sampling):
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                self.cancelled += 1
                raise

    engine = Slow(None)
    (rollout,) = play(config("misbehaving_client"), prompt(file=str(tmp_path / "said")), engines=[engine])
    output = (tmp_path / "said").read_text()
    assert rollout.detail == "the agent has asked for nothing", output
    for name in ("n = 2", "frequency_penalty = 0.5", "response_format", "max_tokens = -1", "not a list of messages"):
        assert name in output, output
    for name in ("is not a message", "min_tokens = 3", "withdrawn", "names no session"):
        assert name in output, output
    assert engine.cancelled == 1


def test_a_session_that_has_ended_answers_410(tmp_path):
    file = tmp_path / "said"

    async def wait() -> None:
        while not file.exists() or not file.read_text().endswith("\n"):
            await asyncio.sleep(0.1)

    from megatron_fp8rl.rollout.agents.agent_pool import AgentPool
    from megatron_fp8rl.rollout.agents.requests import Requests
    from tests.helpers.sessions import CHAT, Fleet, Scorer

    async def run() -> None:
        pool = AgentPool(config("after_the_end"), Requests(Fleet(Engine(two_turns))), Scorer(), CHAT)
        rollout = await pool.run_session(prompt(file=str(file)), 0, 0)
        assert rollout.status == "scored"
        await asyncio.wait_for(wait(), 60)
        await pool.close()

    asyncio.run(run())
    assert file.read_text().startswith("410 ") and "the session of this API key has ended" in file.read_text()


def test_calls_of_tools_go_to_the_agent_and_back(tmp_path):
    """Qwen3's template and vLLM's parser: the agent sends the parsed call back, and the ids stay those sampled."""
    chat = format_of("qwen3")
    call = '<tool_call>\n{"name":"add",  "arguments":{"a": 2}}\n</tool_call>'
    engine = Engine(lambda told: "5" if "<tool_response>" in told else call, chat=chat)
    agent = tmp_path / "agent.py"
    agent.write_text(
        "from openai import AsyncOpenAI\n"
        "ADD = {'name': 'add', 'parameters': {'type': 'object', 'properties': {}}}\n"
        "TOOLS = [{'type': 'function', 'function': ADD}]\n"
        "async def rollout(session, row):\n"
        "    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:\n"
        "        messages = list(session.messages)\n"
        "        first = await client.chat.completions.create(model='m', messages=messages, tools=TOOLS)\n"
        "        assert first.choices[0].finish_reason == 'tool_calls', first\n"
        "        message = first.choices[0].message\n"
        "        assert message.tool_calls[0].function.name == 'add'\n"
        "        messages += [message.model_dump(exclude_none=True), {'role': 'tool', 'content': '5',\n"
        "                     'tool_call_id': message.tool_calls[0].id}]\n"
        "        last = await client.chat.completions.create(model='m', messages=messages, tools=TOOLS)\n"
        "        return float(last.choices[0].message.content == '5')\n"
    )
    branch = solved_with_tools(agent, 1000, engine, chat)
    told = chat.tokenizer.decode(branch.token_ids)
    assert call + "<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>" in told


def test_an_unknown_parser_is_named():
    with pytest.raises(ValueError, match="--session.tool_parser = .hermez.*hermes"):
        ToolCalls("hermez", TOKENIZER).load()


def test_a_key_with_a_number_is_a_conversation_beside_the_session(tmp_path):
    agent = tmp_path / "agent.py"
    agent.write_text(
        "from openai import AsyncOpenAI, BadRequestError\n"
        "async def rollout(session, row):\n"
        "    beside = session.aside()\n"
        "    async def ask(key, text):\n"
        "        async with AsyncOpenAI(base_url=session.base_url, api_key=key, max_retries=0) as client:\n"
        "            told = [{'role': 'user', 'content': text}]\n"
        "            answer = await client.chat.completions.create(model='m', messages=told)\n"
        "            return answer.choices[0].message.content\n"
        "    assert await ask(beside.api_key, '9') == '5' and await ask(session.api_key, '7') == '5'\n"
        "    try:\n"
        "        await ask(session.api_key + '.65', '8')\n"
        "    except BadRequestError as error:\n"
        "        return float('at most 64 conversations' in str(error))\n"
    )
    engine = Engine(lambda text: "5")
    (rollout,) = play(config(f"{agent}:rollout"), prompt(), engines=[engine])
    assert rollout.reward == 1.0, rollout.detail
    (branch,) = rollout.branches
    assert len(engine.prompts) == 2 and TOKENIZER.decode(branch.token_ids).startswith("<bos>7")


def test_calls_that_come_back_written_otherwise_do_not_fork(tmp_path):
    """Agents send back the same calls with other spaces and in another order of their keys, at every turn."""
    chat = format_of("qwen3")

    def answer(told: str) -> str:
        number = 1 + told.count("<tool_response>")
        call = {"name": "add", "arguments": {"a": number}}
        return f"<tool_call>\n{json.dumps(call)}\n</tool_call>" if number < 4 else "done"

    agent = tmp_path / "agent.py"
    agent.write_text(
        "import json\n"
        "from openai import AsyncOpenAI\n"
        "ADD = {'name': 'add', 'parameters': {'type': 'object', 'properties': {}}}\n"
        "TOOLS = [{'type': 'function', 'function': ADD}]\n"
        "async def rollout(session, row):\n"
        "    messages = list(session.messages)\n"
        "    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:\n"
        "        while True:\n"
        "            answer = await client.chat.completions.create(model='m', messages=messages, tools=TOOLS)\n"
        "            message = answer.choices[0].message\n"
        "            if not message.tool_calls:\n"
        "                return float(message.content == 'done')\n"
        "            (call,) = message.tool_calls\n"
        "            arguments = json.dumps(json.loads(call.function.arguments), separators=(',', ':'))\n"
        "            function = {'arguments': arguments, 'name': call.function.name}\n"
        "            messages += [{'role': 'assistant', 'content': None, 'tool_calls': [\n"
        "                {'type': 'function', 'id': call.id, 'function': function}]},\n"
        "                {'role': 'tool', 'content': 'added', 'tool_call_id': call.id}]\n"
    )
    branch = solved_with_tools(agent, 2000, Engine(answer, chat=chat), chat)
    assert sum(isinstance(segment, Completion) for segment in branch.segments) == 4
