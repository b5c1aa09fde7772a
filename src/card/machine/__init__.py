"""This machine: what its processor can do, where passes compute, where files may be kept between starts."""
