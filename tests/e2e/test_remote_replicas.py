"""Replicas that others start, found by their endpoint files: on another network where this machine can make one."""

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from engine_weights import policy_of, sample, write_hf_dir
from inprocess import random_weights, set_weights

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.net.endpoint import Endpoint, endpoint_path
from megatron_fp8rl.rollout.completions import GENERATE_PATH
from megatron_fp8rl.rollout.errors import EngineDeadlineError
from megatron_fp8rl.rollout.fleet import Fleet
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.publish import WeightExporter
from model_configs.tiny import tiny_qwen3_moe
from tests.helpers.processes import until

DEADLINE_SCALE = 0.4
START_S = 600.0 * DEADLINE_SCALE
_OUTSIDE, _INSIDE = (f"10.97.{os.getpid() % 256}.{host}" for host in (1, 2))  # other tests make such networks too


def remote_cfg() -> RunConfig:
    """The configuration of the replica's command line."""
    cfg = tiny_qwen3_moe()
    engine = replace(cfg.engine, placement="remote", kv_cache_bytes=16 << 20, deadline_scale=DEADLINE_SCALE)
    weight_sync = replace(cfg.weight_sync, transport="auto")
    return replace(cfg, name="remote", engine=engine, weight_sync=weight_sync)


def words() -> list[str]:
    return [
        *"--engine.placement remote --weight_sync.transport auto --engine.kv_cache_bytes".split(),
        str(16 << 20),
        "--engine.deadline_scale",
        str(DEADLINE_SCALE),
    ]


@pytest.fixture(scope="module")
def other_host() -> Iterator[list[str]]:
    """Command prefix for another address without a route outward; empty without the rights."""
    name = f"fp8rl{os.getpid()}"
    if os.geteuid() != 0 or not shutil.which("ip") or subprocess.run(["ip", "netns", "add", name]).returncode:
        yield []
        return
    here, there = f"a{os.getpid()}", f"b{os.getpid()}"
    inside = ["ip", "netns", "exec", name]
    try:
        for command in (
            ["ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", name],
            ["ip", "addr", "add", f"{_OUTSIDE}/24", "dev", here],
            ["ip", "link", "set", here, "up"],
            [*inside, "ip", "addr", "add", f"{_INSIDE}/24", "dev", there],
            [*inside, "ip", "link", "set", there, "up"],
            [*inside, "ip", "link", "set", "lo", "up"],
        ):
            subprocess.run(command, check=True)
        os.environ["LAUNCH_ADDRESS"] = _OUTSIDE  # on the trainer's side; the other finds its own
        yield inside
    finally:
        os.environ.pop("LAUNCH_ADDRESS", None)
        subprocess.run(["ip", "netns", "del", name])


def start_replica(before: list[str], run_dir: Path, *more: str, log: str = "rollout-0", **variables: str):
    """Start a replica, or a part of one, as an agent does, below a shell that can be killed."""
    environment = {key: value for key, value in os.environ.items() if key != "LAUNCH_ADDRESS"}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    command = [*before, sys.executable, *"-m megatron_fp8rl replica tiny_qwen3_moe".split(), *words(), *more]
    command += ["--replica", "0", "--endpoint", str(endpoint_path(run_dir, 0))]
    (run_dir / "logs").mkdir(exist_ok=True)
    path = run_dir / "logs" / f"{log}.log"
    environment.setdefault("LAUNCH_LOG", str(path))
    with path.open("ab") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)


def status_of(url: str, token: str | None) -> int:
    request = urllib.request.Request(url, method="POST", data=b"")
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        return urllib.request.urlopen(request, timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.long  # tests/slurm has the same over nodes
def test_a_remote_replica_is_found_published_to_lost_and_found_again(other_host, tmp_path):
    cfg = remote_cfg()
    stale = Endpoint(name="rollout-0", url="http://127.0.0.1:9", host="gone", pid=1, incarnation=7, log="", token="old")
    stale.write(endpoint_path(tmp_path, 0))
    agents = [start_replica(other_host, tmp_path)]
    fleet = Fleet.start(cfg, write_hf_dir(cfg, tmp_path / "hf"), tmp_path)
    try:
        path = endpoint_path(tmp_path, 0)
        endpoint = Endpoint.read(path)
        assert endpoint.incarnation == 8 and endpoint.log.endswith("rollout-0.log")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        if other_host:
            assert endpoint.url.startswith(f"http://{_INSIDE}:")
        for route in ("/pause", "/collective_rpc", GENERATE_PATH, "/inference/v1/generate", "/health"):
            assert status_of(endpoint.url + route, None) == status_of(endpoint.url + route, "guess") == 401
        assert status_of(endpoint.url + "/reset_prefix_cache", endpoint.token) == 200

        policy = policy_of(cfg, random_weights(cfg, 1))
        exporter = WeightExporter(policy, fleet, PlanInputs.of(cfg))
        exporter.publish(1)
        before = sample(fleet)
        os.kill(endpoint.pid, signal.SIGKILL)  # the server; what the agent started ends by itself
        assert agents[0].wait(START_S) == 128 + signal.SIGKILL
        until(lambda: not fleet.clients, "the end of all clients", START_S)
        agents.append(start_replica(other_host, tmp_path))
        set_weights(policy, random_weights(cfg, 1))
        report = exporter.publish(2)  # waits for the replica
        again = sample(fleet)
        assert (before.token_ids, before.rollout_logprobs) == (again.token_ids, again.rollout_logprobs)
        assert again.version_spans == ((0, 2),) and report.version == 2
        exporter.close()
        agents[1].terminate()
        assert agents[1].wait(START_S) == 0
        assert not path.exists()
    finally:
        fleet.shutdown()
        for agent in agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGTERM)
                agent.wait(START_S)


def test_missing_replicas_are_named_with_the_ends_of_their_logs(tmp_path):
    base = remote_cfg()
    cfg = replace(base, engine=replace(base.engine, num_replicas=3, deadline_scale=1.5 / 600))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/rollout-1.node4.log").write_text("starting\nValueError: no such model\n")
    endpoint = Endpoint(
        name="rollout-2", url="http://127.0.0.1:9", host="node7", pid=1, incarnation=1, log="", token="x"
    )
    endpoint.write(endpoint_path(tmp_path, 2))
    with pytest.raises(EngineDeadlineError) as error:
        Fleet.start(cfg, write_hf_dir(cfg, tmp_path / "hf"), tmp_path)
    text = str(error.value)
    assert "replicas rollout-0, rollout-1, rollout-2 did not start within 1.5 s" in text
    assert "rollout-0.json does not exist; it has no log" in text
    assert "rollout-1.node4.log ends with" in text and "no such model" in text
    assert "rollout-2.json names http://127.0.0.1:9 on node7, where nothing answers" in text
    assert json.loads(endpoint_path(tmp_path, 2).read_text())["token"] == "x"
