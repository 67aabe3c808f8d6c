"""Draw the pieces of plots in SVG: marks, texts, and what tells one device from another."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

# Contrast of 3 : 1 and more against both white and #111 (WCAG 2.1, 1.4.11).
_COLORS = ("#2f80ed", "#e0700d", "#1d9a59", "#a855f7", "#e5484d", "#0d9488", "#d6409f", "#94850f")
_CPU = "#7d8590"
_DASHES = ("", "7 3", "2 3", "9 3 2 3")
_MARKS = ("square", "triangle", "diamond", "circle")
LETTER = 6.3
"""Pixels, about, of a letter of 11 px."""


class Look(NamedTuple):
    """What a device looks like, in a plot and as a bar."""

    color: str
    dash: str
    mark: str


def looks(devices: Sequence[str]) -> dict[str, Look]:
    """Of each device: the CPU gray, by which the others are measured."""
    found = {}
    for n, where in enumerate(where for where in devices if where != "cpu"):
        dash = _DASHES[n // len(_COLORS) % len(_DASHES)]
        found[where] = Look(_COLORS[n % len(_COLORS)], dash, _MARKS[n % len(_MARKS)])
    found["cpu"] = Look(_CPU, "", "circle")
    return {where: found[where] for where in devices}


def mark(look: Look, x: float, y: float, size: float, tip: str = "") -> str:
    """A device's mark around a point, with what is said when one points at it."""
    shapes = {
        "circle": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:g}"',
        "square": f'<path d="M{x - 0.9 * size:.1f} {y - 0.9 * size:.1f}'
        f'h{1.8 * size:.1f}v{1.8 * size:.1f}h{-1.8 * size:.1f}z"',
        "triangle": f'<path d="M{x:.1f} {y - 1.25 * size:.1f}'
        f'l{1.2 * size:.1f} {2.1 * size:.1f}h{-2.4 * size:.1f}z"',
        "diamond": f'<path d="M{x:.1f} {y - 1.35 * size:.1f}l{1.35 * size:.1f} {1.35 * size:.1f}'
        f'{-1.35 * size:.1f} {1.35 * size:.1f}{-1.35 * size:.1f} {-1.35 * size:.1f}z"',
    }
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return f'{shapes[look.mark]} fill="{look.color}">{title}{_close(look.mark)}'


def _close(shape: str) -> str:
    return "</circle>" if shape == "circle" else "</path>"


def cross(x: float, y: float, color: str, tip: str) -> str:
    """A ✕ where a curve ended for want of something."""
    return (
        f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" stroke="{color}" stroke-width="2.2"'
        f' fill="none"><title>{escape(tip)}</title></path>'
    )


def text(x: float, y: float, words: str, anchor: str = "start", css: str = "") -> str:
    """Words, escaped; `anchor` as of SVG."""
    kind = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    """A straight line."""
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def path(points: Sequence[tuple[float, float]]) -> str:
    """Points as SVG has them."""
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
