"""The kernels that ask for absent experts and await engram rows: a record that is not what was
routed, an address of another expert, a stale half of an answer taken for new, rows of another token
taken for this one's, a wait without an end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compute.decode.mailbox import GO_ON, PARTS
from compute.kernels import ask, reference_ask
from tests.compute.kernels.comparing import DEVICE

PICKS = 3
TAG, LAYER = 5 * 40, 7
STAMP = (TAG + LAYER) << 32


def arguments(given_up: int = 0) -> dict[str, Any]:
    on_gpu = DEVICE.type == "cuda"
    margins = torch.tensor([0.5, -1.25]).view(torch.int32)
    picks_and_predictions = torch.tensor([2, 4, 8, 3, 1], dtype=torch.int32)
    return {
        "routed": torch.cat((picks_and_predictions, margins)).to(DEVICE),
        "tag": torch.tensor([TAG], device=DEVICE),
        "given_up": torch.tensor([given_up], device=DEVICE),
        "slots": torch.tensor([-1, 0, 5, -1, 3, 1, 2, -1, 6], dtype=torch.int32, device=DEVICE),
        "first_slot": torch.tensor([16 * n + (1 << 40) for n in range(6)], device=DEVICE),
        "record": torch.zeros(8, dtype=torch.int64, pin_memory=on_gpu),
        "status": torch.zeros(1, dtype=torch.int64, pin_memory=on_gpu),
        "answer": torch.zeros(PICKS, PARTS, 2, dtype=torch.int64, device=DEVICE),
        # What the router's lookup leaves: zeros where a pick is absent.
        "table": torch.full((PICKS, 6), 1 << 41, device=DEVICE),
    }


def absent(*picks: int) -> dict[str, torch.Tensor]:
    """The table and the slots where the picks in these places are absent."""
    said = arguments()
    said["table"][list(picks)] = 0
    for pick in picks:
        said["slots"][said["routed"][pick]] = -1
    return {name: said[name] for name in ("table", "slots")}


def answer(go_on: int = 1, *, stamp: int = STAMP) -> tuple[torch.Tensor, torch.Tensor]:
    """Words that say where the picks lie, and the addresses they say."""
    addresses = torch.randint(1 << 33, 1 << 47, (PICKS, 6))
    parts = torch.zeros(PICKS, PARTS, dtype=torch.int64)
    parts[:, :6], parts[0, GO_ON] = addresses, go_on
    halves = torch.stack((parts & 0xFFFFFFFF, parts >> 32), -1)
    return (halves | stamp).to(DEVICE), addresses


def both(looks: int = 3, **given: Any) -> dict[str, torch.Tensor]:
    """What the kernel wrote, which is what its reference wrote."""
    results = []
    for kernels in (ask, reference_ask):
        said = arguments() | {name: value.clone() for name, value in given.items()}
        if kernels is reference_ask:
            said = {name: tensor.cpu() for name, tensor in said.items()}
        told = {name: said[name] for name in ("routed", "tag", "slots", "record")}
        kernels.tell(**told, layer=LAYER, picks=PICKS)
        rest = {name: said[name] for name in said if name not in ("routed", "record", "slots")}
        kernels.ask(**rest, layer=LAYER, looks=looks)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        results.append({name: tensor.cpu() for name, tensor in said.items()})
    for name, found in results[0].items():
        assert torch.equal(found, results[1][name]), name
    return results[0]


def test_experts_on_the_device_wait_for_no_answer() -> None:
    got = both(looks=0)
    assert (got["table"] == 1 << 41).all()
    assert (got["record"] >> 32 == TAG + LAYER).all()
    values = (got["record"] & 0xFFFFFFFF).tolist()
    assert values[:5] == [2, 4, 8, 3, 1]
    margins = torch.tensor(values[5:7]).to(torch.int32).view(torch.float32)
    assert margins.tolist() == [0.5, -1.25]
    assert int(got["status"]) == int(got["given_up"]) == 0


def test_an_absent_pick_is_marked_and_the_answer_read() -> None:
    words, addresses = answer()
    got = both(**absent(1), answer=words)
    assert (got["record"][:3] >> 31 & 1).tolist() == [0, 1, 0]
    assert torch.equal(got["table"], addresses)
    assert int(got["status"]) == int(got["given_up"]) == 0


@pytest.mark.parametrize("old", range(2 * PARTS * PICKS))
def test_a_word_of_an_earlier_answer_is_waited_for(old: int) -> None:
    words, _ = answer()
    words.view(-1)[old] = int(words.view(-1)[old]) - (1 << 32)
    got = both(**absent(1), answer=words)
    assert int(got["status"]) == STAMP | 1 and int(got["given_up"]) == 1
    # Whatever is read then has to be readable.
    assert (got["table"] >= 1 << 40).all()


def test_the_host_gives_up_or_gave_up_before() -> None:
    words, _ = answer(go_on=0)
    assert int(both(**absent(0), answer=words)["status"]) == STAMP | 1
    words, _ = answer()
    again = both(**absent(0), answer=words, given_up=torch.tensor([1], device=DEVICE))
    assert int(again["status"]) == STAMP | 1
    assert both(given_up=torch.tensor([1], device=DEVICE))["status"].item() == 0


@pytest.mark.parametrize(
    ("word", "looks", "given_up", "waits_on"),
    [
        (STAMP | 1, 1, 0, False),
        (STAMP, 3, 0, True),  # the host gives up
        (STAMP - (1 << 32) | 1, 3, 0, True),  # of the layer before, so too of an earlier token
        (STAMP | 1, 0, 0, True),
        (STAMP | 1, 3, 1, True),
    ],
)
def test_rows_of_another_token_are_taken(
    word: int, looks: int, given_up: int, waits_on: bool
) -> None:
    for kernels in (ask, reference_ask):
        said = arguments(given_up)
        here = torch.tensor([word], device=DEVICE)
        state = {"tag": said["tag"], "given_up": said["given_up"], "rows_here": here}
        if kernels is reference_ask:
            state = {name: tensor.cpu() for name, tensor in state.items()}
        kernels.await_rows(**state, status=said["status"], layer=LAYER, looks=looks)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        assert int(state["given_up"]) == waits_on
        assert int(said["status"]) == (STAMP | 1 if waits_on else 0)
