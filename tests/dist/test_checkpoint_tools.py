"""Converted checkpoints in the trainer, in every layout; and checkpoints of runs, of every layout, converted back."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint_tools import megatron_to_hf, verify
from checkpoint_tools.hf_folder import HfFolder
from checkpoint_tools.hf_to_megatron import convert
from checkpoint_tools.workers import WorkerOptions
from megatron_fp8rl.config import ModelConfig, ParallelConfig
from megatron_fp8rl.names import registry
from megatron_fp8rl.trainer import checkpoint
from megatron_fp8rl.trainer.model.build import build_chunks, unwrap
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from tests.helpers.checkpoints import read_tensors
from tests.helpers.dist import RankError, run_ranks
from tests.helpers.families import MODELS, fits
from tests.helpers.logits import assert_logits_equal, reference_logits, trainer_logits
from tests.helpers.training import DENSE, MOE, continue_training, full_weights, run_config, weight_pieces
from tests.tolerances import LOGITS_FLOAT32

FAMILIES = MODELS | {
    "qwen3": replace(DENSE, num_layers=3, num_key_value_heads=1, head_dim=20, vocab_size=67, tie_embeddings=True),
    "mixtral-one-expert": replace(MODELS["mixtral"], experts_per_token=1),
    "qwen3_moe": replace(MOE, num_layers=3, num_experts=6, head_dim=20, vocab_size=67),
}
LAYOUTS = [
    dict(world_size=1),
    dict(world_size=2, tensor=2),
    dict(world_size=2, pipeline=2),
    dict(world_size=2, expert=2),
    dict(world_size=2, tensor=2, expert=2),
    dict(world_size=2, tensor=2, expert_tensor=2),
]


def _name(layout: dict) -> str:
    return "-".join(f"{k}{v}" for k, v in layout.items() if k != "world_size") or "one"


def _references(folder: str) -> dict[str, list]:
    """transformers' checkpoints and logits, and the converted checkpoints."""
    result = {}
    for kind, model in FAMILIES.items():
        result[kind] = reference_logits(model, f"{folder}/{kind}")
        convert(HfFolder.open(f"{folder}/{kind}"), Path(f"{folder}/{kind}.megatron"), WorkerOptions(workers=1))
    return result


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> tuple[str, dict[str, list]]:
    folder = str(tmp_path_factory.mktemp("families"))
    return folder, run_ranks(1, _references, folder)[0]


def _all_logits(layout: dict, folder: str) -> dict[str, list | None]:
    parallel = Parallel.init(ParallelConfig(**layout), deadline_s=60)
    fitting = {kind: model for kind, model in FAMILIES.items() if fits(model, layout)}
    return {kind: trainer_logits(m, layout, f"{folder}/{kind}.megatron", parallel) for kind, m in fitting.items()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=_name)
def test_logits_of_converted_checkpoints_equal_transformers(layout, references):
    folder, expected = references
    compared = 0
    for rank in run_ranks(layout["world_size"], _all_logits, layout, folder):
        for kind, logits in rank.items():
            if logits is not None:
                assert_logits_equal(logits, expected[kind], **LOGITS_FLOAT32)
                compared += 1
    num_last = layout["world_size"] // layout.get("pipeline", 1)
    assert compared == num_last * sum(fits(model, layout) for model in FAMILIES.values())


def _plain_load(folder: str) -> dict[str, tuple[set[str], set[str]]]:
    """Keys that a model asks for and a converted folder lacks, and the reverse, by Megatron-Core's own strict load."""
    from megatron.core import dist_checkpointing, parallel_state

    result = {}
    parallel = Parallel.init(ParallelConfig(), deadline_s=60)
    for kind, model in FAMILIES.items():
        (chunk,) = build_chunks(run_config(model=model), parallel)
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        state = unwrap(chunk).sharded_state_dict(metadata=metadata | {"singleton_local_shards": False})
        loaded, missing, unexpected = dist_checkpointing.load(state, f"{folder}/{kind}.megatron", strict="return_all")
        unwrap(chunk).load_state_dict({key: loaded[key] for key in state})
        result[kind] = missing, unexpected
    return result


def test_megatron_core_finds_exactly_its_keys(references):
    """Every tensor and object of every family, and no others."""
    for kind, (missing, unexpected) in run_ranks(1, _plain_load, references[0])[0].items():
        assert not missing and not unexpected, kind


def _train_and_save(cfg, folder: str):
    policy = Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))
    continue_training(policy, 1)
    checkpoint.save(folder, 1, policy, {})
    continue_training(policy, 1)
    checkpoint.save(folder, 2, policy, {})
    return weight_pieces(policy)


RUNS = {
    "one-delayed": run_config(trainer="delayed", params="bf16"),
    "tensor2-expert2": run_config(params="bf16", world_size=2, tensor=2, expert=2),
    "odd-vocabulary": run_config(model=replace(DENSE, vocab_size=61), world_size=2, tensor=2),
    "pipeline2": run_config(model=replace(DENSE, tie_embeddings=True), world_size=2, pipeline=2, virtual_stages=2),
    "expert-tensor2": run_config(world_size=2, tensor=2, expert_tensor=2),
}


@pytest.mark.parametrize("run", RUNS)
def test_the_newest_checkpoint_of_a_run_becomes_a_hugging_face_checkpoint(run, tmp_path):
    cfg = RUNS[run]
    run_dir, target = tmp_path / "run", tmp_path / "hf"
    ranks = run_ranks(cfg.parallel.world_size, _train_and_save, cfg, str(run_dir / "checkpoints"))
    options = megatron_to_hf.Options(source=run_dir, target=target, workers=1)
    assert megatron_to_hf.run(options) == 0
    actual = read_tensors(target)
    expected = full_weights(cfg.model, ranks)
    assert set(actual) == set(registry.hf_tensors(cfg.model))
    for name in registry.weights(cfg.model):
        assert torch.equal(registry.from_hf(name, actual.__getitem__, cfg.model), expected[name]), name


def _load(model: ModelConfig, folder: str) -> None:
    trainer_logits(model, dict(world_size=1), folder)


def test_the_trainer_refuses_another_model_and_damage(references):
    folder = references[0]
    with pytest.raises(RankError, match="model.num_experts is 6 there, but 3 here"):
        run_ranks(1, _load, replace(FAMILIES["qwen3_moe"], num_experts=3), f"{folder}/qwen3_moe.megatron")
    file = Path(f"{folder}/mistral.megatron/__0_0.distcp")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(RankError, match=r"is incomplete: file __0_0.distcp has \d+ bytes instead of"):
        run_ranks(1, _load, FAMILIES["mistral"], f"{folder}/mistral.megatron")


def test_verify_compares_logits(references, capsys):
    folder = Path(references[0])
    options = dict(source=folder / "deepseek_v3", workers=1, num_tokens=40)
    # In a process of its own: Megatron-Core's groups belong to a process.
    ((status, output),) = run_ranks(1, _verify, options | dict(converted=folder / "deepseek_v3.megatron"))
    assert status == 0 and "max difference" in output and "within 1.0e-04" in output
    assert verify.Options(converted=folder, **options).tolerance == LOGITS_FLOAT32["atol"]


def _verify(options: dict) -> tuple[int, str]:
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = verify.run(verify.Options(**options))
    return status, out.getvalue()
