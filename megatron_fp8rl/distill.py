"""The job of the command distill: on-policy distillation from frozen teachers.

The student samples, and the teacher of each source scores the same tokens. In the loss of reinforcement learning, the
teacher's log-probabilities take the place of the reference model's. So ``algo.kl_coef`` times KL(student || teacher) is
minimized on the student's own samples, beside the rewards if there are any. The estimate uses the sampled token, as in
Thinking Machines' "On-Policy Distillation" (2025); ``algo.teacher_kl`` selects a divergence over several tokens
(``trainer/divergence.py``). Runs identically on every trainer rank.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import ClassVar

from megatron_fp8rl import rl_loop
from megatron_fp8rl.data.packing import with_ref_logprobs, with_top_tokens
from megatron_fp8rl.observe.spans import span
from megatron_fp8rl.preflight.teachers import is_served, student_of, teachers_of
from megatron_fp8rl.rollout.teacher_client import ServedTeacher
from megatron_fp8rl.trainer.frozen import FrozenPolicy
from megatron_fp8rl.types import Sample, TrainBatch


class Distillation(rl_loop.Trainer):
    """One run on this rank. Every method is a collective over the trainer ranks."""

    has_reference: ClassVar[bool] = False

    def connect(self, stack: ExitStack) -> None:
        """Load the teachers in folders while engines start."""
        self._names = teachers_of(self.cfg.data)
        with span("start_teachers"):
            self._teachers = {name: self._build(name) for name in dict.fromkeys(self._names.values())}
        super().connect(stack)

    def with_reference(self, samples: Sequence[Sample], batches: Sequence[TrainBatch]) -> list[TrainBatch]:
        algo, scored = self.cfg.algo, {}
        with span("teachers"):
            for name, teacher in self._teachers.items():
                part = [sample for sample in samples if self._names[sample.environment] == name]
                if not self.parallel.broadcast_object(bool(part)):
                    continue
                if algo.teacher_kl == "sampled":
                    scored |= teacher.sample_logprobs(part)
                elif isinstance(teacher, ServedTeacher):
                    top = teacher.top_tokens(part, algo.teacher_top_k, self.cfg.model.vocab_size)
                    batches = [with_top_tokens(batch, top) for batch in batches]
                else:
                    sources = [key for key, of_key in self._names.items() if of_key == name]
                    how = (sources, self.cfg.model.vocab_size, algo.teacher_top_k * (algo.teacher_kl == "top_k"))
                    batches = [teacher.with_distributions(batch, *how) for batch in batches]
        return (
            [with_ref_logprobs(batch, scored) for batch in batches] if algo.teacher_kl == "sampled" else list(batches)
        )

    def _build(self, name: str) -> FrozenPolicy | ServedTeacher:
        if is_served(name):
            return ServedTeacher(name, self.cfg.engine.request_s, self.parallel)
        return FrozenPolicy.build(student_of(self.cfg, name), self.parallel)


run = partial(rl_loop.run, job=Distillation)
