"""Packets of a Perfetto trace: tracks, slices, instants, counters, flows. The published protobufs.

Owns      track uuids, and the order of tracks under their parent.
Needs     the package `perfetto`; `Packets` raises UsageError without it.
Edges     a packet is written as soon as it is made, so a trace of any length needs no memory. A
          flow is an arrow from the first to the next packet, in time, that carries its id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

from hisparse.export import missing

_INT64 = 1 << 63


class Packets:
    """Writes to `out`. Times are nanoseconds."""

    def __init__(self, out: BinaryIO) -> None:
        try:
            from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as proto
        except ImportError:
            raise missing("perfetto", "perfetto") from None
        self._pb: Any = proto
        self._out = out
        self._uuids = 0
        self.packets = 0

    def track(self, name: str, parent: int = 0, rank: int = 0) -> int:
        """A new track below `parent` (0: at the top), the lowest `rank` first."""
        return self._track(name, parent, rank)

    def counter(self, name: str, parent: int, unit: str = "") -> int:
        """A new track of numbers."""
        return self._track(name, parent, 0, counter=unit)

    def begin(
        self, track: int, at: int, name: str, args: Mapping[str, object], flows: Iterable[int] = ()
    ) -> None:
        """A slice begins; it ends at the next `end` of its track that no later slice takes."""
        self._event(track, at, self._pb.TrackEvent.TYPE_SLICE_BEGIN, name, args, flows)

    def end(self, track: int, at: int) -> None:
        self._event(track, at, self._pb.TrackEvent.TYPE_SLICE_END)

    def instant(
        self, track: int, at: int, name: str, args: Mapping[str, object], flows: Iterable[int] = ()
    ) -> None:
        self._event(track, at, self._pb.TrackEvent.TYPE_INSTANT, name, args, flows)

    def count(self, track: int, at: int, value: float) -> None:
        packet, event = self._new(track, at, self._pb.TrackEvent.TYPE_COUNTER)
        if isinstance(value, int):
            event.counter_value = value
        else:
            event.double_counter_value = value
        self._write(packet)

    def _track(self, name: str, parent: int, rank: int, counter: str | None = None) -> int:
        self._uuids += 1
        packet = self._pb.TracePacket()
        track = packet.track_descriptor
        track.uuid, track.name = self._uuids, name
        track.sibling_order_rank = min(rank, (1 << 31) - 1)
        track.child_ordering = self._pb.TrackDescriptor.EXPLICIT
        if parent:
            track.parent_uuid = parent
        if counter is not None:
            track.counter.unit_name = counter
        self._write(packet)
        return self._uuids

    def _event(
        self,
        track: int,
        at: int,
        kind: int,
        name: str = "",
        args: Mapping[str, object] | None = None,
        flows: Iterable[int] = (),
    ) -> None:
        packet, event = self._new(track, at, kind)
        if name:
            event.name = name
        event.flow_ids.extend(flows)
        for key, value in (args or {}).items():
            note = event.debug_annotations.add(name=key)
            if isinstance(value, int) and -_INT64 <= value < _INT64:
                note.int_value = value
            else:
                note.string_value = str(value)
        self._write(packet)

    def _new(self, track: int, at: int, kind: int) -> tuple[Any, Any]:
        packet = self._pb.TracePacket(timestamp=at, trusted_packet_sequence_id=1)
        event = packet.track_event
        event.type, event.track_uuid = kind, track
        return packet, event

    def _write(self, packet: Any) -> None:
        if not self.packets:
            packet.trusted_packet_sequence_id = 1
            packet.sequence_flags = self._pb.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        self._out.write(self._pb.Trace(packet=[packet]).SerializeToString())
        self.packets += 1
