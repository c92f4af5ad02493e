"""What `make demo-real` writes and runs, with a small GGUF file in place of the one that it fetches."""

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fp8rl import cli
from megatron_fp8rl.commands import grpo
from megatron_fp8rl.commands.grpo import model_in
from megatron_fp8rl.config import RewardConfig
from megatron_fp8rl.data.tokenizer import end_ids, load_tokenizer
from megatron_fp8rl.envs.rewards.configured import RowRewards
from megatron_fp8rl.types import Prompt
from tests.helpers.gguf_files import CHATML, write_gguf
from tests.helpers.tools import load_tool
from tests.unit.data.test_gguf import LLAMA

TINY = replace(LLAMA, hidden_size=96, max_position_embeddings=8192)
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tool():
    """tools/real_model.py as a module."""
    return load_tool("real_model")


@pytest.fixture(scope="module")
def written(tool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("real") / "runs" / "real"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tool, "fetch", lambda place: write_gguf(place / "a.gguf", TINY))
        patch.setattr("sys.argv", ["real_model.py", str(folder)])
        assert tool.main() == 0
        patch.setattr(tool, "fetch", None)  # what exists is not fetched again
        assert tool.main() == 0
    return folder


def rows_of(folder: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_held_out_questions_are_new_and_answers_are_numbers(tool, written):
    train, held_out = rows_of(written, "train"), rows_of(written, "test")
    easy, easy_held_out = rows_of(written, "easy"), rows_of(written, "easy_test")
    assert len(held_out) == tool.NUM_HELD_OUT == 1024 and len(train) > 10_000
    assert len(easy_held_out) == tool.NUM_EASY_HELD_OUT and len(easy) > 150
    assert all(int(row["answer"]) >= 0 for row in easy + easy_held_out)
    for rows, others, tasks in ((train, held_out, tool.TASKS), (easy, easy_held_out, tool.EASY_TASKS)):
        questions = [row["question"] for row in rows + others]
        assert len(set(questions)) == len(questions)
        assert {row["task"] for row in rows} == {row["task"] for row in others} == tasks.keys()
    rewards = RowRewards((RewardConfig(function="number"),))
    for row in held_out[:200] + easy_held_out:
        prompt = Prompt(prompt_id="x/0", environment="x", token_ids=(1,), text=row["question"], answer=row["answer"])
        assert rewards.score(prompt, f"The answer is {row['answer']}.")["reward"] == 1.0
        assert rewards.score(prompt, f"The answer is {int(row['answer']) + 1}.")["reward"] == 0.0


def test_the_model_tiles_and_has_the_template_and_end_token_of_the_file(tool, written):
    model = model_in(written / "model")
    assert (model.hidden_size, model.head_dim) == (128, tool.HEAD_DIM)
    tokenizer = load_tokenizer(str(written / "model"))
    assert end_ids(tokenizer) == (2,) and tokenizer.eos_token == "<|im_end|>" and tokenizer.chat_template == CHATML
    assert json.loads((written / "model" / "generation_config.json").read_text())["eos_token_id"] == 2


@pytest.mark.parametrize("size", ["REAL_GPU", "REAL_CPU"])
def test_the_makefiles_command_is_a_valid_run_in_fp8(size, written, monkeypatch):
    monkeypatch.setattr(grpo, "_local_gpus", lambda: (1, 140.0) if size == "REAL_GPU" else (0, 0.0))
    monkeypatch.chdir(written.parents[1])
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    options = re.search(rf"^{size} := (.*)$", makefile, re.M)[1]
    recipe = re.search(r"^demo-real:\n((?:\t.*\n)+)", makefile, re.M)[1]
    command = re.search(r"-m megatron_fp8rl (grpo .*) \$\$size \$\(ARGS\)", recipe)[1]
    invocation = cli.parse([*shlex.split(command), *shlex.split(options)], {"grpo": grpo.COMMAND})
    assert invocation.cfg.precision.trainer != "bf16" and invocation.cfg.name == "demo_real"
    assert invocation.cfg.num_steps == (100 if size == "REAL_GPU" else 5)
    (source,) = invocation.cfg.data.environments
    assert Path(source.dataset).is_file() and Path(source.eval).is_file()
