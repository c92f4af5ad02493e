"""From how many tokens on something is faster, of made-up times, and the plot of them."""

from __future__ import annotations

import pytest

from benchmarks import crossover, experts, linears, timing
from benchmarks.crossover import Sweep, one_against, one_against_all


def sweep(**ms: dict[int, float]) -> Sweep:
    tokens = sorted({count for times in ms.values() for count in times})
    return Sweep({}, {n: {arm.replace("_", " "): times[n] for arm, times in ms.items() if n in times} for n in tokens})


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ([1, 1, 1, 1], "everywhere"),
        ([3, 3, 3, 3], "nowhere"),
        ([1.97, 1.97, 1.97, 1.97], "nowhere"),  # within the noise of a measurement
        ([3, 3, 1, 1], "from 2,048"),
        ([1, 3, 3, 3], "to 128"),
        ([1, 1, 1, 3], "to 2,048"),
        ([3, 1, 1, 3], "512 to 2,048"),
        ([3, 1, 3, 1], "512, from 8,192"),
    ],
)
def test_where_one_is_faster(ours, expected):
    tokens = (128, 512, 2048, 8192)
    found = sweep(ours=dict(zip(tokens, ours)), theirs=dict.fromkeys(tokens, 2.0))
    _, one, other = one_against("ours", "theirs")
    assert crossover.won(found, one, other) == expected


def test_only_what_was_timed_on_both_sides_is_compared():
    found = sweep(ours={128: 1.0, 512: 3.0}, theirs={512: 2.0, 2048: 2.0})
    _, one, other = one_against("ours", "theirs")
    assert crossover.won(found, one, other) == "nowhere"
    assert crossover.won(sweep(ours={128: 1.0}), one, other) is None


def test_fp8_and_bf16_are_told_apart_by_arms():
    found = sweep(te_bf16={128: 2.0, 512: 2.0}, te_blockwise={128: 9.0, 512: 9.0}, ours={128: 3.0, 512: 1.0})
    _, fp8, bf16 = crossover.fp8_against_bf16()
    assert crossover.won(found, fp8, bf16) == "from 512"
    _, ours, all_others = one_against_all("ours")
    assert crossover.won(found, ours, all_others) == "from 512"


def rows_of_experts(counts=crossover.SWEEP, experts=128, device="NVIDIA H200") -> list[dict]:
    base = {"measured": "experts", "experts": experts, "hidden": 2048, "width": 768, "pattern": "balanced"}
    rows = []
    for tokens in counts:
        times = {"te bf16": 5 + tokens / 15_000, "te blockwise": 9 + tokens / 9_000, "te delayed": 8 + tokens / 9_000}
        times |= {"grouped bf16": 1 + tokens / 14_000, "grouped fp8": 1.2 + tokens / 25_000}
        rows += [base | {"tokens": tokens, "device": device, "arm": arm, "ms": ms} for arm, ms in times.items()]
        rows[-1]["floor_ms"] = tokens / 30_000
    return rows


def rows_of_linears(counts=crossover.SWEEP, what="mlp", size=12_288, device="NVIDIA H200") -> list[dict]:
    base = {"measured": "linears", "what": what, "rows": 4096, "columns": size}
    rows = []
    for tokens in counts:
        times = {"te bf16": 0.2 + tokens / 1_000, "te blockwise": 0.4 + tokens / 1_400}
        times |= {"te delayed": 0.3 + tokens / 1_600}
        times |= {"ours te blockwise": 0.35 + tokens / 1_400, "ours deep_gemm": 0.3 + tokens / 1_500}
        rows += [base | {"tokens": tokens, "device": device, "arm": arm, "ms": ms} for arm, ms in times.items()]
    return rows


def test_a_sweep_is_a_shape_with_three_numbers_of_tokens():
    rows = rows_of_experts() + rows_of_experts((128, 512), experts=16) + rows_of_experts((7, 128), device="other")
    rows += [rows[0] | {"measured": "kernels"}, {"measured": "ceilings"}, rows[0] | {"experts": 3, "error": "no"}]
    (found,) = experts.sweeps(rows)
    assert found.fields["experts"] == 128 and list(found.ms) == [128, 512, 2048, 8192, 32_768, 131_072]
    (line,) = crossover.lines([found], experts.DUELS)
    assert line["tokens"] == "128 to 131,072"
    # 1.2 + t / 25,000 meets 1 + t / 14,000 at 6,364 tokens.
    assert line["FP8 pays"] == "from 8,192" and line["grouped fp8 before te blockwise"] == "everywhere"
    assert "FP8 pays: from 8,192" in crossover.told(line)
    assert [sweep.fields["columns"] for sweep in linears.sweeps(rows_of_linears() + rows)] == [12_288]
    assert crossover.lines(linears.sweeps(rows_of_linears()), linears.DUELS)[0]["FP8 pays"] == "from 512"


@pytest.mark.parametrize("benchmark", [experts, linears])
def test_plots_are_drawn_of_bars_curves_or_both(tmp_path, benchmark):
    of = rows_of_experts if benchmark is experts else rows_of_linears
    other = of((16_384,), 16) if benchmark is experts else of((16_384,), "linear", 4096)
    layers = [{"measured": "layers", "model": "m", "what": "m", "layers": 4, "arm": "bf16", "ms": 1.0, "device": "d"}]
    for index, rows in enumerate((of(), other, of() + other + layers)):
        benchmark.plot(rows, path := tmp_path / f"{index}.png")
        assert path.read_bytes().startswith(b"\x89PNG")
    benchmark.plot(layers, path := tmp_path / "none.png")
    assert not path.exists()


def test_a_case_that_may_not_end_in_time_is_left_out(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timing.time, "monotonic", lambda: now[0])
    budget = timing.Budget(10.0)
    assert budget.allows("a")
    with budget.case():
        now[0] = 4.0
    with budget.case():
        now[0] = 6.0
    assert budget.allows("b") and not capsys.readouterr().out
    now[0] = 6.1
    assert not budget.allows("c")
    assert capsys.readouterr().out == "SKIPPED c: the budget is spent; run the same command again\n"


def test_arms_without_their_package_are_left_out_at_once(capsys, monkeypatch):
    from megatron_fp8rl.precision import hardware

    monkeypatch.setattr(hardware, "installed_packages", lambda: frozenset({"transformer_engine"}))
    assert timing.runnable(["te bf16", "grouped fp8", "ours te blockwise", "ours deep_gemm"]) == [
        "te bf16",
        "ours te blockwise",
    ]
    assert "LEFT OUT grouped fp8: DeepGEMM is not installed" in capsys.readouterr().out
    with pytest.raises(SystemExit) as left:
        timing.runnable(["grouped fp8"])
    assert left.value.code == 2
