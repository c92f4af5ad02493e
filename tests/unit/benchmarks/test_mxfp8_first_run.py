"""The checks for the first Blackwell GPU, with stand-ins on a CPU: they pass for equal results and see others."""

from types import SimpleNamespace

import torch

from benchmarks.mxfp8_first_run import same_bytes, same_linear
from megatron_fp8rl.precision.formats import MXFP8
from megatron_fp8rl.precision.quantizers import quantize
from tests.helpers import fake_te


def quantizer(wrong: bool):
    """Transformer Engine's two copies, with scales padded as its own."""

    def call(matrix):
        (rows, row_scales), (columns, column_scales) = (quantize(m, MXFP8) for m in (matrix, matrix.t().contiguous()))
        padded = torch.nn.functional.pad(row_scales, (0, 4))
        padded[5, 7] += wrong
        return SimpleNamespace(
            _rowwise_data=rows.view(torch.uint8),
            _rowwise_scale_inv=padded,
            _columnwise_data=columns.t().contiguous().view(torch.uint8),
            _columnwise_scale_inv=torch.nn.functional.pad(column_scales.t().contiguous(), (0, 0, 0, 4)),
        )

    return call


def test_bytes_are_compared_in_both_directions(capsys):
    assert same_bytes(quantizer(wrong=False), "cpu")
    capsys.readouterr()
    assert not same_bytes(quantizer(wrong=True), "cpu")
    assert "rowwise scale_inv: 1 of 16384 differ" in capsys.readouterr().out


def test_products_are_compared(monkeypatch):
    fake_te.install(monkeypatch)
    from megatron_fp8rl.trainer.model.linear_te import te_linear

    assert same_linear(te_linear, "cpu")
    assert not same_linear(
        lambda x, weights, recipe, *, splits: te_linear(x, weights, recipe, splits=splits) * 1.02, "cpu"
    )
