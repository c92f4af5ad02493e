"""Replicas come and go: who is asked, who is asked instead, when weights are due, and how it ends."""

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megatron_fp8rl.data.tokenizer import character_tokenizer
from megatron_fp8rl.net.address import local_address
from megatron_fp8rl.net.auth import TOKEN_VARIABLE, RequireToken, headers
from megatron_fp8rl.net.endpoint import Endpoint
from megatron_fp8rl.rollout import fleet as fleet_module
from megatron_fp8rl.rollout import replicas
from megatron_fp8rl.rollout.completions import PartialCompletion
from megatron_fp8rl.rollout.errors import EngineDeadError, EngineDeadlineError, Exit
from megatron_fp8rl.rollout.replicas import Replica
from megatron_fp8rl.rollout.stream import RolloutStream
from megatron_fp8rl.token_array import TokenArray
from megatron_fp8rl.weight_sync.engines import NoReplicaError
from model_configs.tiny import tiny_qwen3_moe
from tests.helpers.fields import set_fields
from tests.helpers.processes import until
from tests.helpers.streams import Client, Fleet, Numbers, Ranks, Scorer, numbers

# ---- the stream


class Mortal(Client):
    dies_at = 0

    async def generate(self, prompt, n, seed, *, sampling=None):
        result = await super().generate(prompt, n, seed, sampling=sampling)
        if self.dies_at and len(self.prompts) >= self.dies_at:
            raise EngineDeadError("rollout-0 died with exit code -9")
        return result


class MortalFleet(Fleet):
    def __init__(self, num_clients: int):
        super().__init__()
        self.clients = [Mortal() for _ in range(num_clients)]
        self.joining: list[Mortal] = []
        self.num_asked_again = 0

    @property
    def wants_publication(self):
        return bool(self.joining) and not self.clients

    def remove(self, client, reason, *, num_retried=0):
        assert "exit code -9" in reason
        self.num_asked_again += num_retried
        if client in self.clients:
            self.clients.remove(client)
            self.joining.append(Mortal())

    async def wait_for_members(self):
        while not self.clients:
            await asyncio.sleep(0.01)


def stream_on(fleet, **rollout):
    cfg = set_fields(tiny_qwen3_moe(), prompts_per_step=6, completions_per_prompt=2, **rollout)
    return RolloutStream(cfg, fleet, Numbers(), Scorer(), Ranks(0, []))


def contents(groups):
    return [(r.name, r.seed, r.reward, r.completions[0].token_ids) for group in groups for r in group.rollouts]


@pytest.mark.parametrize("dies_at", [1, 3])
def test_prompts_of_a_dead_replica_are_asked_of_the_others_with_the_same_seeds(dies_at):
    expected = contents(stream_on(MortalFleet(2)).next_groups())
    fleet = MortalFleet(2)
    fleet.clients[0].dies_at = dies_at
    survivor = fleet.clients[1]
    assert contents(stream_on(fleet).next_groups()) == expected
    assert fleet.clients == [survivor]
    assert sorted(survivor.prompts) == [0, 1, 2, 3, 4, 5]  # three of its own, three of the other's
    assert fleet.num_asked_again == {1: 3, 3: 3}[dies_at]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_when_none_is_left_the_present_version_is_published_to_those_that_come_back(max_staleness):
    fleet = MortalFleet(1)
    fleet.clients[0].dies_at = 2
    stream = stream_on(fleet, max_staleness=max_staleness)
    calls = []

    def republish():
        calls.append(stream.version)

        def admit():
            fleet.clients, fleet.joining = fleet.joining, []

        fleet.call(admit)

    stream.republish = republish
    assert numbers(stream.next_groups()) == [0, 1, 2, 3, 4, 5]
    assert calls == [0]
    assert stream.position == 6


# ---- the fleet


class Source:
    """Replicas that die when they are told to; ``starts`` more of each."""

    starts_here = False

    def __init__(self, starts: int):
        self.starts = starts
        self.alive: dict[int, Replica] = {}

    async def next(self, index: int) -> Replica | None:
        if not self.starts:
            return None
        self.starts -= 1
        exited = asyncio.get_running_loop().create_future()
        self.alive[index] = Replica(
            name=f"rollout-{index}", url="http://x:1", log_path=Path("/nowhere"), process_group=0, exited=exited
        )
        return self.alive[index]

    def note_ready(self, replica):
        pass

    def end(self, replica, how):
        replica.exited.set_result(how)

    def missing(self, index):
        return "lost"

    def stop(self):
        pass


@pytest.fixture
def started(tmp_path, monkeypatch):
    """(fleet of two, source) for a number of starts."""
    character_tokenizer().save_pretrained(tmp_path)
    made = []

    async def healthy(self, client):
        if not client.is_alive:
            raise EngineDeadError("died")

    monkeypatch.setattr(fleet_module.Fleet, "_wait_healthy", healthy)

    def start(starts: int):
        cfg = tiny_qwen3_moe()
        cfg = replace(cfg, engine=replace(cfg.engine, num_replicas=2))
        source = Source(starts)
        made.append(fleet_module.Fleet(cfg, tmp_path, source))
        made[-1]._keep_all()
        made[-1].wait_until_ready()
        return made[-1], source

    yield start
    for fleet in made:
        fleet.shutdown()


