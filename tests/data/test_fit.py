import pytest

from multipack.data.documents import Documents


@pytest.fixture
def documents(write_store):
    """Lengths 12 (after a prompt of 9), 4 and 9."""
    return Documents.whole(write_store([[(9, False), (3, True)], [(4, True)], [(9, True)]]))


def test_what_fits_is_left_alone(documents):
    for policy in ("error", "truncate", "split", "drop"):
        fitted, report = documents.fit(12, policy)
        assert fitted.fingerprint == documents.fingerprint
        assert report.describe() == ""


def test_an_error_names_number_name_and_length(documents):
    with pytest.raises(
        ValueError,
        match=r"document 0 \(doc0\) has 12 tokens, more than the limit of 8 .*2 of 3 documents are too long.*"
        r"data\.overlong=truncate, split or drop",
    ):
        documents.fit(8)
    with pytest.raises(ValueError, match=r"document 2 \(doc2\) has 9 tokens"):
        documents.take([1, 2]).fit(8, "error")


def test_truncate_counts_what_is_lost(documents):
    fitted, report = documents.fit(8, "truncate")
    assert fitted.lengths.tolist() == [8, 4, 8]
    assert (report.truncated_documents, report.truncated_tokens, report.without_targets) == (2, 5, 1)
    assert report.describe() == (
        "2 documents longer than 8 tokens truncated (5 tokens); 1 documents or pieces without a target"
    )


def test_split_loses_no_token(documents):
    fitted, report = documents.fit(8, "split")
    assert fitted.lengths.tolist() == [8, 4, 4, 8, 1]
    assert (report.split_documents, report.pieces) == (2, 4)
    assert report.without_targets == 2  # the piece that is all prompt, and the piece of one token
    assert "2 documents longer than 8 tokens split into 4 pieces" in report.describe()


def test_drop_counts_documents_and_tokens(documents):
    fitted, report = documents.fit(8, "drop")
    assert fitted.lengths.tolist() == [4]
    assert (report.dropped_documents, report.dropped_tokens) == (2, 21)
    assert "2 documents longer than 8 tokens dropped (21 tokens)" in report.describe()
    with pytest.raises(ValueError, match="leaves nothing: all 3 documents exceed 3 tokens"):
        documents.fit(3, "drop")


def test_impossible_requests_are_refused(documents):
    with pytest.raises(ValueError, match="one of error, truncate, truncate_left, split, drop"):
        documents.fit(8, "shorten")
    with pytest.raises(ValueError, match="cannot fit into 0"):
        documents.fit(0, "split")


def test_an_empty_view_fits(documents):
    fitted, report = documents.take([]).fit(8)
    assert (len(fitted), report.without_targets) == (0, 0)
