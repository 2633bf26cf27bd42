"""The mean and covariance of a prompt's queries, gathered from the chunks in which the prompt comes."""

from __future__ import annotations

from typing import Any

from ._arrays import float32, float64, in_float32, library, read, refuse_not_finite, same_place, same_shape

#: Rows that are centred and multiplied together: 32 heads of 128 take 16 MiB in float32.
_TILE = 1024


class QueryMoments:
    """The mean and covariance of the queries of each query head, over all chunks that were added.

    Chunks are centred on their own means in float32 and combined in float64 by the update of Chan, Golub and LeVeque
    (1979), so that a large mean does not cost the covariance its digits. Chunks may be of any length. It takes
    ``8 * q_heads * (head_dim + 1) * head_dim`` bytes.

    Attributes
    ----------
    count
        Queries of each head so far.

    Examples
    --------
    >>> moments = QueryMoments()
    >>> moments.add(np.array([[[1, 0], [3, 0]]], np.float32))
    >>> moments.add(np.array([[[2, 3]]], np.float32))
    >>> moments.count, moments.mean.tolist()
    (3, [[2.0, 1.0]])
    """

    def __init__(self) -> None:
        self.count = 0
        self._mean: Any = None  # (q_heads, head_dim) float64
        self._squares: Any = None  # (q_heads, head_dim, head_dim) float64: products about the mean, summed

    def __repr__(self) -> str:
        if self._mean is None:
            return "QueryMoments(count=0)"
        q_heads, head_dim = self._mean.shape
        return f"QueryMoments(count={self.count}, q_heads={q_heads}, head_dim={head_dim})"

    def add(self, queries: Any) -> None:
        """Take in more queries.

        Parameters
        ----------
        queries
            ``(q_heads, n, head_dim)``, float32, float16 or bfloat16, before their rotary embedding. ``n`` may be 0.

        Raises
        ------
        TypeError, ValueError
            Another kind, shape or device than before, or a value that is not finite. Nothing was taken in.
        """
        like = None if self._mean is None else ("the queries before", self._mean)
        queries = read("queries", queries, "q_heads, n, head_dim", like=like, empty=True)
        n = queries.shape[1]
        if self._mean is not None:
            q_heads, head_dim = self._mean.shape
            same_shape("queries", queries, (q_heads, n, head_dim), "the queries before")
        refuse_not_finite("queries", queries)
        more = QueryMoments()
        with in_float32(queries):
            for start in range(0, n, _TILE):
                more._combine(*_tile_moments(queries[:, start : start + _TILE]))
            if n and not bool(library(queries).isfinite(more._squares).all()):
                raise ValueError("queries: products of their values are too large for float32")
        self.merge(more)

    def merge(self, other: QueryMoments) -> None:
        """Take in all queries that another one has taken in, as if they had been added here.

        Raises
        ------
        TypeError, ValueError
            `other` is something else, or of other shapes.
        """
        if not isinstance(other, QueryMoments):
            raise TypeError(f"other: must be a QueryMoments, not {type(other).__name__}")
        if other.count == 0:
            return
        if self._mean is not None:
            same_place("other", other._mean, "the queries before", self._mean)
            same_shape("other", other._mean, tuple(self._mean.shape), "the queries before")
        with in_float32(other._mean):
            self._combine(other.count, other._mean, other._squares)

    def _combine(self, count: int, mean: Any, squares: Any) -> None:
        if self.count == 0:
            self.count, self._mean, self._squares = count, mean, squares
            return
        total = self.count + count
        apart = mean - self._mean
        outer = apart[:, :, None] * apart[:, None, :]
        self._squares = self._squares + squares + outer * (self.count * count / total)
        self._mean = self._mean + apart * (count / total)
        self.count = total

    @property
    def mean(self) -> Any:
        """``(q_heads, head_dim)`` float32.

        Raises
        ------
        ValueError
            Before any query was added.
        """
        self._refuse_none()
        return float32(self._mean)

    @property
    def covariance(self) -> Any:
        """``(q_heads, head_dim, head_dim)`` float32, of the queries as they are: divided by their count.

        Raises
        ------
        ValueError
            Before any query was added.
        """
        self._refuse_none()
        return float32(self._squares / self.count)

    @property
    def nbytes(self) -> int:
        """Bytes that are held."""
        return 0 if self._mean is None else int(self._mean.nbytes + self._squares.nbytes)

    def _refuse_none(self) -> None:
        if self.count == 0:
            raise ValueError("count = 0: add queries before asking for their moments")


def _tile_moments(queries: Any) -> tuple[int, Any, Any]:
    """Return the count, the mean and the summed products about it of ``(q_heads, n, head_dim)``."""
    rows = float32(queries)
    about = rows.mean(axis=1)  # to float32's rounding: what it misses is the mean of what is left
    centred = rows - about[:, None]
    squares = float64(library(rows).matmul(centred.swapaxes(1, 2), centred))
    missed = float64(centred.mean(axis=1))
    squares = squares - missed[:, :, None] * missed[:, None, :] * rows.shape[1]
    return rows.shape[1], float64(about) + missed, squares


def query_moments(queries: Any) -> tuple[Any, Any]:
    """Return the mean and covariance of the queries of each query head, as :func:`expected_scores` takes them.

    Parameters
    ----------
    queries
        ``(q_heads, n, head_dim)``, float32, float16 or bfloat16, before their rotary embedding. The first positions
        are often outliers: both the paper's code and the figures of this package leave out 4, ``queries[:, 4:]``.

    Returns
    -------
    tuple
        The mean ``(q_heads, head_dim)`` and the covariance ``(q_heads, head_dim, head_dim)``, divided by ``n``.
        float32 arrays, or tensors where the queries are.

    Raises
    ------
    TypeError, ValueError
        An argument or a value that breaks a rule. There must be a query.

    See Also
    --------
    QueryMoments : The same from chunks.

    Examples
    --------
    >>> mean, covariance = query_moments(np.array([[[1, 0], [3, 4]]], np.float32))
    >>> mean.tolist(), covariance.tolist()
    ([[2.0, 2.0]], [[[1.0, 2.0], [2.0, 4.0]]])
    """
    queries = read("queries", queries, "q_heads, n, head_dim")
    moments = QueryMoments()
    moments.add(queries)
    return moments.mean, moments.covariance
