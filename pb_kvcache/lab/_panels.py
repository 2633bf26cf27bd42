"""A plot of a report: lines that the reader chooses from, and panels, each a matplotlib figure of its own.

A panel of its own can stand beside another one or below it, as wide as the screen lets it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ._colours import GRID

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Lines of a plot that are shown at a time.
MOST = 4


@dataclass(frozen=True)
class Line:
    """What has one colour in all panels of a plot."""

    name: str
    colour: str
    width: float = 1.6
    #: Lengths of strokes and gaps, in line widths. Empty: no gaps.
    dashes: tuple[float, ...] = ()


class Lines:
    """The lines of one plot, in their order, and which of them are shown at first.

    Parameters
    ----------
    lines
        In the order of the legend.
    first
        Names, the most telling first. The first `MOST` of them that there are lines of are shown.
    """

    def __init__(self, lines: Iterable[Line], first: Iterable[str]) -> None:
        self.all = list(lines)
        names = [line.name for line in self.all]
        self.first = [name for name in dict.fromkeys(first) if name in names][:MOST]

    def style(self, name: str) -> dict[str, Any]:
        """Return what matplotlib draws a line with."""
        line = self.all[self._number(name)]
        dashes = (0, line.dashes) if line.dashes else "-"
        return {"color": line.colour, "linewidth": line.width, "linestyle": dashes, "gid": self.group(name)}

    def group(self, name: str) -> str:
        """Return the name of the SVG group that a line is in."""
        return f"line-{self._number(name)}"

    def mark(self, artists: Iterable[Artist], name: str) -> None:
        """Put what a line is made of into its group."""
        for artist in artists:
            artist.set_gid(self.group(name))

    def _number(self, name: str) -> int:
        return next(number for number, line in enumerate(self.all) if line.name == name)


@dataclass(frozen=True)
class Panel:
    """A part of a plot."""

    title: str
    #: What it shows, in a sentence with its figures, for who does not see it.
    says: str
    figure: Figure
    #: The line that the panel belongs to as a whole. Empty: it has all lines.
    line: str = ""


@dataclass(frozen=True)
class Plot:
    """Panels under one title, with one legend."""

    title: str
    caption: str
    lines: Lines
    panels: Sequence[Panel]


def new(width: float = 4.3, height: float = 3.1) -> tuple[Figure, Axes]:
    """Return an empty figure, in inches, and its axes."""
    # Figure itself, not pyplot: no global state, no window system.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def plain(axis: Axes, x: str, y: str) -> None:
    """Leave of a frame what is read: two sides, lines across, and what the axes are."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
