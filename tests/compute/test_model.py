"""The forward pass against its sources: what it asks for, gives back, and does when they fail."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from compute.layers.hyper_connections import collapse, write_back
from compute.layers.moe import route
from compute.layers.norm import rms_norm
from compute.predictor import predict
from compute.resident import ResidentExperts
from compute.sources import ExpertBytes
from protocol.errors import ReadError, UsageError
from tests.golden import harness
from tests.golden.cases import case
from tests.golden.harness import Capture, Mini, config

CPU = torch.device("cpu")

TOKENS: list[int] = case("mini_len037")["prompt_ids"].tolist()


class WatchedExperts:
    """Resident experts that note every call and shred what compute may not read any more."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.calls: list[str] = []
        self.hints: list[tuple[int, list[int], int | None, list[int], list[float]]] = []
        self.fetched: dict[int, list[int]] = {}
        self._fail_at = fail_at

    def fetch(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, ExpertBytes]]:
        self.calls.append(f"fetch {layer}")
        self.fetched[layer] = list(experts)
        return self._arriving(layer, experts)

    def _arriving(self, layer: int, experts: Sequence[int]) -> Iterator[tuple[int, ExpertBytes]]:
        for expert, held in harness.experts().fetch(layer, experts):
            if layer == self._fail_at:
                raise ReadError("model-00005: expert cannot be read")
            lent = ExpertBytes(*(part.clone() for part in held))
            yield expert, lent
            for part in lent:
                part.fill_(0xFF)  # codes of -6 and NaN scales, from the next draw on

    def hint(
        self,
        layer: int,
        picks: Sequence[int],
        predicted_layer: int | None,
        predicted: Sequence[int],
        scores: Sequence[float],
    ) -> None:
        self.calls.append(f"hint {layer}")
        self.hints.append((layer, list(picks), predicted_layer, list(predicted), list(scores)))

    def release(self) -> None:
        self.calls.append("release")


def test_each_needed_expert_is_fetched_once_a_chunk_after_a_hint_and_released() -> None:
    source, capture = WatchedExperts(), Capture()
    mini = Mini(source=source, observe=capture)
    got = mini.run(TOKENS, mini.model.new_state(), 0, 37, every=True)
    layers = range(config().num_hidden_layers)
    assert source.calls == [c for n in layers for c in (f"hint {n}", f"fetch {n}", "release")]
    for layer in layers:
        picks = capture[f"layers.{layer}.gate_indices"]
        assert source.fetched[layer] == sorted(set(picks.flatten().tolist()))
        assert source.hints[layer][1] == source.fetched[layer]
    plain = Mini()
    want = plain.run(TOKENS, plain.model.new_state(), 0, 37, every=True)
    assert torch.equal(got, want), "expert bytes were read after they were given back"


def test_the_answer_is_the_same_bits_whatever_arrives_first() -> None:
    shuffler = random.Random(5)

    def shuffled(layer: int, experts: Sequence[int]) -> list[int]:
        return shuffler.sample(experts, len(experts))

    answers = []
    for source in (None, ResidentExperts.read(harness.shards(), CPU, shuffled)):
        mini = Mini(source=source)
        state = mini.model.new_state()
        parts = [mini.run(TOKENS, state, 0, 30, every=True)]
        parts += [mini.run(TOKENS, state, at, at + 1, every=True) for at in range(30, 37)]
        answers.append(torch.cat(parts))
    assert torch.equal(answers[0], answers[1])


def test_the_prediction_is_the_next_gate_on_this_input_best_first() -> None:
    source, capture = WatchedExperts(), Capture()
    mini = Mini(source=source, observe=capture)
    state = mini.model.new_state()
    mini.run(TOKENS, state, 0, 36, every=False)
    source.hints.clear()
    capture.clear()
    mini.run(TOKENS, state, 36, 37, every=False)
    k, layers = config().num_experts_per_tok, harness.weights().layers
    for layer, _, following, predicted, scores in source.hints:
        if layer + 1 == len(layers):
            assert (following, predicted, scores) == (None, [], [])
            continue
        assert following == layer + 1 and len(predicted) == len(scores) == k
        assert scores == sorted(scores, reverse=True) and scores[-1] == 0
        x = capture[f"layers.{layer}.ffn_in"]
        assert predicted == route(x, layers[layer + 1].gate, k, 1.0).picks[0].tolist()


def test_farther_layers_are_predicted_once_what_misses_has_been_asked_for() -> None:
    source, capture = WatchedExperts(), Capture()
    mini = Mini(source=source, observe=capture, ahead=3)
    mini.run(TOKENS, mini.model.new_state(), 0, 37, every=False)
    layers = harness.weights().layers
    expected = []
    for n in range(len(layers)):
        farther = [f"hint {n}"] * len(range(n + 2, min(n + 4, len(layers))))
        expected += [f"hint {n}", f"fetch {n}", *farther, "release"]
    assert source.calls == expected
    for layer, picks, target, predicted, scores in source.hints:
        assert picks == source.fetched[layer]
        if target is not None:
            x = capture[f"layers.{layer}.ffn_in"]
            said = predict(x, layers[target].gate, config().num_experts_per_tok, len(predicted))
            assert (predicted, scores) == (said.experts.tolist(), said.margins.tolist())


