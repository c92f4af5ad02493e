"""Adam in pieces: its states come and leave while it steps, in order, and no bit changes."""

from itertools import chain

import pytest
import torch

from megatron_fp8rl.trainer.optimizer import fp8_params
from tests.helpers.adam_states import CountingAdam, make_adam, states_of

SIZES = [40, 300, 64, 64, 200, 1, 90]  # in two groups, [40, 300] and the others
PIECES = [[0], [1], [2], [3], [4], [5, 6]]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(fp8_params, "_MASTERS_AT_A_TIME", 100)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, CountingAdam])
def test_no_bit_changes(kind):
    plain, _ = make_adam(kind, SIZES)
    moved, offload = make_adam(kind, SIZES)
    groups = moved.param_groups
    offload.release("optimizer")
    for _ in range(4):  # the first step has no moments to stream
        plain.step()
        with offload.streamed():
            moved.step()
        assert offload.offloaded == ("optimizer",) and not any(x.untyped_storage().nbytes() for x in states_of(moved))
    offload.restore()
    assert all(torch.equal(a, b) for a, b in zip(states_of(plain), states_of(moved), strict=True))
    assert moved.param_groups is groups and [len(group["params"]) for group in groups] == [2, 5]
    assert [group.get("step") for group in groups] == [group.get("step") for group in plain.param_groups]
    assert "step" not in vars(moved)


class Watched(CountingAdam):
    """Notes the sizes of the parameters that it updates, and the parameters whose moments and values have memory."""

    seen: list[tuple[list[int], list[int], list[int]]]

    def step(self) -> None:
        params = [p for group in self.everything for p in group["params"]]
        updated = [
            index for index, p in enumerate(params) for group in self.param_groups for q in group["params"] if p is q
        ]
        moments = [i for i, p in enumerate(params) if all(x.untyped_storage().nbytes() for x in self.state[p].values())]
        self.seen.append((updated, moments, [i for i, p in enumerate(params) if p.untyped_storage().nbytes()]))
        super().step()


def test_the_next_piece_comes_and_the_last_one_leaves():
    adam, offload = make_adam(Watched, SIZES)
    adam.everything, adam.seen = adam.param_groups, []
    adam.step()
    offload.release("optimizer")
    adam.seen.clear()
    with offload.streamed():
        adam.step()
        assert all(p.untyped_storage().nbytes() for group in adam.param_groups for p in group["params"])
        assert sum(x.untyped_storage().nbytes() for x in states_of(adam)) == 4 * sum(SIZES)
    assert [updated for updated, _, _ in adam.seen] == PIECES
    for index, (_, moments, params) in enumerate(adam.seen):
        assert moments == [*chain(*PIECES[max(index - 1, 0) : index + 2])]
        assert params == [*chain(*PIECES[: index + 2])]


def test_memory_is_free_after_a_step_that_fails():
    adam, offload = make_adam(CountingAdam, SIZES)
    adam.step()
    offload.release("optimizer")
    groups, adam.param_groups[1]["params"][2].grad = adam.param_groups, None
    with pytest.raises(TypeError), offload.streamed():
        adam.step()
    assert adam.param_groups is groups and "step" not in vars(adam)
    assert not any(x.untyped_storage().nbytes() for x in states_of(adam))


@pytest.mark.parametrize("reason", ["one storage", "not Adam alone"])
def test_states_that_pieces_cannot_have_come_together(reason):
    adam, offload = make_adam(CountingAdam, SIZES)
    adam.step()
    if reason == "one storage":
        first, second = adam.param_groups[1]["params"][:2]
        adam.state[first]["exp_avg"], adam.state[second]["exp_avg"] = torch.zeros(2, 64)
    else:
        offload._optimizer.may_step_in_pieces = False
    offload.release("optimizer")
    with offload.streamed():
        assert offload.offloaded == ()
    assert offload.offloaded == ("optimizer",)
