"""Mutations of traces and of other tools' files, as an attacker or a faulty disk would make them."""

import copy
import gzip
import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

import zstandard
from foreign_seeds import ForeignSeed

Line = dict[str, Any]

NUMBERS = (
    *(0, 1, -1, 2, 63, 64, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 10**30),
    *(0.0, -0.5, 1e308, 5e-324),
)
TEXTS = (
    *("", "a", "nan", "\ud800", "\x1b[31m", "\x1b]0;pwned\x07", "\u202eabc", "\x00", "../../x"),
    *("x" * 100_000, "é" * 300),
    *("aten.add.Tensor", "aten.as_strided.default", "prim.Print.default", "os.system", "function", "extension", "cpu"),
    *("cuda:0", "float32", "complex128", "sparse_csr", "quint8"),
)
TREES: tuple[Any, ...] = (
    *([], {}, [[]], [None], {"a": 1}, {"float": "nan"}, {"tensor": {}}, {"tuple": [{"dict": [[[], 1]]}]}, {"same": 0}),
    *(list(range(300)), [2**62] * 3, [1 << 50]),
)
VALUES: tuple[Any, ...] = (None, True, False, *NUMBERS, *TEXTS, *TREES)
RAW = (
    *(b"NaN", b"Infinity", b"1e999", b"-1e999", b"\\ud800", b"\xff\xfe", b"\x00"),
    *(b"{", b"}", b"[", b"]", b'"', b"9" * 400),
)
TIMES = (2, 3, 10, 1000)
MOST_BYTES = 1 << 20  # Largest mutant in bytes before compression; memory for a larger file is justified by its size.


def mutant(seed_lines: list[Line], random: Random) -> tuple[bytes, str]:
    """Return the content of a file with changed lines of a trace, and the suffix of its name, such as `.gz`."""
    lines = copy.deepcopy(seed_lines)
    change_lines(lines, random)
    content = b""
    for line in lines:
        content += dump(line) + b"\n"
        if len(content) > MOST_BYTES:
            break
    for _ in range(random.choice((0, 0, 0, 1, 2))):
        content = random.choice(OF_BYTES)(content, random)
    suffix = random.choice(("", "", "", "", "", "", ".gz", ".zst"))
    return _packed(content, suffix, random), suffix


def change_lines(lines: list[Line], random: Random) -> None:
    """Change, remove or add lines at random, one to eight times, in the list `lines` itself."""
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        random.choice(_OF_LINES)(lines, random)


def dump(line: Any) -> bytes:
    try:
        return json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace")
    except RecursionError:
        return b"[" * 2000


