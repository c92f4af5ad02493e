"""Files with a line of JSON for each step: cutting them, and damage is named."""

import pytest

from megatron_fp8rl.observe.records import last_step, read_json_lines, truncate_from


def test_truncation_keeps_earlier_steps_only_and_moves_a_cut_off_line_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = b"".join(b'{"step": %d, "x": %d}\n' % (step, step + 1) for step in (1, 2, 3))
    path.write_bytes(whole)
    assert truncate_from(path, 4) == 0
    path.write_bytes(whole + b'{"step": 3, "prom')
    assert truncate_from(path, 4) == len(b'{"step": 3, "prom')
    assert path.read_bytes() == whole
    assert truncate_from(path, 3) > 0
    assert [record["step"] for record in read_json_lines(path)] == [1, 2]
    assert truncate_from(path, 0) > 0
    assert path.read_bytes() == b""
    aside = path.with_suffix(".cut.jsonl").read_bytes()  # nothing is lost
    assert aside.startswith(b'{"step": 3, "prom{"step": 3') and aside.count(b"\n") == whole.count(b"\n")


def test_the_last_step_is_that_of_the_last_whole_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("")
    assert last_step(path) == -1
    path.write_text('{"step": 1}\n{"step": 12, "x": 1}\n{"step": 13, "x"')
    assert last_step(path) == 12


def test_json_lines_name_the_bad_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2"):
        read_json_lines(path)
