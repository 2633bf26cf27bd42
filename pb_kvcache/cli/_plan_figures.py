"""The figures that ``pb-kvcache plan --plot`` draws."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .. import HeadPlan, LayerPlan
from .._files import replacing


def _figure_module() -> Any:
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ImportError("--plot: needs matplotlib: pip install 'pb-kvcache[plot]'") from None


def draw_layers(layers: Sequence[int], plan: LayerPlan, path: str) -> None:
    """Draw the budgets of a plan's layers, whose numbers in the model are given, to a file."""
    figure = _figure_module().Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.bar(layers, plan.budgets, width=0.9, color="#4477aa")
    mean = plan.total / plan.num_layers
    axes.axhline(mean, color="#aa3377", linewidth=1, label=f"mean {mean:g}")
    axes.set_xlabel("layer")
    axes.set_ylabel("positions")
    axes.set_title(str(plan).splitlines()[-1].partition(";")[0], fontsize=10)
    axes.legend(frameon=False)
    _write_figure(figure, path)


def draw_heads(heads: HeadPlan, path: str) -> None:
    """Draw the budgets of all heads to a file: layers across, heads down."""
    figure = _figure_module().Figure(figsize=(8, 1.5 + 0.25 * heads.num_kv_heads), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(heads.budgets.T, aspect="auto", cmap="viridis", norm="log")
    axes.set_xlabel("layer")
    axes.set_ylabel("KV head")
    axes.set_yticks(range(heads.num_kv_heads))
    axes.set_title(str(heads).splitlines()[-1], fontsize=10)
    figure.colorbar(image, label="positions")
    _write_figure(figure, path)


def _write_figure(figure: Any, path: str) -> None:
    with replacing(path) as file:
        try:
            figure.savefig(file, format=Path(path).suffix[1:] or "png")
        except RuntimeError as error:  # a format whose program is not there, such as pgf and its TeX
            raise ValueError(str(error)) from error
