"""One description of a selection rule, for the array functions, the caches and the files that record one."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

from ._checks import integer, real, shown
from ._options import POOLING, REDUCE, at_least, choice, pooling_options

#: What gives a position its score. :func:`select` makes the first itself, from the window's attention.
SCORES = ("window", "expected", "mixed", "keydiff", "repeat")


@dataclass(frozen=True)
class Selection:
    """A rule that ranks the positions of a prompt and says which of them are always kept.

    Parameters
    ----------
    window
        How many of the prompt's last queries are looked at for the score.
    pooling
        ``"max"`` or ``"avg"`` over neighbours. None is no pooling, as is a `kernel` of 1: both are stored as
        ``"max"`` of 1.
    kernel
        Neighbours that are pooled, the position itself included. Odd.
    protect
        The last positions, always kept. None: the window. Where it is smaller, the other positions of the window
        compete by the sum over the queries that see them, divided by the whole window.
    sinks
        The first positions, always kept.
    value_weight
        Whether a position's score is multiplied by the norm of its value behind the output projection, averaged over
        the query heads of the group: ``||W_O V_i||``. The array functions take these norms as `weights`.
    reduce
        ``"mean"``, ``"max"`` or ``"sum"`` over the query heads of a group.
    edge
        What an average divides by at both ends: ``"count"`` or ``"kernel"``, as for :func:`pool_scores`.
    score
        ``"window"``: the window's attention. ``"expected"``, ``"mixed"``, ``"keydiff"`` and ``"repeat"`` name scores
        that are made elsewhere and given to :func:`select_from_scores`.

    second_hop
        Of the positions that are not always kept, the share that goes to those which the others attended to themselves:
        the attention of their own queries, weighted by their scores. For prompts whose facts hang together in chains. A
        cache needs the whole prompt at once for it, and the array functions do not have its queries.

    Raises
    ------
    TypeError, ValueError
        A field that breaks a rule. The message says which.

    Examples
    --------
    >>> print(Selection.named("output"))
    output (window 32, score window times the value's norm, no pooling, last 8 kept, mean over a group)
    >>> Selection(window=64, kernel=5, pooling="avg", edge="kernel").describe()
    'window 64, score window, avg of 5 divided by the kernel, last 64 kept, mean over a group'
    """

    window: int = 32
    pooling: str | None = "max"
    kernel: int = 7
    protect: int | None = None
    sinks: int = 0
    value_weight: bool = False
    reduce: str = "mean"
    edge: str = "count"
    score: str = "window"
    second_hop: float = 0.0

    #: The rules that have a name. "snapkv": arXiv 2404.14469.
    NAMES: ClassVar[tuple[str, ...]] = ("snapkv", "output", "mixed")

    def __post_init__(self) -> None:
        def store(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        store("window", at_least("window", self.window, 1))
        pooling_options(self.kernel, "max" if self.pooling is None else self.pooling, self.edge)
        store("kernel", 1 if self.pooling is None else integer("kernel", self.kernel))
        if self.kernel == 1:  # one way to say it, so that equal rules are equal
            store("pooling", "max")
        if self.protect is not None:
            store("protect", at_least("protect", self.protect, 1))
        store("sinks", at_least("sinks", self.sinks, 0))
        if not isinstance(self.value_weight, bool):
            raise TypeError(f"value_weight = {shown(self.value_weight)}: must be True or False")
        choice("reduce", self.reduce, REDUCE)
        choice("score", self.score, dict.fromkeys(SCORES))
        store("second_hop", real("second_hop", self.second_hop))
        if not 0 <= self.second_hop < 1:
            raise ValueError(f"second_hop = {self.second_hop:g}: must be 0 or more and below 1")
        if self.score in ("keydiff", "repeat") and self.second_hop:
            raise ValueError(f"second_hop = {self.second_hop:g}: goes by attention, and score = {self.score!r} is none")
        if self.score == "keydiff" and self.value_weight:
            raise ValueError("value_weight = True: weighs scores of 0 and more, and score = 'keydiff' has others")

    @classmethod
    def named(cls, name: str) -> Selection:
        """Return the rule that has this name: ``"snapkv"``, ``"output"`` or ``"mixed"``.

        Raises
        ------
        ValueError
            For another name.
        """
        if not isinstance(name, str) or name not in cls.NAMES:
            raise ValueError(f"selection = {shown(name)}: must be a Selection or one of {', '.join(cls.NAMES)}")
        return cls(**_RULES[name])

    @classmethod
    def of(cls, selection: Selection | str) -> Selection:
        """Return a rule, or the one that has this name.

        Raises
        ------
        TypeError, ValueError
            For anything else.
        """
        if isinstance(selection, Selection):
            return selection
        if not isinstance(selection, str):
            raise TypeError(
                f"selection = {shown(selection)}: must be a Selection or one of {', '.join(cls.NAMES)}, "
                f"not {type(selection).__name__}"
            )
        return cls.named(selection)

    @property
    def name(self) -> str | None:
        """The rule's name, or None where it has none."""
        return next((name for name in self.NAMES if self.named(name) == self), None)

    @property
    def protected(self) -> int:
        """How many of the last positions are always kept: `protect`, or the window."""
        return self.window if self.protect is None else self.protect

    @property
    def always_kept(self) -> int:
        """How many positions are always kept, the protected ones and the sinks: the smallest budget."""
        return self.protected + self.sinks

    def describe(self) -> str:
        """Return the rule in words, for reports."""
        pooled = "no pooling" if self.kernel == 1 else f"{self.pooling} of {self.kernel}"
        parts = [
            f"window {self.window}",
            f"score {self.score}" + (" times the value's norm" if self.value_weight else ""),
            pooled + (f" divided by the {self.edge}" if self.pooling == "avg" else ""),
            f"last {self.protected} kept",
        ]
        if self.sinks:
            parts.append(f"first {self.sinks} kept")
        if self.second_hop:
            parts.append(f"{self.second_hop:g} of them by a second hop")
        return ", ".join([*parts, f"{self.reduce} over a group"])

    def __str__(self) -> str:
        return self.describe() if self.name is None else f"{self.name} ({self.describe()})"

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name: text, numbers, bools and None."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Selection:
        """Return the rule that :meth:`to_dict` wrote. A field that is missing has its default.

        Raises
        ------
        TypeError, ValueError
            For what is no mapping, an unknown field, or a value that breaks a rule.
        """
        if not isinstance(fields, Mapping):
            raise TypeError(f"selection: must be a mapping of fields, not {type(fields).__name__}")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                raise ValueError(f"selection: has an unknown field {name!r}, must have {', '.join(known)}")
        return cls(**fields)


_RULES: dict[str, dict[str, Any]] = {
    "snapkv": {},
    "output": {"kernel": 1, "protect": 8, "value_weight": True},
    "mixed": {"kernel": 1, "protect": 8, "value_weight": True, "score": "mixed"},
}


class Default:
    """What an option has that was not given. A signature shows it as its value."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


#: The options of the array functions that a rule says as well, by name.
DEFAULT = SimpleNamespace(
    **{name: Default(getattr(Selection, name)) for name in ("sinks", "kernel", "pooling", "edge", "reduce")}
)


def rule_of(selection: Selection | str | None, **options: Any) -> Selection:
    """Return the rule of a call that takes one, or its fields one by one.

    Parameters
    ----------
    selection
        A rule, the name of one, or None.
    **options
        Fields of :class:`Selection`. None for `window` or `protect`, or a :class:`Default`, was not given.

    Raises
    ------
    TypeError, ValueError
        For a rule together with a field, or as :class:`Selection`.
    """
    fields = {
        name: value
        for name, value in options.items()
        if not isinstance(value, Default) and (value is not None or name not in ("window", "protect"))
    }
    if selection is not None:
        if fields:
            names = ", ".join(fields)
            raise ValueError(f"selection and {names}: a selection says all of its rule; give it or {names}")
        return Selection.of(selection)
    choice("pooling", fields.get("pooling", "max"), POOLING)  # None is a Selection's
    # A layer's call has the rule of the layer before it. Types are compared, as True and 1.0 equal 1 and are refused.
    plain = all(type(value) in (int, str) for value in fields.values())
    return _remembered(**fields) if plain else Selection(**fields)


@functools.lru_cache(maxsize=64)
def _remembered(**fields: Any) -> Selection:
    """Return the rule with these fields: checking them takes 4 to 7 us, finding it again 0.2 to 0.7."""
    return Selection(**fields)


def _first_hop(rule: Selection) -> Selection:
    """Refuse a rule with a second hop where the queries are not at hand."""
    if rule.second_hop:
        raise ValueError(
            f"selection: has second_hop = {rule.second_hop:g}, which needs the prompt's queries; a cache of "
            "pb_kvcache.transformers has them"
        )
    return rule


def rule_for(selection: Selection | str | None, queries: int, n: int, **options: Any) -> Selection:
    """Return the rule of a call that has the attention of so many queries to `n` positions, which is its window.

    Raises
    ------
    TypeError, ValueError
        As :func:`rule_of`. For a rule with another window, unless the prompt is shorter than that, or that protects
        every position.
    """
    if selection is None:
        rule = rule_of(None, **{**options, "window": queries})
    else:
        rule = rule_of(selection, **options)
        if queries != min(rule.window, n):
            raise ValueError(f"selection: has a window of {rule.window}, must be the number of queries, {queries}")
    _first_hop(rule)
    if rule.protected >= n:
        name = "window" if rule.protect is None else "protect"
        raise ValueError(f"{name} = {rule.protected}: must be greater than 0 and smaller than n = {n}")
    return rule


def rule_of_scores(selection: Selection | str | None, *, protect: int | None, **options: Any) -> Selection:
    """Return the rule of a call that has scores already: without a selection `protect` must be given.

    Raises
    ------
    TypeError, ValueError
        As :func:`rule_of`. TypeError for a call without both.
    """
    if selection is None and protect is None:
        raise TypeError("protect: must be given, or a selection, which says it")
    return _first_hop(rule_of(selection, protect=protect, **options))


def require_window_score(rule: Selection) -> None:
    """Refuse a rule whose score is not made from the window's attention alone.

    Raises
    ------
    ValueError
        For such a rule.
    """
    if rule.score != "window":
        raise ValueError(
            f"selection: has score = {rule.score!r}, must have 'window' where attn is all that is given; "
            "select_from_scores takes scores that were made"
        )
