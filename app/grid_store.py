"""How far a grid's capture is: read from the log of its store, without opening a shard."""

from dataclasses import dataclass
from pathlib import Path

from microtome.capture.store_files import amiss, is_store, read_log, read_manifest


@dataclass(frozen=True)
class StoreProgress:
    """What a store holds. share: of its tokens, 0 to 1. rows, tokens, seconds: of its whole shards."""

    is_whole: bool
    share: float
    rows: int
    tokens: int
    seconds: float


def store_progress(path: Path) -> StoreProgress | None:
    """How far the store in a folder is; None if there is no store. Raises ValueError for a damaged manifest."""
    if not is_store(path):
        return None
    shards = read_manifest(path)["shards"]
    records = [record for record in read_log(path).values() if amiss(path, record) is None]
    tokens = sum(record.tokens for record in records)
    return StoreProgress(
        is_whole=len(records) == len(shards),
        share=tokens / max(1, sum(shard["tokens"] for shard in shards)),
        rows=sum(record.rows for record in records),
        tokens=tokens,
        seconds=sum(record.seconds for record in records),
    )