def test_a_layer_is_foretold_once_more_before_its_attention_by_the_stream() -> None:
    source = WatchedExperts()

    def observe(name: str, layer: int, tensor: torch.Tensor) -> None:
        if name in ("stream_in", "attn_out"):
            source.calls.append(f"{name} {layer}")
            seen[name, layer] = tensor

    seen: dict[tuple[str, int], torch.Tensor] = {}
    mini = Mini(source=source, observe=observe, early=True)
    state = mini.model.new_state()
    mini.run(TOKENS, state, 0, 36, every=False)
    # A pass that may pick every expert of a layer foretells nothing of it.
    before = [call for call in source.calls if call.startswith(("hint", "stream_in"))]
    layers = harness.weights().layers
    assert before == [c for n in range(len(layers)) for c in (f"stream_in {n}", f"hint {n}")]
    source.calls.clear()
    source.hints.clear()
    mini.run(TOKENS, state, 36, 37, every=False)
    expected = []
    for n in range(len(layers)):
        early = [f"hint {n - 1}"] if n else []
        routed = [f"attn_out {n}", f"hint {n}", f"fetch {n}", "release"]
        expected += [f"stream_in {n}", *early, *routed]
    assert source.calls == expected
    eps, k = config().rms_norm_eps, config().num_experts_per_tok
    for layer in range(1, len(layers)):
        weights, streams = layers[layer], seen["stream_in", layer]
        # The layer before, with its picks, now says this of the layer at hand.
        before_it, picks, target, predicted, scores = source.hints[2 * layer - 1]
        assert (before_it, picks, target) == (layer - 1, source.fetched[layer - 1], layer)
        made = mini.model._mixes(streams, weights.attention_mix)
        carried = write_back(torch.zeros(1, streams.shape[2]), streams, made)
        x = rms_norm(collapse(carried, made.pre), weights.ffn_norm, eps)
        said = predict(x, weights.gate, k, k)
        # Collapsed in two steps, and rounded between them.
        assert len(set(predicted) & set(said.experts.tolist())) >= k - 1
        assert scores == pytest.approx(said.margins.tolist(), abs=0.02)


def test_a_chunk_predicts_exactly_the_experts_its_tokens_would_pick() -> None:
    gate = harness.weights().layers[3].gate
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    k = config().num_experts_per_tok
    got = predict(x, gate, k, 16)
    wanted = set(route(x, gate, k, 1.0).picks.flatten().tolist())
    assert set(got.experts[got.margins >= 0].tolist()) == wanted
    assert got.margins.tolist() == sorted(got.margins.tolist(), reverse=True)


def test_a_failed_read_gives_everything_back_and_spoils_the_state_until_restored() -> None:
    broken = Mini(source=WatchedExperts(fail_at=4))
    sound = Mini()
    state = sound.model.new_state()
    sound.run(TOKENS, state, 0, 20, every=False)
    kept = state.snapshot()
    expected = sound.run(TOKENS, state, 20, 37, every=False)
    state.restore(kept)
    with pytest.raises(ReadError):
        broken.run(TOKENS, state, 20, 37, every=False)
    source = broken.model._experts
    assert isinstance(source, WatchedExperts) and source.calls[-2:] == ["fetch 4", "release"]
    assert broken.engram.open == {}
    with pytest.raises(UsageError, match="failed midway"):
        sound.run(TOKENS, state, 20, 37, every=False)
    state.restore(kept)
    assert torch.equal(sound.run(TOKENS, state, 20, 37, every=False), expected)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [([], "no tokens"), ([5, 512], "512 is outside"), ([-1], "-1 is outside")],
)
def test_bad_tokens_are_refused_and_the_state_stays(tokens: list[int], said: str) -> None:
    mini = Mini()
    state = mini.model.new_state()
    mini.run(TOKENS, state, 0, 5, every=False)
    ticket = mini.engram.request(5, [1] * len(tokens), TOKENS[2:5])
    with pytest.raises(UsageError, match=said):
        mini.model.forward(tokens, state, ticket)
    assert mini.engram.open == {} and state.length == 5
    mini.run(TOKENS, state, 5, 6, every=False)


def test_a_sequence_beyond_the_models_positions_is_refused_with_both_numbers() -> None:
    mini = Mini()
    state = mini.model.new_state()
    state.length = config().max_position_embeddings
    ticket = mini.engram.request(0, [1], [])
    with pytest.raises(UsageError, match="1048577 tokens are more than the model's limit of 1048"):
        mini.model.forward([1], state, ticket)


def test_the_last_row_of_all_logits_is_what_a_plain_pass_returns() -> None:
    mini = Mini()
    every = mini.run(TOKENS, mini.model.new_state(), 0, 37, every=True)
    last = mini.run(TOKENS, mini.model.new_state(), 0, 37, every=False)
    assert every.shape == (37, 512) and last.shape == (512,)
    assert torch.allclose(every[-1], last, atol=1e-5)


def test_spans_cover_every_layers_work() -> None:
    seen: list[tuple[str, int]] = []

    class Spans:
        def span(self, name: str, **args: int) -> AbstractContextManager[None]:
            seen.append((name, args["layer"]))
            return nullcontext()

    mini = Mini()
    mini.model._tracer = Spans()
    mini.run(TOKENS, mini.model.new_state(), 0, 3, every=False)
    for layer in range(8):
        names = [name for name, at in seen if at == layer]
        assert names == [
            *(["engram"] if layer in (1, 3) else []),
            "attention",
            "routing",
            "experts",
        ]
