"""A request that ends engines costs two replicas, and only its own session; the other requests go on."""

import asyncio

import pytest

from megatron_fp8rl.net.endpoint import Endpoint
from megatron_fp8rl.rollout import replicas
from megatron_fp8rl.rollout.agents import agent_pool
from megatron_fp8rl.rollout.agents import requests as requests_module
from megatron_fp8rl.rollout.agents.requests import Requests
from megatron_fp8rl.rollout.errors import EngineDeadError, Exit, RequestLostError
from megatron_fp8rl.rollout.stream import RolloutStream
from model_configs.tiny import tiny_qwen3_moe
from tests.helpers.fields import set_fields
from tests.helpers.sessions import TOKENIZER, Engine, Fleet, agent_file, config, play, prompt
from tests.helpers.streams import Client as StreamClient
from tests.helpers.streams import Fleet as StreamFleet
from tests.helpers.streams import Numbers, Ranks, numbers
from tests.helpers.streams import Scorer as StreamScorer

POISON = "9"


class Mortal(Engine):
    """Dies with all of its requests soon after a prompt that starts with the poison has arrived."""

    def __init__(self, name: str, *, answers_s: float = 0.2, dies_s: float = 0.05, by_sigkill: bool = False) -> None:
        super().__init__(lambda text: "5", name=name)
        self._answers_s, self._dies_s, self._by_sigkill = answers_s, dies_s, by_sigkill
        self.dead: asyncio.Event | None = None

    @property
    def is_dead(self) -> bool:
        return self.dead is not None and self.dead.is_set()

    async def outlast(self) -> None:
        if self.is_dead:
            raise EngineDeadError(f"rollout replica {self.name} died")

    async def generate(self, prompt, n, seed, *, sampling):
        self.dead = self.dead or asyncio.Event()
        if TOKENIZER.decode(prompt, skip_special_tokens=True).startswith(POISON):
            asyncio.get_running_loop().call_later(self._dies_s, self.dead.set)
        dying = asyncio.ensure_future(self.dead.wait())
        try:
            await asyncio.wait({dying}, timeout=self._answers_s)
        finally:
            dying.cancel()
        if self.is_dead:
            reason = f"rollout replica {self.name} died, which ends with\n  Traceback\n  ERROR IndexError: {self.name}"
            raise EngineDeadError(reason, is_innocent=self._by_sigkill)
        return await super().generate(prompt, n, seed, sampling=sampling)


def engines(**how) -> list[Mortal]:
    return [Mortal(f"rollout-{i}", **how) for i in range(5)]


def lost(fleet: list[Mortal]) -> list[str]:
    return [engine.name for engine in fleet if engine.is_dead]


ASKS = "await session.ask()\nreturn 1.0"
CATCHES = "try:\n    await session.ask()\nexcept AgentError:\n    pass\nreturn 1.0"


@pytest.mark.parametrize("body", [ASKS, CATCHES], ids=["the error is raised", "the error is caught"])
def test_a_poisoned_session_costs_two_replicas_and_itself(tmp_path, monkeypatch, body):
    warnings = []
    monkeypatch.setattr(agent_pool._log, "warning", lambda text, *values: warnings.append(text % values))
    agent = agent_file(tmp_path, body)
    fleet = engines()
    prompts = [prompt(i, f"{i}+3=") for i in range(10)]
    rollouts = play(config(agent), *prompts, engines=fleet)
    assert len(lost(fleet)) == 2
    assert [rollout.status for rollout in rollouts] == ["scored"] * 9 + ["score_failed"]
    assert [rollout.reward for rollout in rollouts[:9]] == [1.0] * 9
    detail = rollouts[9].detail
    assert "has cost two rollout replicas and is not sent to a third" in detail
    assert "Traceback" not in detail and detail.count("IndexError: rollout-") == 2
    (warning,) = warnings
    assert warning.startswith("session chain_sum/9#9 is lost: the request has cost two rollout replicas")


