"""A run with an agent, trainer and engine as they are: every turn is exact, and nothing is left behind."""

import json
import re
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from megatron_fp8rl.observe.recording import read_steps
from megatron_fp8rl.runtime.stop import SAVED
from megatron_fp8rl.types import Completion, Context
from tests.helpers.fields import options

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 900
SLOW_AGENT = """
import asyncio, random

async def rollout(session, row):
    call = await session.ask()
    await asyncio.sleep(random.Random(session.name).uniform(0.0, 3.0))
    session.say(str(len(call)), role="tool")
    return float(len(await session.ask()) % 2)
"""
KINDS = ("works", "works", "by url", "gives up", "wrong requests", "exit", "crash", "bug")
FAILING_AGENT = r"""
import asyncio, ctypes, json, os, sys, zlib
import aiohttp
from openai import AsyncOpenAI, BadRequestError
from megatron_fp8rl.envs.agent_session import AgentError

KINDS = ("works", "works", "by url", "gives up", "wrong requests", "exit", "crash", "bug")
WRONG = [{"stop": [""]}, {"max_tokens": 2.5}, {"n": 2}, {"tools": [{"type": "function"}]}, {"logit_bias": {"5": 1}},
         {"extra_body": {"allowed_token_ids": [1]}}, {"messages": [{"role": "user", "content": "\u20ac"}]}]
BODIES = [b"[" * 100000, b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b"\xff"]

async def num_refused(session):
    refused = 0
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        for prompt in ([-1], [10**6], []):
            try:
                await client.completions.create(model="m", prompt=prompt)
            except BadRequestError:
                refused += 1
        for fields in WRONG:
            try:
                await client.chat.completions.create(**{"model": "m", "messages": session.messages, **fields})
            except BadRequestError:
                refused += 1
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer {session.api_key}"}) as http:
        for body in BODIES:
            async with http.post(f"{session.base_url}/chat/completions", data=body) as answer:
                refused += answer.status == 400
    for arguments in ({"max_tokens": 5 / 2}, {"stop": [""]}, {"tools": [{"type": "function"}]}):
        try:
            await session.ask(**arguments)
        except AgentError:
            refused += 1
    return refused

async def rollout(session, row):
    kind = KINDS[zlib.crc32(session.name.encode()) % len(KINDS)]
    attempt = os.urandom(4).hex()

    def tell(text):
        with open("FILE", "a") as output:
            output.write(json.dumps([session.name, attempt, text]) + chr(10))

    if kind == "by url":
        async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            messages = list(session.messages)
            for _ in range(2):
                answer = await client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
                tell(answer.choices[0].message.content)
                messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "="}]
        return 1.0
    if kind == "gives up":
        for _ in range(5):
            try:
                await asyncio.wait_for(session.ask(), 0.002)
                return 0.0
            except TimeoutError:
                pass
    if kind == "wrong requests":
        assert await num_refused(session) == 16
        tell(await session.ask())
        return 1.0
    tell(await session.ask())
    if kind == "exit":
        sys.exit("no licence")
    if kind == "crash":
        ctypes.string_at(0)
    if kind == "bug":
        return row["missing"]
    session.say("=")
    tell(await session.ask())
    return 0.5
"""


def hash_of(name: str) -> int:
    return zlib.crc32(name.encode())


OPTIONS = options(
    "--observe.display plain --observe.eval_prompts 0 --num_steps 2 --warm_start.steps 0 --model.random True "
    "--sampling.prompts_per_step 4 --sampling.completions_per_prompt 4 --algo.zero_variance keep --precision.exact "
    "True --checkpoint.export_hf False"
)


def test_sessions_that_fail_are_named_and_only_delivered_answers_are_trained(tmp_path):
    """Of 64 sessions, some end their process, give up requests, or have errors; the others are trained. Requests that
    the endpoint refuses reach no engine and cost no session."""
    agent, told = tmp_path / "failing.py", tmp_path / "told.jsonl"
    agent.write_text(FAILING_AGENT.replace("FILE", str(told)))
    options = OPTIONS | {
        "--output_dir": str(tmp_path / "run"),
        "--sampling.prompts_per_step": "8",
        "--data.environments.0.agent": f"{agent}:rollout",
    }
    args = [word for item in options.items() for word in item]
    command = [sys.executable, "-m", "megatron_fp8rl", "train", "tiny_calculator", *args]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=DEADLINE_S)
    output = done.stdout + done.stderr
    assert done.returncode == 0 and "Traceback" not in output, output[-3000:]
    rollouts = [
        r for _, groups in read_steps(tmp_path / "run" / "rollouts") for group in groups for r in group.rollouts
    ]
    assert len(rollouts) == 64
    answers: dict[str, list[str]] = {}
    for line in told.read_text().splitlines():
        name, attempt, text = json.loads(line)
        answers.setdefault((name, attempt), []).append(text)
    reasons = {"exit": "SystemExit: no licence", "crash": "ended with exit code -11", "bug": "KeyError: 'missing'"}
    for one in rollouts:
        kind = KINDS[hash_of(one.name) % len(KINDS)]
        lines = re.findall(rf"session {re.escape(one.name)} is lost: (.*)", output)
        if kind in reasons:
            assert one.status == "score_failed" and reasons[kind] in one.detail, (kind, one.detail)
            assert len(lines) == 1 and reasons[kind] in lines[0], (kind, lines)
        else:
            assert one.status in ("scored", "truncated") and not lines, (kind, one.detail)
            played = [texts for (name, _), texts in answers.items() if name == one.name]
            assert [completion.text for completion in one.completions] == played[-1], kind
            assert kind != "wrong requests" or len(one.completions) == 1
    assert {KINDS[hash_of(one.name) % len(KINDS)] for one in rollouts} == set(KINDS)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum(line.get("rollout/replicas_lost/sum", 0) for line in steps) == 0
    assert {line["mismatch/abs_logprob_diff/max"] for line in steps if line["step"]} == {0.0}


