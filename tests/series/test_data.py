"""Series from CSV files: what is read, and that each fault is one line that names its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from card.errors import SettingsError
from card.series.data import read_series

HOURS = [f"2020-01-01 {hour:02}:00:00" for hour in range(12)]


def written(folder: Path, *lines: str) -> Path:
    path = folder / "series.csv"
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


def test_a_column_is_read_by_its_name_or_as_the_only_one_with_numbers(tmp_path):
    path = written(tmp_path, "date,load,place", *(f"{hour},{i},here" for i, hour in enumerate(HOURS)))
    assert read_series(path, "load").tolist() == read_series(path).tolist() == list(range(12))
    path = written(tmp_path, "a, b", "1,2", "", "3,4")
    assert read_series(path, "b").tolist() == [2.0, 4.0]


def test_months_are_evenly_spaced_and_so_is_a_file_without_times(tmp_path):
    path = written(tmp_path, "month,x", *(f"2020-{month:02}-01,{month}" for month in range(1, 13)))
    assert len(read_series(path, "x")) == 12


@pytest.mark.parametrize(
    ("lines", "column", "said"),
    [
        (["t,x"], "x", "holds no values"),
        ([], None, "holds no values"),
        (["t,x", "a,1"], "y", "no column 'y'; it has t, x"),
        (["x,y", "1,2"], None, "has x, y; name one"),
        (["t,x", "a,1", "b,"], "x", "line 3: x must be a number, got nothing"),
        (["t,x", "a,1", "b,nan"], "x", "line 3: x must be a number, got 'nan'"),
        (["t,x", "a,1", "b,many"], "x", "got 'many'"),
        (["t,x", "a,1", "b"], "x", "line 3: has 1 cells, the header 2"),
        (
            ["t,x", *(f"{hour},1" for hour in [*HOURS[:5], *HOURS[7:]])],
            "x",
            "line 7: a gap between 2020-01-01 04:00:00",
        ),
        (["t,x", *(f"{hour},1" for hour in [*HOURS[:5], HOURS[4]])], "x", "line 7: 2020-01-01 04:00:00 is not after"),
    ],
)
def test_a_fault_of_a_file_is_one_line_that_names_its_place(lines, column, said, tmp_path):
    with pytest.raises(SettingsError, match=said) as error:
        read_series(written(tmp_path, *lines), column)
    assert "\n" not in str(error.value)


def test_a_file_that_is_no_text_or_is_not_there_is_refused(tmp_path):
    path = tmp_path / "series.csv"
    with pytest.raises(SettingsError, match="cannot be read"):
        read_series(path)
    path.write_bytes(b"\xff\xfe\x00x")
    with pytest.raises(SettingsError, match="no CSV file in UTF-8"):
        read_series(path)
