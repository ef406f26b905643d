"""Downloading a data set."""

import operator
import urllib.request
from collections.abc import Callable
from pathlib import Path

from avagrad.files import write_atomic

_LARGEST = 200_000_000  # bytes


def download(address: str, folder: Path, files_of: Callable[[bytes], dict[str, bytes]], task: str, wanted: str) -> None:
    """Download a file, and write the files that ``files_of`` makes of it into a folder; existing ones are not changed.

    >>> download("ftp-of-old://nowhere", Path("/tmp"), lambda content: {}, "chars", "Expected: a text.")
    Traceback (most recent call last):
    ...
    OSError: chars: 'ftp-of-old://nowhere' could not be downloaded (...); put the files into '/tmp' manually....
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with urllib.request.urlopen(address, timeout=60) as response:
            files = files_of(response.read(_LARGEST))
        for name, content in files.items():
            if not (folder / name).exists():
                write_atomic(folder / name, operator.methodcaller("write", content), shared=True)
    except Exception as error:  # a broken file may raise anything
        problem = f"{address!r} could not be downloaded ({error})"
        raise OSError(f"{task}: {problem}; put the files into {str(folder)!r} manually. {wanted}") from error
