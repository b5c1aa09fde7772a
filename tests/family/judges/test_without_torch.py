"""Text is written where torch and transformers cannot be imported."""

from tests.alone import text_of


def test_text_is_written_with_a_judge() -> None:
    assert text_of("--method", "sparsespec", "--judge", "typical")
