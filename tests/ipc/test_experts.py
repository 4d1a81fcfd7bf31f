"""The expert service and its readers as real processes, tried and broken."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import zmq

from expert_io.slices import BLOCK
from launch.bench.expert_group import ExpertGroup
from protocol import counters
from protocol.config import ModelConfig
from protocol.errors import ReadError
from protocol.layouts import ABSENT, PLACES, entry_slot, look_up
from protocol.messages import Demand, DemandFailed, Landed, ReaderStuck
from protocol.shards import Shards
from protocol.tensor_table import expert_tensor
from protocol.wire import VERSION
from tests.ipc.teaching import A_LAYER_S, teach

MINI = Path(__file__).parents[1] / "golden" / "data" / "mini"
DEMO = Path(__file__).parents[2] / "demo"
SLOTS = 30


def on_disk(
    group: ExpertGroup, layer: int, expert: int, checkpoint: Path = MINI
) -> dict[str, bytes]:
    """An expert's tensors read the plain way."""
    shards = Shards.open(checkpoint, group.config)
    found = {}
    for place in PLACES:
        entry = shards.tensors[expert_tensor(layer, expert, *place.split("."))]
        with entry.path.open("rb") as file:
            found[place] = os.pread(file.fileno(), entry.nbytes, entry.offset)
    return found


def in_arena(group: ExpertGroup, layer: int, expert: int) -> npt.NDArray[np.uint8]:
    slot = entry_slot(int(group.directory.entry[layer, expert]))
    return group.arena.data[slot]


def assert_right(group: ExpertGroup, layer: int, expert: int, checkpoint: Path = MINI) -> None:
    slot = in_arena(group, layer, expert)
    for index, (place, data) in enumerate(on_disk(group, layer, expert, checkpoint).items()):
        begin = int(group.directory.place[layer, expert, index])
        assert slot[begin : begin + len(data)].tobytes() == data, f"{place} of {layer}.{expert}"


def await_count(group: ExpertGroup, name: str, count: float) -> None:
    """Ask for the service's figures until one has come that far."""
    deadline = time.monotonic() + 20
    while group.stats().get(name, 0) < count:
        assert time.monotonic() < deadline, f"{name} did not reach {count}"


@pytest.mark.parametrize("readers", [1, 4])
@pytest.mark.parametrize("direct", [True, False])
def test_every_expert_comes_as_it_is_on_disk(readers: int, direct: bool) -> None:
    with ExpertGroup(MINI, slots=SLOTS, readers=readers, direct=direct, piece_bytes=4096) as group:
        for layer in range(group.config.num_hidden_layers):
            for first in range(0, group.config.n_routed_experts, 4):
                experts = range(first, first + 4)
                group.fetch(layer, list(experts))
                for expert in experts:
                    assert_right(group, layer, expert)


def test_a_resident_expert_is_announced_at_once_and_not_read_again() -> None:
    with ExpertGroup(MINI, slots=SLOTS) as group:
        group.fetch(0, [1, 2])
        read = group.stats()["read_bytes"]
        number = group.ask(0, [2, 1])
        answer = group.compute.receive(5.0)
        while answer is not None and answer[1].demand != number:  # type: ignore[attr-defined]
            answer = group.compute.receive(5.0)
        assert answer is not None and answer[1] == Landed(number, [2, 1])
        assert group.stats()["read_bytes"] == read


def test_a_reader_tells_compute_itself_that_an_expert_is_there() -> None:
    faults = "delay:seconds=0.3"
    with ExpertGroup(MINI, slots=SLOTS, readers=2, faults=faults) as group:
        group.ask(3, [5])
        await_count(group, counters.READS_URGENT, 1)
        service = group.children["experts"].process
        service.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while (word := look_up(group.directory, group.arena, 3, [5])[0]) == ABSENT:
            assert time.monotonic() < deadline
        assert group.directory.entry[3, 5] == ABSENT, "the service has not heard of it"
        slot = group.arena.data[entry_slot(word)]
        for place, data in zip(
            group.directory.place[3, 5].tolist(), on_disk(group, 3, 5).values(), strict=True
        ):
            assert slot[place : place + len(data)].tobytes() == data
        service.send_signal(signal.SIGCONT)
        group.await_resident(3, [5])
        assert group.directory.entry[3, 5] == word


