import json

import numpy as np
import pandas as pd
import pytest

from microtome.data.table import read_table, table_sha256

TEXTS = ["NA", "a, b", 'she said "no"', "two\nlines", "ünïcode", "null"]
LABELS = [1, 0, 1, 0, 1, 0]
SPEAKERS = ["x", "y", "x", "y", "z", "z"]


@pytest.fixture
def frame():
    return pd.DataFrame({"sentence": TEXTS, "mood": LABELS, "who": SPEAKERS})


def write(frame, path):
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in frame.to_dict("records")), encoding="utf-8")
    else:
        frame.to_parquet(path)
    return path


def test_a_table_without_a_label_may_keep_columns_with_gaps(tmp_path, frame):
    path = write(frame.assign(mood=["1", "", "0", "", "1", "0"]), tmp_path / "data.csv")
    table = read_table(path, text="sentence", label=None, keep=["mood"])
    assert list(table.columns) == ["text", "mood"]
    assert table["mood"].tolist() == ["1", "", "0", "", "1", "0"]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet", ".CSV"])
def test_three_formats_give_the_same_table(tmp_path, frame, suffix):
    path = tmp_path / f"data{suffix}"
    write(frame, tmp_path / f"data{suffix.lower()}").rename(path)
    table = read_table(path, text="sentence", label="mood", group="who")
    assert list(table.columns) == ["text", "label", "group"]
    assert table["text"].tolist() == TEXTS
    assert table["label"].tolist() == LABELS
    assert np.issubdtype(table["label"].dtype, np.integer)
    assert table["group"].tolist() == SPEAKERS


def test_without_group_and_with_kept_columns(tmp_path, frame):
    path = write(frame, tmp_path / "data.parquet")
    assert list(read_table(path, text="sentence", label="mood").columns) == ["text", "label"]
    assert list(read_table(str(path), text="sentence", label="mood", keep=["who"]).columns) == ["text", "label", "who"]
    with pytest.raises(ValueError, match=r"keep names \['label'\]"):
        read_table(path, text="sentence", label="mood", keep=["label"])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["True", "False"], [True, False]),
        (["pos", "neg"], ["pos", "neg"]),
        (["0.5", "-2"], [0.5, -2.0]),
        (["1", "b"], ["1", "b"]),
    ],
)
def test_csv_labels_take_their_type(tmp_path, values, expected):
    path = write(pd.DataFrame({"text": ["a", "b"], "label": values}), tmp_path / "data.csv")
    assert read_table(path)["label"].tolist() == expected


def test_an_index_in_the_file_is_not_kept(tmp_path, frame):
    path = write(frame.set_index(frame.index + 10), tmp_path / "data.parquet")
    assert read_table(path, text="sentence", label="mood").index.tolist() == list(range(len(frame)))


def test_csv_with_byte_order_mark_and_blank_lines(tmp_path):
    path = tmp_path / "data.csv"
    path.write_bytes(b"\xef\xbb\xbftext,label\r\n\r\nhello,1\r\n\r\n")
    assert read_table(path).to_dict("records") == [{"text": "hello", "label": 1}]


def test_numbers_as_texts_and_groups_stay_text_in_csv(tmp_path):
    path = tmp_path / "data.csv"
    path.write_text("text,label,who,age\n1e3,0,7,30\n007,1,007,31\n")
    table = read_table(path, group="who", keep=["age"])
    assert table["text"].tolist() == ["1e3", "007"]
    assert table["group"].tolist() == ["7", "007"]
    assert table["age"].tolist() == [30, 31]


def test_missing_column_lists_columns_and_near_matches(tmp_path, frame):
    path = write(frame, tmp_path / "data.csv")
    with pytest.raises(
        KeyError, match=r"no column 'sentense'; its columns are \['sentence', 'mood', 'who'\].*'sentence'\?"
    ):
        read_table(path, text="sentense", label="mood")
    with pytest.raises(KeyError, match="no column 'label'"):
        read_table(path, text="sentence")
    with pytest.raises(KeyError, match="no column 'speaker'"):
        read_table(path, text="sentence", label="mood", group="speaker")


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("column", ["text", "label", "group"])
def test_missing_values_name_the_row(tmp_path, suffix, column):
    frame = pd.DataFrame({"text": ["a", "b", "c"], "label": ["x", "y", "x"], "group": ["p", "q", "r"]})
    frame.loc[1, column] = None
    path = tmp_path / f"data{suffix}"
    if suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        write(frame, path)
    with pytest.raises(ValueError, match=f"row 1 .counted from 0.*{column}.*is empty"):
        read_table(path, group="group")


def test_blank_text_and_other_types_name_the_row(tmp_path):
    blank = write(pd.DataFrame({"text": ["a", "  "], "label": [0, 1]}), tmp_path / "blank.jsonl")
    with pytest.raises(ValueError, match=r"row 1 .counted from 0.: the text in column 'text' is empty"):
        read_table(blank)
    number = write(pd.DataFrame({"text": [3, 4], "label": [0, 1]}), tmp_path / "number.parquet")
    with pytest.raises(TypeError, match=r"row 0 .counted from 0.*holds 3 .*not text"):
        read_table(number)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"suffix '.xlsx'. Give a .csv, .jsonl, .parquet file"):
        read_table(tmp_path / "data.xlsx")
    with pytest.raises(FileNotFoundError, match=r"there is no file .*absent\.csv"):
        read_table(tmp_path / "absent.csv")
    for content, suffix, message in [
        (b"text,label\n", ".csv", "has no rows"),
        (b"", ".csv", "no column 'text'"),
        (b"text,label\nhello, there,1\n", ".csv", r"row 0 .counted from 0.: 3 fields for 2 columns"),
        (b"text,text\na,b\n", ".csv", "names a column twice"),
        (b'text,label\n"a" b,1\n', ".csv", "is not a CSV file"),
        (b"text,label\n\xff\xfe,1\n", ".csv", r"not UTF-8 .byte 11"),
        (b'{"text": "a", "label": 1}\n{"text": \n', ".jsonl", "line 2: not JSON"),
        (b'{"text": "a", "label": 1}\n["b", 1]\n', ".jsonl", "line 2: .* is not an object"),
        (b"not parquet", ".parquet", "cannot be read as Parquet"),
    ]:
        path = tmp_path / f"broken{suffix}"
        path.write_bytes(content)
        with pytest.raises((ValueError, KeyError), match=message):
            read_table(path)


def test_hash_follows_content_and_order_alone():
    table = pd.DataFrame({"text": ["a", "b"], "label": [1, 0]})
    assert table_sha256(table) == table_sha256(table.set_index(pd.Index([7, 9])))
    assert table_sha256(table) == table_sha256(table.astype({"label": "int8"}))
    assert table_sha256(table) != table_sha256(table.iloc[::-1])
    assert table_sha256(table) != table_sha256(table.rename(columns={"text": "texts"}))
    assert table_sha256(table) != table_sha256(table.replace("b", "c"))
    assert len(table_sha256(table)) == 64
