"""Checkpoints: resumed runs agree with uninterrupted ones, in any layout, and a kill never costs the last one."""

import json
import os
import pickle
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_fp8rl.config import AlgoConfig
from megatron_fp8rl.data.checkpoint_dir import digests_of
from megatron_fp8rl.data.checkpoint_pickle import read_metadata
from megatron_fp8rl.trainer import checkpoint
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from tests.helpers.dist import RankError, run_ranks
from tests.helpers.training import DENSE, SMOOTH_ADAM, continue_training, full_weights, run_config, weight_pieces
from tests.tolerances import LAYOUT_WEIGHTS

EXTRA = {"prompt_position": {"sums": 7}, "note": "as given"}
LINEAR_DECAY = replace(SMOOTH_ADAM, decay="linear", warmup_steps=3)  # so that the learning rate tells the update apart


def _build(cfg):
    return Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))


def _state(policy):
    """Weights in pieces, and all other state that a resumed run restores."""
    fp8 = {
        f"{index}.{name}": buffer.clone()
        for index, model in enumerate(policy.models)
        for name, buffer in model.named_buffers()
        if name.endswith("fp8.history")
    }
    return weight_pieces(policy), fp8, policy.step, torch.rand(4)


def _save_and_go_on(cfg, folder):
    """On a rank: (state when saved, metrics and state two updates later)."""
    policy = _build(cfg)
    torch.manual_seed(1)
    continue_training(policy, 2)
    checkpoint.save(folder, 2, policy, EXTRA)
    saved = _state(policy)
    metrics, _ = continue_training(policy, 2)
    return saved, metrics, _state(policy)


def _resume_and_go_on(cfg, folder):
    policy = _build(cfg)
    torch.manual_seed(2)
    step, extra = checkpoint.restore(checkpoint.latest(folder), policy)
    assert (step, extra) == (2, EXTRA)
    restored = _state(policy)
    metrics, _ = continue_training(policy, 2)
    return restored, metrics, _state(policy)


@pytest.mark.parametrize(
    "cfg",
    [
        run_config(trainer="delayed", params="bf16", optim=LINEAR_DECAY),
        run_config(trainer="blockwise", params="bf16", world_size=2, tensor=2, expert=2),
        run_config(params="fp32", world_size=2, pipeline=2, virtual_stages=2),
    ],
    ids=["delayed", "tp2_ep2", "pp2_vpp2"],
)
def test_resume_in_the_same_layout_changes_no_bit(cfg, tmp_path):
    assert_a_resume_changes_no_bit(cfg, tmp_path)


def assert_a_resume_changes_no_bit(cfg, tmp_path):
    """Save, go on, and do the same again from the checkpoint, on the ranks of ``cfg``."""
    world_size = cfg.parallel.world_size
    straight = run_ranks(world_size, _save_and_go_on, cfg, str(tmp_path))
    resumed = run_ranks(world_size, _resume_and_go_on, cfg, str(tmp_path))
    for (saved, metrics, state), (restored, metrics_again, state_again) in zip(straight, resumed, strict=True):
        _assert_same_state(saved, restored)
        assert metrics_again == metrics
        _assert_same_state(state, state_again)


def _assert_same_state(expected, actual):
    for name, (_, weight) in expected[0].items():
        assert torch.equal(actual[0][name][1], weight), name
    assert actual[1].keys() == expected[1].keys()
    for name, history in expected[1].items():
        assert history.any(), f"{name}: nothing was recorded"
        assert torch.equal(actual[1][name], history), name
    assert actual[2] == expected[2]
    assert torch.equal(actual[3], expected[3]), "random state"


