"""Mutations that respect file formats: JSON stays JSON, and checksums and lengths fit.

Each function takes the content of a file, a random generator, and a function that damages bytes
blindly, which it uses for parts without a structure.
"""

import io
import json
import random
import struct
import zipfile
from collections.abc import Callable
from typing import Any

Blind = Callable[[bytes], bytes]

OUTSIDE = "outside-of-the-checkpoint"  # a folder beside it that no file may refer to
_CANARY = f"../{OUTSIDE}/model.safetensors"
_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63)),
    *(0.5, 1e-320, 1e308, float("inf"), float("nan"), "", "\ud800", "\0", "a\nb", "x" * 3000),
    *(_CANARY, "/etc/passwd", "..", ".", "{layer}", "F32", "float32", "bfloat16", "zstd", "<f4"),
    *([], {}, [[]], [0], [2**62, 4], [-1, 8], [1] * 40, {"": {}}),
]


def mutate(name: str, content: bytes, draw: random.Random, blind: Blind) -> bytes:
    """Damage the content of a file according to its name, or blindly where that fails."""
    kind = next((change for ends, change in _KINDS if name.endswith(ends)), None)
    if content[:4] in _OCDBT:
        kind = change_ocdbt
    if kind is None or draw.random() < 0.4:
        return blind(content)
    try:
        return kind(content, draw, blind)
    except Exception:  # earlier damage destroyed its structure
        return blind(content)


def change_json(content: bytes, draw: random.Random, blind: Blind) -> bytes:
    value = json.loads(content)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        value = _changed(value, draw)
    text = json.dumps(value)
    if draw.random() < 0.1:  # a duplicate key, or nesting beyond parsers' limits
        text = draw.choice((text.replace("{", '{"a":1,"a":2,', 1), "[" * 3000 + text))
    return text.encode("utf-8", "surrogatepass")


def change_safetensors(content: bytes, draw: random.Random, blind: Blind) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    header, data = content[8 : 8 + length], content[8 + length :]
    what = draw.random()
    if what < 0.7:
        header = change_json(header, draw, blind)
    elif what < 0.8:
        header = blind(header)
    elif what < 0.9:
        data = blind(data)
    else:
        length = draw.choice((0, 1, 7, len(content), 2**31, 2**63, 2**64 - 1))
        return struct.pack("<Q", length) + content[8:]
    return struct.pack("<Q", len(header)) + header + data


def change_state(content: bytes, draw: random.Random, blind: Blind) -> bytes:
    """Change the metadata or a tensor of a saved state, half of the time with matching hashes."""
    from safetensors.numpy import load, save

    from griffin_eval.states.saved_state import Origin, SavedState

    if draw.random() < 0.3:
        return change_safetensors(content, draw, blind)
    (length,) = struct.unpack("<Q", content[:8])
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    (key,) = metadata
    tensors, said = load(content), json.loads(metadata[key])
    if draw.random() < 0.4:  # a tensor instead of the metadata
        name = draw.choice(sorted(tensors))
        tensors[draw.choice((name, name, "layers.0.h", "x"))] = draw.choice(
            (
                tensors[name] * draw.choice((0, 1e30, float("nan"))),
                tensors[name].astype(draw.choice(("float64", "float16", "int32", "bool"))),
                tensors[name][..., :-1],
                tensors[name].ravel(),
            )
        )
    else:
        said = _changed(said, draw)
    if draw.random() < 0.5:
        origin = Origin(**{name: value for name, value in said.items() if name != "state_sha256"})
        said["state_sha256"] = SavedState(origin, tensors).sha256
    return save(tensors, {key: json.dumps(said)})


def change_zip(content: bytes, draw: random.Random, blind: Blind) -> bytes:
    """Change a member of the archive, mostly the pickle, and write a valid archive."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(out, "w") as made:
        names = archive.namelist()
        pickles = [name for name in names if name.endswith("data.pkl")]
        chosen = draw.choice(pickles if draw.random() < 0.8 else names)
        for name in names:
            data = archive.read(name)
            if name == chosen:
                data = _change_pickle(data, draw, blind)
            if name == chosen and draw.random() < 0.05:
                name = draw.choice((_CANARY, "archive/data/0", "\0", "archive/constants.pkl", ""))
            made.writestr(zipfile.ZipInfo(name), data)
    return out.getvalue()


def _change_pickle(data: bytes, draw: random.Random, blind: Blind) -> bytes:
    """Move, double, drop or replace opcodes; sometimes change bytes or a callable's name."""
    import pickletools

    what = draw.random()
    if what < 0.3:
        return blind(data)
    if what < 0.5:
        old = draw.choice((b"torch._utils\n_rebuild_tensor_v2", b"torch\nFloatStorage", b"cpu"))
        new = draw.choice((b"os\nsystem", b"builtins\neval", b"torch\nHalfStorage", b"0", b""))
        return data.replace(old, new, 1)
    starts = [position for _, _, position in pickletools.genops(data)] + [len(data)]
    ops = [data[a:b] for a, b in zip(starts, starts[1:], strict=False)]
    i, j = draw.randrange(len(ops)), draw.randrange(len(ops))
    match draw.randrange(4):
        case 0:
            ops[i], ops[j] = ops[j], ops[i]
        case 1:
            ops.insert(i, ops[j] * draw.choice((1, 2, 300)))
        case 2:
            del ops[i : i + draw.choice((1, 1, 5))]
        case 3:
            number = draw.choice((0, 255, 2**31 - 1, -1))
            ops[i] = draw.choice(
                (b"J" + struct.pack("<i", number), b"N", b"(", b"}", b"\x8a\x01\x80")
            )
    return b"".join(ops)


