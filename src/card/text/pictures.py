"""Read pictures that users send: a few formats, one frame, bounded bytes and pixels.

Their size is known from the header before a pixel is unpacked, so a small file cannot ask for much memory.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from card.config.fields import require
from card.errors import PromptError, SettingsError, in_few_words, named
from card.machine.folders import followed
from card.machine.packages import install_command

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_DATA_URL = re.compile(r"data:[^,]*?;\s*base64\s*(?:;[^,]*)?,", re.IGNORECASE)
_MOST_HEAD_CHARS = 200
_BLANKS = str.maketrans("", "", " \t\n\f\r")


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureBounds:
    """Bounds of the pictures of one prompt."""

    max_images: int
    max_bytes: int = 20 << 20  # of one file
    max_pixels: int = 40_000_000  # of one picture
    folder: Path | None = None  # of the files that may be named; None: no files

    def __post_init__(self) -> None:
        require(self.max_images >= 0, "max_images", "0 or more", self.max_images)


def require_pillow() -> None:
    """Raise SettingsError if the package that reads pictures is missing."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise SettingsError(
            f"images need the package pillow, which is not installed; run {install_command('images')}"
        ) from None


def read_pictures(sources: Sequence[object], bounds: PictureBounds) -> list[Picture]:
    """Return the pictures of a prompt, in RGB and turned as their camera was held.

    Args:
        sources: each a data URL, a file URL or path below the bounds' folder, bytes, or a picture of pillow.
    Raises: PromptError for the first that cannot be read within the bounds.
    """
    if len(sources) > bounds.max_images:
        most = f"at most {bounds.max_images}" if bounds.max_images else "none"
        raise PromptError(
            f"the prompt has {len(sources)} images, but this engine takes {most}; leave some out, or raise "
            f"{named('max_images')}"
        )
    return [_read(source, bounds, f"image {idx}") for idx, source in enumerate(sources)]


def _read(source: object, bounds: PictureBounds, what: str) -> Picture:
    from PIL import Image

    if isinstance(source, Image.Image):
        return _unpacked(source, bounds, what)
    if isinstance(source, str) and source[:5].lower() == "data:":
        data = _of_data_url(source, bounds, what)
    elif isinstance(source, str | Path):
        data = _of_file(source, bounds, what)
    elif isinstance(source, bytes | bytearray):
        data = bytes(source)
    else:
        kind = type(source).__name__
        raise PromptError(f"{what} must be a data URL, a path, bytes or a picture of pillow, got {kind}")
    _check_bytes(len(data), bounds, what)
    try:
        picture = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise PromptError(f"{what} is too large: {in_few_words(error)}; send a smaller one") from error
    except Exception as error:  # the readers of many formats raise almost anything
        raise PromptError(f"{what} is no picture in {', '.join(FORMATS)}; send it in one of them") from error
    return _unpacked(picture, bounds, what)


def _unpacked(picture: Any, bounds: PictureBounds, what: str) -> Picture:
    from PIL import ImageOps

    width, height = picture.size
    if width * height > bounds.max_pixels or not width * height:
        raise PromptError(
            f"{what} has {width} x {height} pixels, allowed are 1 to {bounds.max_pixels} in all; send a smaller one"
        )
    if getattr(picture, "is_animated", False):
        raise PromptError(f"{what} is animated; send one frame of it")
    try:
        turned: Picture = ImageOps.exif_transpose(picture).convert("RGB")
    except Exception as error:  # the same
        raise PromptError(f"{what} is cut off or damaged: {in_few_words(error)}; send it again") from error
    return turned


def _of_data_url(url: str, bounds: PictureBounds, what: str) -> bytes:
    """Return the bytes of a data URL, read as browsers do: blanks and percent signs may stand in its base64.

    The type that it names counts for nothing: the bytes say what they are.
    """
    head = _DATA_URL.match(url[:_MOST_HEAD_CHARS])
    if head is None:
        raise PromptError(f"{what} is no data URL with base64; it must begin like data:image/png;base64,")
    encoded = url[head.end() :]
    if "%" in encoded:
        encoded = unquote(encoded)
    encoded = encoded.translate(_BLANKS).rstrip("=")
    _check_bytes(len(encoded) * 3 // 4, bounds, what)
    try:
        return base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise PromptError(f"{what} has no valid base64: {error}; encode it again") from error


def _of_file(source: str | Path, bounds: PictureBounds, what: str) -> bytes:
    """Return the bytes of a file below the folder that is allowed."""
    parts = urlsplit(str(source))
    if parts.scheme in ("http", "https"):
        raise PromptError(f"{what} is a web address, and nothing is fetched from the web; send a data URL")
    path = Path(unquote(parts.path) if parts.scheme == "file" else str(source))
    if bounds.folder is None:
        raise PromptError(f"{what} names a file, and files may not be named here; send a data URL")
    try:
        folder = followed(bounds.folder)
        file = followed(folder / path)
        is_allowed = file.is_relative_to(folder) and file.is_file()
        if is_allowed:
            _check_bytes(file.stat().st_size, bounds, what)
            return file.read_bytes()
    except (OSError, ValueError):
        pass  # told below in the same words: a caller learns nothing of what lies outside the folder
    raise PromptError(f"{what} is no file that can be read below the folder for images; name one, or send a data URL")


def _check_bytes(num_bytes: int, bounds: PictureBounds, what: str) -> None:
    if num_bytes > bounds.max_bytes:
        raise PromptError(f"{what} has {num_bytes} bytes, at most {bounds.max_bytes} are allowed; send a smaller one")
