"""Spans count what they enclose, in every thread, and are handed over once."""

import threading
import time

import pytest

from megatron_fp8rl.observe.spans import add_seconds, current, span, take_seconds


@pytest.fixture(autouse=True)
def _empty_spans():
    take_seconds()
    yield
    take_seconds()


def test_nested_spans_count_their_whole_duration():
    with span("outer"):
        with span("inner"):
            time.sleep(0.02)
        time.sleep(0.01)
    seconds = take_seconds()
    assert 0.02 <= seconds["inner"] < seconds["outer"]
    assert seconds["outer"] >= 0.03
    assert take_seconds() == {}


def test_a_span_apart_is_not_counted_twice():
    with span("checkpoint"), span("update"):
        with span("colocated", apart=True):
            time.sleep(0.03)
        with span("inner"):
            time.sleep(0.01)
    seconds = take_seconds()
    assert seconds["colocated"] >= 0.03 and 0.01 <= seconds["inner"] <= seconds["update"] < 0.03
    assert seconds["checkpoint"] == pytest.approx(seconds["update"] + seconds["colocated"], abs=0.005)
    with span("colocated", apart=True):
        pass
    assert set(take_seconds()) == {"colocated"}  # nothing around it


def test_a_span_counts_when_its_block_raises():
    with pytest.raises(RuntimeError, match="boom"):
        with span("update"):
            raise RuntimeError("boom")
    assert set(take_seconds()) == {"update"}


def test_spans_of_many_threads_add_up_exactly():
    def work():
        for _ in range(1000):
            add_seconds("score", 0.5)
            with span("generate"):
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert take_seconds()["score"] == 4000.0


def test_the_current_span_is_the_outermost_of_the_main_thread():
    seen = []
    with span("rollouts"), span("score"):
        threading.Thread(target=lambda: span("generate").__enter__()).start()
        seen.append(current())
    assert seen[0][0] == "rollouts" and seen[0][1] >= 0 and current() is None


def test_a_name_that_cannot_be_a_metric_key_is_refused():
    with pytest.raises(ValueError, match="'Old Logprobs'"):
        span("Old Logprobs")


def test_a_span_costs_microseconds():
    start = time.thread_time()  # not of the clock: neighbours do not count
    for _ in range(10_000):
        with span("update"):
            pass
    assert (time.thread_time() - start) / 10_000 < 50e-6  # about 1 us here
