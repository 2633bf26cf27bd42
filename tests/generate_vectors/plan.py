"""Vectors of kind ``plan``: every layer's budget, or why there is no plan."""

from __future__ import annotations

import random
from typing import Any

from .. import reference_plan

LARGEST = 2**32 - 1


def case(name: str, num_layers: int, total: int, **arguments: Any) -> dict[str, Any]:
    """Return a case whose budgets the reference works out."""
    budgets = reference_plan.plan(num_layers, total, **arguments)
    return {"name": name, "num_layers": num_layers, "total": total, **arguments, "budgets": budgets}


def by_hand(name: str, budgets: list[int], num_layers: int, total: int, **arguments: Any) -> dict[str, Any]:
    """Return a case whose budgets were worked out by hand."""
    return {"name": name, "num_layers": num_layers, "total": total, **arguments, "budgets": budgets}


def refused(name: str, status: str, num_layers: int, total: int, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "num_layers": num_layers, "total": total, **arguments, "status": status}


def by_hand_cases() -> list[dict[str, Any]]:
    """Cases that a person can check."""
    return [
        by_hand("one layer gets everything", [512], 1, 512),
        by_hand("a uniform total that divides", [4, 4, 4], 3, 12, shape="uniform"),
        by_hand("ties go to the lower layers", [4, 4, 3], 3, 11, shape="uniform"),
        by_hand("whole blocks", [32, 16, 16], 3, 64, shape="uniform", multiple_of=16),
        by_hand("a pyramid of 4 over two layers", [8, 2], 2, 10),
        by_hand("an inverted pyramid", [2, 8], 2, 10, ratio=0.25),
        by_hand("a ratio of 1 is uniform", [3, 3, 2], 3, 8, ratio=1.0),
        by_hand("a geometric plan", [4, 2, 1], 3, 7, shape="geometric"),
        by_hand("measured weights", [3, 1, 6], 3, 10, shape="weights", weights=[1.5, 0.5, 3.0]),
        by_hand("the largest remainder goes up", [2, 1, 3], 3, 6, shape="weights", weights=[3.0, 3.0, 5.0]),
        by_hand("what the first layer cannot use goes to the others", [5, 5, 2], 3, 12, ratio=3.0, maximum=5),
        by_hand("the deep layers are raised and the rest pays", [52, 28, 20], 3, 100, ratio=10.0, minimum=20),
        by_hand(
            "bounds meet in one level", [10, 5], 2, 15, shape="weights", weights=[100.0, 1.0], minimum=5, maximum=10
        ),
        by_hand("everything at its minimum", [2, 3, 4], 3, 9, minimum=[2, 3, 4]),
        by_hand("more than the maximums", [7, 6, 5], 3, 100, maximum=[7, 6, 5]),
        by_hand("a minimum is rounded up to a block", [16, 16, 16], 3, 48, minimum=1, ratio=46.0, multiple_of=16),
        by_hand("a maximum is rounded down to a block", [16, 16], 2, 48, maximum=17, multiple_of=16),
        by_hand("nothing to divide", [0, 0], 2, 0, minimum=0),
        by_hand(
            "remainders that differ in their 52nd bit",
            [1, 1, 2],
            3,
            4,
            shape="weights",
            weights=[1.0, 1.0, 1.0 + 2.0**-52],
        ),
        by_hand(
            "weights below the 2^-60th part of the largest count alike",
            [10, 3, 3],
            3,
            16,
            shape="weights",
            weights=[1e300, 2e-300, 1e-300],
            maximum=10,
        ),
        by_hand(
            "the 2^-60th part of the largest is the least weight",
            [10, 2, 2, 2],
            4,
            16,
            shape="weights",
            weights=[1.0, 2.0**-60, 2.0**-61, 5e-324],
            maximum=10,
        ),
        by_hand(
            "twice the least weight is told apart",
            [10, 4, 2],
            3,
            16,
            shape="weights",
            weights=[1.0, 2.0**-59, 2.0**-60],
            maximum=10,
        ),
    ]


