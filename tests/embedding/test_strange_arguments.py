"""What a caller may pass by accident where a word or a number goes into the log: it is refused with
nothing changed, by an error that says what would do, or the log keeps it in a way that can be read
back to the same state."""

from __future__ import annotations

import enum

import numpy as np
import pytest
from embedding_rig import Engine, opened

from hisparse.errors import HiSparseError
from hisparse.fsm.codec import Codec
from hisparse.fsm.events import EVENT_TYPES
from hisparse.fsm.fold import evolve
from hisparse.fsm.state import State, digest


class Word(str):
    __slots__ = ()


class Name(enum.StrEnum):
    ONE = "one"


class Number(enum.IntEnum):
    TWO = 2


STRANGE = {
    "None": None, "True": True, "float": 2.0, "a half": 0.5, "inf": float("inf"), "a list": [1],
    "bytes": b"x", "no text": "", "digits": "2", "a surrogate": "\ud800", "nul": "a\0b",
    "numpy's str": np.str_("u"), "of str": Word("w"), "enum": Name.ONE, "int enum": Number.TWO,
    "int64": np.int64(2), "uint8": np.uint8(255), "float32": np.float32(2), "array": np.array(2),
    "two": 2, "below 0": -1, "64 bits": 1 << 63, "65 bits": 1 << 64,
}  # fmt: skip

PROMPT = list(range(5))
INPUTS = {
    "admit's request": lambda b, v: b.admit(v, PROMPT, 5),
    "admit's max_new": lambda b, v: b.admit("n", PROMPT, v),
    "admit's salt": lambda b, v: b.admit("n", PROMPT, 5, salt=v),
    "finish's reason": lambda b, v: b.finish("a", v),
    "abort's reason": lambda b, v: b.abort("a", v),
    "preempt's reason": lambda b, v: b.preempt("a", v),
    "wanted rows": lambda b, v: b.plan_step({"a": v}),
    "sleep's level": lambda b, v: [b.finish("a"), b.drain(), b.sleep(v)],
    "tick's now_us": lambda b, v: b.coordinator.tick(v),
    "arrive's request": lambda b, v: b.coordinator.arrive(v, 5, 9, [b"x"]),
    "arrive's prompt_tokens": lambda b, v: b.coordinator.arrive("n", v, 9, []),
    "arrive's max_tokens": lambda b, v: b.coordinator.arrive("n", 1, v, []),
    "a page hash": lambda b, v: b.coordinator.arrive("n", 5, 9, [v]),
    "finish's epoch": lambda b, v: b.coordinator.finish("a", v),
    "abort's request": lambda b, v: b.coordinator.abort(v, 1),
    "abort's epoch": lambda b, v: b.coordinator.abort("a", v),
    "lose_rank's rank": lambda b, v: b.scheduler.lose_rank(v),
    "lose_rank's reason": lambda b, v: b.scheduler.lose_rank(0, v),
    "lose_rank's seen_epoch": lambda b, v: b.scheduler.lose_rank(0, seen_epoch=v),
    "join_rank's rank": lambda b, v: [b.coordinator.lose_rank(0), b.coordinator.join_rank(v, 5)],
    "join_rank's at_seq": lambda b, v: [b.coordinator.lose_rank(0), b.coordinator.join_rank(0, v)],
}


def decoding():
    backend = opened()
    engine = Engine(backend)
    engine.admit("a", [*range(100, 120)], 8)
    engine.prefill("a")
    return backend


def read_back(backend):
    """The digest of what a reader of the log's bytes sees."""
    state, codec = State(backend.config), Codec(EVENT_TYPES)
    for seq, event in backend.coordinator.log.read(1):
        evolve(state, codec.decode(*codec.encode(event)), seq)
    return digest(state)


@pytest.mark.parametrize("name", INPUTS)
def test_what_an_input_is_given_is_refused_or_can_be_read_back(name):
    refused = 0
    for strange in STRANGE.values():
        backend = decoding()
        try:
            INPUTS[name](backend, strange)
        except HiSparseError as error:
            refused += 1
            assert "encoded" not in str(error), strange  # it names the argument
        assert read_back(backend) == backend.coordinator.digest(), strange
        if "rank" not in name:
            backend.shutdown()  # and it goes on
            assert read_back(backend) == backend.coordinator.digest(), strange
    assert refused, name


def test_a_number_of_numpy_and_a_word_of_a_class_of_its_own_are_as_good_as_any():
    backend = decoding()
    for i, word in enumerate((Word("w"), np.str_("u"), Name.ONE)):
        admitted = backend.admit(word, PROMPT, np.uint8(255 - i) // np.uint8(64))
        assert type(admitted.request) is str and admitted.request == word
        plan = backend.plan_step({word: np.int32(5)})
        assert type(plan).from_bytes(plan.to_bytes()).granted == {str.__str__(word): 5}
        backend.abandon_step()
        backend.abort(word, word)
    backend.shutdown()
    assert read_back(backend) == backend.coordinator.digest()
