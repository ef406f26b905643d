"""Penn Treebank's files and any text: read right, or refused with a sentence."""

import gzip
import tarfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from web import serving

from avagrad.lab.data import texts
from avagrad.lab.data.texts import PENN_TREEBANK, Texts, download_penn_treebank, from_string, read_texts
from avagrad.lab.tasks.chars import Chars

LINES = ["aer banknote berlitz <unk> N", "mr. <unk> is chairman of n.v.", "", "a"]


def spelled(texts: Texts, part: str) -> str:
    return "".join(texts.alphabet[i] for i in texts.parts[part])


def write(folder: Path, form: str, lines: list[str]) -> None:
    for part in ("train", "valid", "test"):
        (folder / form.format(part)).write_text("".join(line + "\n" for line in lines))


def in_characters(line: str) -> str:
    return " ".join("_" if letter == " " else letter for letter in line)


def test_a_large_text_needs_little_more_than_its_characters_and_tokens() -> None:
    text = "all the letters, and the rest\n" * 2**20
    tracemalloc.start()
    try:
        found = from_string(text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert spelled(found._replace(parts={"end": found.parts["test"][-30:]}), "end") == text[-30:]
    assert peak < 2 * len(text) + 2**25  # tokens, their pieces, and one piece of code points


# --- Penn Treebank ---


def test_both_forms_are_the_same_text(tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    (tmp_path / "characters").mkdir()
    write(tmp_path / "words", "ptb.{}.txt", [f" {line} " for line in LINES])  # as the word-level files have it
    write(tmp_path / "characters", "ptb.char.{}.txt", [in_characters(line) + " " for line in LINES])
    words, characters = read_texts(tmp_path / "words"), read_texts(tmp_path / "characters")
    for part in ("train", "validation", "test"):
        assert spelled(words, part) == spelled(characters, part) == "".join(line + "\n" for line in LINES)


def test_the_character_files_come_first(tmp_path: Path) -> None:
    write(tmp_path, "ptb.{}.txt", ["words"])
    write(tmp_path, "ptb.char.{}.txt", ["c h a r s"])
    assert spelled(read_texts(tmp_path), "train") == "chars\n"


def test_sizes_of_the_complete_files_follow_from_the_word_level_ones() -> None:
    """Bytes and lines of ptb.{train,valid,test}.txt, in which each line has a space at both of its ends."""
    for part, size, lines in (("train", 5_101_618, 42_068), ("valid", 399_782, 3_370), ("test", 449_945, 3_761)):
        assert PENN_TREEBANK[part] == size - 2 * lines


def test_a_file_that_is_cut_off_is_remarked_on(tmp_path: Path) -> None:
    write(tmp_path, "ptb.char.{}.txt", ["a b _ c"])
    (tmp_path / "ptb.char.train.txt").write_text("a b _ c\na b _")  # no end of line
    found = read_texts(tmp_path)
    assert spelled(found, "train") == "ab c\nab \n"
    assert len(found.remarks) == 3
    assert "ptb.char.train.txt has 9 characters, but the complete file has 5,017,482" in found.remarks[0]


def test_the_complete_size_is_not_remarked_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "ptb.char.{}.txt", ["a b"])
    monkeypatch.setattr(texts, "PENN_TREEBANK", dict.fromkeys(PENN_TREEBANK, 3))
    assert read_texts(tmp_path).remarks == ()


def test_words_in_a_file_of_characters_are_rejected(tmp_path: Path) -> None:
    write(tmp_path, "ptb.char.{}.txt", ["aer banknote"])
    with pytest.raises(ValueError, match=r"the word 'aer', but must have single characters .* ptb\.train\.txt"):
        read_texts(tmp_path)


def test_missing_files_are_named_with_where_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no file .* ptb\.char\.train\.txt.*https?://.*--download"):
        read_texts(tmp_path)
    (tmp_path / "ptb.char.train.txt").write_text("a")
    with pytest.raises(FileNotFoundError, match=r"lacks ptb\.char\.valid\.txt, ptb\.char\.test\.txt"):
        read_texts(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_texts(tmp_path / "nowhere")


# --- any text ---


@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=300))
def test_any_text_is_read_as_it_is(content: str) -> None:
    found = from_string(content)
    parts = ("train", "validation", "test")
    assert "".join(spelled(found, part) for part in parts) == content
    assert list(found.alphabet) == sorted(set(content))