def test_predictions_are_read_without_being_demanded() -> None:
    with ExpertGroup(MINI, slots=SLOTS) as group:
        step = teach(group, 1, [5, 6])
        # On a busy machine a guess may come too late to pay; there are more tokens.
        while ABSENT in group.directory.entry[1].take([5, 6]):
            group.hint(step, 0, [], 1, [5, 6])
            group.compute.receive(0.05)
            step += 1
        assert_right(group, 1, 5)
        # Of a layer said twice from the layer before, what is said last is believed by itself.
        step = teach(group, 3, [7, 8], first=[2], begin=step)
        while ABSENT in group.directory.entry[3].take([7, 8]):
            group.hint(step, 2, [], 3, [2])
            group.hint(step, 2, [], 3, [7, 8])
            group.compute.receive(0.05)
            step += 1
        assert_right(group, 3, 8)
        assert group.directory.entry[3, 2] == ABSENT
        stats = group.stats()
        assert stats["reads_predicted"] >= 4 and stats["reads_urgent"] == 1


def test_a_wrong_guess_is_stopped_in_the_middle_of_a_piece() -> None:
    """A disk so slow that the larger of an expert's two pieces takes three layers."""
    with ExpertGroup(DEMO, slots=SLOTS, readers=1, bandwidth=1_200_000.0) as group:
        step = teach(group, 1, [5, 6])
        # With one that is there, as many are named as before, but only one can be read.
        group.fetch(1, [5])
        small, large = group.slices.experts[1][7].pieces
        deadline = time.monotonic() + 20
        while True:
            assert time.monotonic() < deadline
            before = group.stats().get(counters.PREDICTED_WASTED_BYTES, 0)
            group.hint(step, 0, [], 1, [5, 7])
            group.compute.receive(2 * A_LAYER_S)
            group.hint(step, 1, [5], -1, [])
            group.compute.receive(2 * A_LAYER_S)
            step += 1
            part = group.stats().get(counters.PREDICTED_WASTED_BYTES, 0) - before - small.needed
            if 0 < part < large.needed:
                break
        assert part % BLOCK == 0
        assert group.directory.entry[1, 7] == ABSENT
        group.fetch(1, [7])
        assert_right(group, 1, 7, DEMO)


def test_a_killed_reader_is_replaced_and_its_order_read_again() -> None:
    with ExpertGroup(MINI, slots=SLOTS, readers=1, faults="hang:after=2") as group:
        group.fetch(0, [0])
        group.ask(3, [4])
        await_count(group, "reads_urgent", 2)
        group.children["reader-0"].kill()
        assert group.bury("reader-0") == -signal.SIGKILL
        group.start_reader(0, incarnation=1, faults="")
        group.await_resident(3, [4])
        assert_right(group, 3, 4)


def test_a_hanging_reader_is_reported_once_and_its_order_survives_it() -> None:
    faults = "hang:after=1:times=1"
    with ExpertGroup(MINI, slots=SLOTS, readers=1, faults=faults, order_timeout=0.4) as group:
        group.ask(2, [7])
        stuck = group.hear(ReaderStuck)
        assert (stuck.reader, stuck.incarnation) == (0, 0) and stuck.seconds > 0.4
        group.children["reader-0"].kill()
        group.bury("reader-0")
        group.start_reader(0, incarnation=1, faults="")
        group.await_resident(2, [7])
        assert_right(group, 2, 7)


def test_a_reader_that_aborts_over_and_over_loses_nothing() -> None:
    with ExpertGroup(MINI, slots=SLOTS, readers=1, faults="die:after=1") as group:
        group.ask(1, [0, 1, 2])
        for incarnation in range(1, 4):
            assert group.bury("reader-0") == -signal.SIGABRT
            group.start_reader(0, incarnation, faults="die:after=1" if incarnation < 3 else "")
        group.await_resident(1, [0, 1, 2])
        for expert in range(3):
            assert_right(group, 1, expert)