@pytest.fixture(scope="module")
def from_one_rank(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    ((saved, metrics, state),) = run_ranks(1, _save_and_go_on, run_config(optim=LINEAR_DECAY), str(folder))
    return folder, saved, metrics, state


@pytest.mark.parametrize(
    "layout",
    [
        dict(world_size=2, tensor=2, expert=2),
        dict(world_size=2, expert=2),
        dict(world_size=2, pipeline=2, virtual_stages=2),
        dict(world_size=2, context=2),
        dict(world_size=2),
        dict(world_size=4, tensor=2, expert=2, expert_tensor=2),
    ],
    ids=lambda layout: "_".join(f"{key}{value}" for key, value in layout.items()),
)
def test_resume_in_another_layout(layout, from_one_rank):
    folder, saved, metrics, state = from_one_rank
    cfg = run_config(optim=LINEAR_DECAY, **layout)
    ranks = run_ranks(cfg.parallel.world_size, _resume_and_go_on, cfg, str(folder))
    restored = full_weights(cfg.model, [rank[0][0] for rank in ranks])
    for name, weight in full_weights(cfg.model, [saved[0]]).items():
        assert torch.equal(restored[name], weight), name
    for got, want in zip(ranks[0][1], metrics, strict=True):
        assert got["train/lr/mean"] == want["train/lr/mean"]
        for key in ("train/loss/mean", "train/grad_norm/max"):
            assert got[key] == pytest.approx(want[key], rel=1e-5, abs=1e-6), key
    later = full_weights(cfg.model, [rank[2][0] for rank in ranks])
    for name, weight in full_weights(cfg.model, [state[0]]).items():
        torch.testing.assert_close(later[name], weight, **LAYOUT_WEIGHTS, msg=name)


def _histories_elsewhere(cfg, folder):
    policy = _build(cfg)
    checkpoint.restore(checkpoint.latest(folder), policy)
    return _state(policy)[1]


def test_delayed_scaling_state_reaches_another_layout(tmp_path):
    one = run_config(trainer="delayed")
    ((saved, _, _),) = run_ranks(1, _save_and_go_on, one, str(tmp_path))
    two = replace(one, parallel=replace(one.parallel, world_size=2, tensor=2, expert=2))
    histories = run_ranks(2, _histories_elsewhere, two, str(tmp_path))
    for name, history in saved[1].items():
        parts = [rank[name] for rank in histories]
        # Histories of experts are divided over expert-parallel ranks, others are on every rank.
        actual = torch.cat(parts, dim=-1) if ".experts." in name else parts[0]
        assert torch.equal(actual, history), name
        assert ".experts." in name or torch.equal(parts[0], parts[1]), name


def _killed_while_saving(cfg, folder, moment):
    """Save step 1, then step 2; SIGKILL hits the last rank or the committing rank during the second save."""
    policy = _build(replace(cfg, checkpoint=replace(cfg.checkpoint, keep=1)))
    checkpoint.save(folder, 1, policy, EXTRA)
    continue_training(policy, 1)

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    def remove_one_file_and_die(path):
        next(Path(path).glob("*.distcp")).unlink()
        die()

    if moment == "shards":  # the first file is written, but not synced
        if policy.parallel.rank == policy.parallel.world_size - 1:
            os.fsync = die
    elif moment == "commit":  # all shards are written, the list of files is not
        checkpoint._commit = die
    elif moment == "rename":
        os.rename = die
    elif moment == "prune":  # half of the older checkpoint is gone
        shutil.rmtree = remove_one_file_and_die
    checkpoint.save(folder, 2, policy, EXTRA)


def _restored_step(cfg, folder):
    """On a rank: the step of the checkpoint after the kill. Saving must still work."""
    policy = _build(cfg)
    step, extra = checkpoint.restore(checkpoint.latest(folder), policy)
    assert extra == EXTRA
    checkpoint.save(folder, 3, policy, EXTRA)
    return step, sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize(
    ("moment", "survivor", "world_size"),
    [("shards", 1, 1), ("commit", 1, 1), ("rename", 1, 1), ("prune", 2, 1), ("shards", 1, 4), ("commit", 1, 4)],
)
def test_kill_leaves_a_checkpoint_that_loads(moment, survivor, world_size, tmp_path):
    cfg = run_config(model=DENSE, world_size=world_size, tensor=min(2, world_size))
    with pytest.raises(RankError, match="died without a word"):
        run_ranks(world_size, _killed_while_saving, cfg, str(tmp_path), moment)
    assert any(path.name.startswith(".partial_") for path in tmp_path.iterdir())
    for step, left in run_ranks(world_size, _restored_step, cfg, str(tmp_path)):
        assert step == survivor
        assert left == [f"step_{survivor:08d}", "step_00000003"], "the partial folder was not removed"


def _saves(cfg, folder, steps):
    policy = _build(cfg)
    return [checkpoint.save(folder, step, policy, {"step": step}).name for step in steps]


def test_keeps_the_newest_and_knows_damage(tmp_path):
    assert checkpoint.latest(tmp_path / "nothing") is None
    cfg = run_config(model=DENSE)  # keeps 2
    saved = run_ranks(1, _saves, cfg, str(tmp_path), (1, 2, 3, 3))[0]
    assert saved == ["step_00000001", "step_00000002", "step_00000003", "step_00000003_r1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == saved[2:]
    newest = checkpoint.latest(tmp_path)
    assert newest == tmp_path / "step_00000003_r1"
    assert json.loads((newest / "state.json").read_text())["extra"] == {"step": 3}

    shard = next(newest.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    assert checkpoint.latest(tmp_path) == tmp_path / "step_00000003"
    with pytest.raises(RankError, match=rf"{shard.name} has \d+ bytes instead of"):
        run_ranks(1, _restore_path, cfg, str(newest))
    other = replace(cfg, model=replace(DENSE, num_layers=2))
    with pytest.raises(RankError, match="--model.num_layers = 2: is 4 in .* a different model"):
        run_ranks(1, _restore_path, other, str(tmp_path / "step_00000003"))


def _flip(file) -> None:
    """Flip a bit of a byte in the middle; the size stays."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


def _resumed(cfg, folder):
    output = []
    result = checkpoint.resume(folder, _build(cfg), output.append)
    return result and result[0], output


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", ["*.distcp", ".metadata"])
def test_a_flipped_bit_is_found_named_and_the_older_checkpoint_used(tmp_path, world_size, name):
    cfg = run_config(model=DENSE, world_size=world_size)
    run_ranks(world_size, _saves, cfg, str(tmp_path), (1, 2))
    file = sorted((tmp_path / "step_00000002").glob(name))[-1]
    _flip(file)
    for step, output in run_ranks(world_size, _resumed, cfg, str(tmp_path)):
        assert step == 1 and len(output) == 2
        assert f"step_00000002 is damaged: the CRC-32 of {file.name} is wrong" in output[0]
        assert (
            "set aside as " in output[0] and output[1] == f"continues after step 1, from {tmp_path / 'step_00000001'}"
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged_step_00000002", "step_00000001"]


def test_a_start_at_0_beside_damaged_checkpoints_is_refused(tmp_path):
    cfg = run_config(model=DENSE)
    assert run_ranks(1, _resumed, cfg, str(tmp_path))[0] == (
        None,
        [f"starts at step 0: {tmp_path} contains no checkpoint"],
    )
    run_ranks(1, _saves, cfg, str(tmp_path), (1, 2))
    for step in (1, 2):
        (tmp_path / f"step_0000000{step}" / ".metadata").unlink()
    for _ in range(2):  # the second start finds them set aside
        with pytest.raises(RankError, match="are damaged .damaged_step_00000001, damaged_step_00000002"):
            run_ranks(1, _resumed, cfg, str(tmp_path))


def test_pruning_counts_whole_checkpoints_by_the_time_of_writing(tmp_path):
    cfg = run_config(model=DENSE)  # keeps 2
    run_ranks(1, _saves, cfg, str(tmp_path), (18, 20))
    for path in tmp_path.glob("step_*/.metadata"):
        path.unlink()
    assert run_ranks(1, _saves, cfg, str(tmp_path), (4, 5, 6))[0] == ["step_00000004", "step_00000005", "step_00000006"]
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["step_00000005", "step_00000006", "step_00000018", "step_00000020"]  # damaged ones are not touched


class _Attack:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("place", [".metadata", "rng"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_checkpoint_that_would_run_code_is_refused_before_it_does(tmp_path, place, world_size):
    """The attacker writes the folder, including sizes and digests."""
    cfg, mark = run_config(model=DENSE, world_size=world_size), tmp_path / "attacked"
    run_ranks(world_size, _saves, cfg, str(tmp_path / "saved"), (1,))
    folder = tmp_path / "saved" / "step_00000001"
    metadata = read_metadata(folder)
    if place == ".metadata":
        metadata.planner_data = _Attack(mark)
    else:
        torch.save({"python": _Attack(mark)}, folder / "__9_0.distcp")
        key = next(key for key in metadata.storage_data if key.fqn.startswith("rng/"))
        size = (folder / "__9_0.distcp").stat().st_size
        metadata.storage_data[key] = replace(
            metadata.storage_data[key], relative_path="__9_0.distcp", offset=0, length=size
        )
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    state = json.loads((folder / "state.json").read_text())
    files = [path.name for path in folder.iterdir() if path.name != "state.json"]
    state |= {"files": {name: (folder / name).stat().st_size for name in files}, "digests": digests_of(folder, files)}
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(RankError, match=r"UnsafeError: .* could run code: .*(pathlib|getattr)"):
        run_ranks(world_size, _restore_path, cfg, str(folder))
    assert not mark.exists()


def _restore_path(cfg, path):
    return checkpoint.restore(path, _build(cfg))


def test_extra_must_be_json(tmp_path):
    with pytest.raises(RankError, match=r"extra\['tensor'\] cannot be written as JSON"):
        run_ranks(1, _save_extra, run_config(model=DENSE), str(tmp_path))
    assert not list(tmp_path.iterdir())


def _save_extra(cfg, folder):
    checkpoint.save(folder, 1, _build(cfg), {"tensor": torch.zeros(1)})


def _reference(cfg, folder, resume):
    policy = _build(cfg)
    if resume:
        checkpoint.restore(checkpoint.latest(folder), policy)
    else:
        continue_training(policy, 1)
        checkpoint.save(folder, 1, policy, {})
    return {name: tensor.clone() for name, tensor in policy.reference[0].named_parameters()}, weight_pieces(policy)


def test_random_reference_model_is_kept(tmp_path):
    cfg = run_config(model=DENSE, algo=AlgoConfig(kl_coef=0.1))
    ((reference, _),) = run_ranks(1, _reference, cfg, str(tmp_path), False)
    # Another seed builds another model, so only the checkpoint can bring the first one back.
    ((restored, weights),) = run_ranks(1, _reference, replace(cfg, seed=9), str(tmp_path), True)
    assert all(torch.equal(restored[name], tensor) for name, tensor in reference.items())
    assert any(not torch.equal(weights[name][1], restored[name]) for name in weights if name in restored)
