"""Pictures from outside: read within bounds, or refused in one line that says why."""

from __future__ import annotations

import base64
import io
import re
import struct
import sys
import zlib
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from PIL import Image

from card.errors import PromptError, SettingsError
from card.machine.packages import install_command
from card.text.pictures import PictureBounds, read_pictures, require_pillow
from tests.seeing import picture

BOUNDS = PictureBounds(max_images=2, max_bytes=1 << 16, max_pixels=4096)


def saved(kind: str, *, mode: str = "RGB", **options: Any) -> bytes:
    out = io.BytesIO()
    picture(1).convert(mode).save(out, kind, **options)
    return out.getvalue()


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def bomb(width: int, height: int) -> bytes:
    """Return a PNG of few bytes that says it has so many pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def animated() -> bytes:
    out = io.BytesIO()
    picture(1).save(out, "GIF", save_all=True, append_images=[picture(2)])
    return out.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "BMP", "GIF", "WEBP", "JPEG"])
def test_each_format_is_read_from_data_urls_and_bytes(kind: str):
    data = saved(kind, lossless=True) if kind == "WEBP" else saved(kind)
    from_url, from_bytes = read_pictures([url(data, f"image/{kind.lower()}"), data], BOUNDS)
    assert from_url.mode == from_bytes.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(from_url), np.asarray(from_bytes))
    if kind in ("PNG", "BMP", "WEBP"):
        np.testing.assert_array_equal(np.asarray(from_url), np.asarray(picture(1)))


def test_a_picture_is_turned_as_its_camera_was_held():
    exif = Image.Exif()
    exif[0x0112] = 6  # the right side is the top
    (turned,) = read_pictures([saved("PNG", exif=exif)], BOUNDS)
    np.testing.assert_array_equal(np.asarray(turned), np.rot90(np.asarray(picture(1)), -1))


PNG = saved("PNG")


ENCODED = base64.b64encode(PNG).decode()


@pytest.mark.parametrize(
    "source",
    [
        url(PNG, "image/jpeg"),
        url(PNG, "text/html"),
        url(PNG, "image/png;charset=utf-8"),
        "data:image/png;base64;charset=utf-8," + ENCODED,
        "data:;base64," + ENCODED,
        "data:image/png;base64,\n" + base64.encodebytes(PNG).decode().replace("\n", "\r\n"),
        "data:image/png;base64, " + ENCODED + " ",
        "data:image/png;base64," + quote(ENCODED, safe=""),
        "data:image/png;base64," + quote(base64.encodebytes(PNG).decode(), safe=""),
        "data:image/png;base64," + ENCODED.rstrip("="),
    ],
)
def test_a_data_url_is_read_as_browsers_do_and_its_bytes_say_what_they_are(source: str):
    (read,) = read_pictures([source], BOUNDS)
    np.testing.assert_array_equal(np.asarray(read), np.asarray(picture(1)))


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (url(bomb(60_000, 60_000)), "is too large|has 60000 x 60000 pixels"),
        (url(bomb(100, 41)), "has 100 x 41 pixels, allowed are 1 to 4096"),
        (url(PNG[:-200]), "is cut off or damaged"),
        (url(PNG[:20]), "is no picture in PNG, JPEG, WEBP, GIF, BMP"),
        (url(b""), "is no picture"),
        (url(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml"), "is no picture"),
        (url(animated(), "image/gif"), "is animated"),
        (url(b"<html>", "image/png"), "is no picture"),
        (url(b"x" * (1 << 17)), "at most 65536 are allowed"),
        (b"x" * (1 << 17), "at most 65536 are allowed"),
        ("data:image/png;base64,@@@", "no valid base64"),
        ("data:image/png,abc", "no data URL with base64"),
        ("data:", "no data URL with base64"),
        ("https://example.org/a.png", "nothing is fetched from the web"),
        ("/etc/passwd", "files may not be named here"),
        ("file:///etc/passwd", "files may not be named here"),
        (None, "got NoneType"),
        (7, "got int"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(source: object, reason: str):
    with pytest.raises(PromptError, match=reason) as refused:
        read_pictures([PNG, source], BOUNDS)
    assert str(refused.value).startswith("image 1 ")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 300


def test_files_are_read_below_the_folder_alone(tmp_path: Path):
    folder, secret = tmp_path / "shown", tmp_path / "secret.png"
    folder.mkdir()
    (folder / "a b.png").write_bytes(PNG)
    secret.write_bytes(PNG)
    (folder / "link.png").symlink_to(secret)
    (folder / "circle.png").symlink_to("circle.png")
    bounds = PictureBounds(max_images=1, folder=folder)
    for source in ("a b.png", folder / "a b.png", f"file://{folder}/a%20b.png"):
        assert read_pictures([source], bounds)[0].size == picture(1).size
    for source in ("../secret.png", secret, "link.png", "circle.png", f"file://{secret}", "none.png", "", ".", "a\0b"):
        with pytest.raises(PromptError, match="no file that can be read below the folder"):
            read_pictures([source], bounds)


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    said = f"pillow, which is not installed; run {install_command('images')}"
    with pytest.raises(SettingsError, match=re.escape(said)):
        require_pillow()
