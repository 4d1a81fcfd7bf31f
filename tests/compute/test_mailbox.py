"""The host's side of a running token's words: half a record taken for a whole one, an earlier
token's for this one's, an address that arrives as another."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compute.decode.mailbox import GO_ON, Mailbox
from compute.kernels.reference_ask import tell

LAYERS, PICKS, PREDICTIONS, EXPERTS = 5, 3, 2, 16
SAID = PICKS + 2 * PREDICTIONS


def mailbox() -> Mailbox:
    made = Mailbox(LAYERS, PICKS, PREDICTIONS, torch.device("cpu"))
    made.begin()
    return made


def told(box: Mailbox, layer: int, absent: tuple[int, ...] = ()) -> None:
    """The device says at `layer`: picks 1, 4 and 15, then probably 9 and 2."""
    margins = torch.tensor([1.5, -0.25]).view(torch.int32)
    routed = torch.cat((torch.tensor([1, 4, 15, 9, 2], dtype=torch.int32), margins))
    slots = torch.zeros(EXPERTS, dtype=torch.int32)
    slots[list(absent)] = -1
    tell(routed, torch.tensor([box.tag]), slots, box.records[layer], layer=layer, picks=PICKS)


@pytest.mark.parametrize("absent", [(), (4,), (1, 15)])
def test_a_record_is_what_was_routed(absent: tuple[int, ...]) -> None:
    box = mailbox()
    told(box, 2, absent)
    record = box.heard(2)
    assert record is not None and record.picks == [1, 4, 15]
    assert record.guesses() == ([9, 2], [1.5, -0.25])
    assert record.waits == bool(absent)
    assert box.heard(1) is None and box.heard(3) is None


@pytest.mark.parametrize("old", range(SAID))
def test_a_record_counts_before_its_last_word(old: int) -> None:
    box = mailbox()
    told(box, 2)
    words = box.records[2].clone()
    for stale in (0, int(words[old]) - (1 << 32), int(words[old]) - (LAYERS << 32)):
        box.records[2, old] = stale
        assert box.heard(2) is None
    box.records[2] = words
    assert box.heard(2) is not None


def test_an_earlier_tokens_words_count() -> None:
    box = mailbox()
    for layer in range(LAYERS):
        told(box, layer)
    box.status[0] = (box.tag + 1) << 32 | 1
    assert box.gave_up
    box.begin()
    assert not box.gave_up
    assert all(box.heard(layer) is None for layer in range(LAYERS))


def test_a_tag_comes_back_while_an_old_one_may_lie_around() -> None:
    """Also across the end of what fits into 31 bits."""
    box = mailbox()
    box._tokens = (1 << 31) // LAYERS - 3
    tags = [box.begin() for _ in range(6)]
    assert len(set(tags)) == 6
    assert all(tag > 0 and tag + LAYERS <= 1 << 31 for tag in tags)


def test_an_address_arrives_as_another() -> None:
    box = mailbox()
    addresses = np.random.default_rng(3).integers(1 << 32, 1 << 47, (PICKS, 6))
    box.reply(3, addresses)
    words = box.answer.numpy()
    assert (words >> 32 == box.tag + 3).all()
    whole = (words[..., 0] & 0xFFFFFFFF) | (words[..., 1] << 32)
    assert np.array_equal(whole[:, :6], addresses) and whole[0, GO_ON] == 1
    box.reply(4, None)
    assert (box.answer.numpy() & 0xFFFFFFFF == 0).all()
