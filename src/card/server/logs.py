"""Structured logs: one JSON object a line, never with keys, prompts or texts."""

from __future__ import annotations

import logging
import traceback
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

import msgspec

_FIELDS = "card_fields"  # attribute of a log record
_LOGGERS = ("card", "uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "asyncio")


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON; an exception as its type and place, without its message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = record.exc_info[0].__name__
            line["at"] = frames_of(record.exc_info[2])
        return msgspec.json.encode(line, enc_hook=str).decode()


def frames_of(trace: TracebackType | None) -> list[str]:
    """Return the innermost frames of a traceback as "file:line function"."""
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(trace)[-8:]]


def set_up(level: str) -> None:
    """Send the logs of the whole process, uvicorn's included, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(level.upper() if name == "card" else logging.WARNING)


def log_event(logger: logging.Logger, level: int, event: str, **fields: object) -> None:
    """Log an event with its fields."""
    if logger.isEnabledFor(level):
        logger.log(level, event, extra={_FIELDS: fields})
