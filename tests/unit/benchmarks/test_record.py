"""Rows and where they come from; sections of docs/performance.md: one is replaced, the rest stays as it was."""

import json
import os
import sys

import pytest
import torch

from benchmarks import record
from benchmarks.record import Results, next_letter

FILE = """# Title

<!-- begin a -->
old a
<!-- end a -->

Between.

<!-- begin b -->
<!-- end b -->
"""


def test_one_section_is_replaced(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(FILE)
    record.replace("b", "new b", path)
    record.replace("a", "new a", path)
    record.replace("a", "newer a", path)
    expected = FILE.replace("old a", "newer a").replace("begin b -->\n", "begin b -->\nnew b\n")
    assert path.read_text() == expected
    assert [p.name for p in tmp_path.iterdir()] == ["page.md"]


def test_a_section_without_markers_is_appended(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(FILE)
    record.replace("c", "text", path)
    assert path.read_text() == FILE + "\n<!-- begin c -->\ntext\n<!-- end c -->\n"
    record.replace("c", "other", tmp_path / "new.md")
    assert (tmp_path / "new.md").read_text() == "<!-- begin c -->\nother\n<!-- end c -->\n"


def test_a_lost_marker_is_named(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(FILE.replace("<!-- end a -->\n", ""))
    with pytest.raises(ValueError, match="section a has one of its markers only"):
        record.replace("a", "x", path)
    assert "old a" in path.read_text()


def test_rows_become_a_table():
    rows = [{"name": "x|y", "n": 12345, "share": 0.123456}, {"name": "z", "n": 1, "ok": True, "share": 2e6}]
    assert record.table(rows).splitlines() == [
        "| name | n | share | ok |",
        "| --- | ---: | ---: | ---: |",
        "| x\\|y | 12,345 | 0.1235 |  |",
        "| z | 1 | 2,000,000 | yes |",
    ]


def test_every_row_is_stamped_and_every_file_has_a_section():
    page = record.PAGE.read_text(encoding="utf-8")
    others = {"exact", "accuracy"}  # without a stamp, and with its own page and stamp
    for path in (path for path in record.KEPT.glob("*.jsonl") if path.stem not in others):
        assert f"<!-- begin {path.stem} -->" in page, path
        for row in map(json.loads, path.read_text().splitlines()):
            of = row | row["stamp"] if "stamp" in row else row
            assert {"date", "commit", "machine", "command", "run"} <= set(of), path


def test_superseded_runs_are_left_out():
    rows = [{"run": run, "model": model} for run in ("A", "B") for model in ("qwen3_8b", "qwen3_30b_a3b")]
    kept = record.not_superseded("layers", rows)
    assert [(row["run"], row["model"]) for row in kept] == [
        ("A", "qwen3_8b"),
        *((r["run"], r["model"]) for r in rows[2:]),
    ]


def test_rows_carry_a_letter_and_a_stamp_of_their_invocation(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/some/where/benchmarks/publish.py", "--model", "a b"])
    record.stamp.cache_clear()
    path = tmp_path / "deep" / "rows.jsonl"
    for value in (1, 2):
        results = Results(path, ["value", "arm"])
        for arm in "ab":
            results.add({"value": value, "arm": arm, "device": "cpu"})
    rows = Results(path, ["value", "arm"]).rows()
    assert [row["run"] for row in rows] == ["A", "A", "B", "B"] and capsys.readouterr().out.count("RESULT {") == 4
    assert all({"date", "commit", "machine", "host", "command"} == set(row["stamp"]) for row in rows)
    assert [row["value"] for row in Results(path, ["arm"]).rows()] == [2, 2]  # the newest of each key
    first, second = record.runs(rows).splitlines()
    assert first.startswith("- A: 20") and second.startswith("- B: ") and "PyTorch 2." in first
    assert first.endswith(": `python -m benchmarks.publish --model 'a b'`") and "/some/where" not in first
    record.stamp.cache_clear()


def test_arms_that_run_side_by_side_join_one_run_of_one_machine(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        json.dumps({"arm": "old", "run": "A", "date": "2026-11-24"}) + "\n"
    )  # from before there were stamps
    both = [Results(path, ["arm"], "B"), Results(path, ["arm"], "B")]
    for results, arm in zip(both, "xy", strict=True):
        results.add({"arm": arm})
    assert Results(path, ["arm"]).add({"arm": "z"})["run"] == "C"
    assert Results(path, ["arm"], "B").add({"arm": "later"})["run"] == "B"
    with pytest.raises(ValueError, match="--run E: .*rows.jsonl has no such run; the next one is D"):
        Results(path, ["arm"], "E")
    now = record.stamp() | {"machine": "8 NVIDIA H100", "command": "other"}
    monkeypatch.setattr(record, "stamp", lambda: dict(now))
    with pytest.raises(ValueError, match="--run B: the machine of that run is '.*', and now it is '8 NVIDIA H100'"):
        Results(path, ["arm"], "B")


def test_gpus_are_those_that_this_process_may_use(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nfor i in 1 2 3; do echo NVIDIA H200, 580.1; done\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert record.machine().startswith("2 NVIDIA H200, driver 580.1, CUDA 13.0, PyTorch 2.")
    smi.write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    assert record.machine().startswith("2 a GPU, driver unknown, CUDA 13.0")


def test_letters_follow_each_other():
    assert [next_letter(taken) for taken in (["A", None], ["Z"], ["AZ"], [])] == ["B", "AA", "BA", "A"]


def test_a_file_in_another_s_hands_is_waited_for_until_a_deadline(tmp_path):
    with record.locked(tmp_path / "a"):
        with record.locked(tmp_path / "b"), pytest.raises(TimeoutError, match="another process has its lock"):
            with record.locked(tmp_path / "a", deadline_s=0.1):
                pass
    with record.locked(tmp_path / "a", deadline_s=0.1):
        pass
