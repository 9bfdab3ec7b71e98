"""Makes the Parquet files of `fixtures/tables`, and the CSV with the same rows, by pyarrow.

    V/bin/pip install numpy pyarrow
    V/bin/python crates/data/references/tables.py

Each file is written in another way: snappy with dictionaries (pyarrow's default), zstd with pages of version 2 and delta encodings,
gzip without dictionaries, and uncompressed in small groups of rows with timestamps of old programs.
"""

import datetime
import decimal
import pathlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "fixtures/tables"
ROWS = 40

rows = []
for i in range(ROWS):
    at = datetime.datetime(2020, 1, 1, 6) + datetime.timedelta(days=37 * i, hours=i)
    rows.append(
        {
            "age": None if i % 7 == 3 else 20 + i,
            "size": float("nan") if i == 5 else 0.1 * i - 1.5,
            "small": 1e-12 * i,
            "price": decimal.Decimal(i * 125 - 300) / 100,
            "count": 2**31 + i,
            "city": None if i % 11 == 4 else ["Rome", "Oslo", "a \"b\", c"][i % 3],
            "member": i % 4 == 0,
            "day": at.date(),
            "at": None if i == 9 else at,
            "tags": ["x"] * (i % 3),
            "place": {"x": float(i), "y": None if i % 5 else i},
            "y": ["no", "yes"][i % 2],
        }
    )

types = {
    "age": pa.int64(),
    "size": pa.float64(),
    "small": pa.float32(),
    "price": pa.decimal128(9, 2),
    "count": pa.uint32(),
    "city": pa.dictionary(pa.int32(), pa.string()),
    "member": pa.bool_(),
    "day": pa.date32(),
    "at": pa.timestamp("us"),
    "tags": pa.list_(pa.string()),
    "place": pa.struct([("x", pa.float64()), ("y", pa.int16())]),
    "y": pa.string(),
}
table = pa.table({name: pa.array([row[name] for row in rows], kind, from_pandas=False) for name, kind in types.items()})
FOLDER.mkdir(parents=True, exist_ok=True)
pq.write_table(table, FOLDER / "snappy.parquet")
pq.write_table(
    table,
    FOLDER / "zstd.parquet",
    compression="zstd",
    data_page_version="2.0",
    use_dictionary=False,
    column_encoding={"age": "DELTA_BINARY_PACKED", "y": "DELTA_BYTE_ARRAY", "size": "BYTE_STREAM_SPLIT"},
)
pq.write_table(table, FOLDER / "gzip.parquet", compression="gzip", use_dictionary=False)
pq.write_table(
    table, FOLDER / "plain.parquet", compression="none", row_group_size=15, use_deprecated_int96_timestamps=True
)


def text(value):
    if value is None or value != value:
        return ""
    if isinstance(value, datetime.datetime):
        return value.isoformat()
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[list]"
    value = str(value)
    return '"' + value.replace('"', '""') + '"' if '"' in value or "," in value else value


names = [name for name in types if name != "place"]
names = names[: names.index("tags")] + ["tags.list.element", "place.x", "place.y", "y"]
lines = [",".join(names)]
for row, small in zip(rows, table["small"].to_pylist()):
    flat = row | {"place.x": row["place"]["x"], "place.y": row["place"]["y"], "tags.list.element": row["tags"], "small": np.float32(small)}
    lines.append(",".join(text(flat[name]) for name in names))
(FOLDER / "same.csv").write_text("\n".join(lines) + "\n")
