"""How far a student is from its teacher, by token [*], from the logits [*, V] of both over the whole vocabulary.

The teacher is a constant: no gradient goes into it. The divergence is that of the distributions at the temperature, in
nats; it is not multiplied by the square of the temperature.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from cadenza.algorithms.shapes import at_least_float32, check_shapes

Divergence = Callable[..., Tensor]


def forward_kl(student: Tensor, teacher: Tensor, *, temperature: float = 1.0) -> Tensor:
    """KL(teacher || student): the student must cover all that the teacher might say."""
    log_student, log_teacher = _log_distributions(student, teacher, temperature)
    return (log_teacher.exp() * (log_teacher - log_student)).sum(-1)


def reverse_kl(student: Tensor, teacher: Tensor, *, temperature: float = 1.0) -> Tensor:
    """KL(student || teacher): the student must not say what the teacher would not. On the student's own samples, its
    mean over tokens is the loss of on-policy distillation."""
    log_student, log_teacher = _log_distributions(student, teacher, temperature)
    return (log_student.exp() * (log_student - log_teacher)).sum(-1)


DIVERGENCES: Mapping[str, Divergence] = {"forward_kl": forward_kl, "reverse_kl": reverse_kl}


def _log_distributions(student: Tensor, teacher: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    check_shapes(student=student, teacher=teacher)
    if temperature <= 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    log_student = (at_least_float32(student) / temperature).log_softmax(-1)
    return log_student, (at_least_float32(teacher.detach()) / temperature).log_softmax(-1)
