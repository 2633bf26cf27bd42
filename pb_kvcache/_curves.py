"""What every KV head of a model loses at each of a few budgets: measured once, then planned from at any total.

An ``.npz`` file (a zip archive of ``.npy`` members, which ``numpy.load`` reads) has ``grid``, integers ``(points,)``,
``losses``, floats ``(layers, heads, points)``, and ``measured``, JSON in ASCII as bytes. ``measured`` may be missing.
An ``.npy`` file is the plain array ``(points, layers, heads)`` that others publish. It says neither at which budgets
nor how it was measured.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ._amount import Amount, TotalError
from ._divide import checked_curves, divide
from ._files import replacing
from ._head_plan import HeadPlan
from ._plan import LayerPlan
from ._selection import Selection
from ._text import read_json, write_json

#: What the names of a rule's fields begin with in `measured`.
RULE_PREFIX = "selection."
#: Curves that come with the package, by name: of SmolLM2-135M-Instruct under the rules mixed and snapkv.
SHIPPED = {"smollm2": "curves-smollm2-135m.npz", "smollm2-snapkv": "curves-smollm2-135m-snapkv.npz"}
#: The most bytes of a file, and of one member: 8 million losses, 64 times 128 layers of 64 heads and 16 points.
_LIMIT = 64 << 20
#: The most bytes of `measured` as JSON.
_MEASURED_LIMIT = 64 << 10


def curve_file(path: str | os.PathLike[str]) -> Path | None:
    """Return where curves are: of a name in :data:`SHIPPED` that no file has, or of a path that ends in ``.npz``."""
    if os.fspath(path) in SHIPPED and not Path(path).exists():
        return Path(__file__).parent / "data" / SHIPPED[os.fspath(path)]
    return Path(path) if Path(path).suffix == ".npz" else None


def measured_rule(measured: Mapping[str, Any]) -> Selection | None:
    """Return the rule that ranked positions in a measurement, if what is said of it says so."""
    fields = {name.removeprefix(RULE_PREFIX): value for name, value in measured.items() if name.startswith(RULE_PREFIX)}
    return Selection.from_dict(fields) if fields else None


class CurveSet:
    """What every KV head of every layer loses at each of a few budgets.

    Parameters
    ----------
    grid
        Budgets at which losses were measured: positions, ascending, above 0, of shape ``(points,)``. Copied.
    losses
        What each head loses at each of them, finite, ``(layers, heads, points)``. Copied. Less is better: what others
        publish as a gain is given with its sign changed.
    measured
        How: text, numbers, bools and None by name, such as the model, the selection and the prompts.

    Attributes
    ----------
    grid
        The same, uint32, read-only.
    losses
        The same, float64, read-only.

    Raises
    ------
    TypeError, ValueError
        An argument breaks a rule above. The message names it, the place and the rule.

    Examples
    --------
    >>> curves = CurveSet([16, 64, 256], [[[0.8, 0.1, 0.0], [0.9, 0.8, 0.1]]], {"model": "mine"})
    >>> curves.plan(160).budgets
    array([[ 64, 256]], dtype=uint32)
    """

    grid: npt.NDArray[np.uint32]
    losses: npt.NDArray[np.float64]

    def __init__(self, grid: npt.ArrayLike, losses: npt.ArrayLike, measured: Mapping[str, Any] | None = None) -> None:
        points, values = checked_curves(grid, losses, heads=True)
        self.grid, self.losses = points.copy(), values.copy()
        self._measured = _checked_measured({} if measured is None else measured)
        self._freeze()

    def _freeze(self) -> None:
        self.grid.flags.writeable = self.losses.flags.writeable = False

    @property
    def measured(self) -> dict[str, Any]:
        """How the losses were measured. A copy."""
        return dict(self._measured)

    @property
    def selection(self) -> Selection | None:
        """The rule that ranked positions where the losses were measured, if `measured` says it."""
        return measured_rule(self._measured)

    @property
    def num_layers(self) -> int:
        """Layers."""
        return int(self.losses.shape[0])

    @property
    def num_kv_heads(self) -> int:
        """KV heads of a layer."""
        return int(self.losses.shape[1])

    def plan(
        self,
        budget: int | None = None,
        *,
        total: int | None = None,
        minimum: Any = None,
        maximum: Any = None,
        multiple_of: int = 1,
    ) -> HeadPlan:
        """Return the plan of the heads at a budget, as :func:`divide` makes it.

        Parameters
        ----------
        budget
            Positions per head on average.
        total
            Positions in all heads, instead of `budget`.
        minimum, maximum, multiple_of
            As for :func:`divide`: numbers, or arrays ``(layers, heads)``.

        Raises
        ------
        TypeError, ValueError
            Not one of `budget` and `total` is given, or as for :func:`divide`.
        """
        made = self._divided(self.losses, "heads", budget, total, minimum, maximum, multiple_of)
        assert isinstance(made, HeadPlan)
        return made

    def layer_plan(
        self,
        budget: int | None = None,
        *,
        total: int | None = None,
        minimum: Any = None,
        maximum: Any = None,
        multiple_of: int = 1,
    ) -> LayerPlan:
        """Return the plan of the layers at a budget, by :meth:`layer_curves`. All heads of a layer hold the same.

        The arguments are those of :meth:`plan`, with layers for heads.
        """
        made = self._divided(self.layer_curves(), "layers", budget, total, minimum, maximum, multiple_of)
        assert isinstance(made, LayerPlan)
        return made

    def _divided(
        self,
        losses: npt.NDArray[np.float64],
        units: str,
        budget: int | None,
        total: int | None,
        minimum: Any,
        maximum: Any,
        multiple_of: int,
    ) -> HeadPlan | LayerPlan:
        count = losses[..., 0].size
        amount = Amount.one_of({"budget": budget, "total": total})
        if amount is None:
            raise ValueError("budget, total: one of them must be given")
        positions = amount.total(count)
        try:
            return divide(self.grid, losses, positions, minimum=minimum, maximum=maximum, multiple_of=multiple_of)
        except TotalError as error:
            raise amount.refusal(error, count, units) from None

    def layer_curves(self) -> npt.NDArray[np.float64]:
        """Return what each layer loses where all its heads hold the same: the sum over heads, ``(layers, points)``."""
        with np.errstate(over="ignore"):  # divide refuses a sum beyond the doubles
            return np.asarray(self.losses.sum(axis=1))

    def to_array(self) -> npt.NDArray[np.float64]:
        """Return the losses as a plain array ``(points, layers, heads)``, a copy."""
        return np.ascontiguousarray(np.moveaxis(self.losses, 2, 0))

    @classmethod
    def from_array(
        cls, array: npt.ArrayLike, grid: npt.ArrayLike, measured: Mapping[str, Any] | None = None
    ) -> CurveSet:
        """Return the curves of a plain array ``(points, layers, heads)``, whose grid the caller knows."""
        values = np.asarray(array)
        if values.ndim != 3:
            raise ValueError(f"array: has shape {values.shape}, must be (points, layers, heads)")
        return cls(grid, np.moveaxis(values, 0, 2), measured)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the curves to a file: all of them to ``.npz``, the plain array alone to ``.npy``.

        What stood at `path` is there until all of the new file is. The same curves give the same bytes.

        Raises
        ------
        ValueError
            The name ends in neither, or the curves take more than 64 MiB.
        OSError
            The file cannot be written.
        """
        suffix = _suffix(path)
        if self.losses.nbytes + 4096 > _LIMIT:
            raise ValueError(f"{os.fspath(path)}: {self.losses.nbytes} bytes of losses, must be less than {_LIMIT}")
        with replacing(path) as file:
            if suffix == ".npy":
                _write(file, self.to_array())
                return
            with zipfile.ZipFile(file, "w") as archive:
                text = np.frombuffer(write_json(self._measured).encode(), np.uint8)
                for name, array in (("grid", self.grid), ("losses", self.losses), ("measured", text)):
                    member = io.BytesIO()
                    _write(member, array)
                    # A fixed date, so that the bytes depend on the curves alone.
                    archive.writestr(zipfile.ZipInfo(name + ".npy", (1980, 1, 1, 0, 0, 0)), member.getvalue())

    @classmethod
    def of(cls, curves: CurveSet | str | os.PathLike[str]) -> CurveSet:
        """Return curves, or those of a file.

        Raises
        ------
        OSError, TypeError, ValueError
            As :meth:`load`, or for what is neither.
        """
        if isinstance(curves, (str, os.PathLike)):
            return cls.load(curves)
        if not isinstance(curves, CurveSet):
            raise TypeError(f"curves: must be a CurveSet or the path of a curve file, not {type(curves).__name__}")
        return curves

    @classmethod
    def load(cls, path: str | os.PathLike[str], grid: npt.ArrayLike | None = None) -> CurveSet:
        """Read curves from a file that :meth:`save` or ``numpy.save`` wrote. No pickles are read.

        Parameters
        ----------
        path
            The file. What it is shows in its first bytes, whatever its name. Or, where no file is called that,
            ``"smollm2"`` or ``"smollm2-snapkv"``: the shipped curves of SmolLM2-135M-Instruct, under the rule
            ``"mixed"``, which keep wording best, or under ``"snapkv"``, which keep facts best.
        grid
            The budgets of a plain array, which has none. None for an ``.npz`` file, which has its own.

        Raises
        ------
        OSError
            The file cannot be read.
        ValueError
            The file is larger than 64 MiB, damaged or something else, its numbers break a rule of :class:`CurveSet`, or
            `grid` is missing or in excess. The message names the file.
        """
        name = os.fspath(path)
        with (curve_file(path) or Path(path)).open("rb") as file:
            content = file.read(_LIMIT + 1)
        if len(content) > _LIMIT:
            raise ValueError(f"{name}: more than {_LIMIT} bytes, which no curve file has")
        plain = content.startswith(b"\x93NUMPY")
        if plain and grid is None:
            raise ValueError(f"{name}: a plain array has no budgets; give them with grid=, one for each of its points")
        if not plain and grid is not None:
            raise ValueError(f"{name}: not a plain array; grid= is for those alone, leave it out")
        try:
            if plain:
                return cls.from_array(_array(content), [] if grid is None else grid)
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                _check_directory(archive, content)
                return cls(*_members(archive))
        except _CurvesError as error:
            raise ValueError(f"{name}: {error}") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: not a curve file: {error}") from None
        except Exception as error:  # at wrong bytes zipfile and NumPy's header reader raise nearly anything
            raise ValueError(f"{name}: not a curve file, or a damaged one: {error}") from None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CurveSet):
            return NotImplemented
        return (
            np.array_equal(self.grid, other.grid)
            and np.array_equal(self.losses, other.losses)
            and self._measured == other._measured
        )

    def __hash__(self) -> int:
        return hash((self.grid.tobytes(), self.losses.shape))

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._freeze()  # NumPy's pickles and copies forget it

    def __repr__(self) -> str:
        return (
            f"<CurveSet: {self.num_layers} layers of {self.num_kv_heads} KV heads, {len(self.grid)} points, "
            f"{self.grid[0]} .. {self.grid[-1]}>"
        )