@pytest.mark.parametrize(
    ("log", "left_no_error"),
    [("INFO 1 request\n", True), ("INFO\nvllm.v1.EngineDeadError: EngineCore\nINFO\n", False), (None, False)],
)
def test_a_remote_replica_that_ends_without_an_error_was_ended_from_outside(tmp_path, monkeypatch, log, left_no_error):
    """So an operator's or a scheduler's SIGKILL on another host is not counted."""
    monkeypatch.setattr(replicas, "_PING_S", 0.01)
    if log is not None:
        (tmp_path / "log").write_text(log)

    async def ended() -> Exit:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        told = {"name": "rollout-0", "url": url, "host": "node3", "pid": 1, "incarnation": 1, "token": ""}
        endpoint = Endpoint(log=str(tmp_path / "log"), **told)
        endpoint.write(tmp_path / "endpoint.json")
        exited = asyncio.get_running_loop().create_future()
        watching = asyncio.ensure_future(replicas._watch(endpoint, tmp_path / "endpoint.json", exited))
        await asyncio.sleep(0.1)
        assert not exited.done()
        server.close()
        await asyncio.wait_for(watching, 30)
        return exited.result()

    how = asyncio.run(ended())
    assert how.left_no_error == left_no_error and "nothing listens" in str(how)


def ask_all(fleet: list[Mortal], texts: list[str]) -> list:
    async def run():
        requests = Requests(Fleet(*fleet))
        asked = (requests.ask(TOKENIZER.encode(text), 1, i) for i, text in enumerate(texts))
        return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(run())


def test_replicas_that_sigkill_ended_are_not_counted():
    fleet = engines(by_sigkill=True)
    (error,) = ask_all(fleet[:3], ["9"])
    assert len(lost(fleet)) == 3 and not isinstance(error, RequestLostError)


def test_a_poison_that_acts_late_costs_three_replicas_and_nothing_else(monkeypatch):
    """It outlasts the start, so at the second death the cause is still unknown."""
    monkeypatch.setattr(requests_module, "OUTLAST_S", 0.02)
    fleet = engines(answers_s=0.6, dies_s=0.3)
    outcomes = ask_all(fleet, ["9", "1+1=", "2+2=", "3+3=", "4+4=", "5+5="])
    assert len(lost(fleet)) <= 3
    assert isinstance(outcomes[0], RequestLostError)
    assert not any(isinstance(outcome, Exception) for outcome in outcomes[1:]), outcomes


def test_a_late_poison_alone_costs_two_replicas(monkeypatch):
    monkeypatch.setattr(requests_module, "OUTLAST_S", 0.02)
    fleet = engines(answers_s=0.6, dies_s=0.3)
    (error,) = ask_all(fleet, ["9"])
    assert isinstance(error, RequestLostError) and len(lost(fleet)) == 2


def test_a_poisoned_prompt_without_an_agent_loses_its_group():
    class Client(StreamClient):
        async def generate(self, prompt, n, seed, *, sampling=None):
            if prompt[0] == 3:
                raise EngineDeadError("rollout replica rollout-0 died")
            return await super().generate(prompt, n, seed, sampling=sampling)

    class Some(StreamFleet):
        def __init__(self):
            super().__init__()
            self.clients = [Client() for _ in range(4)]

        def remove(self, client, reason, *, num_retried=0):
            if client in self.clients:
                self.clients.remove(client)

    fleet = Some()
    cfg = set_fields(tiny_qwen3_moe(), prompts_per_step=6, completions_per_prompt=2)
    groups = RolloutStream(cfg, fleet, Numbers(), StreamScorer(), Ranks(0, [])).next_groups()
    assert numbers(groups) == [0, 1, 2, 3, 4, 5] and len(fleet.clients) == 2
    statuses = {rollout.status for group in groups for rollout in group.rollouts if group is not groups[3]}
    assert statuses == {"scored"}
    assert all("not sent to a third" in rollout.detail for rollout in groups[3].rollouts)
    assert [rollout.status for rollout in groups[3].rollouts] == ["score_failed"] * 2
