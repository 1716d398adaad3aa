"""Retrieval of facts against TF-IDF computed by hand."""

from __future__ import annotations

import math

from engram_lab.lab.ask.retrieval import best

DOCUMENTS = ["red boat sails", "red red house", "Maya's green boat", "the"]


def by_hand(query: str) -> list[float]:
    """Cosines of tf * (ln((1 + n) / (1 + df)) + 1) vectors, words of two letters or more, lower case."""
    texts = [["red", "boat", "sails"], ["red", "red", "house"], ["maya", "green", "boat"], ["the"]]
    words = sorted({word for text in texts for word in text})
    idf = {word: math.log(5 / (1 + sum(word in text for text in texts))) + 1 for word in words}

    def vector(text: list[str]) -> list[float]:
        raw = [text.count(word) * idf[word] for word in words]
        length = math.sqrt(sum(x * x for x in raw)) or 1.0
        return [x / length for x in raw]

    asked = vector(query.split())
    return [sum(a * b for a, b in zip(asked, vector(text), strict=True)) for text in texts]


def test_the_ranking_is_that_of_the_cosines() -> None:
    for query in ("red boat", "red house", "green maya boat", "boat boat red"):
        scores = by_hand(query)
        wanted = sorted((n for n in range(4) if scores[n] > 0), key=lambda n: -scores[n])
        assert len({round(scores[n], 9) for n in wanted}) == len(wanted) > 1
        assert best(DOCUMENTS, [query], 4) == (tuple(wanted),)
        assert best(DOCUMENTS, [query], 1) == (tuple(wanted[:1]),)
    # By hand: "red boat" has both words only in the first; "red" alone fills more of the second than of the first.
    assert best(DOCUMENTS, ["Red BOAT!", "red"], 3)[0][0] == 0
    assert best(DOCUMENTS, ["red"], 3) == ((1, 0),)


def test_equals_stay_in_order_and_strangers_stay_out() -> None:
    assert best(["same words", "other", "same words"], ["words"], 5) == ((0, 2),)
    assert best(DOCUMENTS, ["zebra", "a", ""], 3) == ((), (), ())
    assert best(["a", "?"], ["a"], 3) == ((),)  # no document has a word
    assert best(DOCUMENTS, [], 3) == ()
