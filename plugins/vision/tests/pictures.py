"""Image files for tests, drawn by Pillow."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from PIL import Image


def picture(width: int = 40, height: int = 30, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of a file with a gradient, so that no two pixels of a row are equal."""
    image = Image.new("RGB", (width, height))
    image.putdata([(x * 5 % 256, y * 7 % 256, (x * y) % 256) for y in range(height) for x in range(width)])
    out = BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()
