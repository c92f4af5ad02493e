"""A folder with several end tokens: a turn stops at its own, in the warm start, ``grpo``, agents and ``eval``."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from megatron_fp8rl.observe.recording import read_steps

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 600
END_OF_TEXT, TURN_END = 256, 262  # the tokenizer's EOS token, and the token that ends turns
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
CONFIG = """
from dataclasses import replace
from megatron_fp8rl.config import EnvironmentConfig, RewardConfig, WarmStartConfig
from model_configs.tiny import tiny_qwen3

def copying():
    cfg = tiny_qwen3()
    rows = EnvironmentConfig(dataset="{rows}", eval="{rows}", rewards=(RewardConfig(function="number"),))
    return replace(
        cfg,
        model=replace(cfg.model, vocab_size=384),
        data=replace(cfg.data, environments=(rows,), tokenizer="{tokenizer}"),
        warm_start=WarmStartConfig(steps=60, batch_size=64, lr=4e-3),
        sampling=replace(cfg.sampling, max_prompt_tokens=16, max_completion_tokens=16),
    )
"""
AGENT = """
async def rollout(session, row):
    first = await session.ask()
    session.say(row["answer"] + "=")
    second = await session.ask()
    return float(first == second == row["answer"])
"""


def write_tokenizer(folder: Path) -> None:
    names = {0: "<pad>", 1: "<unk>", END_OF_TEXT: "<|endoftext|>", TURN_END: "<|im_end|>"}
    names |= {ord(character): character for character in "0123456789="}
    vocab = {names.get(token, f"<reserved_{token}>"): token for token in range(384)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<|endoftext|>"
    )
    whole.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    whole.chat_template = TEMPLATE
    whole.save_pretrained(folder)
    write_ends(folder)


def write_ends(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END_OF_TEXT, TURN_END]}))


def run(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "megatron_fp8rl", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{folder}"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows, an agent, a configuration, and a model that copies a digit and ends its turn."""
    home = tmp_path_factory.mktemp("ends")
    write_tokenizer(home / "tokenizer")
    rows = [{"question": f"{digit}=", "answer": str(digit)} for digit in range(10)]
    turns = [{"question": f"{d}={d}<|im_end|>{d}=", "answer": str(d)} for d in range(10)]
    for name, content in (("rows", rows), ("both", rows + turns)):
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    (home / "agent.py").write_text(AGENT)
    (home / "own.py").write_text(CONFIG.format(rows=home / "both.jsonl", tokenizer=home / "tokenizer"))
    shown = run(home, *"sft own:copying --observe.display plain --output_dir warm".split())
    assert "completions end at <|endoftext|> (256), <|im_end|> (262)" in shown
    shutil.copytree(home / "warm" / "warm_start" / "hf", home / "model")
    config = json.loads((home / "model" / "config.json").read_text())
    assert config["eos_token_id"] == [END_OF_TEXT, TURN_END]  # the folder of the warm start lists both, too
    (home / "model" / "config.json").write_text(json.dumps(config | {"eos_token_id": END_OF_TEXT}))
    write_ends(home / "model")
    return home


def test_grpo_stops_at_every_end_token_with_and_without_an_agent(home):
    args = "grpo --model model --data rows.jsonl both.jsonl --reward number --gpus 0 --num_steps 1 --output_dir run"
    args += " --data.environments.1.dataset rows.jsonl --data.environments.1.agent agent.py:rollout"
    args += " --sampling.prompts_per_step 8 --sampling.completions_per_prompt 4 --sampling.max_completion_tokens 16"
    args += " --sampling.max_prompt_tokens 16 --session.max_tokens 64 --algo.zero_variance keep"
    args += " --observe.eval_every 0 --observe.display plain --checkpoint.export_hf False"
    shown = run(home, *args.replace("agent.py", str(home / "agent.py")).split())
    assert "completions end at <|endoftext|> (256), <|im_end|> (262)" in shown
    groups = [group for _, of_step in read_steps(home / "run" / "rollouts") for group in of_step]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert {len(rollout.completions) for rollout in rollouts} == {1, 2}  # alone, and with the agent
    for rollout in rollouts:
        for completion in rollout.completions:
            assert completion.finish_reason == "stop" and completion.token_ids[-1] == TURN_END
            assert len(completion.token_ids) < 16 and TURN_END not in completion.token_ids[:-1]
    lengths = [len(completion.token_ids) for rollout in rollouts for completion in rollout.completions]
    assert sum(lengths) / len(lengths) < 3
    assert sum(rollout.reward == 1.0 for rollout in rollouts) > 0.8 * len(rollouts)
    metrics = [json.loads(line) for line in (home / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics][-1] == 1


def test_an_evaluation_stops_at_every_end_token(home):
    args = "eval own:copying --checkpoint model --num_problems 20 --num_completions 2 --output_dir evaluated"
    shown = run(home, *args.split())
    (folder,) = [Path(line).parent for line in shown.splitlines() if line.endswith("/eval.json")]
    problems = [json.loads(line) for line in (home / folder / "problems.jsonl").read_text().splitlines()]
    texts = [(item["text"], problem["answer"]) for problem in problems for item in problem["completions"]]
    assert len(texts) == 40 and all(len(text) < 15 and "<|" not in text for text, _ in texts)
    assert sum(text == answer for text, answer in texts) > 32
