"""The C tokenizer gives the ids and the text of Hugging Face's `tokenizers`."""

import ctypes
import random
import unicodedata
from pathlib import Path

import pytest

tokenizers = pytest.importorskip("tokenizers")
from deepwell import _deepwell  # noqa: E402
from tokenizers import (  # noqa: E402
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

_ROOT = Path(__file__).resolve().parents[2]
_LIBRARY = ctypes.CDLL(str(Path(_deepwell.__file__).resolve().parent / "libdeepwell.so"))
_LIBRARY.dw_last_error.restype = ctypes.c_char_p
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_PATTERNS = {"llama3": _LLAMA3, "qwen": _LLAMA3.replace("{1,3}", "")}
_CORPUS = [
    (_ROOT / "docs/engine.md").read_text(),
    "日本語 你好世界 привет мир é à ü 12345 67890 " * 20,
]
_WORDS = (
    """'s 'S 'T 're 'VE 'll 'lL 'ſ don't I'M <end> <mask> <tool> <tool>x <right> hello the 123456 ٣٤٥ Ⅷ ½ 😀 👨‍👩‍👧‍👦 日本
한국어 각 ế Å ... !!! _ `a""".split()
    + [
        *(
            "  ",
            "\n",
            "\r\n",
            "\t",
            "\u00a0",
            "\u3000",
            " engine",
            "!!!\n\n",
            "  \n  ",
            "\0",
            "\x85",
            "\ufeff",
        ),
        *("e\u0302\u0301", "e\u0301\u0302", "q\u0307\u0323", "\u0344", "\u1100\u1161\u11a8"),
    ]
)
# Characters of Unicode 3.2: later versions, of which the two sides may know different ones, agree on these.
_CHARACTERS = [
    chr(code)
    for code in range(0x30000)
    if unicodedata.ucd_3_2_0.category(chr(code)) not in ("Cn", "Co", "Cs")
]


class Ours:
    def __init__(self, json):
        data = json.encode()
        self.handle = ctypes.c_void_p()
        status = _LIBRARY.dw_tokenizer_parse(
            data, ctypes.c_size_t(len(data)), ctypes.byref(self.handle)
        )
        assert status == 0, _LIBRARY.dw_last_error()

    def encode(self, text):
        data, ids, count = text.encode(), ctypes.POINTER(ctypes.c_int64)(), ctypes.c_size_t()
        arguments = (
            self.handle,
            data,
            ctypes.c_size_t(len(data)),
            1,
            ctypes.byref(ids),
            ctypes.byref(count),
        )
        assert _LIBRARY.dw_tokenizer_encode(*arguments) == 0
        result = ids[: count.value]
        _LIBRARY.dw_tokens_free(ids)
        return result

    def decode(self, ids, skip_special):
        array, text, count = (ctypes.c_int64 * len(ids))(*ids), ctypes.c_void_p(), ctypes.c_size_t()
        arguments = (
            self.handle,
            array,
            ctypes.c_size_t(len(ids)),
            int(skip_special),
            ctypes.byref(text),
        )
        assert _LIBRARY.dw_tokenizer_decode(*arguments, ctypes.byref(count)) == 0
        result = ctypes.string_at(text, count.value).decode("utf-8", "replace")
        _LIBRARY.dw_text_free(text)
        return result


def trained(kind, ignore_merges=False, add_prefix_space=False, nfc=False):
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    byte_level = pre_tokenizers.ByteLevel(
        add_prefix_space=add_prefix_space, use_regex=kind == "gpt2"
    )
    if kind != "gpt2":
        byte_level = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(_PATTERNS[kind]), "isolated"), byte_level]
        )
    made.pre_tokenizer = byte_level
    if nfc:
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    made.train_from_iterator(_CORPUS, trainer)
    made.add_special_tokens([AddedToken("<mask>", lstrip=True), AddedToken("<right>", rstrip=True)])
    made.add_tokens(
        [AddedToken("<tool>", normalized=True), AddedToken("<tool>x", normalized=False)]
    )
    if kind == "llama3":
        template = processors.TemplateProcessing(single="<end> $A", special_tokens=[("<end>", 0)])
        made.post_processor = processors.Sequence(
            [processors.ByteLevel(trim_offsets=False), template]
        )
    return made


def awkward_text(rng):
    parts = []
    for _ in range(rng.randrange(30)):
        chance = rng.random()
        if chance < 0.5:
            parts.append(rng.choice(_WORDS))
        elif chance < 0.75:
            parts.append(rng.choice(_CHARACTERS) * rng.choice([1, 1, 3]))
        elif chance < 0.85:
            parts.append(" " * rng.randrange(8))
        else:
            parts.append(rng.choice(_CORPUS[0].split(" ")))
    return "".join(parts)


@pytest.mark.parametrize(
    "kind, settings",
    [
        ("gpt2", {}),
        ("gpt2", {"add_prefix_space": True, "nfc": True}),
        ("llama3", {"ignore_merges": True}),
        ("qwen", {"nfc": True}),
    ],
)
def test_ids_and_text_are_those_of_tokenizers(kind, settings):
    theirs = trained(kind, **settings)
    ours = Ours(theirs.to_str())
    rng = random.Random(kind)
    for text in ["", *_CHARACTERS[::29], *(awkward_text(rng) for _ in range(500))]:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids, text
        for skip_special in (True, False):
            assert ours.decode(ids, skip_special) == theirs.decode(
                ids, skip_special_tokens=skip_special
            )
    for _ in range(50):  # ids that cut characters apart
        ids = [rng.randrange(900) for _ in range(20)]
        assert ours.decode(ids, True) == theirs.decode(ids, skip_special_tokens=True)


def test_long_runs_take_little_time():
    theirs = trained("llama3")
    text = "a" * 100_000 + " " * 100_000 + "7" * 1000 + "?" * 100_000
    assert Ours(theirs.to_str()).encode(text) == theirs.encode(text).ids
