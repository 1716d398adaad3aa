"""Which of a user's facts belong to a text: TF-IDF with scikit-learn, the plainest kind of retrieval."""

from __future__ import annotations

from collections.abc import Sequence


def best(documents: Sequence[str], queries: Sequence[str], k: int) -> tuple[tuple[int, ...], ...]:
    """For each query the numbers of at most k documents, best first.

    A document is as good as the cosine of its TF-IDF vector with the query's; of equal ones the earlier comes first,
    and one that shares no word with the query never comes. Words are lower case, of two or more letters or digits; the
    weights are fitted on the documents (scikit-learn's default: tf * (ln((1 + n) / (1 + df)) + 1), of length 1).
    """
    from sklearn.feature_extraction.text import TfidfVectorizer

    if not queries:
        return ()
    vectorizer = TfidfVectorizer()
    try:
        known = vectorizer.fit_transform(documents)
    except ValueError:  # no document has a word
        return ((),) * len(queries)
    found = []
    for scores in (vectorizer.transform(queries) @ known.T).toarray():
        order = (-scores).argsort(kind="stable")[:k]
        found.append(tuple(int(n) for n in order if scores[n] > 0))
    return tuple(found)