def test_sessions_go_on_over_publications_and_a_restart(tmp_path):
    """Asynchronous, two data-parallel ranks, one restart: slow tools keep sessions open; every step is trained once."""
    agent = tmp_path / "slow.py"
    agent.write_text(SLOW_AGENT)
    run_dir = tmp_path / "run"
    options = OPTIONS | {
        "--output_dir": str(run_dir),
        "--num_steps": "6",
        "--sampling.max_staleness": "1",
        "--engine.placement": "separate",
        "--precision.exact": "False",
        "--parallel.world_size": "2",
        "--checkpoint.every_steps": "0",
        "--data.environments.0.agent": f"{agent}:rollout",
    }
    command = [
        sys.executable,
        *"-m megatron_fp8rl train tiny_calculator".split(),
        *(w for item in options.items() for w in item),
    ]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + DEADLINE_S
        while not (run_dir / "metrics.jsonl").exists() or len((run_dir / "metrics.jsonl").read_text().splitlines()) < 3:
            assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()[-3000:]
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == SAVED, (tmp_path / "log").read_text()[-3000:]
        assert (
            subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=DEADLINE_S).returncode == 0
        )
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(7))
    groups = [group for _, of_step in read_steps(run_dir / "rollouts") for group in of_step]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len(groups) == 6 * 4 and len({group.prompt.prompt_id for group in groups}) == len(groups)
    assert all(one.status in ("scored", "truncated") for one in rollouts), {one.detail for one in rollouts}
    versions = [[version for c in one.completions for version in (c.min_version, c.max_version)] for one in rollouts]
    assert any(min(own) < max(own) for own in versions if own), "no session was open during a publication"
    assert all(max(own) - min(own) <= 1 for own in versions if own)


CONFIGS = ("tiny_calculator", "tests.helpers.verifiers_products:tiny_products")


@pytest.mark.long
@pytest.mark.parametrize("config", CONFIGS, ids=["agent", "verifiers"])
def test_the_task_is_learned(tmp_path, config):
    """From the warm start, which copies the right question in two of five answers, to nearly all; every token exact."""
    if config != "tiny_calculator":
        pytest.importorskip("verifiers", reason="the extra verifiers is not installed")
    args = ("--output_dir", str(tmp_path), "--observe.display", "plain", "--num_steps", "12")
    done = subprocess.run(
        [sys.executable, "-m", "megatron_fp8rl", "train", config, *args],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert "Traceback" not in done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    accuracy = [line["eval/pass_rate/mean"] for line in lines if "eval/pass_rate/mean" in line]
    assert accuracy[0] < 0.4 and accuracy[-1] > 0.8, accuracy
    trained = [line for line in lines if line["step"]]
    assert all("mismatch/abs_logprob_diff/max" in line for line in trained)
    for line in trained:
        assert all(value == 0.0 for key, value in line.items() if key.startswith("mismatch/abs_logprob_diff")), line
    if config == "tiny_calculator":
        assert_two_turns(tmp_path, lines)


def assert_two_turns(run_dir: Path, lines: list[dict]) -> None:
    """Sessions of two turns with a tool between them are recorded, compared and shown by turn."""
    assert any("mismatch/abs_logprob_diff_turn_2/max" in line for line in lines)
    steps = read_steps(run_dir / "rollouts")
    rollouts = [rollout for _, groups in steps for group in groups for rollout in group.rollouts]
    sessions = [rollout for rollout in rollouts if len(rollout.completions) == 2]
    assert sessions and all(rollout.status != "score_failed" for rollout in rollouts)
    for session in sessions:
        kinds = [type(segment) for segment in session.branches[0].segments]
        assert kinds == [Context, Completion, Context, Completion] and session.branches[0].segments[2].role == "tool"
    assert "policy, turn 2" in (run_dir / "report.html").read_text()
