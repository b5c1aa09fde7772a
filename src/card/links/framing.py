"""Frames of ZeroMQ's protocol (ZMTP 3), checked by a server: each message must be a single frame.

ZeroMQ bounds the size of a frame and the number of messages, but a message of endless frames would fill the memory.
"""

from __future__ import annotations

from collections import deque

from card.drafting.messages import MAX_REQUEST_BYTES

_GREETING_BYTES = 64
_VERSION_AT = 10  # in the greeting, after a signature that begins with 0xFF and ends with an odd byte
_MORE, _LONG, _COMMAND = 1, 2, 4
_SEALING_BYTES = 64  # most bytes that encryption adds to a frame
_MOST_COMMAND_BYTES = 1 << 14  # of a handshake
FRAME_OVERHEAD_BYTES = 64  # memory of ZeroMQ for each frame of any size
# A client with so many unread bytes waits until the server has read some. One frame of any size is always accepted.
_MOST_WAITING_FRAMES = 128
_MOST_WAITING_BYTES = 2 * MAX_REQUEST_BYTES
_MOST_WAITING_BYTES_OF_A_STRANGER = 1 << 16  # a client without a session sends only a greeting


class Framing:
    """Follows the frames of one connection: refuses what no target sends, and counts the unread bytes."""

    def __init__(self) -> None:
        self._greeting = bytearray()
        self._head = bytearray()  # of the next frame
        self._left = 0  # bytes left of the present frame
        self._waiting: deque[int] = deque()  # sizes of message frames that the server has not read
        self._waiting_bytes = 0
        self._num_taken = 0

    def feed(self, data: bytes) -> str:
        """Follow the client's next bytes. Returns: why they are refused; empty if they are not."""
        at = 0
        if len(self._greeting) < _GREETING_BYTES:
            at = min(_GREETING_BYTES - len(self._greeting), len(data))
            self._greeting += data[:at]
            if not self._is_greeting():
                return "it does not use version 3 of ZeroMQ's protocol"
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
                continue
            self._head.append(data[at])
            at += 1
            if len(self._head) == (9 if self._head[0] & _LONG else 2):
                if fault := self._begin(self._head[0], int.from_bytes(self._head[1:], "big")):
                    return fault
                self._head.clear()
        return ""

    def is_full(self, num_taken: int, *, is_stranger: bool) -> bool:
        """Return whether the client must wait.

        Args:
            num_taken: messages that the server has read so far.
        """
        while self._num_taken < num_taken and self._waiting:
            self._num_taken += 1
            self._waiting_bytes -= self._waiting.popleft()
        most_bytes = _MOST_WAITING_BYTES_OF_A_STRANGER if is_stranger else _MOST_WAITING_BYTES
        if self._left and len(self._waiting) == 1 and not is_stranger:
            return False  # the end of a large frame must come in
        return len(self._waiting) >= _MOST_WAITING_FRAMES or self._waiting_bytes >= most_bytes

    def _is_greeting(self) -> bool:
        """Return whether the greeting is valid so far."""
        said = self._greeting
        return said[0] == 0xFF and (len(said) <= _VERSION_AT or (bool(said[9] & 1) and said[_VERSION_AT] >= 3))

    def _begin(self, flags: int, num_bytes: int) -> str:
        """Begin a frame. Returns: why it is refused; empty if it is not."""
        self._left = num_bytes
        if flags & ~(_MORE | _LONG | _COMMAND):
            return f"a frame has the flags {flags:#x}"
        if flags & _MORE:
            return "a message must be one frame, and this one announces more"
        if flags & _COMMAND:
            is_short = num_bytes <= _MOST_COMMAND_BYTES
            return "" if is_short else f"a command has {num_bytes} bytes; at most {_MOST_COMMAND_BYTES} are allowed"
        if num_bytes > MAX_REQUEST_BYTES + _SEALING_BYTES:
            return f"a frame has {num_bytes} bytes; at most {MAX_REQUEST_BYTES} are allowed"
        size = num_bytes + FRAME_OVERHEAD_BYTES
        self._waiting.append(size)
        self._waiting_bytes += size
        return ""
