"""Downloading a data set, and unpacking its archive."""

import gzip
import operator
import tarfile
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from avagrad.files import write_atomic

_LARGEST = 200_000_000  # bytes


def download(address: str, folder: Path, files_of: Callable[[bytes], dict[str, bytes]], task: str, wanted: str) -> None:
    """Download a file, and write what ``files_of`` makes of it into a folder; existing files are not changed."""
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


def unpack(archive: IO[bytes], largest: Mapping[str, int], whole: int) -> dict[Path, bytes]:
    """Return the files of a .tar.gz whose names are in ``largest``, with the most bytes that each can have.

    An archive that unpacks to more than ``whole`` bytes is rejected, without keeping them in memory.
    """
    files = {}
    try:
        with gzip.open(archive) as unpacked:  # checks size and checksum before tar trusts its headers
            unpacked.seek(whole)
            if unpacked.read(1):
                raise ValueError(f"unpacks to more than {whole:,} bytes, but an official archive has fewer")
        archive.seek(0)
        with tarfile.open(fileobj=archive, mode="r:gz") as tar:
            for member in tar:
                name, size = Path(member.name), member.size
                # A sparse member can have more bytes than the archive.
                if name.name in largest and member.isfile() and not member.issparse():
                    if size > (most := largest[name.name]):
                        raise ValueError(f"cannot be used: {name} has {size:,} bytes, but should have at most {most:,}")
                    file = tar.extractfile(member)
                    files[name] = file.read() if file else b""
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        problem = f"cannot be read to its end as a .tar.gz ({error}): it is truncated, or another kind of file"
        raise ValueError(problem) from error
    return files
