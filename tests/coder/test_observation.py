"""Observations: head and tail by tokens, marker first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nano_coder.agent.actions import shorten
from nano_shared.policy import ObservationFormat
from nano_shared.printable import terminal_text

FORM = ObservationFormat(head_tokens=10, tail_tokens=5)


def words(text: str) -> int:
    return len(text.split())


def test_a_short_text_is_shown_as_it_is() -> None:
    assert shorten("one two", words, FORM, full_output="f") == ("one two", False)


def test_a_long_text_keeps_both_ends_behind_a_marker_that_says_where_the_rest_is() -> None:
    text = " ".join(f"w{i}" for i in range(1000))
    shown, cut = shorten(text, words, FORM, full_output=".nano/output_0.txt")
    marker, head, gap, tail = shown.split("\n")
    assert cut
    assert ".nano/output_0.txt" in marker
    assert head.split() == [f"w{i}" for i in range(10)]
    assert gap == "[...]"
    assert tail.split() == [f"w{i}" for i in range(995, 1000)]


@given(st.text(min_size=0, max_size=400))
def test_what_is_shown_of_a_text_is_bounded(text: str) -> None:
    shown, cut = shorten(text, len, FORM, full_output="f")
    assert len(shown) <= 15 + (len(shown.split("\n")[0]) + len("\n\n[...]\n") if cut else 0)


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("".join(f"\r\x1b[32mdownloading {n}%\x1b[0m" for n in range(301)) + "\n", "downloading 300%\n"),
        ("\x1b[1m\x1b[31m2 failed\x1b[0m, \x1b[38;5;82m1 passed\x1b[0m", "2 failed, 1 passed"),
        ("\x1b]8;;http://a\x1b\\link\x1b]8;;\x07 \x1b]0;title\x07x", "link x"),
        ("a.c:1: \x1b[01;31m\x1b[Kerror:\x1b[m\x1b[K no", "a.c:1: error: no"),
        ("12 %\r100%\r          \rdone\n", "done\n"),
        ("working\r\x1b[K\nnext", "\nnext"),
        ("old\x1b[2Knew", "new"),
        ("|\b/\b-\bN\bNA\bAME", "NAME"),
        ("one\r\ntwo\r\n", "one\ntwo\n"),
        ("\x1b(B\x1b7a\x1b8\x1b[?25hb\x07", "ab"),
        ("cut in a colour \x1b[3", "cut in a colour "),
        ("plain  \n\ttext\n", "plain  \n\ttext\n"),
    ],
)
def test_a_model_is_shown_what_a_terminal_would_show(raw: str, shown: str) -> None:
    assert terminal_text(raw) == shown
    assert shorten(raw, len, ObservationFormat(head_tokens=9999, tail_tokens=1), full_output="f")[0] == shown


@given(st.text(st.sampled_from("a \x1b[]0;Km\r\b\n\x07\x9b\\P"), max_size=40))
def test_nothing_that_drives_a_terminal_is_left_and_lines_stay(text: str) -> None:
    shown = terminal_text(text)
    assert not set(shown) & set("\x1b\r\b\x07\x9b")
    assert terminal_text(shown) == shown


def test_lines_of_files_are_shown_as_they_are() -> None:
    assert (
        shorten(
            "1|\x1b[m\r", len, ObservationFormat(head_tokens=9, tail_tokens=9), full_output="f", tool="read"
        )[0]
        == "1|\x1b[m\r"
    )
