"""Requests of the launcher for small configurations."""

from launch.cluster import Cluster
from launch.plan import Request
from megatron_fp8rl import cli

CPU = Cluster(gpu=None, gpus_per_node=0, ranks_per_node=4, run_root="/shared")
GPU = Cluster(run_root="/shared")


def request(config: str, *args: str, cluster: Cluster = GPU, **changes) -> Request:
    cfg = cli.parse_overrides(cli.load_config(config), list(args))
    values = {"job": "train", "cluster": cluster, "config_name": config, "cfg": cfg, "overrides": args}
    return Request(**values | changes)


SMALL = tuple("--parallel.world_size 2 --parallel.expert 2 --engine.placement separate --weight_sync.transport".split())
