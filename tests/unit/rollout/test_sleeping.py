"""The order of calls by which an engine sleeps, wakes and is updated, against a server that follows vLLM's rules."""

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from megatron_fp8rl.rollout.client import EngineClient
from megatron_fp8rl.rollout.completions import GENERATE_PATH, Answer, Sampling
from megatron_fp8rl.rollout.errors import EngineError, Exit
from megatron_fp8rl.rollout.replicas import Replica

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=1, stop_token_ids=(), stop_strings=())


class FakeEngine(EngineClient):
    """A client whose server is a few lines: what sleeps, whether the scheduler runs, and every call in order."""

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

    assert run(tmp_path, play) == [
        "/pause?mode=abort",
        f"/sleep?level={level}&mode=abort",
        "/wake_up?tags=weights",
        "/pause?mode=abort",
        "/start_weight_update",
        "/finish_weight_update",
        "/wake_up?tags=kv_cache",
    ]


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
