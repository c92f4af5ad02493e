"""What a resume with another configuration prints and refuses, before anything starts."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_fp8rl import cli
from megatron_fp8rl.config import ConfigError, EnvironmentConfig, RewardConfig, RunConfig
from megatron_fp8rl.data import run_folder
from megatron_fp8rl.data.resumed_config import changed_contents, changes, content_digests, refusals
from model_configs import dense
from model_configs.tiny import tiny_qwen3

ROWS = EnvironmentConfig(dataset="rows.jsonl", rewards=(RewardConfig(function="number"),))


def as_json(cfg: RunConfig) -> dict:
    return json.loads(json.dumps(dataclasses.asdict(cfg)))


def run(folder: Path, **sections) -> RunConfig:
    cfg = replace(tiny_qwen3(), output_dir=str(folder), num_steps=10)
    for name, fields in sections.items():
        value = replace(getattr(cfg, name), **fields) if isinstance(fields, dict) else fields
        cfg = replace(cfg, **{name: value})
    return cfg


def write_checkpoint(cfg: RunConfig, step: int = 5) -> Path:
    """The part of a checkpoint that decides about a resume."""
    folder = Path(cfg.run_dir) / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    (Path(cfg.run_dir) / "run.lock").touch()
    (folder / "state.json").write_text(json.dumps({"step": step, "files": {}, "config": as_json(cfg)}))
    return folder


def weights(folder: Path, seed: int) -> Path:
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    save_file({"a": torch.randn(1 << 16, generator=generator)}, folder / "model.safetensors")
    return folder


def problems(cfg: RunConfig) -> list[str]:
    return [str(violation) for violation in run_folder.resume_violations(cfg)]


def test_a_dry_run_names_what_a_resume_would_refuse(tmp_path, capsys):
    before = run(tmp_path)
    write_checkpoint(before)
    command = cli.Command(
        name="mine",
        summary="",
        run=lambda _: 0,
        default_config="tiny_qwen3",
        reads_data=True,
    )
    arguments = ["mine", "--dry-run", "--output_dir", str(tmp_path)]
    assert cli.main([command], arguments) == 0
    capsys.readouterr()
    assert cli.main([command], [*arguments, "--model.num_layers", "3"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["model"]["num_layers"] == 3 and "--model.num_layers" in printed.err


def test_every_changed_field_has_a_line_with_both_values(tmp_path):
    before = run(tmp_path, data={"environments": (ROWS,)}, precision={"kernels": {"experts": "te"}})
    reward = RewardConfig(function="exact", options={"strict": True})
    more = replace(ROWS, dataset="other.jsonl")
    now = run(
        tmp_path,
        data={"environments": (replace(ROWS, rewards=(reward,)), more)},
        precision={"trainer": "bf16", "kernels": {}},
        optim={"lr": 5e-7, "min_lr": 1e-7},
        seed=7,
    )
    lines = [change.text for change in changes(as_json(before), now)]
    fields = [line.partition(" was ")[0] for line in lines]
    assert fields == [
        *("precision.trainer", "precision.kernels.experts", "optim.lr", "optim.min_lr"),
        *(f"data.environments[0].rewards[0].{name}" for name in ("function", "options.strict")),
        *("data.environments[1]", "seed"),
    ]
    assert "data.environments[0].rewards[0].function was 'number', now 'exact'" in lines
    assert "precision.kernels.experts was 'te', now absent" in lines
    assert lines[-1].startswith("seed was 1, now 7; the rows of the data are in another order")
    assert all(len(line) < 200 for line in lines)
    assert not refusals(as_json(before), now, tmp_path, steps=5)


def test_an_equal_configuration_and_fields_of_another_release_say_nothing(tmp_path):
    cfg = run(tmp_path)
    before = as_json(cfg)
    del before["algo"]["veto_below"]
    before["algo"]["of_another_release"] = 3
    assert not changes(before, cfg)
    write_checkpoint(cfg)
    assert not problems(cfg)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"model": {"rope_theta": 5e5}}, "--model.rope_theta = 500000.0: is "),
        ({"model": {"initializer_range": 0.5}}, "--model.initializer_range = 0.5: was "),
        ({"warm_start": {"lr": 0.5}}, "--warm_start.lr = 0.5: was "),
        ({"lora": {"rank": 8}}, "--lora.rank = 8: was None in "),
        ({"num_steps": 4}, "--num_steps = 4: the run has already finished step 5"),
    ],
)
def test_a_field_that_can_no_longer_take_effect_is_refused_by_name(tmp_path, sections, expected):
    write_checkpoint(run(tmp_path))
    (actual,) = problems(run(tmp_path, **sections))
    assert actual.startswith(expected)
    with pytest.raises(ConfigError, match=expected), run_folder.locked(run(tmp_path, **sections)):
        pass


def test_a_reference_model_that_does_not_exist_is_refused_before_anything_starts(tmp_path):
    random = run(tmp_path, warm_start={"steps": 0}, model={"random": True})
    folder = write_checkpoint(random)
    assert problems(random) == []
    (error,) = problems(replace(random, algo=replace(random.algo, kl_coef=0.1)))
    assert "--algo.kl_coef = 0.1: needs a reference model, which" in error and "Set 0, or name another" in error
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"has_reference": True}))
    assert problems(replace(random, algo=replace(random.algo, kl_coef=0.1))) == []
    loaded = run(tmp_path / "loaded", model={"hf_path": str(weights(tmp_path / "model", 1))})
    write_checkpoint(loaded)
    assert problems(replace(loaded, algo=replace(loaded.algo, kl_coef=0.1))) == []


def test_a_finished_warm_start_cannot_be_changed_before_the_first_checkpoint(tmp_path):
    cfg = run(tmp_path)
    (tmp_path / "warm_start" / "hf").mkdir(parents=True)
    (tmp_path / "run.lock").touch()
    (tmp_path / "warm_start" / "config.json").write_text(json.dumps(as_json(cfg)))
    assert not problems(cfg)
    (actual,) = problems(run(tmp_path, warm_start={"steps": 999}))
    assert actual.startswith("--warm_start.steps = 999: was ")


def test_other_initial_weights_are_refused_and_a_moved_folder_is_not(tmp_path):
    first, copy, other = (weights(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2)))
    folder = tmp_path / "run"
    cfg = run(folder, model={"hf_path": str(first)})
    write_checkpoint(cfg)
    assert not problems(run(folder, model={"hf_path": str(copy)}))
    (actual,) = problems(run(folder, model={"hf_path": str(other)}))
    assert actual.startswith(f"--model.hf_path = '{other}': was ")
    first.rename(tmp_path / "moved")
    moved = run(folder, model={"hf_path": str(tmp_path / "moved")})
    assert not problems(moved)
    (line,) = [change.text for change in changes(as_json(cfg), moved)]
    assert "the weights come from the checkpoint" in line
    assert problems(run(folder, model={"random": True, "hf_path": None}))


def test_another_model_of_the_same_folder_name_is_one_error(tmp_path):
    write_checkpoint(run(tmp_path))
    other = {"num_layers": 6, "hidden_size": 256, "num_attention_heads": 8, "ffn_hidden_size": 1024}
    (problem,) = problems(run(tmp_path, model=other))
    assert "is of another model: 4 fields differ, such as --model.num_layers" in problem and "another --name" in problem


def test_lengths_that_take_the_other_frequencies_of_longrope_are_refused(tmp_path):
    before = replace(dense.grpo_phi4_mini(), output_dir=str(tmp_path))
    limit = before.model.rope_scaling.original_max_position_embeddings
    write_checkpoint(before)
    for tokens, is_refused in ((64, False), (limit, True)):
        sampling = replace(before.sampling, max_completion_tokens=tokens)
        found = problems(replace(before, sampling=sampling))
        assert bool(found) is is_refused, found
    (problem,) = found
    assert "--sampling.max_completion_tokens" in problem and "take other frequencies (limit 4,096)" in problem


def test_files_whose_content_changed_under_their_path_are_told(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("a")
    (tmp_path / "r.py").write_text("def f(completion): return 1.0\n")
    rewards = (RewardConfig(function=f"{tmp_path}/r.py:f"), RewardConfig(function="math"))
    cfg = run(tmp_path, data={"environments": (replace(ROWS, rewards=rewards),)})
    before = json.loads(json.dumps(content_digests(cfg, tmp_path)))
    assert set(before) == {"tokenizer.json", "chat_template.jinja", "r.py"}
    assert changed_contents(before, content_digests(cfg, tmp_path)) == changed_contents({}, before) == []
    (tmp_path / "r.py").write_text("def f(completion): return 2.0\n")
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    told = changed_contents(before, content_digests(cfg, tmp_path))
    assert [text.partition(";")[0] for text in told] == [
        f"the content of {name}" for name in ("chat_template.jinja", "r.py", "tokenizer_config.json")
    ]
