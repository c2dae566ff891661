"""Observations: head and tail by tokens, marker first."""

from hypothesis import given
from hypothesis import strategies as st

from nano_coder.agent.observation import shorten
from nano_shared.profile import ObservationFormat

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
