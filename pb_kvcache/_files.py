"""Writing a file as a whole: what stood there stays until all of the new one is there."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Give the block a binary file to write and seek in, and put it at `path` when the block ends.

    A block that raises, KeyboardInterrupt too, leaves what stood at `path`, and nothing beside it. The new content
    replaces a regular file in one step: a reader sees the old one or the new one. It keeps the old one's mode, and its
    owner where the system allows that. A new file has the mode that ``open()`` would give it. A symbolic link is
    followed. A device, a FIFO and the program's own standard output are written to when the block has ended.

    Raises
    ------
    OSError, ValueError
        The file cannot be written, or the block raised one. The message names `path`, unless an OSError names another
        file already.
    """
    name = os.fspath(path)
    # A name of its own, so that two that write at once do not write into each other's. It does not grow with the
    # target's, which may be as long as a name can be.
    partial = f".pb-kvcache-{secrets.token_hex(8)}.part"
    try:
        status = _status(name)
        stream = _standard_stream(status)
        if stream is None and (status is None or stat.S_ISREG(status.st_mode)):
            target = os.path.realpath(name)
            partial = os.path.join(os.path.dirname(target), partial)  # noqa: PTH118, PTH120
            with _beside(partial, target, status) as file:
                yield file
        else:
            with tempfile.TemporaryFile() as copy:
                yield copy
                copy.seek(0)
                with open(name if stream is None else os.dup(stream), "wb") as file:  # noqa: PTH123
                    shutil.copyfileobj(copy, file)
    except OSError as error:
        if error.filename not in (None, partial):
            raise
        if error.errno is None:  # one that was made of words alone
            raise OSError(f"{name}: {error}") from error
        raise OSError(error.errno, error.strerror, name) from error
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


@contextlib.contextmanager
def _beside(partial: str, target: str, status: os.stat_result | None) -> Iterator[IO[bytes]]:
    """Write a file beside the target, and replace the target, whose status is given, if there is one."""
    try:
        with open(partial, "x+b") as file:  # noqa: PTH123
            yield file
        if status is not None:
            if hasattr(os, "chown"):
                with contextlib.suppress(OSError):
                    os.chown(partial, status.st_uid, status.st_gid)
            os.chmod(partial, stat.S_IMODE(status.st_mode))  # noqa: PTH101 - last: chown clears set-user-ID
        os.replace(partial, target)  # noqa: PTH105
    finally:
        with contextlib.suppress(OSError):
            os.unlink(partial)  # noqa: PTH108


def _status(name: str) -> os.stat_result | None:
    """Return the status of a file that may be written to. None: there is none yet."""
    if not name or name.endswith(("/", os.sep)):
        number = errno.EISDIR if name else errno.ENOENT
        raise OSError(number, os.strerror(number), name)
    try:
        status = os.stat(name)  # noqa: PTH116 - a Path would drop what a name ends with
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    # To replace a file takes leave to write to its folder alone. One that is read-only is so for a reason.
    if not os.access(name, os.W_OK):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), name)
    return status


def _standard_stream(status: os.stat_result | None) -> int | None:
    """Return the descriptor of standard output or error where the file is that one, as ``/dev/stdout`` is.

    Were it replaced, what the program prints later would be lost with the old one.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, closed, or no file at all
            if status is not None and os.path.samestat(os.fstat(stream.fileno()), status):
                stream.flush()
                return stream.fileno()
    return None
