"""Supervised jobs on gloo ranks: losses against transformers, resumes bit for bit, equal numbers in every layout."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_fp8rl import dpo, supervised
from megatron_fp8rl.commands.supervised import DpoOptions, SftOptions, configure
from megatron_fp8rl.config import CheckpointConfig, ObserveConfig, ParallelConfig, PrecisionConfig, RunConfig
from megatron_fp8rl.runtime.stop import RunStopped, StopRequest
from megatron_fp8rl.trainer.parallel import Parallel
from tests.helpers.dist import run_ranks
from tests.helpers.own_model import make_model

FP32 = PrecisionConfig(trainer="bf16", rollout="bf16", params="fp32")  # parameters and products


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("supervised")
    chats = [
        [
            {"role": "user", "content": f"How much is {i} and {i}?"},
            {"role": "assistant", "content": f"It is {2 * i}"},
            {"role": "user", "content": "Sure?"},
            {"role": "assistant", "content": "Yes"},
        ]
        for i in range(12)
    ]
    make_model(folder / "model", [message["content"] for chat in chats for message in chat])
    for name, part in (("train", chats[:9]), ("held", chats[9:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in part))
        pairs = [{"prompt": chat[0]["content"], "chosen": chat[1]["content"], "rejected": "No idea."} for chat in part]
        (folder / f"{name}_pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return folder


def sft_config(folder: Path, run: str, **parallel: int) -> RunConfig:
    data = {"data": (str(folder / "train.jsonl"),), "eval": (str(folder / "held.jsonl"),)}
    options = SftOptions(model=str(folder / "model"), **data, batch_size=4, epochs=2, max_length=128, gpus=0)
    cfg, _ = configure(options, lambda cfg: replace(cfg, precision=FP32), loss="sft", lr=1e-3)
    assert cfg.num_steps == 5  # 18 rows of 4
    return replace(
        cfg,
        parallel=ParallelConfig(**parallel),
        observe=ObserveConfig(display="none", eval_every=2),
        checkpoint=CheckpointConfig(every_steps=2, keep=3),
        output_dir=str(folder / run),
    )


class _StopBefore(StopRequest):
    """Asks to stop before a step."""

    def __init__(self, step: int, calls: int = 0):
        super().__init__()
        self.step = step

    def at_boundary(self, parallel, step, save=None):
        self.is_due = step + 1 == self.step
        super().at_boundary(parallel, step, *([] if save is None else [save]))

    def is_asked(self) -> bool:
        return self.is_due


def dpo_config(folder: Path, run: str, **parallel: int) -> RunConfig:
    data = {"data": (str(folder / "train_pairs.jsonl"),), "eval": (str(folder / "held_pairs.jsonl"),)}
    options = DpoOptions(model=str(folder / "model"), **data, batch_size=6, epochs=2, max_length=128, gpus=0, beta=0.5)
    cfg, _ = configure(options, lambda cfg: replace(cfg, precision=FP32), loss="dpo", lr=1e-4)
    sft = sft_config(folder, run, **parallel)
    return replace(
        cfg, parallel=sft.parallel, observe=sft.observe, checkpoint=sft.checkpoint, output_dir=sft.output_dir
    )


def _train(cfg: RunConfig, job: type[supervised.Supervised], stop_before: int = 0) -> None:
    """On a rank: the whole run, or one that is asked to stop before a step."""
    os.environ["MEGATRON_FP8RL_CACHE"] = str(Path(cfg.model.hf_path).parent / "cache")
    parallel = Parallel.init(cfg.parallel, deadline_s=60)
    try:
        supervised.run(cfg, parallel, Path(cfg.model.hf_path), _StopBefore(stop_before), job=job)
    except RunStopped:
        assert stop_before


def lines(cfg: RunConfig) -> dict[int, dict[str, float]]:
    rows = map(json.loads, (Path(cfg.run_dir) / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: {key: value for key, value in row.items() if not key.startswith("time/")} for row in rows}


def test_sft_measures_what_transformers_measures_and_resumes_bit_for_bit(folder: Path):
    whole, cut = sft_config(folder, "whole"), sft_config(folder, "cut")
    run_ranks(1, _train, whole, supervised.Supervised)
    for stop_before in (4, 0):
        run_ranks(1, _train, cut, supervised.Supervised, stop_before)
    expected, actual = lines(whole), lines(cut)
    timed = "train/tokens_per_s/mean"
    assert list(expected) == list(actual) == [0, 1, 2, 3, 4, 5]
    for step in expected:
        assert {**expected[step], timed: 0} == {**actual[step], timed: 0}, step
    weights = [(Path(cfg.run_dir) / "hf" / "model.safetensors").read_bytes() for cfg in (whole, cut)]
    assert weights[0] == weights[1]
    losses = [expected[step]["eval/loss/mean"] for step in (0, 2, 4, 5)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0] - 1
    for step, name in ((0, folder / "model"), (5, Path(whole.run_dir) / "hf")):
        assert expected[step]["eval/loss/mean"] == pytest.approx(
            _nll(name, folder / "held.jsonl"), abs=5e-3 if step else 3e-5
        ), step
    trained = (Path(whole.run_dir) / "hf").iterdir()
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= {path.name for path in trained}


def test_dpo_starts_at_log_2_learns_and_resumes(folder: Path):
    whole, cut = dpo_config(folder, "dpo whole"), dpo_config(folder, "dpo cut", world_size=2)
    run_ranks(1, _train, whole, dpo.Dpo)
    (kept,) = (folder / "cache").glob("*.reference.npy")
    written = kept.stat().st_mtime_ns
    for stop_before in (2, 0):
        run_ranks(2, _train, cut, dpo.Dpo, stop_before)
    assert [path.stat().st_mtime_ns for path in (folder / "cache").glob("*.reference.npy")] == [written]
    expected, actual = lines(whole), lines(cut)
    assert expected[0]["eval/loss/mean"] == expected[1]["train/loss/mean"] == pytest.approx(math.log(2), abs=1e-6)
    assert list(expected) == list(actual) == [0, 1, 2, 3]
    for step, row in expected.items():
        for key in ("train/loss/mean", "eval/loss/mean", "loss/reward_margin/mean", "eval/reward_accuracy/mean"):
            if key in row:
                assert actual[step][key] == pytest.approx(row[key], abs=2e-5), (step, key)
    assert expected[3]["eval/loss/mean"] < 0.6 and expected[3]["eval/reward_accuracy/mean"] == 1
    assert expected[3]["eval/loss/mean"] == pytest.approx(_dpo_loss(folder, Path(whole.run_dir) / "hf", 0.5), abs=5e-3)


def _dpo_loss(folder: Path, model: Path, beta: float) -> float:
    """The sigmoid loss of TRL's documentation, by transformers in FP32."""
    tokenizer, losses = AutoTokenizer.from_pretrained(model), []
    nets = [AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32) for name in (model, folder / "model")]

    def logprob(net, prompt: str, answer: str) -> float:
        head = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        parts = [tokenizer.encode(text, add_special_tokens=False) for text in (head, f"{answer}<|im_end|>")]
        with torch.no_grad():
            logprobs = net(torch.tensor([parts[0] + parts[1]])).logits[0].log_softmax(-1)
        return sum(logprobs[len(parts[0]) + i - 1, token].item() for i, token in enumerate(parts[1]))

    for line in (folder / "held_pairs.jsonl").read_text().splitlines():
        row = json.loads(line)
        policy, reference = [
            [logprob(net, row["prompt"], row[side]) for side in ("chosen", "rejected")] for net in nets
        ]
        difference = (policy[0] - policy[1]) - (reference[0] - reference[1])
        losses.append(math.log1p(math.exp(-beta * difference)))
    return sum(losses) / len(losses)


