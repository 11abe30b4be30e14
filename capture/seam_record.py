"""Which modules call transformers' attention interface in a forward, and with what; optionally with other arguments.

The recording of `microtome.capture.dissect` and its proof: q, k and v as the implementation gets them, z as it returns
it. Models that do not use the interface do not appear in the record.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from microtome.capture.attention_seam import SeamCall, intercepted, seam_for_now


@dataclass(frozen=True)
class RecordedCall:
    """One call: q `[batch, head, query, d_head]`, k, v `[batch, kv_head, key, d_head]`, z `[batch, query, head, d]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    z: Tensor


@dataclass(frozen=True, eq=False)
class _Recorder:
    paths: dict[nn.Module, str]
    record: dict[str, list[RecordedCall]]
    change: Callable[[SeamCall], SeamCall] | None

    def arguments(self, call: SeamCall) -> SeamCall:
        return call if self.change is None else self.change(call)

    def result(self, call: SeamCall, z: Tensor) -> Tensor:
        if call.module in self.paths:
            self.record.setdefault(self.paths[call.module], []).append(
                RecordedCall(call.query, call.key, call.value, z)
            )
        return z


@contextmanager
def recorded_seam_calls(
    model: nn.Module, change: Callable[[SeamCall], SeamCall] | None = None
) -> Iterator[dict[str, list[RecordedCall]]]:
    """Record each call of the attention interface by the path of the calling module.

    Args:
        model: any model; its attention setting is put back on exit.
        change: optional, returns the call with which to go on.
    """
    record: dict[str, list[RecordedCall]] = {}
    paths = {module: path for path, module in model.named_modules()}
    with seam_for_now(model), intercepted(_Recorder(paths, record, change)):
        yield record
