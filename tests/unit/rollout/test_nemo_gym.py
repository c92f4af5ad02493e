"""Rows of NeMo Gym play through the endpoint of a session. Its servers are played by a small one with their protocol."""

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from openai import OpenAI

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.envs.environment import EnvironmentSpecError
from megatron_fp8rl.envs.libraries.nemo_gym import PARAMETERS, Rows
from megatron_fp8rl.types import Completion, Prompt
from tests.helpers.sessions import Engine, config, play, prompt


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
        found = {"reward": float(text == row["sum"])} if row["sum"] else {"error": "no reward"}
        content = json.dumps(row | found).encode()
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
    rows = [{PARAMETERS: {"input": [message], "metadata": {"extra_body": '{"seed": 1}'}}, "sum": one} for one in sums]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def of_rows(server, file: Path) -> RunConfig:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    server.policy_url = f"http://127.0.0.1:{port}/v1"
    cfg = config("megatron_fp8rl.envs.libraries.nemo_gym:rollout", port=port)
    (source,) = cfg.data.environments
    source = replace(source, agent_options={"file": str(file), "url": f"http://127.0.0.1:{server.server_port}/"})
    return replace(cfg, data=replace(cfg.data, environments=(source,)))


def test_rows_are_problems(tmp_path):
    file = tmp_path / "rows.jsonl"
    parts = [{"type": "input_text", "text": "2+"}, {"type": "input_text", "text": "3="}]
    inputs = ["1+1=", [{"role": "system", "content": "Add."}, {"role": "user", "content": parts}]]
    file.write_text("\n".join(json.dumps({PARAMETERS: {"input": one}}) for one in inputs))
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
    for one in (right, wrong):
        (branch,) = one.branches
        assert [type(segment) is Completion for segment in branch.segments] == [False, True]
        assert branch.segments[1].text == "5" and branch.token_ids[: len(one.prompt.token_ids)] == one.prompt.token_ids
    assert [one.status for one in lost] == ["score_failed"] * 2
    assert "answered without a reward" in lost[0].detail and "status 500" in lost[1].detail
