"""Checkpoints written during training: each contains the step of its start, or is not committed."""

import errno
import json
import os
import signal
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_fp8rl.trainer import checkpoint
from megatron_fp8rl.trainer.parallel import Parallel
from megatron_fp8rl.trainer.policy import Policy
from tests.helpers.dist import RankError, run_ranks
from tests.helpers.ranges import leave_range
from tests.helpers.training import DENSE, MOE, continue_training, run_config, weight_pieces

GATE_S = 60.0


def _build(cfg):
    return Policy.build(cfg, Parallel.init(cfg.parallel, deadline_s=60))


class _Gate:
    """Holds the write of every checkpoint of this process until it is opened."""

    def __init__(self):
        from megatron_fp8rl.trainer.compat.megatron_saving import StagedShards

        self.opened, write = threading.Event(), StagedShards.write

        def held(staged):
            assert self.opened.wait(GATE_S)
            return write(staged)

        StagedShards.write = held


def _state(policy):
    """Weights in pieces, FP8 histories, the number of updates, and the next random numbers."""
    buffers = [(f"{i}.{name}", b) for i, model in enumerate(policy.models) for name, b in model.named_buffers()]
    histories = {name: buffer.clone() for name, buffer in buffers if name.endswith("fp8.history")}
    return weight_pieces(policy), histories, policy.step, torch.rand(4)


def _trains_while_writing(cfg, folder, stock):
    """On a rank: (state when the checkpoint was begun, metrics of the two updates after it)."""
    from megatron_fp8rl.trainer.compat import megatron_saving

    if stock:
        leave_range("megatron-core")
        megatron_saving._gathered = None
    policy, gate = _build(cfg), _Gate()
    torch.manual_seed(1)
    continue_training(policy, 2)
    with closing(checkpoint.Saver(folder, policy)) as saver:
        saver.begin(2, {"note": "begun"})
        begun = _state(policy)
        metrics, _ = continue_training(policy, 2)
        saver.poll()
        assert checkpoint.latest(folder) is None, "named before it was written"
        gate.opened.set()
        path = saver.finish()
    assert saver.finish() == path == checkpoint.latest(folder)
    return begun, metrics


def _restores(cfg, folder):
    policy = _build(cfg)
    assert checkpoint.restore(checkpoint.latest(folder), policy) == (2, {"note": "begun"})
    restored = _state(policy)
    metrics, _ = continue_training(policy, 2)
    return restored, metrics


@pytest.mark.parametrize(
    ("cfg", "stock"),
    [
        (run_config(model=MOE, trainer="delayed", params="bf16", world_size=2, tensor=2, expert=2), False),
        (run_config(model=DENSE, params="fp32", world_size=2), False),
        (run_config(model=DENSE, params="fp32", world_size=2), True),
    ],
    ids=["tp2_ep2", "dp2", "dp2_gathered_by_megatron"],
)
def test_a_checkpoint_holds_the_step_at_which_it_was_begun(cfg, stock, tmp_path):
    """Compares weights and random numbers, and the optimizer's state by two further updates."""
    before = run_ranks(2, _trains_while_writing, cfg, str(tmp_path), stock)
    after = run_ranks(2, _restores, cfg, str(tmp_path))
    for (begun, metrics), (restored, again) in zip(before, after, strict=True):
        for name, (_, weight) in begun[0].items():
            assert torch.equal(restored[0][name][1], weight), name
        assert restored[1].keys() == begun[1].keys()
        for name, history in begun[1].items():
            assert torch.equal(restored[1][name], history), name
        assert restored[2] == begun[2] and torch.equal(restored[3], begun[3])
        assert again == metrics


def _gathered_both_ways(cfg):
    """On a rank: whether our gathered optimizer state equals Megatron-Core's, and the number of values."""
    from megatron_fp8rl.trainer.compat import megatron_saving
    from megatron_fp8rl.trainer.compat.megatron_saving import gathered_on_device, padded_buckets

    megatron_saving._PIECE = 10_001  # many pieces, whose ends lie within parameters
    policy = _build(cfg)
    continue_training(policy, 2)
    optimizer, num = policy.optimizer.megatron, 0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        with padded_buckets(optimizer):
            theirs = part.get_parameter_state_dp_zero(False, False, True)
            with gathered_on_device(optimizer):
                ours = part.get_parameter_state_dp_zero(use_gloo_comm=False, empty_data=False, return_on_all_ranks=True)
        assert ours.keys() == theirs.keys()
        for index in range(len(part.buffers)):
            ((dtype, actual),) = ours[index].items()
            for key, expected in theirs[index][dtype].items():
                same = torch.equal(actual[key], expected) if torch.is_tensor(expected) else actual[key] == expected
                assert same, (index, dtype, key)
                num += expected.numel() if torch.is_tensor(expected) else 0
    return num


