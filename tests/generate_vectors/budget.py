"""Vectors of kind ``pyramid_budget``."""

from __future__ import annotations

from typing import Any

from .. import reference

LARGEST = 2**32 - 1

#: Worked out by hand from the rule: budget, layer, layers, ratio, share.
BY_HAND = [
    ("the anchor's first layer", 512, 0, 32, 4, 819),
    ("the anchor's layer 15", 512, 15, 32, 4, 521),
    ("the anchor's last layer", 512, 31, 32, 4, 204),
    ("one layer gets the budget", 512, 0, 1, 4, 512),
    ("the middle layer of three gets the average", 6, 1, 3, 4, 6),
    ("a small budget rounds to nothing", 1, 31, 32, 4, 0),
    ("no budget", 0, 3, 32, 4, 0),
    ("the largest share that fits is not saturation", 2863311530, 0, 2, 3, LARGEST),
]

#: Extremes of the arguments, of the share and of the 64-bit product.
EXTREMES = [
    (3000000000, 0, 2, 4),
    (3000000000, 1, 2, 4),
    (2863311531, 0, 2, 3),
    (2863311530, 1, 2, 3),
    (2**31 - 1, 0, 2, LARGEST),
    (2**31, 0, 2, LARGEST),
    (2**31, 1, 2, LARGEST),
    (2**31 + 1, 0, 80, 39),
    (LARGEST, 0, 1, 4),
    (LARGEST, 0, 2, 1),
    (LARGEST, 1, 2, 1),
    (LARGEST, 0, 2, 2),
    (LARGEST, 1, 2, 2),
    (LARGEST, 0, LARGEST, LARGEST),
    (LARGEST, 2**31, LARGEST, LARGEST),
    (LARGEST, 2**31 - 1, LARGEST, LARGEST),
    (LARGEST, LARGEST - 1, LARGEST, LARGEST),
    (LARGEST, LARGEST - 2, LARGEST, LARGEST),
    (LARGEST, LARGEST - 1, LARGEST, 1),
    (1, 0, LARGEST, LARGEST),
    (1, 1, LARGEST, LARGEST),
    (2**31, 12345, 65537, 65537),
    (2**32 - 2, 2**30, 2**31 + 1, 3),
    (65536, 32767, 65536, 65536),
    # 2 * budget * (...) is 2**64 - 2**33 (fits), and about 2**64 (does not)
    (2**31, 0, 2**31 + 1, 2),
    (2**31, 2**31, 2**31 + 1, 2),
    (2**31, 1, 2**31 + 1, 2),
]

INVALID = [
    ("layer equal to num_layers", 512, 32, 32, 4),
    ("layer beyond num_layers", 512, LARGEST, 1, 4),
    ("no layers", 512, 0, 0, 4),
    ("ratio 0", 512, 0, 32, 0),
    ("ratio 0 with one layer", 512, 0, 1, 0),
]


def _case(name: str, budget: int, layer: int, num_layers: int, ratio: int) -> dict[str, Any]:
    share = reference.share(budget, layer, num_layers, ratio)
    case = {"name": name, "budget": budget, "layer": layer, "num_layers": num_layers, "pyramid_ratio": ratio}
    return case | ({"expect": "ok", "share": share} if share <= LARGEST else {"expect": "saturates"})


def _content() -> dict[str, Any]:
    cases = []
    for name, budget, layer, num_layers, ratio, share in BY_HAND:
        case = _case(name, budget, layer, num_layers, ratio)
        if case["share"] != share:
            raise AssertionError(f"the reference disagrees with the hand-worked share of {name}: {case['share']}")
        cases.append(case)
    for num_layers in (1, 2, 3, 4, 32, 80):
        for ratio in (1, 2, 4, 39):
            for layer in sorted({0, 1, num_layers // 2, num_layers - 2, num_layers - 1} & set(range(num_layers))):
                for budget in (7, 64, 2048):
                    name = f"{num_layers} layers, ratio {ratio}, layer {layer}, budget {budget}"
                    cases.append(_case(name, budget, layer, num_layers, ratio))
    for budget, layer, num_layers, ratio in EXTREMES:
        cases.append(_case(f"extreme {budget}, {layer}, {num_layers}, {ratio}", budget, layer, num_layers, ratio))
    for name, budget, layer, num_layers, ratio in INVALID:
        case = {"name": name, "budget": budget, "layer": layer, "num_layers": num_layers, "pyramid_ratio": ratio}
        cases.append(case | {"expect": "invalid"})
    return {"kind": "pyramid_budget", "about": "One layer's share of a pyramid.", "cases": cases}


FILES = {"pyramid_budget.json": _content}
