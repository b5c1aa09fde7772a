"""What a command starts before it imports what computes: the drafter's process, which imports the same meanwhile."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from card.methods import find_method
from card.transport.child import DrafterChild


def start_drafter_child(method: str, draft: str | None, options: Mapping[str, Any]) -> DrafterChild | None:
    """Start a process for the drafter if these options lead to one; whoever loads the models takes it over.

    A wrong guess costs a process that ends unused.
    """
    if draft is None or not _leads_to_a_process(method, options):
        return None
    try:
        return DrafterChild(options.get("draft_threads") or 1)
    except OSError:
        return None  # the drafter's link says what is wrong


def _leads_to_a_process(method: str, options: Mapping[str, Any]) -> bool:
    chosen = find_method(method)
    placement = options.get("placement") or (None if chosen.is_tuned else chosen.placement)
    devices = {options.get("device") or "cpu", options.get("draft_device") or "cpu"}
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    writers = options.get("writers")
    return (
        placement in (None, "process")
        and options.get("schedule") != "turns"
        and options.get("draft_address") is None
        and devices == {"cpu"}
        and num_cores > (options.get("draft_threads") or 1)
        and (writers is None or "beam" in writers)
    )