def test_one_read_error_is_retried_and_a_lasting_one_names_file_and_offset() -> None:
    with ExpertGroup(MINI, slots=SLOTS, readers=1, faults="eio:expert=2.3") as group:
        group.fetch(2, [2])
        with pytest.raises(ReadError, match=r"model-00005-of-00015\.safetensors: reading"):
            group.fetch(2, [3])
        group.done_with(group.demands)
        assert group.stats()["read_failures"] >= 1
        group.fetch(2, [4])
        assert_right(group, 2, 4)


def test_a_short_read_fails_the_demand_and_never_passes_for_bytes() -> None:
    with (
        ExpertGroup(MINI, slots=SLOTS, readers=1, faults="short:expert=2.3") as group,
        pytest.raises(ReadError, match="cut short"),
    ):
        group.fetch(2, [3])


def test_a_shard_cut_while_serving_fails_its_experts_only(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(MINI, tmp_path / "mini"))
    with ExpertGroup(copy, slots=SLOTS) as group:
        group.fetch(0, [0])
        with (copy / "model-00006-of-00015.safetensors").open("r+b") as file:
            file.truncate(5000)
        with pytest.raises(ReadError, match=r"model-00006.*cut short"):
            group.fetch(3, [2])
        group.done_with(group.demands)
        group.fetch(1, [1])
        assert_right(group, 1, 1)


def test_a_nan_scale_fails_the_read(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(MINI, tmp_path / "mini"))
    entry = Shards.open(copy, ModelConfig.load(copy)).tensors[expert_tensor(4, 9, "w3", "scale")]
    with entry.path.open("r+b") as file:
        file.seek(entry.offset + 3)
        file.write(b"\xff")
    with (
        ExpertGroup(copy, slots=SLOTS) as group,
        pytest.raises(ReadError, match="is not a number"),
    ):
        group.fetch(4, [9])


def test_senseless_messages_are_counted_and_survived() -> None:
    with ExpertGroup(MINI, slots=SLOTS) as group:
        raw = group.context.socket(zmq.DEALER)
        raw.setsockopt(zmq.LINGER, 0)
        raw.connect(group.endpoints.experts)
        own = bytes((VERSION,))
        frames = [b"", own, own + b"\x28\xc1", b"\x07\x28\x93\x01\x02\x90", os.urandom(5000)]
        frames += [Demand(1, 99, [0]).encode(), Demand(1, 0, [9999]).encode()]
        for frame in frames:
            raw.send(frame)
        raw.send_multipart([b"a", b"b", b"c"])
        group.fetch(0, [1])
        await_count(group, "malformed_messages", len(frames) + 1)
        assert_right(group, 0, 1)
        raw.close()


def test_hints_to_a_stopped_service_never_block() -> None:
    with ExpertGroup(MINI, slots=SLOTS) as group:
        os.kill(group.children["experts"].pid, signal.SIGSTOP)
        begin = time.monotonic()
        sent = [group.hint(step, 0, [1], 1, [2, 3]) for step in range(5000)]
        assert time.monotonic() - begin < 5.0
        assert not all(sent) and group.compute.dropped == sent.count(False)
        os.kill(group.children["experts"].pid, signal.SIGCONT)
        group.fetch(0, [1])


def test_children_end_with_code_0_when_told() -> None:
    with ExpertGroup(MINI, slots=SLOTS) as group:
        group.stop()
        for child in group.children.values():
            assert child.process.wait(timeout=5) == 0


def test_a_failed_expert_of_a_demand_does_not_hold_up_the_others() -> None:
    with ExpertGroup(MINI, slots=SLOTS, readers=2, faults="eio:expert=5.1") as group:
        number = group.ask(5, [0, 1, 2])
        landed, failed = set(), set()
        while len(landed) + len(failed) < 3:
            received = group.compute.receive(10.0)
            assert received is not None
            if isinstance(received[1], Landed):
                landed.update(received[1].experts)
            elif isinstance(received[1], DemandFailed):
                assert received[1].demand == number
                failed.add(received[1].expert)
        assert (landed, failed) == ({0, 2}, {1})


def test_warm_experts_are_read_in_the_background() -> None:
    with ExpertGroup(MINI, slots=SLOTS, warm=[(7, 3), (6, 2)]) as group:
        group.await_resident(7, [3])
        group.await_resident(6, [2])
        assert_right(group, 7, 3)
        assert group.stats()["reads_background"] == 2
