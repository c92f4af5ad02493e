"""Environments of NeMo Gym (0.4). Its servers run separately and call the session's OpenAI endpoint.

NeMo Gym's model server has one URL, set by ``session.endpoint``, and one key; any key works. Each
request names its session in the field ``user``, which its metadata carries.
"""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from megatron_fp8rl.envs.agent_session import AgentError, AgentSession
from megatron_fp8rl.envs.environment import EnvironmentSpecError, Problem
from megatron_fp8rl.types import Prompt

PARAMETERS = "responses_create_params"


class Rows:
    """The rows of a JSONL file as problems; one eighth of them is held out. The server scores them."""

    def __init__(self, *, file: str) -> None:
        self._rows = _rows(file)

    def make_problem(self, index: int) -> Problem:
        number = index % len(self._rows)
        items = self._rows[number][PARAMETERS]["input"]
        items = [{"role": "user", "content": items}] if isinstance(items, str) else items
        messages = tuple({"role": item["role"], "content": _text(item["content"])} for item in items if "role" in item)
        return Problem(question=messages[-1]["content"], answer="", metadata={"row": number}, messages=messages)

    def score(self, prompt: Prompt, completion_text: str) -> float:
        raise AgentError("a row of NeMo Gym is scored by its server; set the agent of this source")


async def rollout(session: AgentSession, row: Mapping[str, Any], *, file: str, url: str) -> float:
    """One run of a row of ``file`` by the agent server at ``url``, such as http://localhost:12001."""
    body = dict(_rows(file)[row["row"]])
    metadata = dict(body[PARAMETERS].get("metadata") or {})
    in_requests = json.loads(metadata.get("extra_body", "{}")) | {"user": session.api_key}
    body[PARAMETERS] = body[PARAMETERS] | {"metadata": metadata | {"extra_body": json.dumps(in_requests)}}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as client:  # the session has a deadline
        async with client.post(f"{url.rstrip('/')}/run", json=body) as answer:
            text = await answer.text()
            if answer.status != 200:
                raise AgentError(f"{url}/run answered with status {answer.status}: {text[:1000]}")
    result = json.loads(text)
    if "reward" not in result:
        raise AgentError(f"{url}/run answered without a reward: {text[:1000]}")
    return float(result["reward"])


@functools.lru_cache(maxsize=8)
def _rows(file: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
    for number, row in enumerate(rows, 1):
        if not row.get(PARAMETERS, {}).get("input"):
            raise EnvironmentSpecError(f"{file}:{number} has no {PARAMETERS} with an input: is it a file of NeMo Gym?")
    if not rows:
        raise EnvironmentSpecError(f"{file} has no rows")
    return rows


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
