"""GPUs of replicas, and the environment that gives them."""

from dataclasses import replace

import pytest

from megatron_fp8rl.config import ConfigError, RunConfig
from megatron_fp8rl.precision.hardware import Hardware
from megatron_fp8rl.rollout import fleet as fleet_module
from megatron_fp8rl.rollout import placement, replicas, server_process
from megatron_fp8rl.rollout.fleet import Fleet
from model_configs.tiny import tiny_qwen3


def run(*, world: int, replicas: int, tensor: int, where: str) -> RunConfig:
    cfg = tiny_qwen3()
    engine = replace(cfg.engine, num_replicas=replicas, tensor=tensor, placement=where)
    return replace(cfg, parallel=replace(cfg.parallel, world_size=world), engine=engine)


def gpus(count: int) -> list[str]:
    return [str(i) for i in range(count)]


@pytest.mark.parametrize(
    ("world", "replicas", "tensor", "where", "expected"),
    [
        (4, 4, 1, "colocated", ["0", "1", "2", "3"]),
        (4, 2, 2, "colocated", ["0,1", "2,3"]),
        (4, 1, 2, "colocated", ["0,1"]),
        (2, 2, 1, "separate", ["2", "3"]),
        (2, 3, 2, "separate", ["2,3", "4,5", "6,7"]),
    ],
)
def test_replicas_get_the_trainers_gpus_or_those_behind_them(world, replicas, tensor, where, expected):
    cfg = run(world=world, replicas=replicas, tensor=tensor, where=where)
    assert placement.assign(cfg, gpus(8), local_ranks=world) == expected


def test_gpus_keep_the_names_of_the_environment():
    listed = {"CUDA_VISIBLE_DEVICES": "GPU-a, 3,GPU-c,7"}
    assert placement.visible_gpus(listed) == ["GPU-a", "3", "GPU-c", "7"]
    cfg = run(world=2, replicas=1, tensor=2, where="separate")
    assert placement.assign(cfg, placement.visible_gpus(listed), local_ranks=2) == ["GPU-c,7"]
    # As CUDA reads it: everything behind an entry that names no GPU is hidden, and an empty list hides all.
    assert placement.visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1,-1,2"}) == ["0", "1"]
    assert placement.visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_only_ranks_of_this_host_count():
    """16 ranks on two hosts: the engines of the first host lie behind its 8."""
    cfg = run(world=16, replicas=1, tensor=2, where="separate")
    assert placement.assign(cfg, gpus(10), local_ranks=8) == ["8,9"]


@pytest.mark.parametrize(
    ("world", "replicas", "tensor", "where", "shown", "field", "words"),
    [
        (4, 5, 1, "colocated", 8, "--engine.num_replicas = 5", "Lower it to 4, or --engine.placement separate"),
        (1, 1, 2, "colocated", 8, "--engine.num_replicas = 1", "Lower --engine.tensor to 1"),
        (2, 3, 2, "separate", 6, "--engine.num_replicas = 3", "Lower it to 2"),
        (8, 1, 1, "separate", 8, "--engine.num_replicas = 1", "Use --engine.placement colocated"),
        (4, 1, 1, "separate", 2, "--parallel.world_size = 4", "which shows 2 GPUs (0, 1). Lower it to 2"),
    ],
)
def test_too_few_gpus_are_refused_with_a_remedy(world, replicas, tensor, where, shown, field, words):
    cfg = run(world=world, replicas=replicas, tensor=tensor, where=where)
    with pytest.raises(ConfigError) as error:
        placement.assign(cfg, gpus(shown), local_ranks=world)
    assert field in str(error.value) and words in str(error.value)


def test_an_engine_sees_its_gpus_and_nothing_of_the_trainers_settings(monkeypatch, tmp_path):
    trainer = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "CUDA_VISIBLE_DEVICES": "4,5,6,7",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    for name, value in trainer.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fleet_module, "here", lambda: Hardware("hopper"))
    environments: list[dict[str, str]] = []

    def start_server(cfg, hf_dir, *, gpus, kernels, token, **unused):
        environments.append(server_process._environment(cfg, token, gpus, kernels))
        raise FileNotFoundError("no engine is wanted here")

    monkeypatch.setattr(replicas, "start_server", start_server)
    monkeypatch.setattr(Fleet, "_keep_all", lambda self: None)
    cfg = run(world=2, replicas=2, tensor=1, where="separate")
    with Fleet.start(cfg, tmp_path, tmp_path, wait=False) as fleet:
        for index in range(2):
            with pytest.raises(FileNotFoundError):
                fleet._replicas.spawn(index)
    assert [e["CUDA_VISIBLE_DEVICES"] for e in environments] == ["6", "7"]
    assert not environments[0].keys() & (trainer.keys() - {"CUDA_VISIBLE_DEVICES"})
    with pytest.raises(ConfigError, match="this host shows 4"):
        Fleet.start(run(world=2, replicas=3, tensor=1, where="separate"), tmp_path, tmp_path, wait=False)
