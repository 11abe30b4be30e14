"""A site's rows in the shards of a store: shape and dtype at once, values when they are asked for.

Selections (`tensor[:, head]`, `tensor[rows]`) stay on disk; `load()` reads what they leave. Whole shards are read into
place, single rows and heads through a map of the file, so that only their pages are read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from microtome.capture.safetensors_file import read_rows


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """Rows of a site on disk.

    Attributes:
        name: of the tensor in every shard.
        files: one per shard, in the order of the rows.
        starts: number of the first row of each shard, and of all rows.
        inner: axes behind the rows, in the file.
        dtype: of the values.
        picked: numbers of the rows that are selected, in the order wanted; None for all.
        head: the one head that is selected.
    """

    name: str
    files: tuple[Path, ...]
    starts: tuple[int, ...]
    inner: tuple[int, ...]
    dtype: torch.dtype
    picked: np.ndarray | None = None
    head: int | None = None

    @property
    def shape(self) -> torch.Size:
        """Shape of what `load` returns."""
        return torch.Size((len(self), *(self.inner if self.head is None else self.inner[1:])))

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def nbytes(self) -> int:
        """Bytes of what `load` returns."""
        return self.shape.numel() * self.dtype.itemsize

    def __len__(self) -> int:
        return self.starts[-1] if self.picked is None else len(self.picked)

    def dim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __getitem__(self, key: object) -> "StoredTensor":
        """One head, `[:, head]`, or some rows: numbers, a slice. Nothing is read.

        Raises:
            IndexError: a head or row out of range.
            TypeError: another kind of index.
        """
        if isinstance(key, tuple):
            rows, head = key if len(key) == 2 else (None, None)
            if rows != slice(None) or not isinstance(head, int) or self.dim() < 3:
                raise TypeError(f"{self.name}[{key!r}]: give [:, head] or rows; load() first for anything else.")
            if not -self.inner[0] <= head < self.inner[0]:
                raise IndexError(f"{self.name} has {self.inner[0]} heads; head {head} is out of range.")
            return replace(self, head=head % self.inner[0])
        if isinstance(key, slice):
            chosen = np.arange(len(self))[key]
        else:
            wanted = key.cpu().numpy() if isinstance(key, Tensor) else np.asarray(key)
            if wanted.ndim != 1 or wanted.dtype.kind not in "iu":
                raise TypeError(f"{self.name}[{key!r:.60}]: give row numbers, a slice, or [:, head].")
            if len(wanted) and not -len(self) <= wanted.min() <= wanted.max() < len(self):
                raise IndexError(f"{self.name} has {len(self)} rows; {wanted.min()} to {wanted.max()} were asked for.")
            chosen = np.where(wanted < 0, wanted + len(self), wanted)
        return replace(self, picked=chosen if self.picked is None else self.picked[chosen])

    def load(self) -> Tensor:
        """The values, in memory of their own: what happens to the files later does not reach them.

        Raises:
            FileNotFoundError: a shard went away since the store was opened.
            ValueError: a shard is damaged.
        """
        out = torch.empty(self.shape, dtype=self.dtype)
        if self.picked is None:
            for number, (first, stop) in enumerate(pairwise(self.starts)):
                if self.head is None:
                    self._read(number, out[first:stop])
                else:
                    out[first:stop] = self._shard(number)[:, self.head]
            return out
        shard_of = np.searchsorted(self.starts, self.picked, side="right") - 1
        for number in np.unique(shard_of).tolist():
            places = np.flatnonzero(shard_of == number)
            local = torch.from_numpy(self.picked[places] - self.starts[number])
            out[torch.from_numpy(places)] = self._of_head(self._shard(number))[local]
        return out

    def parts(self) -> Iterator[Tensor]:
        """The values in consecutive pieces, a shard's rows at most in each."""
        if self.picked is None:
            for first, stop in pairwise(self.starts):
                if stop > first:
                    yield self.shard_rows(first, stop)
            return
        largest = max(1, int(np.diff(self.starts).max()))
        for first in range(0, len(self), largest):
            yield self[first : first + largest].load()

    def shard_rows(self, first: int, stop: int) -> Tensor:
        """All rows of the shard that holds rows `first` up to, not including, `stop`."""
        number = list(pairwise(self.starts)).index((first, stop))
        return replace(self, files=(self.files[number],), starts=(0, stop - first)).load()

    def _of_head(self, values: Tensor) -> Tensor:
        return values if self.head is None else values[:, self.head]

    def _read(self, number: int, out: Tensor) -> None:
        """All rows of a shard into memory that is there."""
        file = self.files[number]
        try:
            read_rows(file, self.name, out)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{file} went away since the store was opened. Open the store again.") from error
        except ValueError as error:
            raise ValueError(f"{error} Run `microtome store verify {file.parent}`.") from error

    def _shard(self, number: int) -> Tensor:
        """All rows of a shard, mapped."""
        file = self.files[number]
        try:
            with safe_open(file, framework="pt") as opened:
                values = opened.get_tensor(self.name)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{file} went away since the store was opened. Open the store again.") from error
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged: {error}. Run `microtome store verify {file.parent}`.") from error
        expected = (self.starts[number + 1] - self.starts[number], *self.inner)
        if tuple(values.shape) != expected or values.dtype != self.dtype:
            raise ValueError(
                f"{file}: {self.name} is {values.dtype} {tuple(values.shape)}, expected {self.dtype} {expected}. "
                f"Run `microtome store verify {file.parent}`."
            )
        return values


def in_memory(tensor: Tensor | StoredTensor) -> Tensor:
    """A tensor as it is, or read from disk."""
    return tensor if isinstance(tensor, Tensor) else tensor.load()


def pieces(tensor: Tensor | StoredTensor) -> Iterator[Tensor]:
    """A tensor in consecutive pieces of rows: whole if it is in memory, by shard if on disk."""
    if isinstance(tensor, Tensor):
        yield tensor
    else:
        yield from tensor.parts()


def joined(tensors: Sequence[Tensor | StoredTensor]) -> Tensor:
    """Rows of several, one after the other, in memory."""
    return torch.cat([in_memory(tensor) for tensor in tensors])
