"""Cluster files: found by name or path, judged as a whole."""

import dataclasses
from types import SimpleNamespace

import pytest

from launch import cluster, slurm
from launch.cluster import Cluster, ClusterError
from launch.spec import JobSpec, Role


@pytest.mark.parametrize("name", ["pyxis", "plain", "local"])
def test_examples_are_sound(name):
    assert cluster.load(name).violations() == []
    assert name in cluster.known()


@pytest.mark.parametrize("name", ["my cluster.py", 'it\'s "big".py'])
def test_a_path_may_hold_blanks_and_quotes(tmp_path, name):
    path = tmp_path / "a b" / name
    path.parent.mkdir()
    path.write_text("from launch.cluster import Cluster\nCLUSTER = Cluster(account='x y')\n")
    assert cluster.load(str(path)).account == "x y"


def test_a_name_may_hold_them_too(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "FOLDER", tmp_path)
    (tmp_path / "it's big.py").write_text("from launch.cluster import Cluster\nCLUSTER = Cluster(partition='p')\n")
    assert cluster.load("it's big").partition == "p"
    with pytest.raises(ClusterError, match="did you mean it's big"):
        cluster.load("its big")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\n", "sets CLUSTER to None"),
        ("CLUSTER = 3\n", "sets CLUSTER to 3"),
        ("a = 1\nb = a.c\n", ":2: AttributeError"),
        ("a = (\n", ":1: SyntaxError"),
        ("from launch.cluster import Cluster\nCLUSTER = Cluster(partitoin='p')\n", ":2: TypeError"),
    ],
)
def test_a_broken_file_is_named_with_its_line(tmp_path, text, said):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(ClusterError) as caught:
        cluster.load(str(path))
    assert str(path) in str(caught.value) and said in str(caught.value)


def test_a_missing_one_is_told_from_those_there_are():
    with pytest.raises(ClusterError, match=r"did you mean pyxis\?.*local, plain, pyxis"):
        cluster.load("pyxsi")
    with pytest.raises(ClusterError, match="no such file"):
        cluster.load("no/such.py")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("4:00:00", 14400), ("2-0", 172800), ("1-12:30", 131400), ("1-0:0:1", 86401)],
)
def test_time_limits_are_read_as_sbatch_does(text, seconds):
    assert cluster.parse_time_limit(text) == seconds


WRONG = {
    "time_limit": "soon",
    "gpu": "h800",
    "gpus_per_node": 0,
    "run_root": "relative",
    "python": "/usr/bin/perl",
    "max_restarts": -1,
    "cpus_per_node": 0,
    "container_mounts": ("/a:/b",),
    "setup": ("a\nb",),
    "env": {"A=B": "c"},
    "sbatch": {"nodes": 3},
}


@pytest.mark.parametrize(("field", "value"), WRONG.items())
def test_a_mistake_names_field_and_value(field, value):
    [found] = Cluster(**{field: value}).violations()
    assert found.field.startswith(f"CLUSTER.{field}") and found.remedy


def test_all_mistakes_are_named_at_once():
    found = {violation.field.partition("[")[0] for violation in Cluster(**WRONG).violations()}
    assert found >= {f"CLUSTER.{field}" for field in WRONG}


def test_nodes_without_gpus_have_ranks():
    sound = Cluster(gpu=None, gpus_per_node=0, ranks_per_node=2)
    assert sound.violations() == [] and sound.slots_per_node == 2
    assert [v.field for v in dataclasses.replace(sound, ranks_per_node=None).violations()] == ["CLUSTER.ranks_per_node"]
    assert [v.field for v in Cluster(ranks_per_node=4).violations()] == ["CLUSTER.ranks_per_node"]
    assert Cluster().slots_per_node == 8


def test_the_signal_comes_before_the_limit():
    [found] = Cluster(time_limit="5:00", save_signal_s=300).violations()
    assert found.field == "CLUSTER.save_signal_s" and "300 s" in found.remedy


def executor(**changes) -> SimpleNamespace:
    """What a ``nemo_run.SlurmExecutor`` has. Importing nemo-run takes seconds."""
    names = "heterogeneous array het_group_indices retries signal gpus_per_task cpus_per_task container_image srun_args"
    names += (
        " additional_parameters setup_lines qos mem mem_per_gpu mem_per_cpu comment constraint exclude gres exclusive"
    )
    fields = dict.fromkeys(
        f"{names} segment network account partition gpus_per_node time env_vars container_mounts".split()
    )
    return SimpleNamespace(**fields | {"tunnel": type("LocalTunnel", (), {})()} | changes)


@pytest.mark.parametrize(("time", "limit"), [(None, None), (30, "30"), ("00:10:00", "00:10:00")])
def test_an_executor_may_leave_its_time_out_or_give_minutes(time, limit):
    made = Cluster.from_executor(executor(time=time), ranks_per_node=2)
    assert made.time_limit == limit and made.violations() == [] and made.env == {}


def test_a_field_of_an_executor_that_is_of_another_type_is_named():
    with pytest.raises(ClusterError, match=r"CLUSTER.time_limit = 0.5: is of type float. Write text, in quotes"):
        Cluster.from_executor(executor(time=0.5), ranks_per_node=2)
    with pytest.raises(ClusterError, match=r"CLUSTER.env = {'A': 1}: is of type dict"):
        Cluster.from_executor(executor(env_vars={"A": 1}), ranks_per_node=2)


def test_without_a_time_limit_the_script_asks_for_none():
    spec = JobSpec(name="j", run_dir="/r", roles=(Role(name="t", kind="command", nodes=(0,), command=()),), nodes=1)
    script = slurm.dry_run(spec, Cluster(time_limit=None))
    assert "--time" not in script and "--signal=USR1@300" in script
    assert "--time=30" in slurm.dry_run(spec, Cluster(time_limit="30"))


def test_a_run_root_has_to_exist(tmp_path):
    assert Cluster(run_root=str(tmp_path)).missing_files() == []
    [found] = Cluster(run_root=f"{tmp_path}/a:b").missing_files()
    assert found.field == "CLUSTER.run_root" and "does not exist" in str(found) and "all nodes share" in found.remedy


def test_files_are_looked_for(tmp_path):
    image = tmp_path / "im age.sqsh"
    here = Cluster(container_image=str(image), container_mounts=(f"{tmp_path}:/data", "/no/where:/x"))
    assert [v.field for v in here.missing_files()] == ["CLUSTER.container_image", "CLUSTER.container_mounts"]
    image.touch()
    assert [v.field for v in here.missing_files()] == ["CLUSTER.container_mounts"]
    assert Cluster(container_image="registry#image:tag").missing_files() == []


def test_the_interpreter_is_the_containers_or_this_one():
    import sys

    assert Cluster(container_image="image").interpreter == "python"
    assert Cluster().interpreter == sys.executable
    assert Cluster(python="/opt/a b/bin/python").interpreter == "/opt/a b/bin/python"
