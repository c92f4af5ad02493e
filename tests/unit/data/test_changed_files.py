"""A file of rows that is truncated, rewritten, extended or replaced while a run reads it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fp8rl.config import DataConfig, EnvironmentConfig, RunConfig, SamplingConfig
from megatron_fp8rl.data.prompts import PromptStream
from megatron_fp8rl.data.rows import open_rows
from megatron_fp8rl.data.tokenizer import character_tokenizer
from megatron_fp8rl.data.unchanged import DataChangedError, DataFile
from tests.helpers.models import small_model

ROWS = [{"question": f"{i} + {i} = ", "answer": str(2 * i)} for i in range(300)]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch) -> None:
    monkeypatch.setenv("MEGATRON_FP8RL_CACHE", str(tmp_path_factory.mktemp("cache")))


def write(path: Path, rows: list[dict]) -> Path:
    """In place, as a shell's ``>`` does."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def stream(folder: Path, dataset: Path) -> PromptStream:
    sampling = SamplingConfig(max_prompt_tokens=40, max_completion_tokens=8)
    data = DataConfig(environments=(EnvironmentConfig(dataset=str(dataset)),))
    model = small_model((1, 8, 1, 1, 8, 128))
    cfg = RunConfig(name="x", model=model, data=data, sampling=sampling, output_dir=str(folder / "run"))
    return PromptStream(cfg, character_tokenizer())


def shifted(rows: list[dict]) -> list[dict]:
    """As many bytes, but other questions and answers."""
    return [{name: value.translate(str.maketrans("123456789", "234567891")) for name, value in r.items()} for r in rows]


@pytest.mark.parametrize(
    ("rows", "change"),
    [(ROWS[:100], "truncated"), ([], "truncated"), (ROWS[::-1] + ROWS, "rewritten"), (shifted(ROWS), "rewritten")],
    ids=["shorter", "empty", "longer", "same_size"],
)
def test_a_change_in_place_ends_the_run_with_the_file_and_both_states(tmp_path, rows, change):
    path = write(tmp_path / "train.jsonl", ROWS)
    size, prompts = path.stat().st_size, stream(tmp_path, path)
    prompts.next_prompts(10)
    write(path, rows)
    expected = (
        rf"{path} was {change} during the run: it had {size:,} bytes, written 20.* now has {path.stat().st_size:,} "
    )
    with pytest.raises(DataChangedError, match=expected):
        prompts.next_prompts(10)


def test_a_line_shortened_between_check_and_read_is_no_row(tmp_path, monkeypatch):
    path = write(tmp_path / "train.jsonl", ROWS)
    rows = open_rows(str(path), {})
    monkeypatch.setattr(DataFile, "check", lambda self: None)
    os.truncate(path, 50)
    with pytest.raises(DataChangedError, match="was truncated during the run"):
        rows[299]


def test_rows_that_are_still_there_are_read(tmp_path):
    path = write(tmp_path / "train.jsonl", ROWS)
    rows = open_rows(str(path), {})
    os.utime(path)
    assert rows[7] == ROWS[7]
    with path.open("a") as file:
        file.write(json.dumps(ROWS[0]) + "\n")
    assert [rows[i] for i in range(len(rows))] == ROWS
    write(tmp_path / "other.jsonl", ROWS[:3]).replace(path)
    assert rows[299] == ROWS[299]
    path.unlink()
    assert rows[250] == ROWS[250]


SAVED = """
import os, sys
from pathlib import Path
import datasets
from megatron_fp8rl.data.rows import open_rows
datasets.Dataset.from_list([{"question": "q" * 200, "answer": str(i)} for i in range(20_000)]).save_to_disk(sys.argv[1])
rows = open_rows(sys.argv[1], {})
assert rows[19_999]["answer"] == "19999"
(file,) = Path(sys.argv[1]).glob("*.arrow")
os.truncate(file, 4096)
try:
    rows[19_999]
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_truncated_saved_data_set_is_no_bus_error(tmp_path):
    done = subprocess.run([sys.executable, "-c", SAVED, str(tmp_path / "saved")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "DataChangedError" in done.stdout and ".arrow was truncated during the run" in done.stdout


def test_large_files_are_compared_by_samples(tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_fp8rl.data.unchanged._WHOLE_BYTES", 1000)
    monkeypatch.setattr("megatron_fp8rl.data.unchanged._SAMPLE_BYTES", 64)
    path = write(tmp_path / "train.jsonl", ROWS)
    file = DataFile(path)
    os.utime(path)
    file.check()
    write(path, shifted(ROWS))
    with pytest.raises(DataChangedError, match="was rewritten"):
        file.check()


def test_other_rows_under_the_same_name_are_another_identity(tmp_path):
    path = write(tmp_path / "train.jsonl", ROWS)
    before = stream(tmp_path, path).row_identities
    os.utime(path)
    assert stream(tmp_path, path).row_identities == before
    assert before["train"].startswith("300 rows (digest ")
    write(path, shifted(ROWS))
    assert stream(tmp_path, path).row_identities != before