@pytest.mark.parametrize("layout", [dict(world_size=1), dict(world_size=2), dict(world_size=2, expert=2)], ids=str)
def test_optimizer_state_gathered_on_the_device_is_megatrons(layout):
    for num in run_ranks(layout["world_size"], _gathered_both_ways, run_config(**layout)):
        assert num > 100_000


def _dies_while_writing(cfg, folder, victim):
    """Step 1 is saved; of step 2 one rank dies in its thread, while all train on."""
    policy = _build(cfg)
    checkpoint.save(folder, 1, policy, {})
    continue_training(policy, 1)
    trains = threading.Event()
    if policy.parallel.rank == victim:
        sync = os.fsync

        def die(descriptor):  # the file is written, but not synced
            if threading.current_thread().name != "write checkpoint":
                return sync(descriptor)
            assert trains.wait(GATE_S)
            os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = die
    with closing(checkpoint.Saver(folder, policy)) as saver:
        saver.begin(2, {})
        trains.set()
        for _ in range(1000):
            continue_training(policy, 1)
            saver.poll()


def _found(cfg, folder):
    output, policy = [], _build(cfg)
    step, _ = checkpoint.resume(folder, policy, output.append)
    checkpoint.save(folder, 2, policy, {})
    return step, sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_killed_in_the_background_write_leaves_the_older_checkpoint(victim, tmp_path):
    cfg = run_config(model=DENSE, world_size=2)
    with pytest.raises(RankError, match=f"rank {victim} of 2:\nthe process died without a word"):
        run_ranks(2, _dies_while_writing, cfg, str(tmp_path), victim)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".partial_00000002", "step_00000001"]
    for actual in run_ranks(2, _found, cfg, str(tmp_path)):
        assert actual == (1, ["step_00000001", "step_00000002"])


def _cannot_write(cfg, folder):
    """On a rank: the error and its step, if the last rank's disk is full while it writes step 2."""
    policy = _build(cfg)
    checkpoint.save(folder, 1, policy, {})
    if policy.parallel.rank == 1:

        def full(descriptor):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.fsync = full
    with closing(checkpoint.Saver(folder, policy)) as saver:
        saver.begin(2, {})
        end = time.monotonic() + GATE_S
        with pytest.raises(checkpoint.CheckpointError) as error:
            while time.monotonic() < end:
                continue_training(policy, 1)
                saver.poll()
    return str(error.value)


def test_an_error_of_the_thread_is_raised_on_all_ranks_with_its_file(tmp_path):
    for text in run_ranks(2, _cannot_write, run_config(model=DENSE, world_size=2), str(tmp_path)):
        assert "cannot write the checkpoint of step 2 to " in text and "rank 1: [Errno 28] No space left" in text
        assert str(tmp_path / ".partial_00000002" / "__1_0.distcp") in text and "rank 0" not in text
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_00000001"]


def _one_after_the_other(cfg, folder):
    policy, gate = _build(cfg), _Gate()
    saver = checkpoint.Saver(folder, policy)
    saver.begin(1, {"step": 1})
    opener = threading.Timer(0.5, gate.opened.set)
    opener.start()
    began = time.monotonic()
    saver.begin(2, {"step": 2})  # waits until the first is on disk
    waited, between = time.monotonic() - began, sorted(path.name for path in Path(folder).iterdir())
    saver.close()  # as after an error: the second is not named
    return waited, between, sorted(path.name for path in Path(folder).iterdir())


def test_one_checkpoint_is_written_at_a_time(tmp_path):
    ((waited, between, left),) = run_ranks(1, _one_after_the_other, run_config(model=DENSE), str(tmp_path))
    assert waited >= 0.4
    assert between == left == [".partial_00000002", "step_00000001"]
    assert json.loads((tmp_path / "step_00000001" / "state.json").read_text())["extra"] == {"step": 1}


def test_the_copies_are_freed_when_they_are_written(tmp_path):
    ((held, written, after),) = run_ranks(1, _bytes_held, run_config(model=replace(DENSE, num_layers=1)), str(tmp_path))
    assert held > 100_000 and after == 0
    assert written >= held


def _bytes_held(cfg, folder):
    policy, gate = _build(cfg), _Gate()
    saver = checkpoint.Saver(folder, policy)
    saver.begin(1, {})
    staged = saver._open.staged
    held = staged.num_bytes
    gate.opened.set()
    path = saver.finish()
    return held, sum(file.stat().st_size for file in path.iterdir()), staged.num_bytes
