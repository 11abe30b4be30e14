"""What `microtome steer` is about: a task from a data set or from a file, and prompts of one's own."""

from pathlib import Path
from typing import Any

import pandas as pd

from microtome.app.steer_config import SteerConfig
from microtome.data.catalogue import DATA_SETS, load_data
from microtome.data.table import read_table, table_sha256
from microtome.interventions.steering_task import SteeringTask, sentiment_task, split_task

TABLES = (".csv", ".jsonl", ".parquet")


def steering_task_of(config: SteerConfig) -> tuple[SteeringTask, dict[str, Any]]:
    """The task, and what it is, JSON-able: name, tables_sha256.

    Raises ValueError for labels that are not of two classes, a class that is not there, too few texts; what reading
    raises.
    """
    sizes = {"contrast": config.contrast, "prompts": config.prompts, "dev_prompts": config.dev_prompts}
    if config.data == "sentiment":
        task = sentiment_task(**sizes, words=config.words, seed=config.seed)
    else:
        neutral = None if config.neutral_file is None else lines_of(config.neutral_file, config.text_column)
        table, names, name = _labelled(config)
        task = split_task(table, name=name, **sizes, words=config.words, neutral=neutral, names=names, seed=config.seed)
    tables = [task.contrast, task.other, *task.prompts.values()]
    facts = {"name": task.name, "tables_sha256": [table_sha256(table) for table in tables]}
    return task, facts | {"wanted": task.names[0], "unwanted": task.names[1]}


def _labelled(config: SteerConfig) -> tuple[pd.DataFrame, tuple[str, str], str]:
    """text, label (bool), group; names of the two classes; name of the data."""
    if config.data in DATA_SETS:
        known = DATA_SETS[config.data]
        drawn = load_data(config.data, seed=config.seed).table
        labels, group, name = drawn[next(iter(known.labels))], drawn[known.group], config.data
        texts = drawn["text"]
    else:
        place = Path(config.data).expanduser()
        table = read_table(place, text=config.text_column, label=config.label_column, group=config.group_column)
        texts, labels, name = table["text"], table["label"], place.stem
        group = table["group"] if "group" in table else pd.Series(range(len(table)))
    wanted, unwanted = two_classes(labels, config.positive)
    held = pd.DataFrame({"text": texts, "label": labels.astype(str) == wanted, "group": group})
    return held, (wanted, unwanted), name


def two_classes(labels: pd.Series, positive: str | None) -> tuple[str, str]:
    """Names of the wanted and of the other class.

    Raises ValueError for another number of classes than two, a wanted one that is not there, or none named where the
    labels are not true and false.
    """
    classes = sorted({str(label) for label in labels.dropna()})
    if len(classes) != 2 or labels.isna().any():
        raise ValueError(
            f"label_column: {len(classes)} classes ({', '.join(classes[:6])}) and {int(labels.isna().sum())} rows "
            "without one. Give a column of two classes, one for each row."
        )
    if positive is None:
        if set(classes) != {"True", "False"}:
            raise ValueError(f"positive: name the class that is wanted: {' or '.join(classes)}.")
        positive = "True"
    if positive not in classes:
        raise ValueError(f"positive: {positive!r} is none of {', '.join(classes)}.")
    return positive, next(one for one in classes if one != positive)


def lines_of(path: Path, column: str) -> list[str]:
    """Texts of a file: the column of a table, or the lines that hold more than spaces. Raises ValueError for none."""
    path = path.expanduser()
    if path.suffix.lower() in TABLES:
        found = read_table(path, text=column, label=None)["text"].tolist()
    else:
        found = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    if not (found := [text for text in found if text.strip()]):
        raise ValueError(f"{path} holds no text.")
    return found
