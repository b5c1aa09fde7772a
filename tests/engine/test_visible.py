"""The text without its images is a list that is shorter by their places, however it is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from card.engine.visible import VisibleText
from card.models.images import PlacedImages, PromptImage

PARTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=3)
BOUND = st.none() | st.integers(-20, 20)


@given(parts=PARTS, rest=st.integers(0, 4), answer=st.integers(0, 5), start=BOUND, stop=BOUND)
def test_it_reads_like_the_list_of_what_is_visible(parts, rest, answer, start, stop):
    prompt: list[int] = []
    visible: list[int] = []
    starts: list[int] = []
    images: list[PromptImage] = []
    for num_tokens, size in parts:
        visible += (told := [100 + len(prompt) + idx for idx in range(num_tokens)])
        prompt += told
        starts.append(len(prompt))
        images.append(PromptImage(b"." * 32, {}, (1, size)))
        prompt += [7] * size
    visible += (told := [500 + idx for idx in range(rest)])
    prompt += told
    text = list(prompt)
    seen = VisibleText(text, len(prompt), PlacedImages(tuple(images), tuple(starts)))
    text += range(900, 900 + answer)
    visible += range(900, 900 + answer)
    assert list(seen) == visible
    assert len(seen) == len(visible)
    assert seen[start:stop] == visible[start:stop]
    assert [seen[-1 - idx] for idx in range(len(visible))] == visible[::-1]
