"""Which node carries what, and every reason why a run cannot be laid out."""

import dataclasses

import pytest

from launch import plan
from launch.layout import Layout, Need, Place, plan_layout
from launch.plan import plan_training
from megatron_fp8rl import cli
from tests.helpers.launch_requests import CPU, GPU, SMALL, request


def laid_out(nodes: int | None = None, **need) -> Layout:
    layout, problems = plan_layout(Need(**{"tensor": 1, "slots": 8} | need), nodes)
    assert problems == [] and layout is not None
    return layout


def refused(nodes: int | None = None, **need) -> str:
    layout, problems = plan_layout(Need(**{"tensor": 1, "slots": 8} | need), nodes)
    assert layout is None
    [problem] = problems
    return problem


def places(layout: Layout) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(place.nodes, place.slots) for place in layout.replicas]


def test_what_fits_on_one_node_stays_there():
    layout = laid_out(ranks=4, replicas=2, tensor=2)
    assert (layout.nodes, layout.trainer_nodes, layout.ranks_per_node) == (1, (0,), 4)
    assert places(layout) == [((0,), (4, 5)), ((0,), (6, 7))]


def test_more_nodes_put_engines_apart_and_spread_the_trainer():
    apart = laid_out(2, ranks=4, replicas=2, tensor=2)
    assert (apart.trainer_nodes, places(apart)) == ((0,), [((1,), (0, 1)), ((1,), (2, 3))])
    spread = laid_out(3, ranks=2, replicas=1)
    assert (spread.trainer_nodes, spread.ranks_per_node, places(spread)) == ((0, 1), 1, [((2,), (0,))])
    even = laid_out(3, ranks=1, replicas=3)
    assert places(even) == [((1,), (0,)), ((1,), (1,)), ((2,), (0,))]


def test_one_replica_on_a_node():
    layout = laid_out(ranks=16, replicas=2, tensor=8)
    assert (layout.nodes, layout.trainer_nodes, layout.ranks_per_node) == (4, (0, 1), 8)
    assert places(layout) == [((2,), tuple(range(8))), ((3,), tuple(range(8)))]


def test_a_replica_that_spans_nodes():
    layout = laid_out(ranks=8, replicas=2, tensor=16)
    assert layout.nodes == 5 and places(layout) == [((1, 2), tuple(range(8))), ((3, 4), tuple(range(8)))]
    assert "does not fill whole nodes of 8" in refused(ranks=8, replicas=1, tensor=12)


def test_every_trainer_node_has_as_many_ranks():
    layout = laid_out(ranks=12, replicas=0)
    assert (layout.trainer_nodes, layout.ranks_per_node) == ((0, 1), 6)


def test_engines_that_share_the_trainers_slots():
    layout = laid_out(ranks=16, replicas=4, tensor=4, shares_slots=True)
    assert layout.nodes == 2
    assert places(layout) == [((0,), (0, 1, 2, 3)), ((0,), (4, 5, 6, 7)), ((1,), (0, 1, 2, 3)), ((1,), (4, 5, 6, 7))]
    assert "which are fewer" in refused(ranks=2, replicas=3, shares_slots=True)
    assert "cross the edge of a node" in refused(ranks=3, replicas=1, tensor=2, slots=2, shares_slots=True)


def test_too_few_and_too_many_nodes_name_what_would_do():
    assert refused(1, ranks=16, replicas=1) == (
        "--nodes 1 is too few: 16 trainer ranks and 1 replicas x 1 take 3 nodes of 8"
    )
    assert refused(7, ranks=2, replicas=1).endswith("can take 1, 2, 3")