def test_a_file_is_read_as_it_is(tmp_path: Path) -> None:
    content = "naïve 🐈\r\nžluť 漢字" * 5
    (tmp_path / "text").write_bytes(content.encode())
    found = read_texts(tmp_path / "text")
    assert "".join(spelled(found, part) for part in ("train", "validation", "test")) == content
    write(tmp_path, "ptb.{}.txt", LINES)
    assert spelled(read_texts(tmp_path), "train") == "".join(line + "\n" for line in LINES)


def test_a_byte_order_mark_is_no_character(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbf" + b"abc" * 20)
    assert read_texts(tmp_path / "text").alphabet == "abc"


@pytest.mark.parametrize(("letters", "dtype"), [(1, "uint8"), (256, "uint8"), (257, "uint16"), (0x10001, "uint32")])
def test_tokens_are_as_small_as_the_alphabet_allows(letters: int, dtype: str) -> None:
    found = from_string("".join(chr(0x10000 + i) for i in range(letters)))
    assert {part.dtype.name for part in found.parts.values()} == {dtype}


def test_what_is_not_text_is_rejected_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"abcdefg\xe9 latin")
    with pytest.raises(ValueError, match=r"text' cannot be read as utf-8 from byte 7 on .* encoding=latin-1"):
        read_texts(path)
    assert "é" in read_texts(path, "latin-1").alphabet
    path.write_bytes("abcdef漢".encode()[:-1])
    with pytest.raises(ValueError, match=r"from byte 6 on \(unexpected end of data\): it is truncated"):
        read_texts(path)
    for encoding in ("utf-9", "base64", "zlib"):
        with pytest.raises(ValueError, match=f"encoding is '{encoding}', which is not a text encoding"):
            read_texts(path, encoding)
    path.write_bytes(b"\xef\xbb\xbfabc\xff")
    for encoding in ("utf-8", "UTF8"):
        with pytest.raises(ValueError, match="from byte 6 on"):
            read_texts(path, encoding)


@pytest.mark.parametrize("content", [b"", b"a", b"abc" * 10])
def test_an_empty_or_short_text_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"the train part has \d+ characters, but needs at least 64"):
        Chars(data=str(path))


# --- fetching ---


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    with serving(tmp_path / "www") as address:
        yield address, tmp_path / "www"


def test_the_files_are_fetched_only_when_asked(tmp_path: Path, served: tuple[str, Path]) -> None:
    address, root = served
    source = tmp_path / "simple-examples" / "data"
    source.mkdir(parents=True)
    write(source, "ptb.char.{}.txt", ["a b c"] * 100)
    with tarfile.open(root / "archive.tgz", "w:gz") as tar:
        tar.add(tmp_path / "simple-examples", arcname="./simple-examples")
    goal = tmp_path / "data"
    with pytest.raises(FileNotFoundError, match="--download"):
        Chars(data=str(goal))
    assert not goal.exists()
    goal.mkdir()
    (goal / "ptb.char.test.txt").write_text("m i n e\n")
    download_penn_treebank(goal, f"{address}/archive.tgz")
    assert sorted(path.name for path in goal.iterdir()) == [f"ptb.char.{p}.txt" for p in ("test", "train", "valid")]
    assert (goal / "ptb.char.test.txt").read_text() == "m i n e\n"
    assert spelled(read_texts(goal), "train") == "abc\n" * 100
    (root / "archive.tgz").unlink()
    download_penn_treebank(goal, f"{address}/archive.tgz")  # all is there: nothing is fetched


def test_a_download_goes_into_a_folder(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("mine")
    with pytest.raises(FileExistsError, match="a file, but must be a folder"):
        download_penn_treebank(tmp_path / "text")
    with pytest.raises(ValueError, match="download is True, but data is not given"):
        Chars(download=True)


def claiming(size: int) -> bytes:
    """An archive with the header of a member, and nothing of what it claims to have."""
    member = tarfile.TarInfo("simple-examples/data/ptb.char.train.txt")
    member.size = size
    return gzip.compress(member.tobuf() + bytes(1024))


@pytest.mark.parametrize(
    "content",
    [None, b"", b"not an archive", gzip.compress(b"x" * 10**5)[:-9], claiming(0), claiming(1 << 40)],
    ids=["missing", "empty", "no archive", "truncated", "incomplete", "too large"],  # gzip writes the time
)
def test_a_download_that_fails_leaves_nothing(tmp_path: Path, served: tuple[str, Path], content: bytes | None) -> None:
    address, root = served
    if content is not None:
        (root / "archive.tgz").write_bytes(content)
    with pytest.raises(OSError, match="could not be downloaded"):
        download_penn_treebank(tmp_path / "data", f"{address}/archive.tgz")
    assert list((tmp_path / "data").iterdir()) == []
