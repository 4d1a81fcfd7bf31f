"""The committed demo checkpoint is whole, small, and still the model its kept routes came from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tools.train.engine import Engine

DEMO = Path(__file__).parents[2] / "demo"
TOKENS = 64
MOST_BYTES = 40_000_000


def test_all_of_it_fits_the_repository() -> None:
    size = sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file())
    assert 30_000_000 < size < MOST_BYTES


@pytest.fixture(scope="module")
def kept() -> dict[str, torch.Tensor]:
    return load_file(Path(__file__).with_name("held_out.safetensors"))


def test_engine_takes_the_kept_routes_and_predicts_held_out_text(
    kept: dict[str, torch.Tensor],
) -> None:
    losses, trace = Engine(DEMO, torch.device("cpu")).run(kept["tokens"][: TOKENS + 1].long())
    picks, inputs = torch.stack(trace.picks), torch.stack(trace.inputs)
    wanted_picks = kept["picks"][:, :TOKENS].long()
    same = (picks.unsqueeze(-1) == wanted_picks.unsqueeze(-2)).any(-1).float()
    # The orders in which processors sum a product had 98.1 to 98.6 % of the picks in common.
    assert same.mean() > 0.97 and same[0].mean() > 0.99
    wanted = kept["inputs"].float()
    assert (inputs.float() - wanted).norm() < 0.1 * wanted.norm()
    # A model that knew only how often each token occurs would lose more than 6 nats a token.
    assert losses.mean() < 4.5
