"""Read series from a column of a CSV file; every fault is found before anything is forecast."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from card.errors import SettingsError

Values = NDArray[np.float64]
_GAP = 1.5  # times the usual step; months differ by less, and so do days when the clocks change
_CLOCK_CHANGE_S = 3600.0


def checked_series(values: Iterable[float] | Values, least: int) -> Values:
    """Return values that can be forecast.

    Args:
        least: fewest values.
    Returns: [T] float64.
    Raises: SettingsError if there are too few, one is no finite number, or all are equal.
    """
    try:
        series = np.asarray(values if isinstance(values, np.ndarray) else list(values), np.float64)
    except (TypeError, ValueError):
        raise SettingsError("the series must be a sequence of numbers") from None
    if series.ndim != 1:
        raise SettingsError(f"the series must have one dimension, got {series.ndim}; give one column at a time")
    if len(series) < least:
        raise SettingsError(f"the series has {len(series)} of the {least} values that are needed; give a longer one")
    if not np.isfinite(series).all():
        place = int(np.argmin(np.isfinite(series)))
        raise SettingsError(
            f"the series has the value {series[place]} at index {place}; fill it or cut the series there"
        )
    if series.min() == series.max():
        raise SettingsError(f"the series is constant ({series[0]:g}); there is nothing to forecast")
    return series


def read_series(path: Path, column: str | None = None) -> Values:
    """Return a column of a CSV file with a header. Times in the first column must be evenly spaced.

    Times with UTC offsets are compared in UTC, so that the clocks may change between them; all must have one, or none.

    Args:
        column: None takes the only one that holds numbers.
    Returns: [T] float64.
    Raises: SettingsError, with the line, if the file, the column, a number or a time is faulty.
    """
    header, rows = _read_rows(path)
    place = _find_column(path, header, rows, column)
    values = [_number(path, number, header[place], row[place]) for number, row in rows]
    times = [_time(row[0]) for _, row in rows]
    if times and all(isinstance(time, datetime) for time in times):
        _check_times(path, [number for number, _ in rows], [time for time in times if time])
    return np.array(values, np.float64)


def _read_rows(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the header, and the rows with the numbers of their lines."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}; name another file") from None
    except (UnicodeDecodeError, csv.Error):
        raise SettingsError(f"{path} is no CSV file in UTF-8; convert it first") from None
    if not rows:
        raise SettingsError(f"{path} holds no values; a CSV file with a header and a value on each line is needed")
    for number, row in rows:
        if len(row) != len(header):
            raise SettingsError(f"{path}, line {number}: has {len(row)} cells, the header {len(header)}; mend the line")
    return header, rows


def _find_column(path: Path, header: Sequence[str], rows: Sequence[tuple[int, list[str]]], column: str | None) -> int:
    if column is not None and column not in header:
        raise SettingsError(f"{path} has no column {column!r}; it has {', '.join(header)}")
    if column is not None:
        return header.index(column)
    numeric = [place for place in range(len(header)) if _is_number(rows[0][1][place])]
    if len(numeric) != 1:
        choices = ", ".join(header[place] for place in numeric) or "none"
        raise SettingsError(f"{path} must have one column of numbers where none is named, it has {choices}; name one")
    return numeric[0]


def _is_number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


def _number(path: Path, number: int, column: str, cell: str) -> float:
    if not _is_number(cell):
        words = repr(cell[:40]) if cell.strip() else "nothing"
        raise SettingsError(f"{path}, line {number}: {column} must be a number, got {words}; fill the gap or cut there")
    return float(cell)


def _time(cell: str) -> datetime | None:
    try:
        return None if _is_number(cell) else datetime.fromisoformat(cell.strip())
    except ValueError:
        return None


def _check_times(path: Path, numbers: Sequence[int], times: Sequence[datetime]) -> None:
    has_offset = times[0].tzinfo is not None
    for number, time in zip(numbers, times, strict=True):
        if (time.tzinfo is not None) != has_offset:
            words = ("no UTC offset", "have one") if has_offset else ("a UTC offset", "have none")
            raise SettingsError(
                f"{path}, line {number}: {time} has {words[0]}, the times before it {words[1]}; give all of them one"
            )
    steps = [(after - before).total_seconds() for before, after in itertools.pairwise(times)]
    usual = sorted(steps)[len(steps) // 2] if steps else 1.0
    for place, step in enumerate(steps):
        may_be_clocks = not has_offset and abs(step - usual) == _CLOCK_CHANGE_S
        advice = "; if the clocks changed there, give times in UTC or with their offsets" if may_be_clocks else ""
        if step <= 0.0:
            raise SettingsError(
                f"{path}, line {numbers[place + 1]}: {times[place + 1]} is not after {times[place]}{advice}"
            )
        if step > _GAP * usual:
            raise SettingsError(
                f"{path}, line {numbers[place + 1]}: a gap between {times[place]} and {times[place + 1]}, where"
                f" {usual:g} s are usual; fill it or cut the series there{advice}"
            )
