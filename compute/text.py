"""From token ids to text, one token at a time: whole characters only, and stop strings.

Owns the bytes and characters that are not certain yet. Promises: the text handed out piece by piece
is the text of all tokens at once, however it is cut; never half a character; a token costs time in
proportion to its own length, not to what came before.

Special tokens appear in the text as they are written in `tokenizer.json` (`<think>`, `</think>`,
`｜DSML｜` and the rest), because whoever parses a chat needs them. Only end-of-sequence has none.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders

from protocol.errors import CheckpointError, UsageError

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024


class TokenBytes:
    """The bytes each token stands for, as byte-level BPE spells them."""

    def __init__(self, tokenizer: Tokenizer, silent: Sequence[int]) -> None:
        """`silent` are the tokens without text (end of sequence)."""
        self._tokenizer = tokenizer
        self._known: dict[int, bytes] = dict.fromkeys(silent, b"")

    @property
    def added(self) -> frozenset[int]:
        """Tokens that are written into a text by a chat format, not found in it (`<think>`)."""
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    @classmethod
    def load(cls, directory: Path, silent: Sequence[int]) -> TokenBytes:
        """Of `directory/tokenizer.json`; raises CheckpointError where it is not byte-level."""
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; fetch the file with the checkpoint")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception for a bad file
            raise CheckpointError(f"{path}: is not a tokenizer ({error})") from None
        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            raise CheckpointError(
                f"{path}: decoder is {type(tokenizer.decoder).__name__}, expected ByteLevel"
            )
        return cls(tokenizer, silent)

    def of(self, token: int) -> bytes:
        """The bytes of `token`; none for an id that the tokenizer does not have."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = _spelled(self._tokenizer.id_to_token(token) or "")
        return known


class TextStream:
    """The text of one answer while its tokens arrive."""

    def __init__(self, token_bytes: TokenBytes, stops: Sequence[str] = ()) -> None:
        """`stops` end the text and are not part of it; raises UsageError where one is unusable."""
        self._token_bytes = token_bytes
        # A byte that belongs to no character becomes U+FFFD, as in the tokenizer's own decoding.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._stops = StopStrings(stops)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has been met; tokens after it have no text."""
        return self._stops.met

    def push(self, token: int) -> str:
        """The text that became certain with `token`."""
        return self._stops.push(self._decoder.decode(self._token_bytes.of(token)))

    def finish(self) -> str:
        """What was held back as the possible start of a stop string. Half a character at the very
        end is not text and is left out."""
        return self._stops.finish()


class StopStrings:
    """Cuts a text at the first place where one of several strings is complete.

    Which string wins does not depend on how the text is cut into pieces: the one complete first,
    and of those complete at the same character the longest. Held back is the longest end of the
    text with which a stop string begins, no more (Knuth, Morris and Pratt's matching).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if len(stops) > MAX_STOPS:
            raise UsageError(f"{len(stops)} stop strings, expected at most {MAX_STOPS}")
        for stop in stops:
            if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
                raise UsageError(
                    f"a stop string of {len(stop)} characters, expected 1 to {MAX_STOP_CHARACTERS}"
                )
        self._stops = [(stop, _failure_table(stop)) for stop in stops]
        self._matched = [0] * len(stops)
        self._held = ""
        self.met = False

    def push(self, text: str) -> str:
        """The part of the text so far that is certain and not handed out yet."""
        if self.met or not text:
            return ""
        if not self._stops:
            return text
        for position, character in enumerate(text):
            longest = self._advance(character)
            if longest:
                self.met = True
                whole = self._held + text[: position + 1]
                self._held = ""
                return whole[:-longest]
        whole = self._held + text
        certain = len(whole) - max(self._matched)
        self._held = whole[certain:]
        return whole[:certain]

    def finish(self) -> str:
        """What is still held back; the text is over."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Match one more character; the length of the longest stop string it completes, or 0."""
        longest = 0
        for index, (stop, failure) in enumerate(self._stops):
            matched = self._matched[index]
            while matched and stop[matched] != character:
                matched = failure[matched - 1]
            if stop[matched] == character:
                matched += 1
            self._matched[index] = matched
            if matched == len(stop):
                longest = max(longest, matched)
        return longest


def _failure_table(pattern: str) -> list[int]:
    """For each prefix of `pattern` the length of its longest proper end that is a prefix too."""
    table = [0] * len(pattern)
    matched = 0
    for index in range(1, len(pattern)):
        while matched and pattern[index] != pattern[matched]:
            matched = table[matched - 1]
        if pattern[index] == pattern[matched]:
            matched += 1
        table[index] = matched
    return table


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's letter for every byte: printable ones stand for themselves, the others for
    the letters from U+0100 on, in byte order (GPT-2's `bytes_to_unicode`)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _spelled(token: str) -> bytes:
    """Bytes of a token's spelling; one with a letter outside the alphabet is an added token."""
    try:
        return bytes(_BYTES[letter] for letter in token)
    except KeyError:
        return token.encode("utf-8")
