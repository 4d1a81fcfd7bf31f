"""How a service comes to believe a predictor: by what came true."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from expert_io.calibration import Calibration
from launch.bench.expert_group import ExpertGroup

A_LAYER_S = 0.01


def teach(
    group: ExpertGroup,
    layer: int,
    experts: list[int],
    *,
    first: Sequence[int] = (),
    begin: int = 1,
) -> int:
    """Let predictions for `layer` come true until they are believed, in steps from `begin` on; the
    next step's number. What is said `first`, of the same layer in the same step, is wrong."""
    # How long a read takes is known from the first one.
    group.fetch(0, [0])
    step = begin
    while (step - begin) * len(experts) < Calibration.FIRST:
        if first:
            group.hint(step, layer - 1, [], layer, first)
        group.hint(step, layer - 1, [], layer, experts)
        # Compute is busy with a layer.
        threading.Event().wait(A_LAYER_S)
        group.hint(step, layer, experts, -1, [])
        step += 1
    return step
