"""The frames that plots of a report are drawn in, as matplotlib figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def new(width: float, height: float, rows: int, columns: int, **options: Any) -> tuple[Figure, list[Axes]]:
    """Return an empty figure, in inches, and its axes, row by row."""
    # Figure itself, not pyplot: no global state, no window system.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).ravel())


def plain(axis: Axes, x: str, y: str) -> None:
    """Leave of a frame what is read: two sides, lines across, and what the axes are."""
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#e5e5e5", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.set_xlabel(x)
    axis.set_ylabel(y)


def legend(figure: Figure, axis: Axes) -> None:
    """Put an axis's legend below the figure."""
    handles, labels = axis.get_legend_handles_labels()
    made = figure.legend(handles, labels, loc="outside lower center", ncols=min(5, len(labels)), frameon=False)
    for text in made.get_texts():
        text.set_parse_math(False)  # a plan's file may be called anything, "$x$" too


def panels(titles: Sequence[str], draw: Callable[[Axes, int], None], x: str, y: str) -> Figure:
    """Return a figure with one panel a title, at most two side by side, and the first one's legend.

    `draw` gets the panel's axis and its number.
    """
    columns = min(2, len(titles))
    rows = -(-len(titles) // columns)
    figure, axes = new(9.5, 3.3 * rows + 0.9, rows, columns)
    for number, (axis, title) in enumerate(zip(axes, titles, strict=False)):
        draw(axis, number)
        axis.set_title(title, fontsize=10, loc="left", parse_math=False)
        plain(axis, x if number + columns >= len(titles) else "", y if number % columns == 0 else "")
    for axis in axes[len(titles) :]:
        axis.set_visible(False)
    legend(figure, axes[0])
    return figure
