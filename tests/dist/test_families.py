"""Every model family against transformers, in float32: logits of odd-sized models in every layout.

One set of ranks builds all families one after another, so that a layout costs one start.
"""

import math

import pytest

from megatron_fp8rl.config import ParallelConfig
from megatron_fp8rl.trainer.parallel import Parallel
from tests.helpers.dist import run_ranks
from tests.helpers.families import MODELS, fits
from tests.helpers.logits import assert_logits_equal, reference_logits, trainer_logits
from tests.tolerances import LOGITS_FLOAT32

LAYOUTS = [
    dict(world_size=1),
    dict(world_size=2, tensor=2),
    dict(world_size=2, pipeline=2),
    dict(world_size=2, context=2),
    dict(world_size=2, expert=2),
    dict(world_size=2, tensor=2, expert=2),
    dict(world_size=2, tensor=2, expert_tensor=2),
]


def _all_references(folder: str) -> dict[str, list]:
    return {kind: reference_logits(model, f"{folder}/{kind}") for kind, model in MODELS.items()}


def _all_logits(layout: dict, folder: str) -> dict[str, list | None]:
    parallel = Parallel.init(ParallelConfig(**layout), deadline_s=60)
    fitting = {kind: model for kind, model in MODELS.items() if fits(model, layout)}
    return {kind: trainer_logits(model, layout, f"{folder}/{kind}", parallel) for kind, model in fitting.items()}


def _name(layout: dict) -> str:
    return "-".join(f"{k}{v}" for k, v in layout.items() if k != "world_size") or "one"


@pytest.fixture(scope="module")
def references(tmp_path_factory) -> tuple[str, dict[str, list]]:
    folder = str(tmp_path_factory.mktemp("families"))
    return folder, run_ranks(1, _all_references, folder)[0]


@pytest.fixture(scope="module")
def logits(references):
    """Logits of all families in a layout, from the ranks of the last stage; computed once."""
    made: dict[str, list] = {}

    def get(layout: dict) -> list[dict]:
        if _name(layout) not in made:
            made[_name(layout)] = run_ranks(layout["world_size"], _all_logits, layout, references[0])
        return made[_name(layout)]

    return get


CASES = [
    pytest.param(kind, layout, id=f"{_name(layout)}-{kind}")
    for layout in LAYOUTS
    for kind, model in MODELS.items()
    if fits(model, layout)
]


@pytest.mark.parametrize("kind, layout", CASES)
def test_logits_equal_transformers(kind, layout, references, logits):
    results = [rank[kind] for rank in logits(layout) if rank[kind] is not None]
    assert len(results) == layout["world_size"] // layout.get("pipeline", 1)
    for result in results:
        assert_logits_equal(result, references[1][kind], **LOGITS_FLOAT32)


@pytest.mark.parametrize("kind", MODELS)
def test_references_spread(kind, references):
    """Logits of unit size: a tolerance of 1e-4 would say nothing about much smaller ones."""
    spread = [sequence.std().item() for pack in references[1][kind] for sequence in pack]
    assert all(math.isfinite(std) and std > 0.3 for std in spread), spread