class _CurvesError(Exception):
    """What is wrong with a curve file."""


def _checked_measured(measured: Any) -> dict[str, Any]:
    """Return a copy of how curves were measured, whose values JSON keeps as they are."""
    if not isinstance(measured, Mapping):
        raise TypeError(f"measured: must be a mapping, not {type(measured).__name__}")
    for name, value in measured.items():
        if type(name) is not str:
            raise TypeError(f"measured: names must be strings, not {type(name).__name__}")
        if value is not None and type(value) not in (str, int, float, bool):
            raise TypeError(f"measured[{name!r}]: must be text, a number, a bool or None, not {type(value).__name__}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"measured[{name!r}] = {value}: must be finite")
    size = len(write_json(dict(measured)))
    if size > _MEASURED_LIMIT:
        raise ValueError(f"measured: {size} bytes of JSON, must be at most {_MEASURED_LIMIT}")
    return dict(measured)


def _suffix(path: str | os.PathLike[str]) -> str:
    suffix = Path(path).suffix
    if suffix not in (".npz", ".npy"):
        raise ValueError(f"{os.fspath(path)}: must end in .npz, or in .npy for the plain array")
    return suffix


def _write(file: IO[bytes], array: npt.NDArray[Any]) -> None:
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    np.lib.format.write_array(file, little, version=(1, 0), allow_pickle=False)


def _array(content: bytes) -> npt.NDArray[Any]:
    """Return the array of an ``.npy`` file's bytes. Nothing is allocated for what a header claims."""
    file = io.BytesIO(content)
    version = np.lib.format.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise _CurvesError(f"an .npy of version {version}, must be (1, 0) or (2, 0)")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(file)
    if dtype.kind not in "fiu":
        raise _CurvesError(f"an array of dtype {dtype}, must be numbers")
    size = math.prod(shape) * dtype.itemsize
    if any(length < 0 for length in shape) or size != len(content) - file.tell():
        raise _CurvesError(f"damaged: {len(content) - file.tell()} bytes of numbers for shape {shape} of {dtype}")
    values = np.frombuffer(content, dtype, math.prod(shape), file.tell())
    return values.reshape(shape, order="F" if fortran else "C")


def _check_directory(archive: zipfile.ZipFile, content: bytes) -> None:
    """Refuse a zip archive whose directory lists other than the number of members that its end says.

    A directory has no checksum. A damaged length in it hides the members after it, and zipfile does not notice.
    """
    end = len(content) - len(archive.comment) - 22  # the end-of-directory record, whose last part is the comment
    count = int.from_bytes(content[end + 10 : end + 12], "little")
    if count != len(archive.namelist()):
        raise _CurvesError(f"damaged: its directory lists {len(archive.namelist())} members, must be {count}")


def _members(archive: zipfile.ZipFile) -> tuple[npt.NDArray[Any], npt.NDArray[Any], Any]:
    """Return the grid, the losses and `measured` of an archive."""
    names = archive.namelist()
    for name in ("grid.npy", "losses.npy"):
        if name not in names:
            raise _CurvesError(f"not a curve file: it has no member {name}")
    for name in names:
        if name not in ("grid.npy", "losses.npy", "measured.npy") or names.count(name) > 1:
            raise _CurvesError(f"not a curve file: its member {name!r} does not belong there, or is there twice")
    found = {}
    for name in names:
        with archive.open(name) as member:
            content = member.read(_LIMIT + 1)  # at most so much, whatever the archive says
        if len(content) > _LIMIT:
            raise _CurvesError(f"{name}: more than {_LIMIT} bytes")
        found[name] = _array(content)
    text = found.get("measured.npy", np.frombuffer(b"{}", np.uint8))
    if text.dtype != np.uint8 or text.ndim != 1:
        raise _CurvesError(f"measured.npy: of shape {text.shape} and dtype {text.dtype}, must be bytes of JSON")
    return found["grid.npy"], found["losses.npy"], read_json(text.tobytes())
