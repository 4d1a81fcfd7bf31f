"""One request after another: prefill in chunks, then a token at a time, until something ends it.

Owns the order in which a token's work is started (engram rows first) and the sequence state of the
request at hand. No sockets here: a request comes in as a message and events go out as messages.
Promises: every request ends with exactly one Finished; a failed one leaves nothing that the next
could trip over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import torch

from compute.interruption import Cancelled, Interruption
from compute.kept_states import KeptStates
from compute.model import Model
from compute.progress import ProgressPage
from compute.sampling import Sample, Sampler, SamplingParams
from compute.sequence import SequenceState
from compute.sources import EngramSource
from compute.text import TextStream, TokenBytes
from protocol import counters
from protocol.errors import (
    FailureKind,
    HeadraceError,
    UsageError,
    failure_kind,
    refused_by_machine,
)
from protocol.lifecycle import describe
from protocol.messages import Finished, Generate, PrefillProgress, TokenEvent
from protocol.trace import Tracer

Event = PrefillProgress | TokenEvent | Finished


# How often it is said how far a chunk is.
PROGRESS_S = 0.5


@dataclass(frozen=True, slots=True)
class Limits:
    """`chunk_tokens` bounds one prefill pass, `context` the tokens of a sequence."""

    chunk_tokens: int
    context: int


class TextGenerator:
    """Answers requests with one model; one request at a time."""

    def __init__(
        self,
        model: Model,
        engram: EngramSource,
        token_bytes: TokenBytes,
        progress: ProgressPage,
        tracer: Tracer,
        kept: KeptStates,
        limits: Limits,
        counts: Callable[[], dict[str, float]],
        interruption: Interruption | None = None,
    ) -> None:
        """`counts` gives the sources' counters since the start (`protocol.counters`);
        `interruption` is the one the sources ask."""
        self.model = model
        self.engram = engram
        self.token_bytes = token_bytes
        self.progress = progress
        self.tracer = tracer
        self.kept = kept
        self.limits = limits
        self.counts = counts
        self.interruption = interruption or Interruption()
        self.steps = 0
        # Written by the chat format, so that the next turn may have another in its place.
        self.added_tokens = token_bytes.added

    def run(
        self,
        request: Generate,
        cancelled: Callable[[], bool],
        report: Callable[[PrefillProgress], object] = lambda progress: None,
    ) -> Iterator[Event]:
        """Events of `request`, the last of them Finished.

        `cancelled` is asked between tokens and chunks, and by the sources at layers and in waits.
        Then, too, `report` is told now and then how far a long chunk is.
        """
        before = self.counts()
        answer = Answer(self, request)

        def asked() -> bool:
            within = answer.within_chunk()
            if within is not None:
                report(within)
            return cancelled()

        self.interruption.watch(asked)
        reason, error = "error", ""
        kind: FailureKind = ""
        try:
            yield from answer.events()
            reason = answer.reason
        except Cancelled:
            reason = "cancelled"
        except HeadraceError as failed:
            error, kind = str(failed), failure_kind(failed)
        except Exception as failed:
            # What one request holds must not end the process that serves the next.
            refused = refused_by_machine(failed)
            error = str(refused) if refused else describe(failed)
            kind = failure_kind(refused) if refused else "internal"
        finally:
            answer.close()
        yield Finished(
            request.request,
            reason,
            answer.held_text(),
            error,
            kind,
            len(request.prompt),
            answer.reused,
            answer.count,
            answer.figures(before),
        )


class Answer:
    """The course of one request."""

    def __init__(self, generator: TextGenerator, request: Generate) -> None:
        self._of = generator
        self._request = request
        self._tokens = list(request.prompt)
        self._state: SequenceState | None = None
        self._text: TextStream | None = None
        # Rows asked for and not yet handed to a pass.
        self._ahead: int | None = None
        self._steps_before = generator.steps
        self._begin = time.monotonic()
        self._first_token_at = self._last_token_at = 0.0
        # The chunk of the prompt that is being computed, and when something was said of it.
        self._chunk: range | None = None
        self._said_at = self._begin
        self.reason = ""
        self.reused = 0
        self.count = 0

    def events(self) -> Iterator[Event]:
        """The whole course. Raises UsageError, ReadError, StallError, Cancelled."""
        sampler = Sampler(self._checked())
        self._text = TextStream(self._of.token_bytes, self._request.stop)
        logits = yield from self._prefill()
        while True:
            with self._of.tracer.span("sample"):
                sample = sampler.sample(logits)
            self._tokens.append(sample.token)
            self.count += 1
            self.reason = self._end_without_text(sample.token)
            if not self.reason:
                # Before anything else: these rows are on the way while the rest is done.
                self._ask_rows(len(self._tokens) - 1, len(self._tokens))
            yield self._token_event(sample)
            if self._text.stopped:
                self.reason = "stop"
            if self.reason:
                return
            self._of.interruption.check()
            logits = self._forward(len(self._tokens) - 1, len(self._tokens))

    def close(self) -> None:
        """Give up what is asked for and keep the state for a later request."""
        self._give_up_rows()
        if self._state is not None:
            self._of.kept.keep(self._tokens, self._state)

    def held_text(self) -> str:
        """Text held back as the possible start of a stop string."""
        return self._text.finish() if self._text is not None else ""

    def figures(self, before: dict[str, float]) -> dict[str, float]:
        """This request's figures; `before` are the sources' counters at its start."""
        first, last = self._first_token_at, self._last_token_at
        decode = last - first
        figures = {key: value - before[key] for key, value in self._of.counts().items()}
        figures[counters.STEPS] = self._of.steps - self._steps_before
        if self.count:
            figures[counters.TTFT_S] = figures[counters.PREFILL_S] = first - self._begin
            figures[counters.DECODE_S] = decode
        # The first token belongs to the prefill.
        figures[counters.TOKENS_PER_S] = (self.count - 1) / decode if self.count > 1 else 0.0
        return figures

    def _checked(self) -> SamplingParams:
        request, config, limit = self._request, self._of.model.config, self._of.limits.context
        if not request.prompt:
            raise UsageError("the prompt is empty, expected at least one token")
        if len(request.prompt) > limit:
            raise UsageError(
                f"the prompt has {len(request.prompt)} tokens, more than the context of {limit}"
            )
        for token in (min(request.prompt), max(request.prompt)):
            if not 0 <= token < config.vocab_size:
                raise UsageError(
                    f"token id {token} is outside the vocabulary of {config.vocab_size}"
                )
        if config.image_token_id in request.prompt:
            raise UsageError(
                f"token id {config.image_token_id} stands for an image; this engine reads text only"
            )
        if request.max_tokens < 1:
            raise UsageError(f"max_tokens is {request.max_tokens}, expected at least 1")
        params = SamplingParams(
            request.temperature,
            request.top_k,
            request.top_p,
            request.min_p,
            request.seed,
            request.frequency_penalty,
            request.presence_penalty,
            request.logprobs,
        )
        params.check()
        return params

    # --- prefill ----------------------------------------------------------------------------------

    def _prefill(self) -> Generator[Event, None, torch.Tensor]:
        """Run the prompt from where a kept state ends; returns the last token's logits [V]."""
        of, prompt = self._of, self._request.prompt
        self._state = of.model.new_state()
        logits: torch.Tensor | None = None
        with of.tracer.span("reuse"):
            kept = of.kept.longest(prompt)
            if kept is not None:
                self._state.restore(kept.snapshot)
                self.reused, logits = self._state.length, kept.logits
        ends = self._chunk_ends()
        if ends:
            self._ask_rows(self.reused, ends[0])
        for index, end in enumerate(ends):
            yield self._prefill_progress()
            self._of.interruption.check()
            following = ends[index + 1] if index + 1 < len(ends) else None
            self._chunk = range(self._state.length, end)
            logits = self._forward(self._state.length, end, following)
            self._chunk = None
            if end == self._keep_at():
                of.kept.keep(prompt, self._state, logits if following is None else None)
        yield self._prefill_progress()
        assert logits is not None
        return logits

    def _chunk_ends(self) -> list[int]:
        """Where passes over the rest of the prompt end.

        At multiples of the chunk length counted from the sequence's start, so that a resumed
        sequence is cut as a fresh one; and where a state is to be kept.
        """
        size, total = self._of.limits.chunk_tokens, len(self._request.prompt)
        ends = set(range((self.reused // size + 1) * size, total, size)) | {self._keep_at(), total}
        return sorted(end for end in ends if end > self.reused)

    def _keep_at(self) -> int:
        """Where the state of the prompt is kept: at its end, or before the mark that ends it.

        A chat's prompt ends with `<think>` or `</think>`; once the answer is history, another may
        stand there, and a state that contains it would never be used again.
        """
        prompt = self._request.prompt
        marked = len(prompt) > 1 and prompt[-1] in self._of.added_tokens
        return len(prompt) - 1 if marked else len(prompt)

    def _prefill_progress(self) -> PrefillProgress:
        assert self._state is not None
        done, total = self._state.length, len(self._request.prompt)
        return PrefillProgress(self._request.request, done, total, self.reused)

    def within_chunk(self) -> PrefillProgress | None:
        """How far the chunk at hand is, by its layers, where that was not said lately."""
        now = time.monotonic()
        if self._chunk is None or now < self._said_at + PROGRESS_S:
            return None
        self._said_at = now
        layers = self._of.model.config.num_hidden_layers
        done = self._chunk.start + len(self._chunk) * self._of.progress.layer // layers
        return PrefillProgress(self._request.request, done, len(self._request.prompt), self.reused)

    # --- passes -----------------------------------------------------------------------------------

    def _forward(self, start: int, end: int, following: int | None = None) -> torch.Tensor:
        """Run tokens `start` to `end`, whose rows are asked for; ask for those to `following`."""
        assert self._state is not None and self._ahead is not None
        ticket, self._ahead = self._ahead, None
        try:
            if following is not None:
                self._ask_rows(end, following)
        except BaseException:
            self._of.engram.done(ticket)
            raise
        self._of.progress.begin_step()
        self._of.steps += 1
        with self._of.tracer.span("pass", start=start, tokens=end - start):
            return self._of.model.forward(self._tokens[start:end], self._state, ticket)

    def _ask_rows(self, start: int, end: int) -> None:
        reach = self._of.model.config.engram_max_ngram_size - 1
        tokens = self._tokens
        history = tokens[max(0, start - reach) : start]
        self._ahead = self._of.engram.request(start, tokens[start:end], history)

    def _give_up_rows(self) -> None:
        if self._ahead is not None:
            self._of.engram.done(self._ahead)
            self._ahead = None

    # --- ends -------------------------------------------------------------------------------------

    def _end_without_text(self, token: int) -> str:
        """The reason that `token` is the last one, whatever its text; "" where it is not."""
        request = self._request
        if token == self._of.model.config.eos_token_id and not request.ignore_eos:
            return "stop"
        if self.count >= request.max_tokens or len(self._tokens) > self._of.limits.context:
            return "length"
        return ""

    def _token_event(self, sample: Sample) -> TokenEvent:
        assert self._text is not None
        self._last_token_at = time.monotonic()
        if self.count == 1:
            self._first_token_at = self._last_token_at
        return TokenEvent(
            self._request.request,
            sample.token,
            self._text.push(sample.token),
            sample.logprob,
            sample.top_ids,
            sample.top_logprobs,
        )
