"""Read small files of the kernel's; what cannot be read, or is no number, is None."""

from __future__ import annotations

import os
import re
from pathlib import Path

# No file that is asked for here is as long.
_LONGEST = 65536


class Folder:
    """The files below a folder, by names relative to it."""

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)

    def __truediv__(self, name: str) -> Folder:
        return Folder(os.path.join(self.path, name))

    def text(self, name: str) -> str | None:
        """A file's text, without the white space around it."""
        try:
            with open(os.path.join(self.path, name), "rb") as file:
                return file.read(_LONGEST).decode(errors="replace").strip()
        except OSError:
            return None

    def number(self, name: str) -> int | None:
        """The whole number, not negative, that a file consists of."""
        return whole(self.text(name))

    def scaled(self, name: str, divisor: float) -> float | None:
        """A number in another unit: of microwatts, watts by 1e6."""
        value = self.number(name)
        return None if value is None else value / divisor

    def percent(self, name: str) -> float | None:
        """A number from 0 to 100; drivers are known to answer nonsense too."""
        value = self.number(name)
        return None if value is None or value > 100 else float(value)

    def link(self, name: str) -> str | None:
        """The last part of what a link leads to, be that there or not."""
        try:
            return os.path.basename(os.readlink(os.path.join(self.path, name)))
        except OSError:
            return None

    def names(self, name: str = "") -> list[str]:
        """What lies in it, or in a folder in it, in the order of the numbers in their names."""
        try:
            return sorted(os.listdir(os.path.join(self.path, name)), key=_in_order)
        except OSError:
            return []

    def is_closed(self, name: str) -> bool:
        """Whether it is there and this user may not read it."""
        path = os.path.join(self.path, name)
        effective = os.access in os.supports_effective_ids
        return os.path.exists(path) and not os.access(path, os.R_OK, effective_ids=effective)


def whole(text: str | None) -> int | None:
    """The whole number, not negative, that a text is; None for any other, and for one too long."""
    plain = text is not None and len(text) <= 20 and text.isascii() and text.isdigit()
    return int(text) if plain and text else None


def _in_order(name: str) -> list[tuple[int, str]]:
    return [(int(part) if len(part) < 20 else 0, part) for part in re.findall(r"[0-9]+", name)]