def worked_out() -> list[dict[str, Any]]:
    """Cases by the reference: the paper's own table, real models, and the edges of the numbers."""
    listed = [
        case("the paper's table at beta 20", 32, 2048 * 32, ratio=39.0, maximum=7950),
        case("the paper's table at beta 20, a shorter prompt", 32, 2048 * 32, ratio=39.0, maximum=2100),
        case("a small budget at beta 20 keeps its recent windows", 32, 64 * 32, ratio=39.0, minimum=33, maximum=7950),
        case("512 a layer in blocks of 16", 32, 512 * 32, maximum=8192, multiple_of=16),
        case("512 a layer, 80 layers, both bounds", 80, 512 * 80, ratio=12.5, minimum=400, maximum=600),
        case("a prompt between the average and twice it", 32, 512 * 32, ratio=39.0, maximum=700),
        case("a prompt that is not whole blocks", 32, 512 * 32, ratio=39.0, maximum=795, multiple_of=16),
        case(
            "a geometric plan over 28 layers", 28, 512 * 28, shape="geometric", ratio=16.0, minimum=64, multiple_of=32
        ),
        case("an inverted geometric plan", 12, 5000, shape="geometric", ratio=0.125),
        case("a share above 32 bits is capped and the rest moves on", 4, 4 * 3000000000, ratio=10.0),
        case("budgets at the end of 32 bits", 2, 2 * LARGEST - 1),
        case("a ratio at the end of 32 bits", 3, 99, ratio=float(LARGEST), minimum=0),
        case("the steepest ratio", 4, 1000, ratio=2.0**1023, minimum=0),
        case("the most inverted ratio", 4, 1000, ratio=5e-324, minimum=0),
        case("a geometric ratio of 2^1000", 5, 1000, shape="geometric", ratio=2.0**1000, minimum=0, maximum=900),
        case("a ratio next to 1", 5, 1001, ratio=1.0 + 2.0**-52),
        case("all the doubles there are", 4, 1000, shape="weights", weights=[5e-324, 1.0, 1e308, 1.7e308], maximum=400),
        case("the remainders differ in their 60th bit", 2, 3, shape="weights", weights=[1.0, 1.0 + 2.0**-52]),
    ]
    random_ = random.Random(20)
    for index in range(80):
        listed.append(case(f"random {index}", **_random_arguments(random_)))
    return listed


def _random_arguments(random_: random.Random) -> dict[str, Any]:
    """Return arguments of a plan that exists."""
    while True:
        layers = random_.choice([1, 2, 3, 5, 8, 13, 24])
        block = random_.choice([1, 1, 2, 16])
        most = random_.choice([40, 600, 100000])
        arguments: dict[str, Any] = {"num_layers": layers, "multiple_of": block}
        arguments["shape"] = random_.choice(["uniform", "pyramid", "geometric", "weights"])
        if arguments["shape"] in ("pyramid", "geometric"):
            arguments["ratio"] = random_.choice([float(random_.randint(1, 40)), random_.uniform(0.05, 20.0)])
        elif arguments["shape"] == "weights":
            several = [random_.uniform(0.1, 3.0), 1.0, 2.0 ** random_.randint(-60, 60)]
            arguments["weights"] = [random_.choice([*several, random_.random() + 0.01]) for _ in range(layers)]
        kind = random_.randrange(4)
        if kind == 1:
            arguments |= {"minimum": random_.randint(0, most // 4), "maximum": random_.randint(most // 4, most)}
        elif kind == 2:
            arguments["maximum"] = [random_.randint(0, most) for _ in range(layers)]
            arguments["minimum"] = [random_.randint(0, top) for top in arguments["maximum"]]
        elif kind == 3:
            arguments["minimum"] = random_.randint(0, most)
        bounds = reference_plan.bounds_of(arguments.get("minimum", 1), arguments.get("maximum"), layers, block)
        if all(low <= high for low, high in zip(*bounds, strict=True)):
            low, high = (sum(bound) // block for bound in bounds)
            arguments["total"] = random_.randint(low, min(high, low + layers * most // block)) * block
            return arguments


def refusals() -> list[dict[str, Any]]:
    """Return what is refused, by hand."""
    return [
        refused("no layers", "num_layers", 0, 0),
        refused("a block of nothing", "plan_multiple", 2, 4, multiple_of=0),
        refused("a total that is not whole blocks", "plan_total", 2, 24, multiple_of=16),
        refused("more than 32 bits a layer", "plan_overflow", 2, 2 * LARGEST + 1),
        refused("a ratio of 0", "plan_ratio", 2, 4, ratio=0.0),
        refused("a negative ratio", "plan_ratio", 2, 4, ratio=-4.0, shape="geometric"),
        refused("a ratio that is no number", "plan_ratio", 2, 4, ratio="nan"),
        refused("an infinite ratio", "plan_ratio", 2, 4, ratio="inf"),
        refused("no weights", "plan_weights", 2, 4, shape="weights"),
        refused("weights for a shape that has its own", "plan_weights", 2, 4, shape="uniform", weights=[1.0, 1.0]),
        refused("a weight of 0", "plan_weight", 2, 4, shape="weights", weights=[1.0, 0.0]),
        refused("a negative weight", "plan_weight", 2, 4, shape="weights", weights=[-1.0, 1.0]),
        refused("a weight that is no number", "plan_weight", 2, 4, shape="weights", weights=["nan", 1.0]),
        refused("an infinite weight", "plan_weight", 2, 4, shape="weights", weights=[1.0, "inf"]),
        refused("crossed bounds", "plan_bounds", 2, 8, minimum=5, maximum=4),
        refused("crossed bounds of one layer", "plan_bounds", 3, 9, minimum=[1, 3, 1], maximum=[9, 2, 9]),
        refused("bounds with no block between them", "plan_block", 2, 16, minimum=5, maximum=7, multiple_of=4),
        refused("a total below the minimums", "plan_minimum", 3, 2),
        refused("a total below the minimums rounded up", "plan_minimum", 3, 32, multiple_of=16),
    ]


FILES = {
    "plan.json": lambda: {
        "kind": "plan",
        "about": "Every layer's budget, the total kept exactly.",
        "cases": by_hand_cases() + worked_out() + refusals(),
    }
}
