"""Measurements on GPUs: ``python -m benchmarks.NAME``. Each prints ``RESULT`` lines and writes its section of the
page docs/performance.md."""
