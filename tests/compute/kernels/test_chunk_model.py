"""A whole prompt through the kernels of a chunk, against the same prompt through torch.

All but the routed experts, which take the interpreter long: test_chunk_experts.py has those.
"""

from __future__ import annotations

import sys

import pytest
import torch

from compute.kernels import triton_chunk
from compute.layers import moe
from tests.compute.kernels.comparing import DEVICE
from tests.golden.cases import case
from tests.golden.harness import Mini, relative

# As far as the reference is from itself where rounding decides between two experts.
NOISE = 0.04


def prefill(name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor | int]]:
    """Logits and state after the prompt of a golden case."""
    mini = Mini()
    prompt = case(name)["prompt_ids"].tolist()
    state = mini.model.new_state()
    return mini.run(prompt, state, 0, len(prompt), every=False), state.snapshot()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the golden cases run through the kernels there")
def test_a_prompt_through_kernels_leaves_another_state_than_through_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    want, of_torch = prefill("mini_len003")
    users = [
        module
        for name, module in sys.modules.items()
        if name.startswith("compute.layers.") and hasattr(module, "chunk_kernels")
    ]
    users.remove(moe)
    assert len(users) == 4
    for module in users:
        monkeypatch.setattr(module, "chunk_kernels", lambda device: triton_chunk)
    got, of_kernels = prefill("mini_len003")
    assert relative(got, want) < NOISE
    assert of_kernels.keys() == of_torch.keys()
    for name, held in of_torch.items():
        if isinstance(held, torch.Tensor) and held.numel():
            assert relative(of_kernels[name], held) < 2 * NOISE, name
