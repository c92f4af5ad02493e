"""One engine as two parts that share no network but a cable, as on two nodes: its weights, its answers, and its end."""

import os
import signal
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from engine_weights import PROMPT, Reference, policy_of, sample, write_hf_dir
from inprocess import random_weights
from test_remote_replicas import START_S, other_host, remote_cfg, start_replica  # noqa: F401

from megatron_fp8rl.config import RunConfig
from megatron_fp8rl.net.endpoint import Endpoint, endpoint_path
from megatron_fp8rl.rollout.fleet import Fleet
from megatron_fp8rl.weight_sync.plan_inputs import PlanInputs
from megatron_fp8rl.weight_sync.publish import WeightExporter
from tests.helpers.processes import until
from tests.tolerances import ENGINE_LOGPROB_MEAN

WIDE = {"data": 2, "expert": 2}  # attention twice, and each expert on one of the parts; slurm/ has tensor parallelism


def start_part(rank: int, before: list[str], interface: str, port: int, run_dir: Path) -> subprocess.Popen[bytes]:
    """Start one node's part, as its agent does."""
    address = os.environ.get("LAUNCH_ADDRESS", "127.0.0.1")
    variables = {"LAUNCH_ADDRESS": address} if rank == 0 and "LAUNCH_ADDRESS" in os.environ else {}
    more = [word for name, value in WIDE.items() for word in (f"--engine.{name}", str(value))]
    more += ["--nnodes", "2", "--node_rank", str(rank), "--master_addr", address, "--master_port", str(port)]
    log = f"rollout-0.node{rank}"
    return start_replica(before, run_dir, *more, log=log, GLOO_SOCKET_IFNAME=interface, **variables)


def test_two_parts_of_an_engine_on_two_networks(other_host, tmp_path: Path):  # noqa: F811
    base = remote_cfg()
    cfg: RunConfig = replace(base, engine=replace(base.engine, **WIDE))
    (tmp_path / "logs").mkdir()
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    ends = (f"a{os.getpid()}", f"b{os.getpid()}") if other_host else ("lo", "lo")
    parts = [start_part(rank, [[], other_host][rank], ends[rank], port, tmp_path) for rank in (0, 1)]
    fleet = Fleet.start(cfg, write_hf_dir(cfg, tmp_path / "hf"), tmp_path, wait=False)
    try:
        until(lambda: endpoint_path(tmp_path, 0).exists() or any(p.poll() is not None for p in parts), "parts", START_S)
        assert [part.poll() for part in parts] == [None, None], (tmp_path / "logs" / "rollout-0.node0.log").read_text()
        fleet.wait_until_ready()
        weights = random_weights(cfg, 1)
        exporter = WeightExporter(policy_of(cfg, weights), fleet, PlanInputs.of(cfg))
        exporter.publish(1)  # raises unless every worker holds what was sent to it
        (client,) = fleet.clients
        reports = fleet.sync(client.weight_digests(), 120.0)
        assert sorted((report["rank"], report["version"]) for report in reports) == [(0, 1), (1, 1)]
        assert reports[0]["combined"] != reports[1]["combined"], "each holds its own slices"
        completion = sample(fleet)
        tokens = [*PROMPT, *completion.token_ids]
        # Routes are not recorded: near ties may choose other experts than the reference.
        routes = -np.ones((len(tokens) - 1, cfg.model.num_layers, cfg.model.experts_per_token))
        expected = Reference(cfg, weights).logprobs(tokens, 1.0, routes)[len(PROMPT) - 1 :]
        difference = (torch.tensor(completion.rollout_logprobs) - expected).abs()
        assert difference.median() < 2 * ENGINE_LOGPROB_MEAN, difference
        exporter.close()

        # A part whose worker dies ends and says so, for its agent to start both parts again.
        (server,) = children(parts[1].pid)
        (worker,) = children(server)
        os.kill(worker, signal.SIGKILL)
        assert parts[1].wait(START_S) == 1
        # Asked to end, the other one does, although it waits for what will not come.
        parts[0].terminate()
        assert parts[0].wait(START_S) == 0
        until(lambda: not fleet.clients, "the end of all clients", START_S)
        assert Endpoint.read(endpoint_path(tmp_path, 0)) is None
    finally:
        fleet.shutdown()
        for part in parts:
            if part.poll() is None:
                os.killpg(part.pid, signal.SIGTERM)
                part.wait(START_S)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