def test_a_run_that_is_asked_to_stop_waits_no_longer_for_engines(tmp_path, monkeypatch):
    async def never(self, client):
        await asyncio.sleep(600)

    character_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(fleet_module.Fleet, "_wait_healthy", never)
    fleet = fleet_module.Fleet(tiny_qwen3_moe(), tmp_path, Source(1))
    fleet._keep_all()
    began, answers = time.monotonic(), iter((False, True))
    assert not fleet.wait_until_ready(lambda: next(answers))
    fleet.shutdown()
    assert 1 < time.monotonic() - began < 60


def die(fleet, source, index: int, how: Exit) -> None:
    async def end() -> None:
        source.alive[index].exited.set_result(how)
        for _ in range(5):
            await asyncio.sleep(0)

    fleet.sync(end(), 60.0)


class Frail(Source):
    """Replicas of this host, of which the first die while they start."""

    starts_here = True

    def __init__(self, starts: int, *ends: Exit):
        super().__init__(starts)
        self.ends = [*ends]

    async def next(self, index: int) -> Replica | None:
        if (result := await super().next(index)) is not None and self.ends:
            result.exited.set_result(self.ends.pop(0))
        return result


def test_every_engine_stops_at_the_end_tokens_of_the_model_folder(tmp_path, started):
    (tmp_path / "config.json").write_text('{"eos_token_id": [2, 70]}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [71, 70]}')
    fleet, _ = started(2)
    for client in fleet.clients:
        assert client.sampling.stop_token_ids == (2, 70, 71) and client.sampling.dropped_token_ids == (0, 2, 70, 71)
        part = PartialCompletion(seed=0, token_ids=TokenArray.from_ids([0, 22, 1, 23, 71]), finish_reason="stop")
        assert part.complete(client._decode, ()).text == "1<bos>2"


def test_one_that_is_killed_while_it_starts_is_started_again(tmp_path, monkeypatch, started):
    for source, outcome in (
        (Frail(4, Exit(signal=9), Exit(signal=9)), None),
        (Frail(1, Exit(signal=9)), EngineDeadError),  # no start is left
        (Frail(4, Exit(code=1)), EngineDeadError),  # it would end so again
    ):
        monkeypatch.setitem(globals(), "Source", lambda starts, source=source: source)
        if outcome is None:
            fleet, _ = started(4)
            assert len(fleet.clients) == 2 and source.starts == 0
        else:
            with pytest.raises(outcome):
                started(4)


@pytest.mark.parametrize("is_ready", [False, True])
def test_one_that_stands_still_while_it_starts_is_killed(tmp_path, monkeypatch, caplog, is_ready):
    monkeypatch.setattr(replicas, "_STILL_POLL_S", 0.1)
    caplog.set_level("WARNING", logger="megatron_fp8rl")
    source = replicas.LocalReplicas(replace(tiny_qwen3_moe().engine, deadline_scale=0.5 / 30), {}, {}, tmp_path, [])
    server = subprocess.Popen(["sh", "-c", "sleep 100 & wait"], start_new_session=True)
    try:
        until(lambda: psutil.Process(server.pid).children(), "a child")
        psutil.Process(server.pid).children()[0].suspend()  # an engine core, say
        if is_ready:
            source._shared_memory[server.pid] = set()  # then it is asked for its health
        asyncio.run(source._kill_if_stopped("rollout-0", server))
        assert (server.poll() is None) == is_ready or server.wait(60) == -signal.SIGKILL
        assert ("rollout-0 was stopped for" in caplog.text) != is_ready
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_one_that_comes_back_waits_for_a_publication(started):
    fleet, source = started(3)
    first, second = fleet.clients
    die(fleet, source, 0, Exit(signal=9))
    assert fleet.clients == (second,) and not fleet.wants_publication
    assert fleet.has_lost_replica([first]) and not fleet.has_lost_replica([second])
    admitted = fleet.begin_update()
    assert [client.name for client in admitted] == ["rollout-0", "rollout-1"] and admitted[0] is not first
    assert not admitted[0]._open.is_set()  # until it is resumed, with proven weights
    metrics = fleet.take_metrics()
    assert metrics["rollout/replicas/min"] == 1
    assert metrics["rollout/replicas_lost/sum"] == metrics["rollout/replicas_joined/sum"] == 1
    assert fleet.take_metrics()["rollout/replicas/min"] == 2


def test_a_publication_waits_for_the_first_that_comes_back(started):
    fleet, source = started(3)
    die(fleet, source, 0, Exit(code=1))
    die(fleet, source, 1, Exit(code=2))
    assert fleet.wants_publication
    assert [client.name for client in fleet.begin_update()] == ["rollout-0"]