def change_msgpack(content: bytes, draw: random.Random, blind: Blind) -> bytes:
    import msgpack

    value = msgpack.unpackb(content, strict_map_key=False)
    if draw.random() < 0.5:  # metadata of an array
        *_, (group, key) = _places(value, draw)
        if isinstance(group[key], msgpack.ExtType):
            code, data = group[key]
            fields = _changed(msgpack.unpackb(data), draw)
            group[key] = msgpack.ExtType(code, msgpack.packb(fields))
    else:
        value = _changed(value, draw)
    return msgpack.packb(value)


_TOML = """foreign canonical op stack ignore axis factor layers block value differs config check
num_heads block_pattern '2::3' '::0' [0,2,4] '{layer}' '**' 'lm_head.weight' 'cut' 'cut,transpose'
'split' 'taps.last' 'minus.one' 'scale.by' 'absent.means.zeros' 'sqrt(width)' 'recurrent' 1e-320
['attention'] {width=8} 2020-01-01 inf [[1]] true 0 -1 999999 [[check]] [config] [ "" """


def change_toml(content: bytes, draw: random.Random, blind: Blind) -> bytes:
    """Move, double or drop lines, or change their words."""
    lines, words = content.decode().split("\n"), _TOML.replace(".", " ").split()
    i, j = draw.randrange(len(lines)), draw.randrange(len(lines))
    match draw.randrange(5):
        case 0:
            lines[i] = lines[j]
        case 1:
            del lines[i]
        case 2:
            lines.insert(i, f"{draw.choice(words)} = {draw.choice(words)}")
        case 3:
            lines[i], lines[j] = lines[j], lines[i]
        case 4:
            old = draw.choice(("{layer}", "'", '"as it is"', "]", "blocks", '"', "[[tensor]]"))
            lines[i] = lines[i].replace(old, draw.choice(words))
    return "\n".join(lines).encode()


def change_ocdbt(content: bytes, draw: random.Random, blind: Blind) -> bytes:
    """Damage a node or manifest of OCDBT and correct its length and checksum."""
    import pyarrow

    magic, body = content[:4], content[12:-4]
    version, compression, body = body[:1], body[1:2], body[2:]
    codec = pyarrow.Codec("zstd")
    if compression == b"\1":
        stream = pyarrow.CompressedInputStream(pyarrow.BufferReader(body), "zstd")
        body = codec.compress(blind(stream.read()), asbytes=True)
    else:
        body = blind(body)
    whole = magic + struct.pack("<Q", len(body) + 18) + version + compression + body
    return whole + struct.pack("<I", crc32c(whole))


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _crc_of(byte: int) -> int:
    for _ in range(8):
        byte = (byte >> 1) ^ (0x82F63B78 * (byte & 1))
    return byte


_OCDBT = (b"\x0c\xdb\x3a\x2a", b"\x0c\xdb\x20\xde")  # first bytes of a manifest and of a node
_CRC = [_crc_of(byte) for byte in range(256)]
_KINDS: list[tuple[tuple[str, ...], Callable[[bytes, random.Random, Blind], bytes]]] = [
    ((".safetensors",), change_safetensors),
    ((".state",), change_state),
    ((".json", ".zarray", "_METADATA"), change_json),
    ((".pt",), change_zip),
    (("checkpoint",), change_msgpack),
    ((".toml",), change_toml),
]


def _places(value: Any, draw: random.Random) -> list[tuple[Any, Any]]:
    """Return a random path into a value as pairs of a group and a key."""
    way: list[tuple[Any, Any]] = []
    while isinstance(value, dict | list) and value:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        way.append((value, draw.choice(keys)))
        value = value[way[-1][1]]
        if draw.random() < 0.15:
            break
    return way


def _changed(value: Any, draw: random.Random) -> Any:
    way = _places(value, draw)
    if not way or draw.random() < 0.02:
        return draw.choice(_VALUES)
    group, key = way[-1]
    old = group[key]
    match draw.randrange(6):
        case 0 if isinstance(old, int) and not isinstance(old, bool):
            group[key] = old + draw.choice((-1, 1, -old, old, 2**32, 2**63))
        case 0 if isinstance(old, str) and old:
            i = draw.randrange(len(old))
            group[key] = old[:i] + draw.choice(("", "0", "/", "..", "é", "\0")) + old[i + 1 :]
        case 1:
            if isinstance(group, dict):
                del group[key]
            else:
                group.pop(key)
        case 2:  # a copy of another value
            other, place = _places(value, draw)[-1]
            group[key] = json.loads(json.dumps(other[place])) if _plain(other[place]) else old
        case 3 if isinstance(group, dict):
            group[draw.choice((_CANARY, "__metadata__", "", "x", str(key) + "0"))] = group.pop(key)
        case 4 if isinstance(group, dict):
            group[draw.choice((str(key) + "/a", "..", "value", "\udc00"))] = old
        case _:
            group[key] = draw.choice(_VALUES)
    return value


def _plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
