"""Text is written where torch and transformers cannot be imported."""

from tests.alone import text_of


def test_text_is_written_with_its_head() -> None:
    assert text_of("--method", "specbranch", "--hrad", "demo")
