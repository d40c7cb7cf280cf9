#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes unicode_nfc_tables.inc beside itself from Python's unicodedata: what unicode_nfc.cc needs for NFC."""
import pathlib
import unicodedata

CODES = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
HANGUL = range(0xAC00, 0xAC00 + 11172)  # composed by arithmetic


def decompositions():
    """(code, first, second, composes) of every canonical mapping; second is 0 for a single character."""
    for code in CODES:
        mapping = unicodedata.decomposition(chr(code))
        if not mapping or mapping.startswith("<") or code in HANGUL:
            continue
        parts = [int(part, 16) for part in mapping.split()]
        assert len(parts) <= 2
        composes = len(parts) == 2 and unicodedata.normalize("NFC", "".join(map(chr, parts))) == chr(code)
        yield code, parts[0], parts[1] if len(parts) == 2 else 0, composes


def class_ranges():
    """(first, last, class) of every run of characters with one combining class above 0."""
    ranges = []
    for code in CODES:
        combining = unicodedata.combining(chr(code))
        if not combining:
            continue
        if ranges and ranges[-1][1] == code - 1 and ranges[-1][2] == combining:
            ranges[-1][1] = code
        else:
            ranges.append([code, code, combining])
    return ranges


def rows(entries, per_line):
    lines = [entries[i:i + per_line] for i in range(0, len(entries), per_line)]
    return "".join("    " + " ".join(line) + "\n" for line in lines)


mappings = [f"{{0x{a:X}, 0x{b:X}, 0x{c:X}, {int(d)}}}," for a, b, c, d in decompositions()]
classes = [f"{{0x{a:X}, 0x{b:X}, {c}}}," for a, b, c in class_ranges()]
path = pathlib.Path(__file__).with_suffix(".inc")
path.write_text(
    "// SPDX-License-Identifier: Apache-2.0\n"
    f"// Made by {pathlib.Path(__file__).name} from the data of Unicode {unicodedata.unidata_version}; not edited by hand.\n"
    "// clang-format off\n"
    f"constexpr Decomposition kDecompositions[] = {{\n{rows(mappings, 4)}}};\n"
    f"constexpr ClassRange kClassRanges[] = {{\n{rows(classes, 6)}}};\n"
    "// clang-format on\n")
