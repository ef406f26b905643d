"""Makes token files of a text for the task gpt: byte-pair encoding, trained on the text itself.

The last tenth of the text is val.bin, cut at the end of a line. Needs the package tokenizers.

Run: python benchmarks/tokens.py reviews.txt --vocabulary 2000 --out tokens-2000
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

PIECE = 2**20  # characters that are encoded at a time


def pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces that end with a line."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE) + 1 or len(text)
        yield text[start:end]
        start = end


def main() -> None:
    """Train the encoding, encode, and check that the text can be read back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--vocabulary", type=int, default=2000)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if not 256 <= arguments.vocabulary <= 2**16:
        raise SystemExit(f"vocabulary is {arguments.vocabulary}, but must be from 256 to 65536.")
    text = arguments.text.read_text()
    cut = text.find("\n", len(text) * 9 // 10) + 1
    parts = {"train": text[:cut], "val": text[cut:]}
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=arguments.vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(pieces(parts["train"]), trainer)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        encoded = [tokenizer.encode(piece).ids for piece in pieces(part)]
        if tokenizer.decode(encoded[0]) != next(pieces(part)):
            raise SystemExit(f"{name}: the first piece cannot be read back.")
        tokens = numpy.concatenate([numpy.array(ids, dtype=numpy.uint16) for ids in encoded])
        tokens.tofile(arguments.out / f"{name}.bin")
        print(f"{name}: {len(part):,} characters, {len(tokens):,} tokens, {len(part) / len(tokens):.2f} each")
    tokenizer.save(str(arguments.out / "tokenizer.json"))


if __name__ == "__main__":
    main()
