"""What a failed request means: a replica that is ending, however long that takes, or one that refuses it."""

import asyncio
import subprocess
from pathlib import Path

import pytest
from aiohttp import web

from megatron_fp8rl.rollout import client as client_module
from megatron_fp8rl.rollout.client import EngineClient
from megatron_fp8rl.rollout.completions import GENERATE_PATH, Sampling
from megatron_fp8rl.rollout.errors import EngineDeadError, EngineError, Exit
from megatron_fp8rl.rollout.replicas import Replica

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=4, stop_token_ids=(), stop_strings=())


def ask(tmp_path: Path, monkeypatch, *, health: int, exits_after: int | None) -> None:
    """Sample from a server that answers 500, and exits after so many questions for its health; they are counted."""
    monkeypatch.setattr(client_module, "_EXIT_GRACE_S", 0.05)
    monkeypatch.setattr(client_module, "_EXIT_DEADLINE_S", 1.0)
    asked = 0

    async def main() -> None:
        exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

        async def generate(_request: web.Request) -> web.Response:
            return web.Response(status=500, text="EngineCore encountered an issue")

        async def is_healthy(_request: web.Request) -> web.Response:
            nonlocal asked
            asked += 1
            if asked == exits_after:
                exited.set_result(Exit(code=0))
            return web.Response(status=health)

        app = web.Application()
        app.add_routes([web.post(GENERATE_PATH, generate), web.get("/health", is_healthy)])
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        replica = Replica(name="rollout-3", url=url, log_path=tmp_path / "log", process_group=0, exited=exited)
        client = EngineClient(
            replica, sampling=SAMPLING, decode=lambda ids: "", request_deadline_s=60.0, update_deadline_s=60.0
        )
        try:
            await client.generate([1, 2], 1, 0)
        finally:
            await client.close()
            await runner.cleanup()

    try:
        asyncio.run(main())
    finally:
        ask.num_asked = asked


def test_an_engine_that_is_gone_while_its_server_takes_long_to_exit_is_dead(tmp_path, monkeypatch):
    """The requests of a dead replica go to others; an error of a living one would end the run."""
    with pytest.raises(EngineDeadError, match="rollout-3 died with exit code 0"):
        ask(tmp_path, monkeypatch, health=503, exits_after=5)
    assert ask.num_asked >= 5


def test_an_engine_that_lives_has_refused(tmp_path, monkeypatch):
    with pytest.raises(EngineError, match="rollout-3 failed .*status 500: EngineCore") as error:
        ask(tmp_path, monkeypatch, health=200, exits_after=None)
    assert not isinstance(error.value, EngineDeadError) and error.value.status == 500 and ask.num_asked


def test_one_that_neither_lives_nor_ends_is_given_up(tmp_path, monkeypatch):
    with pytest.raises(EngineError, match="status 500"):
        ask(tmp_path, monkeypatch, health=503, exits_after=None)
    assert ask.num_asked > 1


@pytest.mark.parametrize(
    ("script", "exit_", "text"),
    [
        ("exit 3", Exit(code=3), "died with exit code 3"),
        ("kill -9 $$", Exit(signal=9), "was killed by signal 9"),
        ("kill -11 $$", Exit(signal=11), "was killed by signal 11"),
    ],
)
def test_the_end_of_a_process_has_its_code_or_its_signal(script, exit_, text):
    found = Exit.of_process(subprocess.run(["bash", "-c", script], check=False).returncode)
    assert (found, str(found), found.was_killed) == (exit_, text, exit_.signal == 9)
