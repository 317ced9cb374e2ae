"""Converts text to a file of tokens for `deepwell train`.

    python -m deepwell.tokenize --model FOLDER TEXT... -o tokens.bin

FOLDER has the tokenizer's files. TEXT is a text file, which is one document; a .jsonl file, where the field "text" of
each line is one document; or "-" for standard input. The tokenizer's end-of-text token, if it has one, follows each
document. The output is little-endian uint16 if every token fits, else uint32, without a header. An output name that
ends in .npy selects NumPy's format.

Text is read in pieces of about a million characters that end at a line end, so that files of any size fit into memory.
Each piece is tokenised separately: at a cut, about once in a million characters, a token can differ from the tokens of
the whole text.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

PIECE = 1 << 20
# A line end between two words, where tokenizers that split at spaces split anyway. If a text has none for a while, any
# line end is used.
CUT = re.compile(r"(?<=\S\n)(?=\S)")
ANY_LINE = re.compile(r"(?<=\n)")


class Refused(Exception):
    """The arguments or the input are wrong; the message says how."""


def last_cut(text: str) -> int:
    """Returns where to cut, 0 if there is no cut yet."""
    for least, pattern in ((0, CUT), (4 * PIECE, ANY_LINE)):
        cuts = [cut.start() for cut in pattern.finditer(text, max(len(text) - PIECE, 0))]
        if cuts and len(text) > least:
            return cuts[-1]
    return len(text) if len(text) > 16 * PIECE else 0


def pieces(stream: TextIO) -> Iterator[str]:
    """Yields all of `stream` in pieces that end at line ends. A text without lines is cut anywhere."""
    held = ""
    while block := stream.read(PIECE):
        held += block
        if cut := last_cut(held):
            yield held[:cut]
            held = held[cut:]
    if held:
        yield held


def documents(path: str) -> Iterator[Iterator[str]]:
    """Yields each document as its pieces."""
    stream = sys.stdin if path == "-" else open(path, encoding="utf-8", newline="")
    with stream:
        if not path.endswith(".jsonl"):
            yield pieces(stream)
            return
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise Refused(
                    f'{path}, line {number}: expected {{"text": "..."}}: {error}'
                ) from None
            if not isinstance(text, str):
                raise Refused(f'{path}, line {number}: "text" is not a string')
            yield iter([text])


class Writer:
    """Writes tokens to a temporary file, which replaces the output when it is complete."""

    def __init__(self, path: Path, largest: int):
        import numpy as np

        self.np = np
        self.path, self.temporary = path, path.with_name(f"{path.name}.{os.getpid()}.tmp")
        self.type = np.dtype("<u2" if largest < 1 << 16 else "<u4")
        self.count = 0
        self.file = open(self.temporary, "wb")
        if path.suffix == ".npy":
            self.header()

    def header(self) -> None:
        # Wide enough for any count, so that it can be overwritten at the end.
        text = f"{{'descr': '{self.type.str}', 'fortran_order': False, 'shape': ({self.count},), }}"
        text = text.ljust(117) + "\n"
        self.file.seek(0)
        self.file.write(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode())

    def put(self, tokens: list[int]) -> None:
        self.file.write(self.np.asarray(tokens, dtype=self.type).tobytes())
        self.count += len(tokens)

    def commit(self) -> None:
        if self.path.suffix == ".npy":
            self.header()
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.temporary, self.path)

    def abandon(self) -> None:
        self.file.close()
        self.temporary.unlink(missing_ok=True)


class Progress:
    """A progress line on a terminal; nothing elsewhere."""

    def __init__(self):
        self.shown, self.start, self.characters = 0.0, time.monotonic(), 0

    def add(self, characters: int, tokens: int) -> None:
        self.characters += characters
        now = time.monotonic()
        if sys.stderr.isatty() and now - self.shown > 0.2:
            self.shown = now
            rate = self.characters / max(now - self.start, 1e-9)
            line = f"\r{self.characters:,} characters, {tokens:,} tokens, {rate:,.0f} characters/s"
            print(line, end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.shown:
            print(file=sys.stderr)


def tokenize(tokenizer, inputs: list[str], output: Path) -> int:
    """Writes the tokens of `inputs` to `output` and returns their number."""
    largest = max(len(tokenizer) - 1, tokenizer.eos_token_id or 0)
    writer, progress = Writer(output, largest), Progress()
    try:
        for path in inputs:
            for document in documents(path):
                for piece in document:
                    writer.put(tokenizer(piece, add_special_tokens=False)["input_ids"])
                    progress.add(len(piece), writer.count)
                if tokenizer.eos_token_id is not None:
                    writer.put([tokenizer.eos_token_id])
        progress.end()
        writer.commit()
    except BaseException:
        writer.abandon()
        raise
    return writer.count


def load_tokenizer(folder: str):
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import transformers
    except ImportError:
        raise Refused("transformers is not installed: pip install transformers") from None
    transformers.logging.set_verbosity_error()
    try:
        # Without this argument transformers asks on standard input, which may be the text, whether to run the folder's
        # Python code.
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the library raises various errors for a folder without a tokenizer
        if "trust_remote_code" in str(error):
            raise Refused(
                f"the tokenizer in {folder} is Python code of that folder, which is not run here: use a folder with a "
                "tokenizer.json, or tokenize with transformers and write the numbers to a .npy file"
            ) from None
        raise Refused(f"there is no tokenizer in {folder}: {error}") from None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m deepwell.tokenize", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", required=True, help="folder with the tokenizer's files")
    parser.add_argument(
        "inputs", nargs="+", metavar="TEXT", help="text or .jsonl; - for standard input"
    )
    parser.add_argument("-o", "--output", required=True, type=Path, help="tokens.bin or tokens.npy")
    options = parser.parse_args(arguments)
    try:
        if options.output.suffix not in (".bin", ".npy"):
            raise Refused(f"the output is named {options.output}; expected a name in .bin or .npy")
        count = tokenize(load_tokenizer(options.model), options.inputs, options.output)
    except (Refused, OSError, UnicodeDecodeError) as error:
        print(f"deepwell.tokenize: {error}", file=sys.stderr)
        return 1
    print(f"{options.output}: {count:,} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
