"""Writes unicode.inc: the ranges of letters (categories L*) and numbers (N*) by Python's Unicode version.
Then clang-format-14 -i unicode.inc."""
import sys
import unicodedata


def ranges(category):
    found, begin = [], None
    for code in range(sys.maxunicode + 2):
        inside = code <= sys.maxunicode and unicodedata.category(chr(code))[0] == category
        if inside and begin is None:
            begin = code
        if not inside and begin is not None:
            found.append((begin, code - 1))
            begin = None
    return found


print(f"/* Unicode {unicodedata.unidata_version}, by make_unicode.py: first and last code of each range. */")
for name, category in (("letters", "L"), ("numbers", "N")):
    pairs = ", ".join(f"{{{a:#x}, {b:#x}}}" for a, b in ranges(category))
    print(f"static const uint32_t {name}[][2] = {{{pairs}}};")