def _nll(model: Path, rows: Path) -> float:
    """Mean negative log-likelihood of the assistant's tokens, by transformers in FP32."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    total, count = 0.0, 0
    for line in rows.read_text().splitlines():
        ids: list[int] = []
        trained: list[bool] = []
        for message in json.loads(line)["messages"]:
            head = tokenizer.encode(f"<|im_start|>{message['role']}\n", add_special_tokens=False)
            body = tokenizer.encode(f"{message['content']}<|im_end|>", add_special_tokens=False)
            tail = tokenizer.encode("\n", add_special_tokens=False)
            ids += [*head, *body, *tail]
            trained += [False] * len(head) + [message["role"] == "assistant"] * len(body) + [False] * len(tail)
        with torch.no_grad():
            logprobs = net(torch.tensor([ids])).logits[0].log_softmax(-1)
        for place in range(1, len(ids)):
            if trained[place]:
                total -= logprobs[place - 1, ids[place]].item()
                count += 1
    return total / count


def test_sft_has_the_same_losses_in_two_layouts(folder: Path):
    one, two = sft_config(folder, "one"), sft_config(folder, "two", world_size=2)
    one, two = (replace(cfg, num_steps=2, optim=replace(cfg.optim, warmup_steps=0)) for cfg in (one, two))
    run_ranks(1, _train, one, supervised.Supervised)
    run_ranks(2, _train, two, supervised.Supervised)
    for step, row in lines(one).items():
        for key in ("train/loss/mean", "eval/loss/mean", "train/num_tokens/sum"):
            if key in row:
                assert lines(two)[step][key] == pytest.approx(row[key], abs=2e-5), (step, key)
