"""The tokenizer of the demo model: the chat's tokens are single ids, and every byte has its id."""

from __future__ import annotations

from tools.train.corpus import _Prose, _sections
from tools.train.tokenizer import BOS, EOS, LAST_IDS, PAD, bytes_per_id, train_tokenizer

TEXT = (
    "A scheduler decides which process runs next, and for how long it may run. Every queue holds "
    "what waits for a device; a driver takes from its front and wakes whoever asked."
)


def test_special_tokens_are_single_ids_where_the_format_wants_them() -> None:
    tokenizer = train_tokenizer([TEXT] * 4, 330)
    assert [tokenizer.token_to_id(token) for token in (BOS, EOS, PAD)] == [0, 1, 2]
    first = 330 - len(LAST_IDS)
    assert [tokenizer.token_to_id(token) for token in LAST_IDS] == list(range(first, 330))
    assert tokenizer.encode(f"{BOS}{LAST_IDS[0]}hi", add_special_tokens=False).ids[:2] == [0, first]


def test_any_text_comes_back_and_its_bytes_are_counted() -> None:
    tokenizer = train_tokenizer([TEXT] * 4, 330)
    text = "Ünïcode 漢字 \t\n123456 and ⟨symbols⟩"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text
    widths = bytes_per_id(tokenizer)
    assert sum(widths[i] for i in ids) == len(text.encode())


def test_only_prose_is_kept_of_a_page() -> None:
    page = _Prose()
    page.feed(
        "<h1>Scheduling</h1><p>The scheduler decides which process runs next, and for how long "
        "it may run.</p><pre>int main(void);</pre><p>x = y[3] + z;</p>"
        "<p>The scheduler decides which process runs next, and for how long it may run.</p>"
    )
    page.close()
    (section,) = _sections(page.blocks, set())
    assert section[0] == "Scheduling"
    assert section[1].count("scheduler") == 1