@pytest.mark.parametrize("ranks", [1, 2, 6, 8, 24])
@pytest.mark.parametrize("replicas", [0, 1, 3])
@pytest.mark.parametrize("tensor", [1, 2, 8, 16])
@pytest.mark.parametrize("nodes", [None, 1, 2, 3, 4, 6])
def test_no_slot_is_given_twice_and_no_node_is_idle(ranks, replicas, tensor, nodes):
    layout, problems = plan_layout(Need(ranks=ranks, replicas=replicas, tensor=tensor, slots=8), nodes)
    assert (layout is None) == bool(problems)
    if layout is None:
        return
    taken = [(node, slot) for node in layout.trainer_nodes for slot in range(layout.ranks_per_node)]
    taken += [(node, slot) for place in layout.replicas for node in place.nodes for slot in place.slots]
    assert len(taken) == len(set(taken)) == ranks + replicas * tensor
    assert {node for node, _ in taken} == set(range(layout.nodes))
    assert all(0 <= slot < 8 for _, slot in taken) and nodes in (None, layout.nodes)


def test_roles_of_a_separate_run():
    words = ("--weight_sync.transport", "auto")
    (problem,) = plan_training(request("grpo_qwen3_8b", *words, nodes=2)).problems
    assert "--model.hf_path = None: grpo_qwen3_8b has no weights to start from" in problem
    planned = plan_training(request("grpo_qwen3_8b", *words, "--model.random", "True", nodes=2))
    spec = planned.spec
    assert spec is not None, planned.problems
    assert spec.run_dir.startswith("/shared/")
    trainer, *replicas = spec.roles
    assert (trainer.kind, trainer.nodes, trainer.processes_per_node) == ("torchrun", (0,), 4)
    assert trainer.gpus == (0, 1, 2, 3)
    assert trainer.command[:4] == ("-m", "megatron_fp8rl", "train", "grpo_qwen3_8b")
    assert trainer.essential and not trainer.restart
    assert [(r.name, r.nodes, r.gpus) for r in replicas] == [(f"rollout-{i}", (1,), (i,)) for i in range(4)]
    for index, replica in enumerate(replicas):
        assert replica.restart and not replica.essential and replica.kind == "replica"
        words = replica.command
        assert words[words.index("--replica") + 1] == str(index)
        assert words[words.index("--endpoint") + 1] == f"{spec.run_dir}/replicas/rollout-{index}.json"


def test_commands_are_those_of_the_program():
    """What stands behind CONFIG can be parsed, and says where the run and its engines are."""
    spec = plan_training(request("tiny_qwen3_moe", *SMALL, "gloo", cluster=CPU, nodes=3)).spec
    assert spec is not None and [role.nodes for role in spec.roles] == [(0, 1), (2,)]
    words = spec.role("trainer").command
    cfg = cli.parse_overrides(cli.load_config(words[3]), words[4:])
    assert (cfg.run_dir, cfg.engine.placement, cfg.observe.display) == (spec.run_dir, "remote", "plain")
    assert cfg.parallel.world_size == 2 and spec.role("trainer").gpus == ()


def test_a_run_folder_may_hold_anything(tmp_path):
    odd = str(tmp_path / 'it\'s {name} "x" $y')
    spec = plan_training(request("tiny_qwen3_moe", cluster=dataclasses.replace(CPU, run_root=odd))).spec
    assert spec is not None and spec.run_dir == f"{odd}/runs/tiny_qwen3_moe"
    words = spec.role("trainer").command
    assert cli.parse_overrides(cli.load_config(words[3]), words[4:]).run_dir == spec.run_dir


def test_colocated_engines_of_one_node_are_the_trainers_own():
    spec = plan_training(request("tiny_qwen3_moe", cluster=CPU)).spec
    assert spec is not None and [role.name for role in spec.roles] == ["trainer"]
    assert "remote" not in spec.role("trainer").command


def test_warm_start_has_no_engines():
    spec = plan_training(request("tiny_qwen3_moe", *SMALL, "gloo", cluster=CPU, job="sft", nodes=2)).spec
    assert spec is not None and [(role.name, role.nodes) for role in spec.roles] == [("trainer", (0, 1))]
    assert spec.role("trainer").command[2] == "sft"


