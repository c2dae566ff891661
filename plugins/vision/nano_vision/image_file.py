"""Image files: what one holds, checked before a model is shown it, and the tool `view_image`."""

from __future__ import annotations

import re
import struct
import zlib
from io import BytesIO

from PIL import Image, UnidentifiedImageError

from nano_coder.tools.tool import LARGEST_IMAGE, ToolContext, ToolFailure, ToolResult, tool
from nano_shared.errors import UsageError
from nano_shared.files import content_hash
from nano_shared.types import ImageRef

FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
"""what every API takes; Pillow's other readers are never tried"""
_MANY_FRAMES = ("PNG", "GIF", "WEBP")
_DRAWING = re.compile(rb"\s*(<\?xml[^>]*>|<!--.*?-->|<!DOCTYPE[^>]*>|\s)*<svg\b", re.DOTALL | re.IGNORECASE)
_BROKEN = (OSError, SyntaxError, ValueError, ArithmeticError, LookupError, EOFError, struct.error, zlib.error)
"""what Pillow raises for files that are damaged, or made to harm"""
_TOO_MANY = (Image.DecompressionBombError, Image.DecompressionBombWarning)


def read_image(data: bytes, name: str) -> ImageRef:
    """What the bytes of an image's file hold. The file is decoded once, so that a cut one is found here.

    Raises UsageError for an empty file, one above 20 MB, one of another format than PNG, JPEG, GIF and WebP,
    a damaged or animated one, and one of more pixels than Pillow's limit (some 89 million).
    """
    if not data:
        raise UsageError(f"{name} is empty: there is no image in it")
    if len(data) > LARGEST_IMAGE:
        raise UsageError(_TOO_LARGE.format(name, LARGEST_IMAGE >> 20))
    if _DRAWING.match(data[:10_000]):
        raise UsageError(f"{name} is an SVG drawing, which no model reads: render it as a PNG")
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            _refuse_large(name, width, height)
            kind = "JPEG" if image.format == "MPO" else str(image.format)  # a JPEG with previews behind it
            frames = getattr(image, "n_frames", 1) if kind in _MANY_FRAMES else 1
            if frames > 1:
                raise UsageError(f"{name} is animated ({frames} frames): save the one that matters as a PNG")
            image.load()
    except UnidentifiedImageError:
        raise UsageError(f"{name} is no PNG, JPEG, GIF or WebP image, whatever its name says") from None
    except _TOO_MANY:
        raise UsageError(_BOMB.format(name, "more", Image.MAX_IMAGE_PIXELS)) from None
    except _BROKEN as problem:
        raise UsageError(f"{name} is a damaged image: {problem}") from None
    return ImageRef(blob=content_hash(data), media_type=Image.MIME[kind], width=width, height=height)


_TOO_LARGE = "{} has more than {} MB, the most that a model is shown: scale it down"
_BOMB = "{} would have {} pixels, over the {} that are decoded: scale it down"


def _refuse_large(name: str, width: int, height: int) -> None:
    if width * height > (Image.MAX_IMAGE_PIXELS or 0):
        raise UsageError(_BOMB.format(name, f"{width} x {height}", Image.MAX_IMAGE_PIXELS))


_SIZE = "import os, sys; print(os.path.getsize(sys.argv[1]))"


@tool()
def view_image(context: ToolContext, path: str) -> ToolResult:
    """Look at an image file: PNG, JPEG, WebP or GIF."""
    size = context.run_python(_SIZE, [path], isolated=True).stdout if "\0" not in path else b""
    if size.strip().isdigit() and int(size) > LARGEST_IMAGE:
        raise ToolFailure(_TOO_LARGE.format(path, LARGEST_IMAGE >> 20))
    try:
        data = context.jail.read(path)
        image = read_image(data, path)
    except FileNotFoundError:
        raise ToolFailure(f"no such file: {path}") from None
    except IsADirectoryError:
        raise ToolFailure(f"{path} is a directory") from None
    except (OSError, ValueError) as problem:
        raise ToolFailure(f"cannot read {path}: {problem}") from None
    except UsageError as problem:
        raise ToolFailure(str(problem)) from None
    return ToolResult(text=f"{path}: {image}", images=((image, data),))
