"""Series from CSV files: what is read, and that each fault is one line that names its place."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from card.errors import SettingsError
from card.labs.series.data import read_series

STARTS = [(2024, 3, 29), (2024, 10, 25), (2024, 4, 5), (2024, 10, 4)]  # clocks change within four days, somewhere
ZONES = ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/Sao_Paulo", "Asia/Kathmandu", "UTC"]
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


def clocks(zone: str, start: datetime, step: timedelta, count: int) -> list[datetime]:
    """Return what the clocks of a zone show at evenly spaced moments."""
    first = start.replace(tzinfo=ZoneInfo("UTC"))
    return [(first + idx * step).astimezone(ZoneInfo(zone)) for idx in range(count)]


def lines_of(times: list[str]) -> list[str]:
    return ["t,x", *(f"{time},{idx}" for idx, time in enumerate(times))]


@pytest.mark.parametrize("zone", ZONES)
@pytest.mark.parametrize("minutes", [15, 30, 60])
def test_the_clocks_may_change_between_times_with_offsets(zone, minutes, tmp_path):
    for start in [*STARTS, (2024, 3, 8), (2024, 11, 1)]:
        times = clocks(zone, datetime(*start), timedelta(minutes=minutes), 96 * 60 // minutes)
        path = written(tmp_path, *lines_of([time.isoformat() for time in times]))
        assert len(read_series(path, "x")) == len(times)
        del times[20]
        with pytest.raises(SettingsError, match=r"line 22: a gap between .*; fill it or cut the series there$"):
            read_series(written(tmp_path, *lines_of([time.isoformat() for time in times])), "x")


def test_the_zones_of_these_tests_do_change_their_clocks():
    changing = {
        zone
        for zone in ZONES
        for start in [*STARTS, (2024, 3, 8), (2024, 11, 1)]
        if len({time.utcoffset() for time in clocks(zone, datetime(*start), timedelta(hours=1), 96)}) > 1
    }
    assert changing == {"Europe/Berlin", "America/New_York", "Australia/Lord_Howe"}


@pytest.mark.parametrize("zone", ZONES)
def test_midnights_and_months_of_a_zone_are_evenly_spaced(zone, tmp_path):
    zoned = ZoneInfo(zone)
    days = [datetime(2024, 1, 1) + timedelta(days=idx) for idx in range(366)]
    midnights = [day.replace(tzinfo=zoned).isoformat() for day in days]
    months = [datetime(2024 + idx // 12, idx % 12 + 1, 1, tzinfo=zoned).isoformat() for idx in range(24)]
    hours_of_days = {
        (datetime.fromisoformat(after) - datetime.fromisoformat(before)).total_seconds() / 3600
        for before, after in pairwise(midnights)
    }
    assert (len(hours_of_days) == 3) == (zone in ZONES[:3]), "days of 23, 24 and 25 hours, or near"
    for times in (midnights, months):
        assert len(read_series(written(tmp_path, *lines_of(times)), "x")) == len(times)


@pytest.mark.parametrize("minutes", [15, 30, 60])
@pytest.mark.parametrize("start", STARTS[:2], ids=["spring", "autumn"])
def test_local_times_across_a_change_of_the_clocks_are_refused_with_what_to_give_instead(start, minutes, tmp_path):
    times = clocks("Europe/Berlin", datetime(*start), timedelta(minutes=minutes), 96 * 60 // minutes)
    said = "(a gap between|is not after) .*; if the clocks changed there, give times in UTC or with their offsets$"
    with pytest.raises(SettingsError, match=said) as error:
        read_series(written(tmp_path, *lines_of([str(time.replace(tzinfo=None)) for time in times])), "x")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("times", "said"),
    [
        (["2024-01-01T00:00Z", "2024-01-01T01:00"], "line 3: 2024-01-01 01:00:00 has no UTC offset, .* have one"),
        (["2024-01-01T00:00", "2024-01-01T01:00+01:00"], "line 3: .*01:00 has a UTC offset, .* have none"),
    ],
)
def test_times_with_and_without_offsets_do_not_mix(times, said, tmp_path):
    with pytest.raises(SettingsError, match=said) as error:
        read_series(written(tmp_path, *lines_of(times)), "x")
    assert "\n" not in str(error.value)


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
