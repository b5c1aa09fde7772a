"""One self-contained page, pictures and a table of what bench files hold. See tools/bench/README.md."""
