"""Adam in pieces on a GPU: streams of both directions change no bit. Run with -s for the speed."""

import time

import pytest
import torch

from tests.helpers.adam_states import make_adam, states_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SIZES = [100_000_000, 1000] + 40 * [3_145_728, 1_572_864, 2048]  # 3.5 GB with moments


def test_no_bit_changes():
    fused = pytest.importorskip("transformer_engine.pytorch.optimizers").FusedAdam
    plain, _ = make_adam(fused, SIZES, "cuda")
    moved, offload = make_adam(fused, SIZES, "cuda")
    plain.step()
    moved.step()
    num_bytes = sum(x.nbytes for x in states_of(moved))
    offload.release("optimizer")
    for _ in range(3):
        plain.step()
        torch.cuda.synchronize()
        before, started = torch.cuda.memory_allocated(), time.monotonic()
        torch.cuda.reset_peak_memory_stats()
        with offload.streamed():
            moved.step()
        seconds = time.monotonic() - started
        peak = torch.cuda.max_memory_allocated() - before
        print(f"\n{num_bytes / 1e9:.1f} GB out and back in {seconds:.3f} s, at most {peak / 1e9:.1f} GB at once")
        assert torch.cuda.memory_allocated() == before and peak < 0.9 * num_bytes
    offload.restore()
    assert all(torch.equal(a, b) for a, b in zip(states_of(plain), states_of(moved), strict=True))
    assert [group["step"] for group in plain.param_groups] == [group["step"] for group in moved.param_groups] == [4, 4]
