"""The device's expert slots over the arena, with a service that evicts all the time: symptoms are
bytes of another expert behind an address, a slot given up while its layer needs it, and a wait that
never ends. On a CPU the device's memory is the host's."""

from __future__ import annotations

import ctypes
import random

import pytest
import torch

from compute.device_experts import DeviceExperts
from compute.sources import Addresses
from protocol import counters
from protocol.errors import HeadraceError, ReadError
from tests.ipc.compute_side import ExpertRig, mini_config, resident

CPU = torch.device("cpu")
PICKS = mini_config().num_experts_per_tok


def assert_bytes(addresses: Addresses, layer: int, experts: list[int]) -> None:
    """What lies at `addresses` are the tensors of `experts`, in the kernels' order."""
    expected = dict(resident().fetch(layer, experts))
    for expert, of_one in zip(experts, addresses.tolist(), strict=True):
        for address, part in zip(of_one, expected[expert], strict=True):
            assert address % 16 == 0
            found = (ctypes.c_uint8 * part.nbytes).from_address(address)
            assert bytes(found) == part.numpy().tobytes(), f"layer {layer} expert {expert}"


def found_by_the_device(tier: DeviceExperts, layer: int, experts: list[int]) -> list[list[int]]:
    """Addresses as a router's lookup makes them."""
    tier.send_slots()
    of, first, slot_bytes = tier.slots
    return [(first + of[layer, expert].long() * slot_bytes).tolist() for expert in experts]


def placed(tier: DeviceExperts, layer: int, experts: list[int]) -> None:
    held = tier.holds(layer, experts)
    addresses = tier.place(layer, experts)
    assert_bytes(addresses, layer, experts)
    if held:
        assert found_by_the_device(tier, layer, experts) == addresses.tolist()
    tier.release()


@pytest.mark.parametrize("in_place", [False, True])
def test_an_address_leads_to_another_experts_bytes(in_place: bool) -> None:
    chance = random.Random(3)
    with ExpertRig(8, restless=0.3) as rig:
        tier = DeviceExperts(rig.experts, mini_config(), CPU, 9, in_place=in_place)
        for step in range(120):
            layer = step % 3
            placed(tier, layer, sorted(chance.sample(range(6), PICKS)))
        copies, hits = tier.counts[counters.DEVICE_COPIES], tier.counts[counters.DEVICE_HITS]
        assert (copies == hits == 0) if in_place else (copies > 30 and hits > 30)
        assert tier.resident == (0 if in_place else 9)


def test_a_hit_on_the_device_asks_nobody_and_prefill_uses_it() -> None:
    with ExpertRig(8) as rig:
        tier = DeviceExperts(rig.experts, mini_config(), CPU, 6)
        placed(tier, 2, [1, 4, 9])
        before = dict(rig.experts.counts)
        placed(tier, 2, [1, 4, 9])
        assert rig.experts.counts == before
        here, addresses = tier.present(2, [1, 4, 7, 9])
        assert here == [1, 4, 9]
        assert_bytes(addresses, 2, here)
        assert tier.present(3, [1])[0] == [] and rig.experts.counts == before
        found = dict(tier.fetch(2, [1, 4, 7, 9]))
        tier.release()
        assert sorted(found) == [1, 4, 7, 9]
        for expert, expected in resident().fetch(2, [1, 4, 7, 9]):
            if expert != 7:  # given back already, in the arena
                assert all(torch.equal(*pair) for pair in zip(found[expert], expected, strict=True))


def test_an_expert_that_cannot_be_read_leaves_the_slots_as_they_were() -> None:
    with ExpertRig(8, fail=[2, 3, 1]) as rig:
        tier = DeviceExperts(rig.experts, mini_config(), CPU, 6)
        placed(tier, 2, [1, 4, 9])
        with pytest.raises(ReadError):
            tier.place(2, [1, 3, 9])
        tier.release()
        placed(tier, 2, [1, 4, 9])
        assert tier.counts[counters.DEVICE_COPIES] == 3


def test_fewer_slots_than_two_layers_picks_are_refused() -> None:
    with ExpertRig(8) as rig, pytest.raises(HeadraceError, match="at least 6"):
        DeviceExperts(rig.experts, mini_config(), CPU, 5)


def test_a_hint_goes_out_before_somebody_is_asked_and_not_where_nobody_is() -> None:
    with ExpertRig(8) as rig:
        tier = DeviceExperts(rig.experts, mini_config(), CPU, 6)
        asked: list[int] = []

        def asking() -> None:
            assert not rig.messages("Demand")
            asked.append(1)

        assert_bytes(tier.bring(2, [1, 4, 9], asking), 2, [1, 4, 9])
        tier.passed()
        assert asked == [1] and rig.messages("Demand")
        # The device has lost what the arena still has.
        tier.hide([(2, 1), (2, 4), (2, 9)])
        assert_bytes(tier.bring(2, [1, 4, 9], asking), 2, [1, 4, 9])
        tier.passed()
        assert asked == [1]
