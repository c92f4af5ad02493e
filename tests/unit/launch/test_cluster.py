"""Cluster files: found by name or path, judged as a whole."""

from __future__ import annotations

import dataclasses

import pytest

from launch import cluster
from launch.cluster import Cluster, ClusterError


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
