"""A small Debian image for the sandbox podman, made from Debian's archive: no image registry is asked.

    python integration/container_image.py    # as root; 3 to 8 minutes once, seconds later

Prints the image's name. The packed root is kept in /var/tmp, under the hash of what it is made of, from where
`podman import` brings it to the images of another user of this machine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from smoke import CANNOT, parse

from nano_shared.files import content_hash

SUITE, PACKAGES = "bookworm", ("python3", "python3-pytest", "procps")
LEFT_OUT = ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/man", "usr/share/locale")
_RECIPE = content_hash([SUITE, *PACKAGES, *LEFT_OUT, "python"]).removeprefix("sha256:")[:12]
DEBIAN_IMAGE = f"localhost/nano-debian:{_RECIPE}"
PACKED = Path("/var/tmp/nano-images") / f"debian-{_RECIPE}.tar"


def has_image(name: str) -> bool:
    return (
        subprocess.run(["podman", "image", "exists", name], capture_output=True, check=False).returncode == 0
    )


def make_debian_image() -> str:
    """The image's name; made if it is missing. Raises CalledProcessError if a step fails."""
    if not has_image(DEBIAN_IMAGE):
        if not PACKED.exists():
            _pack()
        subprocess.run(["podman", "import", str(PACKED), DEBIAN_IMAGE], check=True, stdout=sys.stderr)
    return DEBIAN_IMAGE


def _pack() -> None:
    PACKED.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=PACKED.parent) as folder:
        root = Path(folder) / "root"
        include = f"--include={','.join(PACKAGES)}"
        subprocess.run(
            ["debootstrap", "--variant=minbase", include, SUITE, root], check=True, stdout=sys.stderr
        )
        for name in LEFT_OUT:
            shutil.rmtree(root / name)
        (root / "usr/bin/python").symlink_to("python3")
        packed = Path(folder) / "packed.tar"
        subprocess.run(["tar", "-C", root, "--numeric-owner", "-cf", packed, "."], check=True)
        os.replace(packed, PACKED)


def main() -> None:
    options = parse(argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]))
    missing = [program for program in ("podman", "debootstrap") if not shutil.which(program)]
    if options.smoke and (missing or not (PACKED.exists() or has_image(DEBIAN_IMAGE))):
        print(f"{CANNOT}it takes minutes the first time, and needs {' and '.join(missing or ['the root'])}")
        return
    print(make_debian_image())


if __name__ == "__main__":
    main()
