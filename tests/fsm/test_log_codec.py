"""The codec: what goes in comes out, and an unknown kind loses nothing."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hisparse.errors import LogError, UsageError
from hisparse.fsm.codec import (
    MAX_BODY_BYTES,
    Codec,
    SegmentHeader,
    UnknownEvent,
    decode_header,
    encode_frame,
    encode_header,
    parse_frames,
)
from hisparse.fsm.events import EVENT_TYPES, Event


class Named(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=1):
    cause: int
    name: str
    share: float


class Paged(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=2):
    cause: int
    pages: tuple[int, ...]
    hashes: tuple[bytes, ...]
    parent: int | None = None


U64 = st.integers(0, 2**64 - 1)
EVENTS = st.one_of(
    st.builds(Named, U64, st.text(), st.floats(allow_nan=False)),
    st.builds(
        Paged,
        U64,
        st.lists(U64).map(tuple),
        st.lists(st.binary()).map(tuple),
        st.none() | U64,
    ),
)
CODEC = Codec((Named, Paged))
HEADER = SegmentHeader(
    segment=3, first_seq=7, schema_digest="d", salt=b"s", config="{}", created=1.5
)


@given(EVENTS)
def test_an_event_survives_the_round_trip(event):
    kind, body = CODEC.encode(event)
    assert kind == type(event).__struct_config__.tag
    assert CODEC.decode(kind, body) == event


@given(EVENTS)
def test_an_unknown_kind_re_encodes_to_the_same_bytes(event):
    kind, body = CODEC.encode(event)
    old = Codec(())
    unknown = old.decode(kind, body)
    assert unknown == UnknownEvent(kind, body)
    assert old.encode(unknown) == CODEC.encode(unknown) == (kind, body)


@given(st.integers(0, 5), st.binary(max_size=30))
def test_a_body_decodes_or_raises_a_log_error(kind, body):
    try:
        CODEC.decode(kind, body)
    except LogError as error:
        assert f"kind {kind}" in str(error)


def test_the_events_of_the_library_make_a_codec():
    assert len(Codec(EVENT_TYPES).schema_digest) == 64


def test_the_digest_tells_schemas_apart_and_repeats():
    assert Codec((Named, Paged)).schema_digest == CODEC.schema_digest
    assert Codec((Named,)).schema_digest != CODEC.schema_digest


def test_an_undeclared_or_unencodable_event_is_refused():
    with pytest.raises(UsageError, match="Paged is not an event"):
        Codec((Named,)).encode(Paged(0, (), ()))
    with pytest.raises(UsageError, match="cannot be encoded"):
        CODEC.encode(Named(0, object(), 1.0))
    with pytest.raises(UsageError, match="cannot be encoded"):
        CODEC.encode(Named(2**70, "", 1.0))


@pytest.mark.parametrize("tag", ["text", 0xFF00, -1])
def test_a_type_needs_an_integer_tag_in_range(tag):
    cls = msgspec.defstruct("Odd", [("cause", int)], tag=tag, array_like=True)
    with pytest.raises(UsageError, match="Odd needs an integer tag"):
        Codec((cls,))


def test_a_kind_names_one_event():
    twin = msgspec.defstruct("Twin", [("cause", int)], tag=1, array_like=True)
    with pytest.raises(UsageError, match="Twin reuses kind 1"):
        Codec((Named, twin))


def test_a_frame_above_the_bound_is_refused():
    with pytest.raises(LogError, match="above"):
        encode_frame(0, 1, 1, bytes(MAX_BODY_BYTES + 1))


def test_a_frame_is_valid_in_its_own_segment_only():
    frame = encode_frame(HEADER.seed, 7, 2, b"body")
    assert parse_frames(frame, len(frame), HEADER.seed, 7).frames == [(7, 2, b"body")]
    for other in ({"segment": 4}, {"first_seq": 8}, {"salt": b"t"}):
        seed = msgspec.structs.replace(HEADER, **other).seed
        assert "checksum" in parse_frames(frame, len(frame), seed, 7).fault


def test_a_header_survives_and_ignores_fields_of_a_later_version():
    assert decode_header(encode_header(HEADER)) == HEADER
    later = msgspec.defstruct("Later", [("extra", int)], bases=(SegmentHeader,), kw_only=True)
    assert decode_header(encode_header(later(**msgspec.structs.asdict(HEADER), extra=1))) == HEADER


def test_a_compression_that_is_not_known_is_named():
    with pytest.raises(LogError, match="'lzma'"):
        decode_header(encode_header(msgspec.structs.replace(HEADER, compression="lzma")))


def test_a_reworded_docstring_is_not_another_format() -> None:
    def types(words: str) -> tuple[type[Event], ...]:
        body = {"__annotations__": {"x": int}, "__doc__": words, "__module__": __name__}
        made = type(Event)("Toy", (Event,), body, frozen=True, gc=False, array_like=True, tag=1)
        return (made,)

    assert Codec(types("One.")).schema_digest == Codec(types("Another.")).schema_digest
