"""How a service comes to believe a predictor: by what came true."""

from __future__ import annotations

import threading

from expert_io.calibration import Calibration
from launch.bench.expert_group import ExpertGroup

A_LAYER_S = 0.01


def teach(group: ExpertGroup, layer: int, experts: list[int]) -> int:
    """Let predictions for `layer` come true until they are believed; the next step's number."""
    # How long a read takes is known from the first one.
    group.fetch(0, [0])
    step = 1
    while (step - 1) * len(experts) < Calibration.FIRST:
        group.hint(step, layer - 1, [], layer, experts)
        # Compute is busy with a layer.
        threading.Event().wait(A_LAYER_S)
        group.hint(step, layer, experts, -1, [])
        step += 1
    return step
