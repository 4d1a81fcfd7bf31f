"""The stage comparison is sharp: every wrong reading of the model turns it red."""

from __future__ import annotations

import pytest

from tests.golden.cases import DEVICE
from tests.golden.mistakes import MISTAKES
from tests.golden.stages import StageRun

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda",
    reason="mistakes are made in torch functions, for which kernels stand in on a GPU",
)

# What shows a mistake most plainly is not what it touches alone, so only the first named kind that
# must be red is stated; a mistake that leaves its own stage green has not been caught.
SHOWS_IN = {
    "no_sink": "attention",
    "residual_mix_transposed": "streams",
    "one_sinkhorn_pass": "streams",
    "pre_mix_of_the_same_sublayer": "streams",
    "no_candidate_filter": "index_score",
    "index_keys_always_from_the_own_source": "index_score",
    "compressed_kv_not_rounded": "compressed rows",
    "index_vectors_not_rounded": "index_score",
    "window_kv_not_rounded": "window",
    "product_inputs_not_rounded": "attention",
    "split_half_rotation": "window",
    "no_inverse_rotation": "attention",
    "no_yarn": "attention",
    "window_theta_on_compressed_layers": "attention",
    "gate_bias_left_in_the_weights": "gate weights",
    "gate_bias_ignored": "picks",
    "fp4_nibbles_swapped": "experts",
    "hash_padded_with_another_class": "hash ids",
    "engram_left_out": "engram add",
    "queries_normed_per_head": "attention",
    "probabilities_not_rounded": "attention",
}


def faults(name: str, steps: int) -> list[str]:
    return StageRun(name).run(steps).faults()


@pytest.mark.parametrize("name", SHOWS_IN)
def test_a_wrong_reading_goes_unnoticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MISTAKES[name](monkeypatch)
    # The filter needs a long prompt, the keys of another source a step that leaves a group open.
    long = name == "no_candidate_filter"
    found = faults("mini_len100", 0) if long else faults("mini_len017", 3)
    assert any(fault.startswith(f"{SHOWS_IN[name]}: ") for fault in found), found


def test_every_listed_mistake_is_tried() -> None:
    assert set(SHOWS_IN) == set(MISTAKES)
    assert faults("mini_len017", 3) == []