def test_without_a_replica_and_restarts_the_first_failure_ends_the_run(started):
    fleet, source = started(2)
    die(fleet, source, 1, Exit(signal=11))
    die(fleet, source, 0, Exit(code=1))
    with pytest.raises(NoReplicaError, match=r"max_replica_restarts is used up.*rollout-1 was killed by signal 11"):
        fleet.begin_update()


def test_one_that_answers_nothing_is_killed_named_and_replaced(started, monkeypatch, caplog):
    monkeypatch.setattr(fleet_module, "_PROBE_S", 0.1)
    caplog.set_level("WARNING", logger="megatron_fp8rl")  # vLLM's server, which other tests import, raises the root's
    silent: set[str] = set()
    asked: list[str] = []

    async def call(self, path, *, verb, deadline_s):
        asked.append(self.name)
        if self.name in silent:
            raise EngineDeadlineError("did not answer")

    monkeypatch.setattr(fleet_module.EngineClient, "_call", call)
    fleet, _source = started(3)
    first, second = fleet.clients
    until(lambda: len(asked) > 6, "questions to both")
    assert fleet.clients == (first, second) and set(asked) == {"rollout-0", "rollout-1"}
    silent.add("rollout-0")
    until(lambda: fleet.clients == (second,), "the end of the one that hangs")
    silent.clear()
    assert "rollout-0 did not answer for 30 s: killed" in caplog.text
    assert "rollout-0 hung for 30 s and was killed" in fleet._first_failure
    until(lambda: bool(fleet._joining), "its successor")
    assert [client.name for client in fleet.begin_update()] == ["rollout-0", "rollout-1"]


def test_a_question_that_is_late_because_the_trainer_was_suspended_ends_no_replica(started, monkeypatch):
    fleet, _ = started(2)
    answers = [
        EngineDeadlineError("late"),
        None,
        EngineDeadError("died"),
        EngineDeadlineError("1"),
        EngineDeadlineError("2"),
    ]

    async def call(self, path, *, verb, deadline_s):
        if (answer := answers.pop(0)) is not None:
            raise answer

    client = fleet.clients[0]
    monkeypatch.setattr(fleet_module, "_PROBE_S", 600.0)
    monkeypatch.setattr(fleet_module.EngineClient, "_call", call)
    actual = [fleet.sync(client.is_silent(20.0), 60.0) for _ in range(3)]
    assert actual == [False, False, True] and not answers


def test_requests_that_wait_for_weights_hear_of_the_end_of_their_replica(started):
    fleet, source = started(2)
    client = fleet.clients[0]

    async def ask():
        client.suspend()
        request = asyncio.ensure_future(client.generate([1, 2], 1, 3))
        await asyncio.sleep(0.01)
        source.alive[0].exited.set_result(Exit(signal=9))
        await request

    with pytest.raises(EngineDeadError, match="rollout-0 was killed by signal 9"):
        fleet.sync(ask(), 60.0)
    assert threading.active_count() >= 1


# ---- how a replica is reached


def test_an_endpoint_is_whole_or_absent_and_readable_by_its_owner_alone(tmp_path):
    path = tmp_path / "replicas" / "rollout-0.json"
    assert Endpoint.read(path) is None
    endpoint = Endpoint(name="rollout-0", url="http://h:1", host="h", pid=3, incarnation=2, log="", token="t")
    endpoint.write(path)
    replace(endpoint, incarnation=3).write(path)
    assert Endpoint.read(path) == replace(endpoint, incarnation=3)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["rollout-0.json"]
    path.write_text('{"name": "rollout-0"}')
    assert Endpoint.read(path) is None


@pytest.mark.parametrize(
    ("environment", "given", "passes"),
    [
        ({TOKEN_VARIABLE: "secret"}, "secret", True),
        ({TOKEN_VARIABLE: "secret"}, "guess", False),
        ({TOKEN_VARIABLE: "secret"}, "", False),
        ({}, "", False),
        ({TOKEN_VARIABLE: ""}, "", False),
    ],
)
@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_only_the_token_opens_a_server(environment, given, passes, kind):
    seen, sent = [], []

    async def app(scope, receive, send):
        seen.append(scope["path"])

    async def send(message):
        sent.append(message)

    given_headers = [(name.lower().encode(), value.encode()) for name, value in headers(given).items()]
    scope = {"type": kind, "path": "/collective_rpc", "headers": given_headers}
    asyncio.run(RequireToken(app, environment)(scope, None, send))
    assert bool(seen) == passes
    if not passes:
        assert sent[0].get("status") == 401 or sent[0]["code"] == 1008


def test_the_address_that_the_agents_agreed_on_comes_first(monkeypatch):
    monkeypatch.setenv("LAUNCH_ADDRESS", "10.1.2.3")
    assert local_address() == "10.1.2.3"
