"""The engine client against small servers: failed requests, and the order of calls around sleep and updates."""

import asyncio
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from aiohttp import web

from megatron_fp8rl.rollout import client as client_module
from megatron_fp8rl.rollout.client import EngineClient
from megatron_fp8rl.rollout.completions import GENERATE_PATH, Answer, Sampling
from megatron_fp8rl.rollout.errors import EngineDeadError, EngineError, Exit
from megatron_fp8rl.rollout.replicas import Replica

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=4, stop_token_ids=(), stop_strings=())


async def generate_once(tmp_path: Path, exited: asyncio.Future[Exit], **handlers) -> None:
    """Sample once from a server with these handlers of requests."""
    app = web.Application()
    app.add_routes([web.post(GENERATE_PATH, handlers["generate"])])
    if "health" in handlers:
        app.add_routes([web.get("/health", handlers["health"])])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    replica = Replica(name="rollout-3", url=url, log_path=tmp_path / "log", process_group=0, exited=exited)
    deadlines = {"request_deadline_s": 60.0, "update_deadline_s": 60.0}
    client = EngineClient(replica, sampling=SAMPLING, decode=lambda ids: "", **deadlines)
    try:
        await client.generate([1, 2], 1, 0)
    finally:
        await client.close()
        await runner.cleanup()


def ask(tmp_path: Path, monkeypatch, *, health: int, exits_after: int | None) -> None:
    """Sample from a server that answers 500 and exits after some health checks, which are counted."""
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

        await generate_once(tmp_path, exited, generate=generate, health=is_healthy)

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
    actual = Exit.from_returncode(subprocess.run(["bash", "-c", script], check=False).returncode)
    assert (actual, str(actual), actual.was_killed) == (exit_, text, exit_.signal == 9)


class FakeEngine(EngineClient):
    """A client of a small server that records calls, sleep levels and the scheduler's state."""

    def __init__(self, log_path: Path) -> None:
        exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        replica = Replica(name="rollout-0", url="", log_path=log_path, process_group=0, exited=exited)
        super().__init__(
            replica, sampling=SAMPLING, decode=lambda ids: "", request_deadline_s=1.0, update_deadline_s=1.0
        )
        self.calls: list[str] = []
        self.sleeping: set[str] = set()
        self.is_paused = False

    async def _request(self, verb: str, path: str, body: Any, read: Any) -> Any:
        self.calls.append(path)
        await asyncio.sleep(0)
        route, query = urlsplit(path).path, parse_qs(urlsplit(path).query)
        if route == "/pause":
            self.is_paused = True
        elif route == "/resume":
            assert not self.sleeping, "a scheduler that runs without memory"
            self.is_paused = False
        elif route == "/sleep":
            assert self.is_paused and not self.sleeping
            self.sleeping = {"weights", "kv_cache"}
        elif route == "/wake_up":
            assert set(query["tags"]) <= self.sleeping, "vLLM ignores the whole call"
            self.sleeping -= set(query["tags"])
            self.is_paused = bool(self.sleeping)
        elif route == "/finish_weight_update":
            assert "weights" not in self.sleeping
        elif route == GENERATE_PATH:
            assert not self.sleeping and not self.is_paused
            return Answer(segments=[])


def run(tmp_path: Path, play) -> list[str]:
    async def main() -> list[str]:
        client = FakeEngine(tmp_path / "log")
        await play(client)
        return client.calls

    return asyncio.run(main())


async def _publish(client: EngineClient) -> None:
    await client.pause("keep")
    await client.start_update()
    await client.finish_update(1)
    await client.resume()


@pytest.mark.parametrize("level", [1, 2])
def test_a_step_of_turns(level, tmp_path):
    """Sleep, wake weights, publish, wake the cache: one resume in all, vLLM's own."""

    async def play(client: FakeEngine) -> None:
        await client.sleep(level)
        await client.wake_up("weights")
        await _publish(client)
        assert client.is_paused and not client._open.is_set()
        await client.wake_up("kv_cache")
        assert not client.is_paused and client._open.is_set()

    calls = f"""
        /pause?mode=abort /sleep?level={level}&mode=abort /wake_up?tags=weights /pause?mode=abort
        /start_weight_update /finish_weight_update /wake_up?tags=kv_cache
    """
    assert run(tmp_path, play) == calls.split()


def test_sleeping_and_waking_again_change_nothing(tmp_path):
    async def play(client: FakeEngine) -> None:
        await client.wake_up()
        await client.sleep(1)
        await client.sleep(1)
        await client.wake_up("weights")
        await client.wake_up("weights")
        await client.wake_up()
        await client.wake_up()

    wakes = ["/wake_up?tags=weights", "/wake_up?tags=kv_cache"]
    assert run(tmp_path, play) == ["/pause?mode=abort", "/sleep?level=1&mode=abort", *wakes]


def test_requests_wait_until_everything_is_awake(tmp_path):
    async def play(client: FakeEngine) -> None:
        await client.sleep(2)
        request = asyncio.ensure_future(client.generate([1], 1, 0))
        await client.wake_up("weights")
        await _publish(client)
        await asyncio.sleep(0.01)
        assert not request.done()
        await client.wake_up("kv_cache")
        request.cancel()

    assert GENERATE_PATH not in run(tmp_path, play)


def test_an_engine_that_samples_is_not_put_to_sleep(tmp_path):
    async def play(client: FakeEngine) -> None:
        client.num_running = 3
        with pytest.raises(EngineError, match="rollout-0 cannot sleep: 3 completions are running"):
            await client.sleep(1)

    assert run(tmp_path, play) == []


@pytest.mark.parametrize(
    ("how", "is_innocent"), [(Exit(code=1), False), (Exit(signal=9), True), (Exit(reason="hung and was killed"), False)]
)
def test_a_request_may_be_the_cause_of_a_death_but_not_of_sigkill(tmp_path, how, is_innocent):
    async def error_of(*, died_before: bool) -> EngineDeadError:
        exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()

        async def generate(_request: web.Request) -> web.Response:
            exited.set_result(how)
            await asyncio.sleep(60)
            return web.Response()

        if died_before:
            exited.set_result(how)
        with pytest.raises(EngineDeadError) as caught:
            await generate_once(tmp_path, exited, generate=generate)
        return caught.value

    error = asyncio.run(error_of(died_before=False))
    assert error.is_innocent == is_innocent and "\n" not in error.summary
    assert asyncio.run(error_of(died_before=True)).is_innocent
