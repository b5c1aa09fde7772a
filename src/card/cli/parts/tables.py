"""Tables that fit the terminal, with fewer columns on a narrow one or all with --wide; progress bars of trainings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from card.machine.heartbeat import Heartbeat

_WIDEST = 10_000


def show(console: Console, table: Table, *, spare: Sequence[str] = (), is_wide: bool = False) -> None:
    """Print a table. If it is too wide, leave out spare columns and print a line that says so.

    Args:
        spare: heads of columns that may be left out, the last one first.
        is_wide: print all columns at any width.
    """
    if is_wide:
        Console(file=console.file, width=max(console.width, _natural_width(console, table))).print(table)
        return
    left_out: list[str] = []
    for head in reversed(spare):
        if _natural_width(console, table) <= console.width:
            break
        columns = [column for column in table.columns if _head(column.header) != head]
        left_out += [head] * (len(columns) < len(table.columns))
        table.columns[:] = columns
    console.print(table)
    if left_out:
        console.print(Text(f"left out here: {', '.join(reversed(left_out))}; --wide shows all columns", style="dim"))


def table(*words: str, numbers: Iterable[str] = (), title: str | None = None) -> Table:
    """Return a plain table with these columns: words are left-aligned, numbers right-aligned."""
    made = Table(*words, box=None, padding=(0, 2, 0, 0), title=title)
    for number in numbers:
        made.add_column(number, justify="right")
    return made


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """Show a bar on standard error until the block ends; without a terminal, a line now and then."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    is_drawn = console.is_terminal
    progress = Progress(*columns, console=console, transient=True, disable=not is_drawn)
    with progress, nullcontext() if is_drawn else Heartbeat(lambda: progress_in_words(progress)):
        yield progress


def progress_in_words(progress: Progress) -> str:
    """Return the progress of the newest task in words."""
    if not progress.tasks:
        return "preparing"
    task = progress.tasks[-1]
    return task.description if task.total is None else f"{task.description}: {task.completed:g} of {task.total:g}"


def _natural_width(console: Console, table: Table) -> int:
    return Measurement.get(console, console.options.update(width=_WIDEST), table).maximum


def _head(header: object) -> str:
    return str(header).replace("\n", " ")