def test_a_replica_over_nodes_gets_vllms_flags():
    [role] = plan.replica_roles(request("grpo_qwen3_8b"), (Place(nodes=(1, 2), slots=tuple(range(8))),), "/shared/run")
    words = role.args(2, head_address="10.0.0.2", head_port=4000)
    for option, value in {"nnodes": "2", "node_rank": "1", "master_addr": "10.0.0.2", "master_port": "4000"}.items():
        assert words[words.index(f"--{option}") + 1] == value


def test_every_problem_is_named_at_once():
    """Of the cluster, of the configuration and of the layout."""
    wrong = request("tiny_qwen3_moe", *SMALL, "ipc", "--parallel.tensor", "3", cluster=CPU, nodes=9)
    problems = "\n".join(plan_training(wrong).problems)
    assert "--parallel.tensor = 3" in problems and "--nodes 9" in problems
    broken = dataclasses.replace(CPU, time_limit="x", max_restarts=-1)
    problems = "\n".join(plan_training(dataclasses.replace(wrong, cluster=broken)).problems)
    assert "CLUSTER.time_limit" in problems and "CLUSTER.max_restarts" in problems and "--parallel.tensor" in problems


def test_shared_memory_ends_at_a_node():
    [problem] = plan_training(request("tiny_qwen3_moe", *SMALL, "ipc", cluster=CPU, nodes=3)).problems
    assert "--weight_sync.transport = 'ipc'" in problem and "--weight_sync.transport auto" in problem


def test_a_mistake_that_doctor_sees_too_is_named_once():
    words = ("--parallel.world_size", "16", "--engine.num_replicas", "16", "--weight_sync.transport", "ipc")
    problems = plan_training(request("grpo_qwen3_8b_colocated", *words)).problems
    assert sum("--weight_sync.transport" in problem for problem in problems) == 1


def test_colocated_engines_over_nodes_are_started_by_agents_on_the_trainers_gpus():
    words = ("--parallel.world_size", "16", "--engine.num_replicas", "16", "--weight_sync.transport", "auto")
    planned = plan_training(request("grpo_qwen3_8b_colocated", *words, "--model.random", "True"))
    assert planned.spec is not None, planned.problems
    assert planned.spec.nodes == 2 and planned.spec.role("trainer").nodes == (0, 1)
    last = planned.spec.role("rollout-15")
    assert (last.nodes, last.gpus) == ((1,), (7,))
    assert any("NCCL cannot connect" in warning for warning in planned.warnings)
    words = planned.spec.role("trainer").command
    assert (
        cli.parse_overrides(cli.load_config(words[3]), words[4:]).engine.placement,
        cli.parse_overrides(cli.load_config(words[3]), words[4:]).weight_sync.transport,
    ) == ("remote", "gloo")


def test_what_doctor_finds_comes_with_its_remedy():
    """A model that the GPUs of the cluster cannot hold."""
    small = dataclasses.replace(GPU, gpu="h100")
    found = plan_training(request("grpo_qwen3_235b_a22b", "--parallel.world_size", "16", cluster=small))
    assert found.spec is None and any("GiB" in problem or "--parallel" in problem for problem in found.problems)


def test_a_cluster_may_bound_the_nodes():
    [problem] = plan_training(
        request("tiny_qwen3_moe", *SMALL, "gloo", cluster=dataclasses.replace(CPU, max_nodes=2), nodes=3)
    ).problems
    assert "3 nodes" in problem and "CLUSTER.max_nodes = 2" in problem


def test_rl_needs_weights():
    problems = plan_training(request("tiny_qwen3_moe", cluster=CPU, job="rl")).problems
    assert any(problem.startswith("--model.hf_path = None") for problem in problems)
    assert plan_training(request("tiny_qwen3_moe", cluster=CPU, job="rl")).spec is None
