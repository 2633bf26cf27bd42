"""The colours of a report, each as it is on white paper, with what it is on a dark screen.

A plot is drawn in the light colours. The page replaces each by a variable, whose value the reader's browser chooses.
Every colour of a line has a contrast of 3 or more to its background in both modes, and every colour of text 4.5 or
more (Web Content Accessibility Guidelines 2.2, 1.4.3 and 1.4.11).
"""

from __future__ import annotations

PAPER = "#ffffff"
#: Frames and text of plots. matplotlib leaves the fill out of text that has this colour.
INK = "#000000"
#: What is less than a line: the full cache, and remarks.
QUIET = "#444444"
GRID = "#e5e5e5"
#: A stretch below which figures say nothing.
SHADE = "#ededed"
#: One colour that both backgrounds bear, for images, whose colours no variable changes.
IMAGE = "#3b7dd8"
#: Uniform budgets.
UNIFORM = "#1d3f91"
#: Lines that have no colour of their own, in this order.
LINES = ("#d9481f", "#1b8a5a", "#0f93a6", "#a8721a", "#7b6ba8", "#b0527a", "#c96a10", "#3d8ada", "#7d8894")

#: By the light colour, the dark one.
DARK = {
    PAPER: "#15171a",
    INK: "#e4e6e9",
    QUIET: "#b8bcc2",
    GRID: "#33373d",
    SHADE: "#25282d",
    UNIFORM: "#7ea2f7",
    "#d9481f": "#f0704a",
    "#1b8a5a": "#3fbf86",
    "#0f93a6": "#2cc8de",
    "#a8721a": "#d9a441",
    "#7b6ba8": "#a99ad6",
    "#b0527a": "#d982a8",
    "#c96a10": "#f4a052",
    "#3d8ada": "#5fa8f0",
    "#7d8894": "#9aa5b1",
    "#2368b8": "#2f86e0",
    "#0a7480": "#16a3ae",
}


def variable(colour: str) -> str:
    """Return what a style sheet calls a colour."""
    return f"var(--{_name(colour)})"


def definitions(dark: bool) -> str:
    """Return the variables' values in one of the modes, as a style sheet's declarations."""
    return " ".join(f"--{_name(light)}: {DARK[light] if dark else light};" for light in DARK)


def _name(colour: str) -> str:
    if colour not in DARK:
        raise ValueError(f"colour = {colour!r}: has no dark one; known: {', '.join(DARK)}")
    return f"c{colour[1:]}"