def _packed(content: bytes, suffix: str, random: Random) -> bytes:
    if suffix == ".gz":
        content = gzip.compress(content, random.choice((1, 9)))
    elif suffix == ".zst":
        content = zstandard.ZstdCompressor(level=random.choice((1, 19))).compress(content)
    if suffix and random.random() < 0.3:
        content = random.choice(OF_BYTES)(content, random)
    return content


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Return (list or object, key) for every element of the nested lists and objects in `tree`."""
    places: list[tuple[Any, Any]] = []
    level = [tree]
    while level and len(places) < 5_000:
        item = level.pop()
        if isinstance(item, dict | list):
            keys = list(item) if isinstance(item, dict) else range(min(len(item), 200))
            places += [(item, key) for key in keys]
            level += [item[key] for key in keys]
    return places


def _place(lines: list[Line], random: Random) -> tuple[Any, Any]:
    """Return a random list or object in the lines, with a key in it; each type of record has equal probability."""
    kinds = sorted({str(line.get("type")) for line in lines if isinstance(line, dict)})
    kind = random.choice(kinds or ["none"])
    chosen = [line for line in lines if isinstance(line, dict) and str(line.get("type")) == kind]
    places = _places(random.choice(chosen)) if chosen else []
    return random.choice(places) if places else ({"a": 0}, "a")


def _put_value(lines: list[Line], random: Random) -> None:
    holder, key = _place(lines, random)
    holder[key] = copy.deepcopy(random.choice(VALUES))


def _put_part(lines: list[Line], random: Random) -> None:
    holder, key = _place(lines, random)
    other, other_key = _place(lines, random)
    holder[key] = copy.deepcopy(other[other_key])


def _take_away(lines: list[Line], random: Random) -> None:
    holder, key = _place(lines, random)
    del holder[key]


def _rename(lines: list[Line], random: Random) -> None:
    holder, key = _place(lines, random)
    if isinstance(holder, dict):
        holder[random.choice(("id", "x", "tensor", "\x1b[2J", "\ud800", "type", "set", "values"))] = holder.pop(key)


def _nest(lines: list[Line], random: Random) -> None:
    holder, key = _place(lines, random)
    depth = random.choice((3, 30, 100, 130, 300))
    wrap: Callable[[Any], Any] = random.choice(
        (lambda inner: [inner], lambda inner: {"tuple": [inner]}, lambda inner: {"dict": [["k", inner]]})
    )
    for _ in range(depth):
        holder[key] = wrap(holder[key])


def _repeat_item(lines: list[Line], random: Random) -> None:
    holder, key = _place(lines, random)
    if isinstance(holder, list):
        holder[key : key + 1] = [holder[key]] * min(random.choice(TIMES), MOST_BYTES // (1 + len(dump(holder[key]))))


def _collide(lines: list[Line], random: Random) -> None:
    holder, key = _place(lines, random)
    count = random.choice((100, 5_000))
    numbers: list[Any] = [number * (2**61 - 1) for number in range(count)]
    if random.random() < 0.5:
        numbers = [{"complex": [float(-1000003 * number), float(number)]} for number in range(count)]
    holder[key] = random.choice(({"set": numbers}, {"dict": [[number, 0] for number in numbers]}))


def _repeat_line(lines: list[Line], random: Random) -> None:
    place = random.randrange(len(lines))
    lines[place : place + 1] = [lines[place]] * random.choice((*TIMES, 30_000))


def _drop_line(lines: list[Line], random: Random) -> None:
    if len(lines) > 2:
        del lines[random.randrange(len(lines))]


def _move_line(lines: list[Line], random: Random) -> None:
    line = lines.pop(random.randrange(len(lines)))
    lines.insert(random.randrange(len(lines) + 1), line)


def _add_line(lines: list[Line], random: Random) -> None:
    kind = random.choice(("zz", "header", "calls", "entered", "end", "\x1b[31m", "observed"))
    numbers = {"thread": 0, "start_ns": random.randrange(100), "scope": 0, "signature": random.randrange(9)}
    lines.insert(random.randrange(1, len(lines) + 1), {"type": kind, **numbers, "x": random.choice(VALUES)})


def _flip(content: bytes, random: Random) -> bytes:
    damaged = bytearray(content)
    for _ in range(random.choice((1, 3, 20))):
        if damaged:
            damaged[random.randrange(len(damaged))] = random.randrange(256)
    return bytes(damaged)


def _cut(content: bytes, random: Random) -> bytes:
    return content[: random.randrange(len(content) + 1)]


def _insert(content: bytes, random: Random) -> bytes:
    place = random.randrange(len(content) + 1)
    return content[:place] + random.choice(RAW) * random.choice((1, 1, 1, 2000)) + content[place:]


def _replace_number(content: bytes, random: Random) -> bytes:
    numbers = list(re.finditer(rb"(?<=[:,\[])[0-9][0-9.e+-]*", content[:100_000]))
    if not numbers:
        return content
    number = random.choice(numbers)
    return content[: number.start()] + random.choice(RAW) + content[number.end() :]


_OF_LINES = (
    *[_put_value] * 8,
    *[_put_part] * 4,
    *(_take_away, _rename, _nest, _repeat_item, _collide, _repeat_line, _drop_line, _move_line, _add_line),
)
OF_BYTES = (_flip, _cut, _insert, _replace_number)

PACKED = (".gz",)  # suffixes that a mutant may get
TOKENS = (b"99999999999999999999", b"-1", b"1e999", b"NaN", b"null", b"__import__('os')", b"[" * 300, b"\x00" * 8, b"")


def foreign_mutant(seed: ForeignSeed, random: Random) -> ForeignSeed:
    files = dict(seed.files)
    name = random.choice(sorted(files))
    files[name] = _changed(files[name], random)
    if seed.opens == name and len(files) == 1 and random.random() < 0.1:
        packed = name + random.choice(PACKED)
        return ForeignSeed(seed.format_name, {packed: gzip.compress(files[name])}, packed)
    return ForeignSeed(seed.format_name, files, seed.opens)


def _changed(content: bytes, random: Random) -> bytes:
    if content[:2] == b"\x1f\x8b" and random.random() < 0.8:
        return gzip.compress(_changed(gzip.decompress(content), random))
    if random.random() < 0.7:
        content = _changed_json(content, random)
    for _ in range(random.choice((0, 1, 1, 2))):
        content = random.choice((*OF_BYTES, _put_token))(content, random)
    return content[:MOST_BYTES]


def _changed_json(content: bytes, random: Random) -> bytes:
    """Return content with its JSON changed, as one document or line by line, else with its text lines changed."""
    try:
        forms: list[Any] = [json.loads(content)]
        separator = b""
    except (ValueError, RecursionError):
        try:
            forms, separator = [json.loads(line) for line in content.splitlines() if line.strip()], b"\n"
        except (ValueError, RecursionError):
            return _changed_text(content, random)
    lines: list[Line] = [{"type": "file", "content": copy.deepcopy(form)} for form in forms]
    if not lines:
        return content
    change_lines(lines, random)
    pieces: list[bytes] = []
    for line in lines:
        pieces.append(dump(line.get("content")) if isinstance(line, dict) else b"")
        if sum(map(len, pieces)) > MOST_BYTES:
            break
    whole = separator.join(pieces)
    return _twice(whole, random) if random.random() < 0.1 else whole


def _twice(content: bytes, random: Random) -> bytes:
    """Return JSON text in which an object has one of its names twice."""
    place = content.find(b'": ', random.randrange(len(content) + 1))
    begin = content.rfind(b'"', 0, place) if place > 0 else -1
    return content if begin < 0 else content[:begin] + content[begin : place + 3] + b"0, " + content[begin:]


def _changed_text(content: bytes, random: Random) -> bytes:
    lines = content.split(b"\n")
    place = random.randrange(len(lines))
    match random.randrange(4):
        case 0:
            lines[place : place + 1] = [lines[place]] * random.choice((0, 2, 3, 1000))
        case 1:
            lines.insert(random.randrange(len(lines) + 1), lines[place])
        case 2:
            words = lines[place].split(b" ")
            words[random.randrange(len(words))] = random.choice((*TOKENS, *RAW))
            lines[place] = b" ".join(words)
        case _:
            lines[place] = lines[place] * random.choice((2, 10, 300))
    return b"\n".join(lines)


def _put_token(content: bytes, random: Random) -> bytes:
    place = random.randrange(len(content) + 1)
    return content[:place] + random.choice(TOKENS) + content[place + random.choice((0, 1, 4)) :]
